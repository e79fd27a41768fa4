//! A mirror of the Hub that attacks `galaxy pull`.

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

/// The longest that a pull may take to refuse. No mirror here is silent, so that this is not about waiting.
const SEES: Duration = Duration::from_secs(60);
/// The length that a file claims to have, while it has no end.
const ENDLESS: u64 = 1 << 60;
/// The bytes that are sent of weights that do not match their tag.
const WEIGHTS: usize = 256 << 20;
/// The bytes that may lie on the disk after a refusal.
const LEFT: u64 = 1 << 20;
static BLOCK: [u8; 64 << 10] = [b' '; 64 << 10];
/// A tag like that of a file that is stored by its SHA-256.
const TAG: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const COMMIT: &str = "c0ffee";

/// The attack of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MirrorAttack {
    /// It sends a list of files without an end.
    List,
    /// It sends as many file names as 16 MB have room for.
    Names,
    /// It sends lists nested in lists.
    Deep,
    /// It sends headers without an end.
    Headers,
    /// It sends a config without an end.
    Config,
    /// It sends weights that do not match their tag.
    Weights,
    /// It redirects again and again.
    Redirects,
}

impl MirrorAttack {
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
    /// The attack, as text.
    pub mirror: String,
    /// How long the pull took to refuse, in seconds.
    pub seconds: f64,
    /// The most memory that the pull held, in bytes.
    pub peak: u64,
    /// The bytes that the pull left on the disk.
    pub left: u64,
    /// The error that the pull printed; empty where it printed none.
    pub said: String,
    /// Whether it refused, within the bounds of time, memory and disk.
    pub held: bool,
}

/// Pulls from a mirror for each attack.
///
/// # Errors
/// When a pull cannot be started.
pub fn all() -> Result<Vec<Row>> {
    MirrorAttack::ALL.into_iter().map(pull).collect()
}

/// Prints the rows as a table.
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

fn pull(deed: MirrorAttack) -> Result<Row> {
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
        // A process that has ended has no memory to look at.
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

/// Serves a mirror on a free port, until this process ends, and returns its endpoint.
fn serve(deed: MirrorAttack) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let endpoint = Arc::new(format!("http://{}", listener.local_addr()?));
    let at = endpoint.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let at = at.clone();
            // The connection ends with an error when the client hangs up.
            std::thread::spawn(move || drop(answer(deed, &at, &stream)));
        }
    });
    Ok((*endpoint).clone())
}

fn answer(deed: MirrorAttack, endpoint: &str, mut stream: &TcpStream) -> Result<()> {
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
        MirrorAttack::Redirects => {
            let next = path.len();
            write!(
                stream,
                "HTTP/1.1 302 Found\r\nconnection: close\r\nlocation: {endpoint}{path}{next}\r\n\
                 content-length: 0\r\n\r\n"
            )?;
        }
        MirrorAttack::Headers => {
            write!(stream, "{ok}")?;
            loop {
                write!(stream, "x-more: {}\r\n", "a".repeat(1000))?;
            }
        }
        MirrorAttack::List => {
            write!(stream, "{ok}\r\n{{\"sha\":\"{COMMIT}\",\"siblings\":[")?;
            endless(stream)?;
        }
        MirrorAttack::Deep => {
            write!(stream, "{ok}\r\n")?;
            stream.write_all(&[b'['; 8 << 20])?;
        }
        MirrorAttack::Names => {
            write!(stream, "{ok}\r\n{}", names())?;
        }
        MirrorAttack::Config | MirrorAttack::Weights if listed => {
            let of = r#"[{"rfilename":"config.json"},{"rfilename":"model.safetensors"}]"#;
            write!(stream, "{ok}\r\n{{\"sha\":\"{COMMIT}\",\"siblings\":{of}}}")?;
        }
        MirrorAttack::Config => {
            file(stream, ok, TAG, ENDLESS)?;
            endless(stream)?;
        }
        MirrorAttack::Weights => {
            let config = path.ends_with("config.json");
            let length = if config { 2 } else { WEIGHTS };
            // The digest that git gives for two braces.
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

/// Sends spaces until the other side hangs up.
fn endless(mut stream: &TcpStream) -> Result<()> {
    loop {
        stream.write_all(&BLOCK)?;
    }
}

/// The JSON of a listing of 15.9 MB.
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
