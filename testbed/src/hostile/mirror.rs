//! A mirror of the Hub that means harm to `galaxy pull`.

use super::{GROWTH, megabytes, peak, say};
use crate::processes::{Process, program};
use anyhow::{Context, Result};
use serde::Serialize;
use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long a pull may take to see that nothing good comes; nobody is silent here, so that this is
/// not about patience.
const SEES: Duration = Duration::from_secs(60);
/// What a file says that its length is, of which there is no end.
const ENDLESS: u64 = 1 << 60;
/// What is sent of weights that are others than they say.
const WEIGHTS: usize = 256 << 20;
/// What may lie on the disk after a refusal.
const LEFT: u64 = 1 << 20;
static BLOCK: [u8; 64 << 10] = [b' '; 64 << 10];
/// As the tag of a file that is stored by its SHA-256.
const TAG: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const COMMIT: &str = "c0ffee";

/// What it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    /// A list of files without an end.
    List,
    /// As many names as 16 MB have room for.
    Names,
    /// Lists in lists.
    Deep,
    /// Headers without an end.
    Headers,
    /// A config without an end.
    Config,
    /// Other weights than the tag says.
    Weights,
    /// One place after another.
    Redirects,
}

impl Deed {
    const ALL: [Self; 7] = [
        Self::List,
        Self::Names,
        Self::Deep,
        Self::Headers,
        Self::Config,
        Self::Weights,
        Self::Redirects,
    ];

    fn words(self) -> &'static str {
        match self {
            Self::List => "a list of files without an end",
            Self::Names => "a list of as many names as 16 MiB hold",
            Self::Deep => "8 million lists in one another",
            Self::Headers => "headers without an end",
            Self::Config => "a config of 2^60 bytes",
            Self::Weights => "256 MiB of other weights than the tag says",
            Self::Redirects => "redirects without an end",
        }
    }
}

/// How a pull fared.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What the mirror did.
    pub mirror: String,
    /// How long the pull took to refuse, in seconds.
    pub seconds: f64,
    /// The most memory that it held, in bytes.
    pub peak: u64,
    /// Bytes that it left on the disk.
    pub left: u64,
    /// What it said at last.
    pub said: String,
    /// Whether it refused, within bounds.
    pub held: bool,
}

/// Pulls from a mirror of each kind.
///
/// # Errors
/// When a pull cannot be started.
pub fn all() -> Result<Vec<Row>> {
    Deed::ALL.into_iter().map(pull).collect()
}

/// Prints them.
pub fn show(rows: &[Row]) {
    println!("\n| mirror | refused after, s | memory, MB | left on the disk, MB | said | kept |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for row in rows {
        println!(
            "| {} | {:.1} | {} | {} | {} | {} |",
            row.mirror,
            row.seconds,
            megabytes(row.peak),
            megabytes(row.left),
            row.said.replace('|', "/"),
            if row.held { "yes" } else { "NO" }
        );
    }
}

fn pull(deed: Deed) -> Result<Row> {
    say("a mirror", deed.words());
    let dir = tempfile::tempdir()?;
    let to = dir.path().join("model");
    let endpoint = serve(deed)?;
    let mut command = Command::new(program("galaxy")?);
    command.args(["pull", "org/name", "--to"]).arg(&to).env("HF_ENDPOINT", endpoint);
    command.env("HF_HOME", dir.path());
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    let mut process = Process::spawn("galaxy pull", command)?;
    let (begun, mut most) = (Instant::now(), 0);
    let status = loop {
        // One that has ended has no memory to look at.
        most = most.max(peak(process.id()).unwrap_or(0));
        if let Some(status) = process.has_ended()? {
            break Some(status);
        }
        if begun.elapsed() > SEES {
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let seconds = begun.elapsed().as_secs_f64();
    if status.is_none() {
        process.kill()?;
    }
    let (_, output) = process.ended()?;
    let said = output.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    let left = if to.exists() { bytes_in(&to)? } else { 0 };
    let refused = status.is_some_and(|status| status.code() == Some(1)) && !said.is_empty();
    let held = refused && most <= GROWTH && left <= LEFT;
    let mirror = deed.words().to_owned();
    Ok(Row { mirror, seconds, peak: most, left, said: said.to_owned(), held })
}

fn bytes_in(dir: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let about = entry.metadata()?;
        bytes += if about.is_dir() { bytes_in(&entry.path())? } else { about.len() };
    }
    Ok(bytes)
}

/// Serves on a port of its own, until this process ends.
fn serve(deed: Deed) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let endpoint = Arc::new(format!("http://{}", listener.local_addr()?));
    let at = endpoint.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let at = at.clone();
            // Whoever has seen enough hangs up.
            std::thread::spawn(move || drop(answer(deed, &at, &stream)));
        }
    });
    Ok((*endpoint).clone())
}

fn answer(deed: Deed, endpoint: &str, mut stream: &TcpStream) -> Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().context("a request")??;
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let path = first.split(' ').nth(1).context("a path")?;
    let listed = path.starts_with("/api/models/");
    let ok = "HTTP/1.1 200 OK\r\nconnection: close\r\n";
    match deed {
        Deed::Redirects => {
            let next = path.len();
            write!(
                stream,
                "HTTP/1.1 302 Found\r\nconnection: close\r\nlocation: {endpoint}{path}{next}\r\n\
                 content-length: 0\r\n\r\n"
            )?;
        }
        Deed::Headers => {
            write!(stream, "{ok}")?;
            loop {
                write!(stream, "x-more: {}\r\n", "a".repeat(1000))?;
            }
        }
        Deed::List => {
            write!(stream, "{ok}\r\n{{\"sha\":\"{COMMIT}\",\"siblings\":[")?;
            endless(stream)?;
        }
        Deed::Deep => {
            write!(stream, "{ok}\r\n")?;
            stream.write_all(&[b'['; 8 << 20])?;
        }
        Deed::Names => {
            write!(stream, "{ok}\r\n{}", names())?;
        }
        Deed::Config | Deed::Weights if listed => {
            let of = r#"[{"rfilename":"config.json"},{"rfilename":"model.safetensors"}]"#;
            write!(stream, "{ok}\r\n{{\"sha\":\"{COMMIT}\",\"siblings\":{of}}}")?;
        }
        Deed::Config => {
            file(stream, ok, TAG, ENDLESS)?;
            endless(stream)?;
        }
        Deed::Weights => {
            let config = path.ends_with("config.json");
            let length = if config { 2 } else { WEIGHTS };
            // What git says of two braces.
            let tag = if config { "9e26dfeeb6e641a33dae4961196235bdb965b21b" } else { TAG };
            file(stream, ok, tag, length as u64)?;
            if config {
                stream.write_all(b"{}")?;
            } else {
                (0..WEIGHTS / BLOCK.len()).try_for_each(|_| stream.write_all(&BLOCK))?;
            }
        }
    }
    Ok(())
}

fn file(mut stream: &TcpStream, ok: &str, tag: &str, length: u64) -> Result<()> {
    write!(
        stream,
        "{ok}etag: \"{tag}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-length: {length}\r\n\r\n"
    )?;
    Ok(())
}

/// Spaces until the other side hangs up.
fn endless(mut stream: &TcpStream) -> Result<()> {
    loop {
        stream.write_all(&BLOCK)?;
    }
}

/// A list of 15.9 MB.
fn names() -> String {
    let mut text =
        format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{{\"rfilename\":\"config.json\"}}");
    let mut name = 0;
    while text.len() < 15_900_000 {
        text.push_str(&format!(",{{\"rfilename\":\"{name:x}\"}}"));
        name += 1;
    }
    text.push_str("]}");
    text
}
