//! `galaxy pull`: a model directory from the Hub, for those with a network.

use super::{failure::Failure, json, print};
use hf_hub::{
    Cache, Repo, RepoType,
    api::{
        Progress,
        sync::{Api, ApiBuilder, ApiError, ApiRepo},
    },
};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::{
    fs,
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    time::Instant,
};

/// Where what is not whole yet is kept, inside of where the model goes.
const UNFINISHED: &str = ".pull";
/// The public Hub, if HF_ENDPOINT says nothing else.
const HUB: &str = "https://huggingface.co";
/// Attempts for a file that breaks off.
const RETRIES: usize = 3;

#[derive(clap::Args, Debug)]
pub struct PullArgs {
    /// The model, like sentence-transformers/all-MiniLM-L6-v2.
    #[arg(value_name = "ORG/NAME")]
    model: String,
    /// Branch, tag or commit.
    #[arg(long, value_name = "REVISION", default_value = "main")]
    revision: String,
    /// Where it goes [default: models/NAME].
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// Prints one JSON object.
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
    seconds: f64,
}

/// Brings a model.
pub async fn pull(args: PullArgs) -> Result<(), Failure> {
    let as_json = args.json;
    let work = tokio::task::spawn_blocking(move || bring(&args));
    let pulled = work.await.map_err(|e| Failure::new(format!("it broke off: {e}")))??;
    if as_json {
        return print(&json(&pulled)?);
    }
    let Pulled { model, commit, directory, files, fetched, seconds } = pulled;
    print(&format!(
        "{model} ({commit}) is in {}: {} files, {} fetched in {seconds:.1} s\n",
        directory.display(),
        files.len(),
        fetched.len()
    ))
}

fn bring(args: &PullArgs) -> Result<Pulled, Failure> {
    let begun = Instant::now();
    let wrong =
        || Failure::usage(format!("{:?} names no model", args.model)).todo("write ORG/NAME");
    let (org, name) = args.model.split_once('/').ok_or_else(wrong)?;
    let plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains('/');
    if !plain(org) || !plain(name) {
        return Err(wrong());
    }
    let to = args.to.clone().unwrap_or_else(|| Path::new("models").join(name));
    let unfinished = to.join(UNFINISHED);
    fs::create_dir_all(&unfinished).map_err(|e| unwritten(&to, &e))?;
    // Its own caches are for many models; this one is for what is not whole yet.
    let mut builder = ApiBuilder::from_cache(Cache::new(unfinished.clone()))
        .with_progress(false)
        .with_retries(RETRIES)
        .with_token(std::env::var("HF_TOKEN").ok().or_else(|| Cache::from_env().token()));
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| HUB.to_owned());
    builder = builder.with_endpoint(endpoint.clone());
    let api: Api = builder.build().map_err(|e| refused(&e, &args.model, &endpoint))?;
    let repo = Repo::with_revision(args.model.clone(), RepoType::Model, args.revision.clone());
    let repo = api.repo(repo);
    let info = repo.info().map_err(|e| refused(&e, &args.model, &endpoint))?;
    let all: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    let files = wanted(&all);
    let has = |name: &str| files.iter().any(|file| file == name);
    if !has("config.json") || !files.iter().any(|file| file.ends_with(".safetensors")) {
        return Err(Failure::new(format!("{} has no config.json with .safetensors", args.model))
            .at(endpoint)
            .todo("choose a model, or with --revision a version of it, that has both"));
    }
    let mut fetched = Vec::new();
    for file in &files {
        let target = to.join(file);
        if target.is_file() {
            continue;
        }
        fetch(&repo, file, &target).map_err(|error| match error {
            Fetching::Hub(error) => refused(&error, &args.model, &endpoint),
            Fetching::Disk(error) => unwritten(&target, &error),
        })?;
        fetched.push(file.clone());
    }
    fs::remove_dir_all(&unfinished).map_err(|e| unwritten(&unfinished, &e))?;
    Ok(Pulled {
        model: args.model.clone(),
        commit: info.sha,
        directory: to,
        files,
        fetched,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// What a model directory needs of a repository: never pickles, nor weights in other formats. Names
/// come from the network, and become paths.
fn wanted(all: &[String]) -> Vec<String> {
    const PLAIN: [&str; 10] = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ];
    let harmless = |part: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(known)
    };
    let shard = |name: &str| name.starts_with("model-") && name.ends_with(".safetensors");
    // A module of sentence-transformers has a folder, as "1_Pooling".
    let module = |folder: &str, name: &str| {
        folder.starts_with(|c: char| c.is_ascii_digit()) && name == "config.json"
    };
    let take = |name: &&String| match name.split('/').collect::<Vec<_>>()[..] {
        [name] => harmless(name) && (PLAIN.contains(&name) || shard(name)),
        [folder, name] => harmless(folder) && module(folder, name),
        _ => false,
    };
    all.iter().filter(take).cloned().collect()
}

enum Fetching {
    Hub(ApiError),
    Disk(std::io::Error),
}

/// Brings one file, and puts it in its place when it is whole.
fn fetch(repo: &ApiRepo, file: &str, target: &Path) -> Result<(), Fetching> {
    let shown = Shown::new(file);
    let kept = repo.download_with_progress(file, shown).map_err(Fetching::Hub)?;
    // What is kept is a link to the bytes.
    let bytes = kept.canonicalize().map_err(Fetching::Disk)?;
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).map_err(Fetching::Disk)?;
    }
    fs::rename(bytes, target).map_err(Fetching::Disk)
}

/// How far a file is: a bar on a terminal, a line elsewhere.
struct Shown {
    file: String,
    bar: ProgressBar,
}

impl Shown {
    fn new(file: &str) -> Self {
        Self { file: file.to_owned(), bar: ProgressBar::hidden() }
    }
}

impl Progress for Shown {
    fn init(&mut self, size: usize, _: &str) {
        if std::io::stderr().is_terminal() {
            self.bar = ProgressBar::new(size as u64).with_message(self.file.clone());
            let form = "{msg} {bytes} of {total_bytes} ({bytes_per_sec}, {eta} left)";
            if let Ok(style) = ProgressStyle::with_template(form) {
                self.bar.set_style(style);
            }
        } else {
            // Nobody is left to tell when stderr is closed.
            let _ = writeln!(std::io::stderr(), "{}: {size} bytes", self.file);
        }
    }
    fn update(&mut self, size: usize) {
        self.bar.inc(size as u64);
    }
    fn finish(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn unwritten(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot write: {error}"))
        .at(path.display())
        .todo("make room, or choose another place with --to; what has come is kept")
}

/// What the Hub, or the way to it, refuses.
fn refused(error: &ApiError, model: &str, endpoint: &str) -> Failure {
    let text = error.to_string();
    let said = |code: &str| text.contains(code);
    match error {
        ApiError::RequestError(_) if said("404") => Failure::new(format!("there is no {model}"))
            .at(endpoint.to_owned())
            .todo("correct the name, or --revision"),
        ApiError::RequestError(_) if said("401") || said("403") => {
            Failure::new(format!("{model} is not there, or not for everybody"))
                .at(endpoint.to_owned())
                .todo("correct the name, or set HF_TOKEN to a token that may read it")
        }
        ApiError::RequestError(_) | ApiError::TooManyRetries(_) => Failure::new(format!(
            "the Hub cannot be reached: {text}"
        ))
        .at(endpoint.to_owned())
        .todo(
            "pull on a machine with a network and copy the directory here; what has come is kept",
        ),
        _ => Failure::new(format!("{model} cannot be brought: {text}")).at(endpoint.to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::{
        io::{BufRead, BufReader},
        net::TcpListener,
    };

    #[test]
    fn only_what_a_model_needs_is_taken() {
        let all = [
            "README.md",
            ".gitattributes",
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "1_Pooling/config.json",
            "../config.json",
            "/etc/config.json",
            "1_Pooling/../../config.json",
            "onnx/config.json",
        ];
        let all: Vec<String> = all.iter().map(|name| (*name).to_owned()).collect();
        let taken = wanted(&all);
        let right = [
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "1_Pooling/config.json",
        ];
        assert_eq!(taken, right);
    }

    /// A Hub of one request: answers, and hangs up.
    fn hub(answer: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
            stream.write_all(answer.as_bytes()).unwrap();
        });
        format!("http://{address}")
    }

    fn info(endpoint: &str) -> Failure {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::new(dir.path().to_owned());
        let api = ApiBuilder::from_cache(cache).with_endpoint(endpoint.to_owned()).build().unwrap();
        let error = api.model("org/name".to_owned()).info().err().unwrap();
        refused(&error, "org/name", endpoint)
    }

    #[test]
    fn what_the_hub_says_is_told_in_our_words() {
        let gone = hub("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        let said = info(&gone).to_string();
        assert!(said.contains("there is no org/name") && said.contains("--revision"), "{said}");
        let mine =
            hub("HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        let said = info(&mine).to_string();
        assert!(said.contains("HF_TOKEN"), "{said}");
        // Nobody listens there any more.
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let said = info(&format!("http://{nobody}")).to_string();
        assert!(
            said.contains("cannot be reached") && said.contains("copy the directory"),
            "{said}"
        );
    }

    #[test]
    fn a_name_is_org_and_name() {
        for model in ["name", "/", "a/", "a/b/c", "../x"] {
            let args = PullArgs {
                model: model.to_owned(),
                revision: "main".to_owned(),
                to: None,
                json: false,
            };
            assert_eq!(bring(&args).err().unwrap().exit_code(), 2, "{model}");
        }
    }
}
