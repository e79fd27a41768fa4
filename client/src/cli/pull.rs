//! `galaxy pull`: a model directory from the Hub, for those with a network.

mod hub;

use super::{failure::Failure, json, print};
use hf_hub::api::sync::ApiError;
use hub::{Fetching, Heard, Hub};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

/// Where what is not whole yet is kept, inside of where the model goes.
const UNFINISHED: &str = ".pull";
/// The file beside a model that says which version of each file was brought.
const BROUGHT: &str = ".galaxy-pulled";
/// The public Hub, if HF_ENDPOINT says nothing else.
const HUB: &str = "https://huggingface.co";
/// A Hub that says nothing for so long is not waited for.
const SILENCE: Duration = Duration::from_secs(60);
/// Between two looks at whether it says something.
const LOOK: Duration = Duration::from_secs(1);

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
    /// Files that were there, and not by us: they stay as they are.
    own: usize,
    seconds: f64,
}

/// Brings a model.
pub async fn pull(args: PullArgs) -> Result<(), Failure> {
    let as_json = args.json;
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| HUB.to_owned());
    let heard = Heard::new();
    let (sender, brought) = oneshot::channel();
    let (from, hears) = (endpoint.clone(), heard.clone());
    // A thread that waits for a silent network does not keep the process.
    std::thread::spawn(move || {
        // Somebody who waits no more has said why.
        let _ = sender.send(bring(&args, &from, hears));
    });
    let pulled = while_heard(brought, &heard, SILENCE).await.ok_or_else(|| {
        Failure::new(format!("nothing has come for {SILENCE:?}"))
            .at(endpoint)
            .todo("look at the network, and pull again; what has come is kept")
    })?;
    let pulled = pulled.map_err(|_| Failure::new("it broke off"))??;
    if as_json {
        return print(&json(&pulled)?);
    }
    let Pulled { model, commit, directory, files, fetched, own, seconds } = pulled;
    let left = match own {
        0 => String::new(),
        own => format!("; {own} were there already, not by a pull, and stay as they are"),
    };
    print(&format!(
        "{model} ({commit}) is in {}: {} files, {} fetched in {seconds:.1} s{left}\n",
        directory.display(),
        files.len(),
        fetched.len()
    ))
}

/// Waits for `work`, unless nothing is heard for so long.
async fn while_heard<T>(
    work: impl Future<Output = T>,
    heard: &Heard,
    silence: Duration,
) -> Option<T> {
    let (mut work, look) = (std::pin::pin!(work), LOOK.min(silence));
    let mut left = silence;
    // By looks, and not by the clock: a process that was stopped heard nothing, and is in no hurry.
    while !left.is_zero() {
        match tokio::time::timeout(look, work.as_mut()).await {
            Ok(done) => return Some(done),
            Err(_) if heard.ago() < look => left = silence,
            Err(_) => left = left.saturating_sub(look),
        }
    }
    None
}

fn bring(args: &PullArgs, endpoint: &str, heard: Heard) -> Result<Pulled, Failure> {
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
    let refuse = |error: &ApiError| refused(error, &args.model, endpoint);
    let of = (endpoint, args.model.as_str(), args.revision.as_str());
    let mut hub = Hub::new(of, unfinished.clone(), heard).map_err(|e| refuse(&e))?;
    let (commit, all) = hub.settle().map_err(|e| refuse(&e))?;
    let files = wanted(&all);
    let has = |name: &str| files.iter().any(|file| file == name);
    if !has("config.json") || !files.iter().any(|file| file.ends_with(".safetensors")) {
        return Err(Failure::new(format!("{} has no config.json with .safetensors", args.model))
            .at(endpoint)
            .todo("choose a model, or with --revision a version of it, that has both"));
    }
    let mut brought = Brought::read(&to);
    let (mut new, mut own) = (Vec::new(), 0);
    for file in &files {
        let there = to.join(file).is_file();
        let known = brought.versions.get(file);
        // Somebody put it there.
        if there && known.is_none() {
            own += 1;
            continue;
        }
        let about = hub.about(file).map_err(|e| refuse(&e))?;
        if there && known.is_some_and(|known| known == about.etag()) {
            continue;
        }
        let bytes = hub.fetch(file, &about).map_err(|error| match error {
            Fetching::Hub(error) => refuse(&error),
            Fetching::Disk(error) => unwritten(&to, &error),
            Fetching::Length { have, want } => {
                Failure::new(format!("{file} came with {have} bytes, and has {want}"))
                    .at(endpoint)
                    .todo("pull again")
            }
        })?;
        new.push((file, about.etag().to_owned(), bytes));
    }
    // All of it is here: what was there gives way at once, and is never half of one version.
    brought.leave(&files).map_err(|e| unwritten(&to, &e))?;
    let mut fetched = Vec::new();
    for (file, version, bytes) in new {
        brought.put(file, &version, &bytes).map_err(|e| unwritten(&to.join(file), &e))?;
        fetched.push(file.clone());
    }
    fs::remove_dir_all(&unfinished).map_err(|e| unwritten(&unfinished, &e))?;
    Ok(Pulled {
        model: args.model.clone(),
        commit,
        directory: to,
        files,
        fetched,
        own,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Which version of each file was brought: what has changed since is brought again, and nothing else.
struct Brought {
    to: PathBuf,
    versions: BTreeMap<String, String>,
}

impl Brought {
    /// What is known of a directory. What cannot be read says nothing.
    fn read(to: &Path) -> Self {
        let text = fs::read(to.join(BROUGHT)).ok();
        let versions = text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
        Self { to: to.to_owned(), versions }
    }
    fn write(&self) -> std::io::Result<()> {
        let new = self.to.join(format!("{BROUGHT}.new"));
        fs::write(&new, serde_json::to_vec(&self.versions)?)?;
        fs::rename(new, self.to.join(BROUGHT))
    }
    /// Puts a file in its place, and notes that it is there.
    fn put(&mut self, file: &str, version: &str, bytes: &Path) -> std::io::Result<()> {
        // If we are ended in the middle it is brought again.
        self.versions.insert(file.to_owned(), String::new());
        self.write()?;
        let target = self.to.join(file);
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::rename(bytes, target)?;
        self.versions.insert(file.to_owned(), version.to_owned());
        self.write()
    }
    /// Removes what was brought and is no part of the model any more.
    fn leave(&mut self, files: &[String]) -> std::io::Result<()> {
        let known: Vec<String> = self.versions.keys().cloned().collect();
        for file in wanted(&known).into_iter().filter(|file| !files.contains(file)) {
            match fs::remove_file(self.to.join(&file)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
                _ => drop(self.versions.remove(&file)),
            }
            self.write()?;
        }
        Ok(())
    }
}

/// What a model directory needs of a repository: never pickles, nor weights in other formats. Names
/// come from the network, and become paths.
fn wanted(all: &[String]) -> Vec<String> {
    const PLAIN: [&str; 13] = [
        "config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "special_tokens_map.json",
        "generation_config.json",
        "modules.json",
        "sentence_bert_config.json",
        "sentence_distilbert_config.json",
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
        ApiError::RequestError(_) | ApiError::IoError(_) => Failure::new(format!(
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
        io::{BufRead, BufReader, Write},
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
        let of = (endpoint, "org/name", "main");
        let mut hub = Hub::new(of, dir.path().to_owned(), Heard::new()).unwrap();
        refused(&hub.settle().err().unwrap(), "org/name", endpoint)
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

    #[tokio::test]
    async fn a_hub_that_says_nothing_is_not_waited_for() {
        let (heard, silence) = (Heard::new(), Duration::from_millis(50));
        let nothing = std::future::pending::<()>();
        assert_eq!(while_heard(nothing, &heard, silence).await, None);
        assert_eq!(while_heard(async { 7 }, &heard, silence).await, Some(7));
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
            let refused = bring(&args, "http://127.0.0.1:1", Heard::new()).err().unwrap();
            assert_eq!(refused.exit_code(), 2, "{model}");
        }
    }
}
