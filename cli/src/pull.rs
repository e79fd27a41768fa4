//! `galaxy pull`: downloads a model directory from the Hub.

mod installed;
mod refusal;
mod shown;

use super::{failure::Failure, json, print};
use galaxy_cli::hub::{About, HubError, Patience, Repository, Web};
use galaxy_model::{
    ModelError,
    files::{self, CONFIG, INDEX, MODULES, TOKENIZER, WEIGHTS, inside},
};
use installed::Installed;
use refusal::{refused, unwritten};
use serde::Serialize;
use shown::Shown;
use std::{
    collections::BTreeSet,
    env, fs,
    io::Read,
    path::{Path, PathBuf},
    time::Instant,
};
use tokio::sync::oneshot;

/// The public Hub, unless HF_ENDPOINT names another.
const HUB: &str = "https://huggingface.co";
/// The most bytes that are read of a file which lists others; such files have some megabytes at
/// most.
const MAX_LIST_BYTES: u64 = 64 << 20;

#[derive(clap::Args, Debug)]
#[command(
    after_help = "HF_ENDPOINT names a mirror of the Hub, HF_TOKEN a token for models that are not for \
    everybody, SSL_CERT_FILE the authorities that are trusted, HTTPS_PROXY and NO_PROXY a proxy."
)]
pub struct PullArgs {
    /// Model to download, like sentence-transformers/all-MiniLM-L6-v2.
    #[arg(value_name = "ORG/NAME")]
    model: String,
    /// Branch, tag or commit to download.
    #[arg(long, value_name = "REVISION", default_value = "main")]
    revision: String,
    /// Directory to put the model in [default: models/NAME].
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Pulled {
    model: String,
    commit: String,
    directory: PathBuf,
    files: Vec<String>,
    fetched: Vec<String>,
    /// How many files were there already, and not by a pull: they stay as they are.
    own: usize,
    /// What the model lacks that some uses of it need.
    notes: Vec<String>,
    seconds: f64,
}

/// Runs `galaxy pull`.
pub async fn pull(args: PullArgs) -> Result<(), Failure> {
    let as_json = args.json;
    let endpoint = env::var("HF_ENDPOINT").ok().filter(|text| !text.trim().is_empty());
    let endpoint = endpoint.unwrap_or_else(|| HUB.to_owned());
    let (sender, pulled) = oneshot::channel();
    // A thread of its own: one that waits for a network does not keep a process that is interrupted.
    std::thread::spawn(move || {
        // Somebody who waits no more wants to know nothing.
        let _ = sender.send(bring(&args, &endpoint, Patience::default()));
    });
    let pulled = pulled.await.map_err(|_| Failure::new("the download stopped unexpectedly"))??;
    if as_json {
        return print(&json(&pulled)?);
    }
    let Pulled { model, commit, directory, files, fetched, own, notes, seconds } = pulled;
    let left = match own {
        0 => String::new(),
        own => format!("; {own} were there already, not by a pull, and stay as they are"),
    };
    let notes: String = notes.iter().map(|note| format!("note: {note}\n")).collect();
    print(&format!(
        "{model} ({commit}) is in {}: {} files, {} fetched in {seconds:.1} s{left}\n{notes}",
        directory.display(),
        files.len(),
        fetched.len()
    ))
}

fn bring(args: &PullArgs, endpoint: &str, patience: Patience) -> Result<Pulled, Failure> {
    let begun = Instant::now();
    let model = args.model.as_str();
    let (_, name) = model.split_once('/').filter(|_| named(model)).ok_or_else(|| {
        Failure::usage(format!("{model:?} names no model")).todo("write ORG/NAME")
    })?;
    let to = args.to.clone().unwrap_or_else(|| Path::new("models").join(name));
    let web = Web::new(endpoint.trim(), token().as_deref(), patience)
        .map_err(|error| refused(&error, model, &args.revision))?;
    let installed = Installed::open(&to)?;
    let mut shown = Shown::new();
    let of = (model, args.revision.as_str());
    let (repository, listing) = Repository::open(web, of, installed.unfinished(), &mut shown)
        .map_err(|error| refused(&error, model, &args.revision))?;
    let (ready, own) = (Vec::new(), BTreeSet::new());
    let mut pulling =
        Pulling { args, repository, all: listing.files, installed, shown, ready, own };
    let (files, notes) = pulling.choose()?;
    let rest = files.iter().filter(|file| !pulling.is_there(file));
    let mut abouts: Vec<(String, About)> = Vec::new();
    for file in rest.cloned().collect::<Vec<_>>() {
        let about = pulling.about(&file)?;
        abouts.extend(about.map(|about| (file, about)));
    }
    pulling.shown.expect(abouts.iter().map(|(_, about)| about.size).fold(0, u64::saturating_add));
    for (file, about) in abouts {
        pulling.fetch(file, about)?;
    }
    let Pulling { repository, mut installed, ready, own, shown, .. } = pulling;
    drop(shown);
    let fetched = ready.iter().map(|(file, ..)| file.clone()).collect();
    installed.replace(&files, ready)?;
    Ok(Pulled {
        model: model.to_owned(),
        commit: repository.commit().to_owned(),
        directory: to,
        files,
        fetched,
        own: own.len(),
        notes,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Whether a text is ORG/NAME.
fn named(model: &str) -> bool {
    files::is_plain(model) && model.matches('/').count() == 1
}

/// The token for the Hub: HF_TOKEN, or the one that `huggingface-cli login` has kept.
fn token() -> Option<String> {
    let kept = || {
        let home = env::var_os("HF_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let home = home.or_else(|| Some(env::home_dir()?.join(".cache/huggingface")))?;
        fs::read_to_string(home.join("token")).ok()
    };
    let whole = |token: String| Some(token.trim().to_owned()).filter(|token| !token.is_empty());
    env::var("HF_TOKEN").ok().and_then(whole).or_else(|| kept().and_then(whole))
}

/// A pull in progress.
struct Pulling<'a> {
    args: &'a PullArgs,
    repository: Repository,
    /// The files of the repository.
    all: BTreeSet<String>,
    installed: Installed,
    shown: Shown,
    /// Files that have come, their versions, and where they lie until they are put in their places.
    ready: Vec<(String, String, PathBuf)>,
    /// Files that somebody else put where they are.
    own: BTreeSet<String>,
}

impl Pulling<'_> {
    /// Chooses the files of which the model consists, and fetches those that list others for it.
    /// Returns them, with notes on what the model lacks.
    fn choose(&mut self) -> Result<(Vec<String>, Vec<String>), Failure> {
        let directories = match self.all.contains(MODULES) {
            true => files::modules(&self.read(MODULES)?).map_err(|e| self.damaged(&e))?,
            false => vec![String::new()],
        };
        let mut chosen = BTreeSet::new();
        // Some of the files lie beside the list of modules, wherever its transformer is.
        let first = directories.first().cloned().unwrap_or_default();
        for directory in [String::new()].iter().chain(&directories) {
            let mut wanted = files::wanted(&self.all, directory);
            let index = inside(directory, INDEX);
            if wanted.contains(&index) {
                let shards = files::shards(&self.read(&index)?).map_err(|e| self.damaged(&e))?;
                let shards = shards.iter().map(|shard| inside(directory, shard));
                let (there, missing): (Vec<_>, Vec<_>) =
                    shards.partition(|shard| self.all.contains(shard));
                if let Some(shard) = missing.first() {
                    let what = format!("{} has no {shard}, which {index} names", self.args.model);
                    return Err(self.unusable(what));
                }
                wanted.extend(there);
            }
            let weights = wanted.iter().any(|file| file.ends_with(".safetensors"));
            let others = files::other_weights(&self.all, directory);
            let needs =
                *directory == first || directories.contains(directory) && !others.is_empty();
            if needs && !(weights && wanted.contains(&inside(directory, CONFIG))) {
                return Err(self.lacks(directory, &others));
            }
            chosen.extend(wanted);
        }
        let tokenizer = chosen.contains(&inside(&first, TOKENIZER)) || chosen.contains(TOKENIZER);
        let words = chosen.iter().any(|file| file.contains("vocab") || file.contains("tokenizer"));
        let mut notes = Vec::new();
        if words && !tokenizer {
            notes.push(format!(
                "there is no {TOKENIZER}, without which no text can be read: `AutoTokenizer` of \
                 transformers makes one with save_pretrained"
            ));
        }
        Ok((chosen.into_iter().collect(), notes))
    }

    /// The contents of a file that lists others; it is fetched if it is not there.
    fn read(&mut self, file: &str) -> Result<Vec<u8>, Failure> {
        if !self.is_there(file)
            && let Some(about) = self.about(file)?
        {
            self.fetch(file.to_owned(), about)?;
        }
        let ready = self.ready.iter().find(|(name, ..)| name == file);
        let path = match ready {
            Some((.., path)) => path.clone(),
            None => self.installed.path(file),
        };
        let mut text = Vec::new();
        let read =
            fs::File::open(&path).and_then(|f| f.take(MAX_LIST_BYTES).read_to_end(&mut text));
        read.map_err(|error| Failure::new(format!("cannot read: {error}")).at(path.display()))?;
        Ok(text)
    }

    /// Whether a file has come already, or is somebody else's.
    fn is_there(&mut self, file: &str) -> bool {
        if self.installed.is_foreign(file) {
            self.own.insert(file.to_owned());
        }
        self.own.contains(file) || self.ready.iter().any(|(name, ..)| name == file)
    }

    /// The version and the size of a file; none if it is there in this version.
    fn about(&mut self, file: &str) -> Result<Option<About>, Failure> {
        let about = self.repository.about(file, &mut self.shown);
        let about = about.map_err(|error| self.failed(file, &error))?;
        Ok(Some(about).filter(|about| !self.installed.has(file, &about.version)))
    }

    fn fetch(&mut self, file: String, about: About) -> Result<(), Failure> {
        self.shown.begin(&file, about.size);
        let path = self.repository.fetch(&file, &about, &mut self.shown);
        let path = path.map_err(|error| self.failed(&file, &error))?;
        self.shown.end();
        self.ready.push((file, about.version, path));
        Ok(())
    }

    /// The failure of a file that does not come.
    fn failed(&self, file: &str, error: &HubError) -> Failure {
        let PullArgs { model, revision, .. } = self.args;
        match error {
            HubError::Status { status: status @ (404 | 410), .. } => Failure::new(format!(
                "the Hub lists {file} of {model}, and does not have it ({status})"
            ))
            .at(self.repository.origin())
            .todo("pull again later, or from another HF_ENDPOINT"),
            error => refused(error, model, revision),
        }
    }

    /// The failure of a repository without a usable model in `directory`; `others` are its weights
    /// in other formats.
    fn lacks(&self, directory: &str, others: &[String]) -> Failure {
        let model = &self.args.model;
        let mut list = others.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
        if let Some(more @ 1..) = others.len().checked_sub(5) {
            list.push_str(&format!(" and {more} more"));
        }
        let (config, weights) = (inside(directory, CONFIG), inside(directory, WEIGHTS));
        if self.all.contains(&inside(directory, "adapter_config.json")) {
            return self
                .unusable(format!("{model} is an adapter, which changes another model: {list}"))
                .todo(
                    "merge it with its base model (merge_and_unload of peft), and use the result",
                );
        }
        if others.iter().any(|file| file.ends_with(".gguf")) {
            return self
                .unusable(format!("{model} has its weights as GGUF files, which are not pulled: {list}"))
                .todo("fetch one of them by hand, and give it where a model is asked for; or choose the model that it was made of");
        }
        if others.is_empty() {
            return self.unusable(format!("{model} has no {config} with {weights}"));
        }
        if !self.all.contains(&config) {
            return self.unusable(format!("{model} has no {config} with {weights}; it has {list}"));
        }
        self.unusable(format!("{model} has no {weights}, and other formats are not read: {list}"))
            .todo(
                "choose another --revision, as refs/pr/N, that has it, or make it with \
                 save_pretrained of transformers",
            )
    }

    fn unusable(&self, what: String) -> Failure {
        Failure::new(what)
            .at(self.repository.origin())
            .todo("choose another model, or with --revision another version of it")
    }

    fn damaged(&self, error: &ModelError) -> Failure {
        self.unusable(format!("{} cannot be used: {error}", self.args.model))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn model_names_other_than_org_slash_name_are_refused() {
        for model in ["name", "/", "a/", "a/b/c", "../x", "a/b?c", "a/..", "a/b c"] {
            let args = PullArgs {
                model: model.to_owned(),
                revision: "main".to_owned(),
                to: None,
                json: false,
            };
            let refused = bring(&args, "http://127.0.0.1:1", Patience::default()).err().unwrap();
            assert_eq!(refused.exit_code(), 2, "{model}");
        }
    }
}
