//! One repository of a Hub: lists its files, and downloads them one at a time.

use super::{
    address::{self, Origin},
    answer::{About, Listing},
    error::HubError,
    partial_file::{PIECE_BYTES, PartialFile, tag},
    web::{Patience, Web, WebResponse},
};
use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// The most bytes of a listing; thousands of files are listed in some hundred kilobytes.
const MAX_LISTING_BYTES: usize = 16 << 20;
/// The most bytes of a file other than weights; a tokenizer has some dozen megabytes.
const MAX_OTHER_BYTES: u64 = 1 << 30;

/// An observer of downloads.
pub trait Watch {
    /// Reports that `bytes` bytes of the file are there.
    fn have(&mut self, bytes: u64);
    /// Reports that an attempt failed, and that the next one follows after `pause`.
    fn pauses(&mut self, why: &HubError, pause: Duration);
}

/// A repository at one commit, with the directory of its partial downloads.
pub struct Repository {
    web: Web,
    model: String,
    commit: String,
    unfinished: PathBuf,
}

impl Repository {
    /// Opens a model, as ORG/NAME, at a revision, and lists its files. All files come from the commit that the revision
    /// is now; partial downloads are kept in the directory `unfinished`.
    ///
    /// # Errors
    /// When the Hub does not answer, or refuses.
    pub fn open(
        web: Web,
        (model, revision): (&str, &str),
        unfinished: &Path,
        watch: &mut impl Watch,
    ) -> Result<(Self, Listing), HubError> {
        let path = format!("/api/models/{model}/revision/{}", address::part(revision));
        let listing = retried(Retries::of_first(web.patience()), watch, || {
            let mut answer = web.get(&path, None)?;
            let text = answer.whole(MAX_LISTING_BYTES)?;
            Listing::parse(&text)
                .map_err(|problem| HubError::Answer { from: answer.from.clone(), problem })
        })?;
        let (model, commit) = (model.to_owned(), listing.commit.clone());
        Ok((Self { web, model, commit, unfinished: unfinished.to_owned() }, listing))
    }

    /// The commit that files come from.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// The Hub that has the repository.
    pub fn origin(&self) -> Origin {
        self.web.origin()
    }

    /// The version and the size of a file.
    ///
    /// # Errors
    /// When the Hub does not tell them.
    pub fn about(&self, file: &str, watch: &mut impl Watch) -> Result<About, HubError> {
        retried(Retries::new(self.web.patience()), watch, || {
            // Not HEAD: addresses with a signature in them are often signed for GET alone.
            let answer = self.web.get(&self.path(file), Some((0, Some(0))))?;
            let about = self.read_about(file, &answer);
            answer.leave();
            about
        })
    }

    /// Downloads one file, and returns its path in the directory of partial downloads. Resumes what an earlier call has
    /// left, and goes on as long as more comes.
    ///
    /// # Errors
    /// When the Hub does not give it, the disk does not take it, or it is not what the Hub says that it is.
    pub fn fetch(
        &self,
        file: &str,
        about: &About,
        watch: &mut impl Watch,
    ) -> Result<PathBuf, HubError> {
        // Names of files have no spaces, so no two of them become one.
        let name = format!("{} {}", file.replace('/', " "), tag(&about.version));
        let whole = self.unfinished.join(&name);
        if fs::symlink_metadata(&whole).is_ok_and(|w| w.is_file() && w.len() == about.size) {
            watch.have(about.size);
            return Ok(whole);
        }
        let mut part = PartialFile::open(self.unfinished.join(format!("{name}.part")), about)?;
        let mut again = false;
        loop {
            watch.have(part.length());
            self.fill(&mut part, file, about, watch)?;
            if part.is_right() {
                break;
            }
            // What an earlier pull has left may be damaged, and so may what came: once.
            part.clear()?;
            if std::mem::replace(&mut again, true) {
                let (from, file) = (self.web.origin(), file.to_owned());
                return Err(HubError::Digest { from, file });
            }
        }
        part.finish(&whole)?;
        Ok(whole)
    }

    /// Asks until all of a file has come.
    fn fill(
        &self,
        part: &mut PartialFile,
        file: &str,
        about: &About,
        watch: &mut impl Watch,
    ) -> Result<(), HubError> {
        let mut retries = Retries::new(self.web.patience());
        while !part.is_whole() {
            let before = part.length();
            if let Err(error) = self.append(part, file, about, watch) {
                if part.length() > before {
                    retries = Retries::new(self.web.patience());
                }
                retries.after(error, watch)?;
            }
        }
        Ok(())
    }

    /// Asks once for the bytes that are missing.
    fn append(
        &self,
        part: &mut PartialFile,
        file: &str,
        about: &About,
        watch: &mut impl Watch,
    ) -> Result<(), HubError> {
        let begin = part.length();
        let range = (begin > 0).then_some((begin, None));
        let asked = self.web.get(&self.path(file), range);
        if let Err(HubError::Status { status: 416, from, .. }) = asked {
            part.clear()?;
            return Err(HubError::Range { from, file: file.to_owned() });
        }
        let mut answer = asked?;
        let other = || HubError::Range { from: answer.from.clone(), file: file.to_owned() };
        let now = self.read_about(file, &answer)?;
        let comes = match answer.status {
            206 => answer.range.and_then(|range| range.from),
            _ => Some(0),
        };
        // The version stands in for an If-Range: the tag that the last host of the way would compare is
        // often not the one that the Hub says.
        let goes_on = comes == Some(begin) && (begin == 0 || now == *about);
        if now.size != about.size || !goes_on {
            part.clear()?;
            if now.size != about.size || comes != Some(0) {
                return Err(other());
            }
        }
        let mut piece = vec![0; PIECE_BYTES];
        while !part.is_whole() {
            let count = answer.read(&mut piece)?;
            if count == 0 {
                let why = "the connection ended before all had come".to_owned();
                return Err(HubError::Network { from: answer.from.clone(), why });
            }
            if !part.append(&piece[..count])? {
                part.clear()?;
                return Err(HubError::Range { from: answer.from.clone(), file: file.to_owned() });
            }
            watch.have(part.length());
        }
        Ok(())
    }

    /// The version and the size that an answer gives of a file. Where it gives no version, the commit stands for it.
    fn read_about(&self, file: &str, answer: &WebResponse) -> Result<About, HubError> {
        let wrong = |problem| HubError::Answer { from: answer.from.clone(), problem };
        let size = answer
            .about
            .size
            .ok_or_else(|| wrong(format!("it does not say how long {file} is")))?;
        if size > MAX_OTHER_BYTES && !file.ends_with(".safetensors") {
            return Err(wrong(format!("it says that {file} has {size} bytes")));
        }
        let version = answer.about.version.clone().unwrap_or_else(|| self.commit.clone());
        Ok(About { version, size })
    }

    fn path(&self, file: &str) -> String {
        format!("/{}/resolve/{}/{file}", self.model, self.commit)
    }
}

/// How often something has failed, and how long to wait until it is tried again.
struct Retries {
    patience: Patience,
    failed: u32,
    waited: Duration,
    /// How often a Hub that cannot be reached is tried again.
    unreached: u32,
}

impl Retries {
    fn new(patience: Patience) -> Self {
        Self { patience, failed: 0, waited: Duration::ZERO, unreached: patience.retries }
    }

    /// The retries of the first request: a Hub that cannot be reached is tried again once at most, so that a missing
    /// network is reported soon.
    fn of_first(patience: Patience) -> Self {
        Self { unreached: patience.retries.min(1), ..Self::new(patience) }
    }

    /// Waits after a failure, or returns it where another attempt does not help or none is left.
    fn after(&mut self, error: HubError, watch: &mut impl Watch) -> Result<(), HubError> {
        let asked = match &error {
            HubError::Status { wait, .. } => *wait,
            _ => None,
        };
        let doubled = self.patience.pause.saturating_mul(1 << self.failed.min(16));
        let pause = asked.unwrap_or(doubled);
        self.failed += 1;
        let most = match &error {
            HubError::Network { .. } => self.unreached,
            error if error.may_pass() => self.patience.retries,
            _ => 0,
        };
        self.waited = self.waited.saturating_add(pause);
        if self.failed > most || self.waited > self.patience.longest {
            return Err(error);
        }
        watch.pauses(&error, pause);
        thread::sleep(pause);
        Ok(())
    }
}

fn retried<T>(
    mut retries: Retries,
    watch: &mut impl Watch,
    mut ask: impl FnMut() -> Result<T, HubError>,
) -> Result<T, HubError> {
    loop {
        match ask() {
            Ok(answer) => return Ok(answer),
            Err(error) => retries.after(error, watch)?,
        }
    }
}
