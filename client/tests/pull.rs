//! `galaxy pull` from a Hub that the test plays: the same answers, over HTTP on loopback.
#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeMap,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

/// What the Hub has, and what it was asked for.
#[derive(Default)]
struct State {
    commit: &'static str,
    files: BTreeMap<String, Vec<u8>>,
    /// Weights that were asked for, and from which byte.
    asked: Vec<(String, usize)>,
    /// Weights of which the next answer is but a half, and then: hangs up, or says nothing more.
    half: Option<Half>,
}

#[derive(Clone, Copy, PartialEq)]
enum Half {
    HangsUp,
    Stalls,
}

/// A Hub with one model, org/name.
struct Hub {
    endpoint: String,
    state: Arc<Mutex<State>>,
}

impl Hub {
    fn new(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State { commit: "c0ffee", files, ..State::default() }));
        let (of, at) = (state.clone(), endpoint.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (of, at) = (of.clone(), at.clone());
                // A client that is killed hangs up.
                std::thread::spawn(move || drop(answer(stream.unwrap(), &at, &of)));
            }
        });
        Self { endpoint, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn start(&self, to: &Path) -> Child {
        Command::new(env!("CARGO_BIN_EXE_galaxy"))
            .args(["pull", "org/name", "--json", "--to"])
            .arg(to)
            .env("HF_ENDPOINT", format!("{}/", self.endpoint))
            .env_remove("HF_TOKEN")
            .env("HF_HOME", to)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Pulls, and gives the names of files that came.
    fn pull(&self, to: &Path) -> Vec<String> {
        let fresh = !to.join(".pull").exists();
        let Output { status, stdout, stderr } = self.start(to).wait_with_output().unwrap();
        let said = String::from_utf8(stderr).unwrap();
        assert!(status.success(), "{said}");
        let pulled: serde_json::Value = serde_json::from_slice(&stdout).unwrap();
        assert_eq!(pulled["commit"], self.state().commit);
        let fetched: Vec<String> = serde_json::from_value(pulled["fetched"].clone()).unwrap();
        for name in fetched.iter().filter(|_| fresh) {
            assert!(said.lines().any(|line| line.starts_with(&format!("{name}: "))), "{said}");
        }
        fetched
    }
}

/// Answers one request, and hangs up.
fn answer(stream: TcpStream, endpoint: &str, state: &Mutex<State>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap()?;
    let path = request.split(' ').nth(1).unwrap().to_owned();
    let mut range = (0, usize::MAX);
    while let Some(line) = lines.next().transpose()?.filter(|line| !line.is_empty()) {
        if let Some(bytes) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            let (from, to) = bytes.split_once('-').unwrap();
            range = (from.parse().unwrap(), to.parse().unwrap_or(usize::MAX));
        }
    }
    let mut state = state.lock().unwrap();
    let commit = state.commit;
    if let Some(revision) = path.strip_prefix("/api/models/org/name/revision/") {
        assert_eq!(revision, "main");
        let files = state.files.keys().map(|name| serde_json::json!({ "rfilename": name }));
        let files: Vec<_> = files.collect();
        let body = serde_json::json!({ "sha": commit, "siblings": files }).to_string();
        return send(stream, "200 OK", "", body.as_bytes(), body.len());
    }
    // All are of the commit that was said.
    let resolve = format!("/org/name/resolve/{commit}/");
    let brought = path.strip_prefix("/cdn/");
    let name = brought.or_else(|| path.strip_prefix(&resolve)).unwrap_or_default().to_owned();
    let Some(bytes) = state.files.get(&name).cloned() else {
        return send(stream, "404 Not Found", "", b"", 0);
    };
    let weights = name.ends_with(".safetensors");
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    let version = format!("{:016x}", hasher.finish());
    if weights && brought.is_none() {
        let head = format!(
            "location: {endpoint}/cdn/{name}\r\nx-repo-commit: {commit}\r\n\
             x-linked-etag: \"{version}\"\r\netag: \"other\"\r\n"
        );
        return send(stream, "302 Found", &head, b"", 0);
    }
    let end = range.1.min(bytes.len() - 1);
    let head = format!(
        "etag: \"{version}\"\r\nx-repo-commit: {commit}\r\ncontent-range: bytes {}-{end}/{}\r\n",
        range.0,
        bytes.len()
    );
    let body = &bytes[range.0..=end];
    let half = match weights && range.1 == usize::MAX {
        true => {
            state.asked.push((name, range.0));
            state.half.take()
        }
        false => None,
    };
    drop(state);
    let now = if half.is_some() { body.len() / 2 } else { body.len() };
    let going = stream.try_clone()?;
    send(stream, "206 Partial Content", &head, &body[..now], body.len())?;
    if half == Some(Half::Stalls) {
        // Until the other side is gone.
        return BufReader::new(going).read_until(0, &mut Vec::new()).map(drop);
    }
    Ok(())
}

fn send(
    mut stream: TcpStream,
    status: &str,
    head: &str,
    body: &[u8],
    length: usize,
) -> std::io::Result<()> {
    let head =
        format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n{head}\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}

/// A model of images, with all that others have beside it.
fn files() -> BTreeMap<String, Vec<u8>> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/vit");
    let real = ["config.json", "preprocessor_config.json", "model.safetensors"];
    let real = real.map(|name| (name.to_owned(), fs::read(golden.join(name)).unwrap()));
    let others = [
        "1_Pooling/config.json",
        "README.md",
        "chat_template.jinja",
        "modules.json",
        "onnx/model.onnx",
        "pytorch_model.bin",
        "sentence_distilbert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    let others = others.map(|name| (name.to_owned(), name.as_bytes().to_vec()));
    // Two that are the same are two.
    let same = ["2_Normalize/config.json", "3_Normalize/config.json"];
    let same = same.map(|name| (name.to_owned(), b"{}".to_vec()));
    real.into_iter().chain(others).chain(same).collect()
}

/// What does not come of [`files`].
const LEFT: [&str; 3] = ["README.md", "onnx/model.onnx", "pytorch_model.bin"];

/// Whether a directory has what is wanted of the Hub, and nothing else that can be seen.
fn is_whole(to: &Path, hub: &Hub) {
    let wanted = hub.state().files.clone();
    let wanted: Vec<_> = wanted.iter().filter(|(name, _)| !LEFT.contains(&name.as_str())).collect();
    for (name, bytes) in &wanted {
        assert_eq!(&&fs::read(to.join(name)).unwrap(), bytes, "{name}");
    }
    let seen = fs::read_dir(to).unwrap().map(|entry| entry.unwrap().file_name());
    let seen: Vec<_> = seen.filter(|name| !name.to_str().unwrap().starts_with('.')).collect();
    assert_eq!(seen.len(), wanted.len(), "{seen:?}");
    assert!(!to.join(".pull").exists());
}

#[test]
fn a_model_comes_with_all_that_belongs_to_it_and_goes_on_where_it_broke_off() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(files()));
    let to = dir.path().join("model");
    hub.state().half = Some(Half::HangsUp);
    let all = hub.state().files.len() - LEFT.len();
    assert_eq!(hub.pull(&to).len(), all);
    is_whole(&to, &hub);
    let half = hub.state().files["model.safetensors"].len() / 2;
    let name = || "model.safetensors".to_owned();
    assert_eq!(hub.state().asked, [(name(), 0), (name(), half)]);
}

#[test]
fn what_has_changed_is_brought_again_and_nothing_else() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(files()));
    let to = dir.path().join("model");
    // Somebody has a file of their own.
    fs::create_dir_all(&to).unwrap();
    fs::write(to.join("tokenizer_config.json"), "mine").unwrap();
    let came = hub.pull(&to);
    assert!(!came.contains(&"tokenizer_config.json".to_owned()), "{came:?}");
    assert_eq!(hub.pull(&to), Vec::<String>::new());
    {
        let mut state = hub.state();
        state.commit = "decade";
        state.files.insert("tokenizer.json".to_owned(), b"another".to_vec());
        state.files.remove("modules.json");
    }
    assert_eq!(hub.pull(&to), ["tokenizer.json"]);
    assert_eq!(fs::read(to.join("tokenizer_config.json")).unwrap(), b"mine");
    hub.state().files.insert("tokenizer_config.json".to_owned(), b"mine".to_vec());
    is_whole(&to, &hub);
}

#[test]
fn a_pull_that_was_killed_goes_on() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(files()));
    let to = dir.path().join("model");
    hub.state().half = Some(Half::Stalls);
    let mut pulling = hub.start(&to);
    let begun = Instant::now();
    let blobs = to.join(".pull/models--org--name/blobs");
    let part = || {
        let found = fs::read_dir(&blobs).ok()?.filter_map(Result::ok);
        let mut parts = found.filter(|entry| entry.path().extension().is_some_and(|e| e == "part"));
        parts.find_map(|entry| entry.metadata().ok().map(|part| part.len()).filter(|&n| n > 0))
    };
    while hub.state().asked.is_empty() || part().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not come to its weights");
        std::thread::yield_now();
    }
    pulling.kill().unwrap();
    pulling.wait().unwrap();
    hub.pull(&to);
    is_whole(&to, &hub);
    let asked = hub.state().asked.clone();
    assert!(asked.len() == 2 && asked[1].1 > 0, "{asked:?}");
}

#[test]
fn what_is_no_model_is_refused() {
    let (dir, hub) = (tempfile::tempdir().unwrap(), Hub::new(BTreeMap::new()));
    let pulled = hub.start(dir.path()).wait_with_output().unwrap();
    let said = String::from_utf8(pulled.stderr).unwrap();
    assert_eq!(pulled.status.code(), Some(1));
    assert!(said.contains("org/name has no config.json") && said.contains(&hub.endpoint), "{said}");
}
