//! A Hub that the test plays: the same answers, over HTTP on loopback.

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex, MutexGuard},
};

/// Files of a repository by name.
pub type Files = BTreeMap<String, Vec<u8>>;

/// What a Hub has, and what it was asked for.
pub struct HubState {
    pub commit: String,
    pub files: Files,
    pub asked: Vec<Request>,
    script: Option<Box<Script>>,
}

/// Answers a request otherwise than a Hub would, or leaves it to the Hub. It gets the files that the Hub has, and its
/// address.
type Script = dyn FnMut(&Request, &Files, &str) -> Option<Reply> + Send;

#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    /// The first byte that is wanted, and the last.
    pub range: Option<(usize, Option<usize>)>,
    pub authorization: Option<String>,
}

impl Request {
    /// The file that is wanted, wherever it is asked for.
    pub fn file(&self) -> Option<&str> {
        let path = self.path.split('?').next()?;
        path.strip_prefix("/cdn/")
            .or_else(|| path.split_once("/resolve/")?.1.split_once('/')?.1.into())
    }
    /// Whether all contents are wanted, and not only the version and the size of the file.
    pub fn is_for_all(&self) -> bool {
        self.range.is_none_or(|(_, end)| end.is_none())
    }
}

#[derive(Clone, PartialEq)]
pub enum Then {
    HangsUp,
    Stalls,
}

pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
    /// The length that it claims, if that is not the body's.
    pub length: Option<usize>,
    pub then: Then,
}

impl Reply {
    pub fn new(status: u16, head: impl Into<String>) -> Self {
        Self { status, head: head.into(), body: Vec::new(), length: None, then: Then::HangsUp }
    }
    pub fn body(self, body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..self }
    }
    /// Only the first half of it comes.
    pub fn half(mut self, then: Then) -> Self {
        let length = self.body.len();
        self.body.truncate(length / 2);
        Self { length: Some(length), then, ..self }
    }
    fn write(&self, stream: &mut impl Write) -> std::io::Result<()> {
        let length = self.length.unwrap_or(self.body.len());
        let head = format!(
            "HTTP/1.1 {} Said\r\nconnection: close\r\ncontent-length: {length}\r\n{}\r\n",
            self.status, self.head
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(&self.body)?;
        stream.flush()
    }
}

/// Bytes of a file, as far as they are wanted.
pub fn contents(request: &Request, bytes: &[u8], head: &str) -> Reply {
    let Some((begin, end)) = request.range else {
        return Reply::new(200, head).body(bytes);
    };
    let all = bytes.len();
    if begin >= all {
        return Reply::new(416, format!("{head}content-range: bytes */{all}\r\n"));
    }
    let end = end.map_or(all - 1, |end| end.min(all - 1));
    let head = format!("{head}content-range: bytes {begin}-{end}/{all}\r\n");
    Reply::new(206, head).body(&bytes[begin..=end])
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The digest by which git names a file.
pub fn git(bytes: &[u8]) -> String {
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref())
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes).as_ref())
}

/// A Hub with one model, org/name.
pub struct Hub {
    pub endpoint: String,
    state: Arc<Mutex<HubState>>,
}

impl Hub {
    pub fn new(files: Files) -> Self {
        let (listener, state) = (TcpListener::bind("127.0.0.1:0").unwrap(), Self::state_of(files));
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        Self::serve(listener, endpoint, state, Ok)
    }

    /// A Hub that does otherwise for the requests that `script` answers.
    pub fn scripted(
        files: Files,
        script: impl FnMut(&Request, &Files, &str) -> Option<Reply> + Send + 'static,
    ) -> Self {
        let hub = Self::new(files);
        hub.script(script);
        hub
    }

    /// Does otherwise from now on for the requests that `script` answers.
    pub fn script(
        &self,
        script: impl FnMut(&Request, &Files, &str) -> Option<Reply> + Send + 'static,
    ) {
        self.state().script = Some(Box::new(script));
    }

    /// A Hub under TLS, and the certificate of it.
    pub fn secure(files: Files) -> (Self, String) {
        use rustls::{ServerConfig, ServerConnection, StreamOwned, crypto::ring, pki_types};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("https://{}", listener.local_addr().unwrap());
        let key = rcgen::KeyPair::generate().unwrap();
        let mut about = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        // No two have the same name.
        about.distinguished_name.push(rcgen::DnType::CommonName, endpoint.clone());
        let certificate = about.self_signed(&key).unwrap();
        let key = pki_types::PrivatePkcs8KeyDer::from(key.serialize_der());
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into())
            .unwrap();
        let config = Arc::new(config);
        let hub = Self::serve(listener, endpoint, Self::state_of(files), move |stream| {
            let connection =
                ServerConnection::new(config.clone()).map_err(std::io::Error::other)?;
            Ok(StreamOwned::new(connection, stream))
        });
        (hub, certificate.pem())
    }

    fn state_of(files: Files) -> Arc<Mutex<HubState>> {
        let commit = "c0ffee".to_owned();
        Arc::new(Mutex::new(HubState { commit, files, asked: Vec::new(), script: None }))
    }

    fn serve<S: Read + Write>(
        listener: TcpListener,
        endpoint: String,
        state: Arc<Mutex<HubState>>,
        open: impl Fn(TcpStream) -> std::io::Result<S> + Send + Sync + 'static,
    ) -> Self {
        let (of, at, open) = (state.clone(), endpoint.clone(), Arc::new(open));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (of, at, open) = (of.clone(), at.clone(), open.clone());
                // A client that is killed hangs up.
                std::thread::spawn(move || drop(answer(open(stream.unwrap()), &at, &of)));
            }
        });
        Self { endpoint, state }
    }

    pub fn state(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap()
    }

    /// The weights that were asked for, and from which byte.
    pub fn weights_asked(&self) -> Vec<(String, usize)> {
        let state = self.state();
        let asked = state.asked.iter().filter(|asked| asked.is_for_all());
        let of = asked.filter_map(|asked| {
            let name = asked.path.strip_prefix("/cdn/")?.to_owned();
            Some((name, asked.range.map_or(0, |range| range.0)))
        });
        of.collect()
    }

    /// The command `galaxy pull`, which pulls from here.
    pub fn command(&self, to: &Path) -> Command {
        self.command_of("org/name", to)
    }

    pub fn command_of(&self, model: &str, to: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_galaxy"));
        command
            .args(["pull", model, "--json", "--to"])
            .arg(to)
            .env("HF_ENDPOINT", format!("{}/", self.endpoint))
            .env("HF_HOME", to)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let others = ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "HF_TOKEN"];
        for name in others.into_iter().chain(["SSL_CERT_FILE", "SSL_CERT_DIR"]) {
            command.env_remove(name).env_remove(name.to_lowercase());
        }
        command
    }

    pub fn start(&self, to: &Path) -> Child {
        self.command(to).spawn().unwrap()
    }

    /// Pulls, and gives the names of files that came.
    pub fn pull(&self, to: &Path) -> Vec<String> {
        let fresh = !to.join(".pull").exists();
        let (pulled, said) = came(self.command(to));
        assert_eq!(pulled["commit"], self.state().commit);
        let fetched: Vec<String> = serde_json::from_value(pulled["fetched"].clone()).unwrap();
        for name in fetched.iter().filter(|_| fresh) {
            assert!(said.lines().any(|line| line.starts_with(&format!("{name}: "))), "{said}");
        }
        fetched
    }

    /// Pulls, which fails, and gives what it says.
    pub fn refusal(&self, to: &Path) -> String {
        refused(self.command(to))
    }
}

/// The JSON that a command prints to stdout, and what it writes to stderr meanwhile.
pub fn came(mut command: Command) -> (serde_json::Value, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert!(status.success(), "{said}");
    (serde_json::from_slice(&stdout).unwrap(), said)
}

/// The errors that a command prints which fails with exit code 1.
pub fn refused(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{said}{}", String::from_utf8_lossy(&stdout));
    said.lines().filter(|line| line.starts_with("error: ")).collect()
}

/// Answers one request, and hangs up.
fn answer(
    stream: std::io::Result<impl Read + Write>,
    endpoint: &str,
    state: &Mutex<HubState>,
) -> std::io::Result<()> {
    let mut stream = stream?;
    let request = read(&mut stream)?;
    let reply = {
        let mut state = state.lock().unwrap();
        state.asked.push(request.clone());
        let HubState { script, files, .. } = &mut *state;
        let other = script.as_mut().and_then(|script| script(&request, files, endpoint));
        other.unwrap_or_else(|| usual(&request, endpoint, &state))
    };
    reply.write(&mut stream)?;
    if reply.then == Then::Stalls {
        // Until the other side is gone.
        stream.read_to_end(&mut Vec::new())?;
    }
    Ok(())
}

fn read(stream: &mut impl Read) -> std::io::Result<Request> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let path = head.split(' ').nth(1).unwrap().to_owned();
    let header = |name: &str| {
        let mut lines = head.lines().skip(1).filter_map(|line| line.split_once(": "));
        lines.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
    };
    let range = header("range").map(|range| {
        let (begin, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        (begin.parse().unwrap(), end.parse().ok())
    });
    Ok(Request { path, range, authorization: header("authorization") })
}

/// The answer of a Hub without a script.
fn usual(request: &Request, endpoint: &str, state: &HubState) -> Reply {
    let HubState { commit, files, .. } = state;
    if let Some(revision) = request.path.strip_prefix("/api/models/org/name/revision/") {
        assert_eq!(revision, "main");
        let names: Vec<_> =
            files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let body = serde_json::json!({ "sha": commit, "siblings": names }).to_string();
        return Reply::new(200, "content-type: application/json\r\n").body(body);
    }
    // All files are of the commit that the listing named.
    let here = request.path.strip_prefix(&format!("/org/name/resolve/{commit}/"));
    let name = here.or_else(|| request.path.strip_prefix("/cdn/")).unwrap_or_default();
    let Some(bytes) = files.get(name) else {
        return Reply::new(404, "x-error-code: EntryNotFound\r\n");
    };
    match here {
        Some(_) if name.ends_with(".safetensors") => {
            let (version, size) = (sha256(bytes), bytes.len());
            let head = format!(
                "location: {endpoint}/cdn/{name}\r\nx-repo-commit: {commit}\r\n\
                 x-linked-etag: \"{version}\"\r\nx-linked-size: {size}\r\netag: \"other\"\r\n"
            );
            Reply::new(302, head)
        }
        Some(_) => {
            let head = format!("etag: \"{}\"\r\nx-repo-commit: {commit}\r\n", git(bytes));
            contents(request, bytes, &head)
        }
        None => contents(request, bytes, "etag: \"of the store\"\r\n"),
    }
}

/// A model of images, with all that others have beside it.
pub fn files() -> Files {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/vit");
    let real = ["config.json", "preprocessor_config.json", "model.safetensors"];
    let real = real.map(|name| (name.to_owned(), fs::read(golden.join(name)).unwrap()));
    let others = [
        "README.md",
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "onnx/config.json",
        "onnx/model.onnx",
        "pytorch_model.bin",
        "sentence_distilbert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "2_Dense/pytorch_model.bin",
    ];
    let others = others.map(|name| (name.to_owned(), name.as_bytes().to_vec()));
    // Two that are the same are two.
    let same = ["2_Dense/config.json", "3_Normalize/config.json"];
    let same = same.map(|name| (name.to_owned(), b"{}".to_vec()));
    let paths = ["", "1_Pooling", "2_Dense", "3_Normalize"];
    let modules = paths.map(|path| serde_json::json!({ "path": path }));
    let modules = ("modules.json".to_owned(), serde_json::json!(modules).to_string().into_bytes());
    real.into_iter().chain(others).chain(same).chain([modules]).collect()
}

/// A model of two files.
pub fn small() -> Files {
    let model = ["config.json", "model.safetensors"];
    files().into_iter().filter(|(name, _)| model.contains(&name.as_str())).collect()
}

/// The files of [`files`] that are not pulled.
pub const LEFT: [&str; 6] = [
    "2_Dense/pytorch_model.bin",
    "README.md",
    "onnx/config.json",
    "onnx/model.onnx",
    "pytorch_model.bin",
    "vocab.txt",
];

/// Whether a directory has what is wanted of the Hub, and nothing else that can be seen.
pub fn is_whole(to: &Path, hub: &Hub) {
    let wanted = hub.state().files.clone();
    let wanted: Vec<_> = wanted.iter().filter(|(name, _)| !LEFT.contains(&name.as_str())).collect();
    for (name, bytes) in &wanted {
        assert_eq!(&&fs::read(to.join(name)).unwrap(), bytes, "{name}");
    }
    assert_eq!(seen(to).len(), wanted.len(), "{:?}", seen(to));
    assert!(!to.join(".pull").exists());
}

/// The files of a directory, but for those that begin with a dot.
pub fn seen(directory: &Path) -> Vec<String> {
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        match entry.file_type().unwrap().is_dir() {
            _ if name.starts_with('.') => {}
            true => all.extend(seen(&entry.path()).iter().map(|inner| format!("{name}/{inner}"))),
            false => all.push(name),
        }
    }
    all
}
