//! One repository of the Hub: what it has, and its files, one at a time.

use galaxy_common::Bytes;
use hf_hub::{
    Cache, Repo, RepoType,
    api::{
        Progress,
        sync::{Api, ApiBuilder, ApiError, Metadata},
    },
};
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    fs,
    io::{self, IsTerminal, Write},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Attempts for a file of which nothing comes, after the first,
const RETRIES: u32 = 3;
/// and the time before the first of them; it doubles.
const WAIT: Duration = Duration::from_millis(500);
/// Between two lines on a long file, where there is no terminal.
const LINES: Duration = Duration::from_secs(10);

/// When something was last heard of the Hub.
#[derive(Clone)]
pub(super) struct Heard(Arc<Mutex<Instant>>);

impl Heard {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
    fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
    /// How long ago that is.
    pub(super) fn ago(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

/// Why a file does not come.
pub(super) enum Fetching {
    Hub(ApiError),
    Disk(io::Error),
    /// What came is of another length.
    Length {
        have: u64,
        want: u64,
    },
}

/// A repository, with what has come of its files and is not whole yet.
pub(super) struct Hub {
    api: Api,
    unfinished: PathBuf,
    repo: Repo,
    heard: Heard,
}

impl Hub {
    /// The repository of a model at `endpoint`; keeps what is not whole in `unfinished`.
    pub(super) fn new(
        (endpoint, model, revision): (&str, &str, &str),
        unfinished: PathBuf,
        heard: Heard,
    ) -> Result<Self, ApiError> {
        // Its own caches are for many models; this one is for what is not whole yet. Its retries ask for
        // what they have already, if one fails before anything has come.
        let api = ApiBuilder::from_cache(Cache::new(unfinished.clone()))
            .with_progress(false)
            .with_retries(0)
            .with_token(std::env::var("HF_TOKEN").ok().or_else(|| Cache::from_env().token()))
            .with_endpoint(endpoint.trim_end_matches('/').to_owned())
            .build()?;
        let repo = Repo::with_revision(model.to_owned(), RepoType::Model, revision.to_owned());
        Ok(Self { api, unfinished, repo, heard })
    }

    /// Its commit, and the files of that; from now on it is of that commit, whatever comes after.
    pub(super) fn settle(&mut self) -> Result<(String, Vec<String>), ApiError> {
        let info = self.api.repo(self.repo.clone()).info()?;
        self.heard.now();
        self.repo = Repo::with_revision(self.repo.url(), RepoType::Model, info.sha.clone());
        Ok((info.sha, info.siblings.into_iter().map(|file| file.rfilename).collect()))
    }

    /// Which version of a file it has, and how long that is.
    pub(super) fn about(&self, file: &str) -> Result<Metadata, ApiError> {
        let about = self.api.metadata(&self.api.repo(self.repo.clone()).url(file))?;
        self.heard.now();
        Ok(about)
    }

    /// Brings one file, and says where it lies until it is put in its place. Goes on from what has come of
    /// it, as long as more comes.
    pub(super) fn fetch(&self, file: &str, about: &Metadata) -> Result<PathBuf, Fetching> {
        let want = about.size() as u64;
        let cache = Cache::new(self.unfinished.clone()).repo(self.repo.clone());
        // Of each file its own, though contents be the same; and a version that we are told is no path.
        let version = about.etag().chars().filter(char::is_ascii_alphanumeric);
        let name = format!("{} {}", file.replace('/', " "), version.collect::<String>());
        let whole = self.unfinished.join(name);
        if fs::metadata(&whole).is_ok_and(|whole| whole.len() == want) {
            return Ok(whole);
        }
        let blob = cache.blob_path(about.etag());
        let mut part = blob.clone();
        part.set_extension("part");
        let have = || fs::metadata(&part).map_or(0, |part| part.len());
        // Of a whole one there is nothing to ask for, and a longer one is wrong.
        if have() >= want && part.exists() {
            fs::remove_file(&part).map_err(Fetching::Disk)?;
        }
        let shown = Shown::new(file, self.heard.clone());
        let mut failed = 0;
        let kept = loop {
            let before = have();
            match self.api.repo(self.repo.clone()).download_with_progress(file, shown.clone()) {
                Ok(kept) => break kept,
                Err(ApiError::IoError(error)) if of_the_disk(&error) => {
                    return Err(Fetching::Disk(error));
                }
                Err(error) => {
                    failed = if have() > before { 1 } else { failed + 1 };
                    if failed > RETRIES || refuses(&error) {
                        return Err(Fetching::Hub(error));
                    }
                }
            }
            thread::sleep(WAIT * (1 << failed.min(RETRIES)) / 2);
        };
        // What it gives is a link to the bytes, of which nobody has need.
        fs::remove_file(&kept).map_err(Fetching::Disk)?;
        let have = fs::metadata(&blob).map_err(Fetching::Disk)?.len();
        if have != want {
            fs::remove_file(&blob).map_err(Fetching::Disk)?;
            return Err(Fetching::Length { have, want });
        }
        fs::rename(blob, &whole).map_err(Fetching::Disk)?;
        Ok(whole)
    }
}

/// Whether the Hub says no, which it will say again.
fn refuses(error: &ApiError) -> bool {
    matches!(error, ApiError::RequestError(_)) && error.to_string().contains("http status: 4")
}

/// Whether it is the disk that does not take what comes.
fn of_the_disk(error: &io::Error) -> bool {
    use io::ErrorKind::{
        FileTooLarge, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull,
    };
    let kinds = [FileTooLarge, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull];
    kinds.contains(&error.kind())
}

/// How far a file is: a bar on a terminal, lines elsewhere.
#[derive(Clone)]
struct Shown {
    file: String,
    bar: ProgressBar,
    heard: Heard,
    /// What comes first is what was there already.
    first: bool,
    /// When the last line was written.
    line: Instant,
}

impl Shown {
    fn new(file: &str, heard: Heard) -> Self {
        let bar = ProgressBar::new(0).with_message(file.to_owned());
        let form =
            "{msg} {decimal_bytes} of {decimal_total_bytes} ({decimal_bytes_per_sec}, {eta} left)";
        if let Ok(style) = ProgressStyle::with_template(form) {
            bar.set_style(style);
        }
        Self { file: file.to_owned(), bar, heard, first: true, line: Instant::now() }
    }

    /// Writes how far it is, where no bar is seen.
    fn say(&mut self, how: &str) {
        if !std::io::stderr().is_terminal() {
            self.line = Instant::now();
            // Nobody is left to tell when stderr is closed.
            let _ = writeln!(io::stderr(), "{}: {how}", self.file);
        }
    }
}

impl Progress for Shown {
    fn init(&mut self, size: usize, _: &str) {
        self.heard.now();
        self.bar.set_length(size as u64);
        self.first = true;
    }
    fn update(&mut self, size: usize) {
        self.heard.now();
        let all = Bytes(self.bar.length().unwrap_or(0));
        if std::mem::take(&mut self.first) {
            self.bar.set_position(size as u64);
            self.bar.reset_eta();
            return match size {
                0 => self.say(&all.to_string()),
                _ => self.say(&format!("goes on from {} of {all}", Bytes(size as u64))),
            };
        }
        self.bar.inc(size as u64);
        if self.line.elapsed() >= LINES {
            let (have, rate) = (Bytes(self.bar.position()), Bytes(self.bar.per_sec() as u64));
            self.say(&format!("{have} of {all}, {rate}/s, {:.0?} left", self.bar.eta()));
        }
    }
    fn finish(&mut self) {
        self.bar.finish_and_clear();
    }
}
