//! Connections that break off, stall, or bring other than was asked for: without the command, and without
//! its pauses.

use super::hub::{Hub, Reply, Then, contents, small};
use galaxy_cli::hub::{About, HubError, Patience, Repository, Watch, Web};
use std::{fs, path::Path, time::Duration};

#[derive(Default)]
struct Seen {
    most: u64,
    pauses: usize,
}

impl Watch for Seen {
    fn have(&mut self, bytes: u64) {
        self.most = self.most.max(bytes);
    }
    fn pauses(&mut self, _: &HubError, _: Duration) {
        self.pauses += 1;
    }
}

/// Patience without pauses.
fn hasty() -> Patience {
    Patience {
        silence: LONG,
        pause: Duration::ZERO,
        longest: Duration::ZERO,
        ..Patience::default()
    }
}

const WEIGHTS: &str = "model.safetensors";
/// Only something that hangs takes so long, on whatever machine.
const LONG: Duration = Duration::from_secs(240);

/// Downloads the weights.
fn fetch(hub: &Hub, to: &Path, patience: Patience) -> (Result<Vec<u8>, HubError>, Seen) {
    let mut seen = Seen::default();
    let web = Web::new(&hub.endpoint, None, patience).unwrap();
    let (repository, _) = Repository::open(web, ("org/name", "main"), to, &mut seen).unwrap();
    let fetched = repository
        .about(WEIGHTS, &mut seen)
        .and_then(|about: About| repository.fetch(WEIGHTS, &about, &mut seen))
        .map(|path| fs::read(path).unwrap());
    (fetched, seen)
}

/// A Hub that passes each answer with contents of the weights through `script`.
fn store(mut script: impl FnMut(Reply) -> Reply + Send + 'static) -> Hub {
    Hub::scripted(small(), move |request, files, _| {
        let name = request.path.strip_prefix("/cdn/").filter(|_| request.is_for_all())?;
        Some(script(contents(request, &files[name], "")))
    })
}

#[test]
fn a_download_that_keeps_breaking_off_resumes_to_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut stalls = vec![Then::Stalls];
    let hub = store(move |whole| match whole.body.len() {
        0..5000 => whole,
        _ => whole.half(stalls.pop().unwrap_or(Then::HangsUp)),
    });
    // A machine that is busy for so long has it ask once more from the same byte.
    let patience = Patience { silence: Duration::from_secs(2), ..hasty() };
    let (fetched, seen) = fetch(&hub, dir.path(), patience);
    assert_eq!(fetched.unwrap(), hub.state().files[WEIGHTS]);
    let asked = hub.weights_asked();
    assert!(asked.len() > 3 && asked.is_sorted_by(|a, b| a.1 <= b.1), "{asked:?}");
    assert_eq!(seen.pauses, asked.len() - 1);
    assert_eq!(seen.most, hub.state().files[WEIGHTS].len() as u64);
}

#[test]
fn a_download_without_progress_fails_and_resumes_later() {
    let dir = tempfile::tempdir().unwrap();
    let mut answers = 0;
    let hub = store(move |whole| {
        answers += 1;
        match answers {
            1 => whole.half(Then::HangsUp),
            _ => Reply { body: Vec::new(), ..whole }.half(Then::HangsUp),
        }
    });
    // An empty answer that says that it has an end elsewhere.
    let (fetched, seen) = fetch(&hub, dir.path(), hasty());
    assert!(matches!(fetched, Err(HubError::Network { .. })), "{fetched:?}");
    assert_eq!(seen.pauses, 5);
    let half = hub.state().files[WEIGHTS].len() / 2;
    hub.script(|_, _, _| None);
    let (fetched, _) = fetch(&hub, dir.path(), hasty());
    assert_eq!(fetched.unwrap(), hub.state().files[WEIGHTS]);
    assert_eq!(hub.weights_asked().last(), Some(&(WEIGHTS.to_owned(), half)));
}

#[test]
fn answers_of_another_range_or_length_are_refused() {
    // From elsewhere, of another length, or more than there are.
    for kind in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let hub = Hub::scripted(small(), move |request, files, endpoint| {
            let bytes = &files[request.file()?];
            let all = bytes.len();
            match kind {
                0 => {
                    request.path.strip_prefix("/cdn/").filter(|_| request.is_for_all())?;
                    let head = format!("content-range: bytes 7-{}/{all}\r\n", all - 1);
                    Some(Reply::new(206, head).body(&bytes[7..]))
                }
                1 => {
                    request.path.strip_prefix("/cdn/").filter(|_| request.is_for_all())?;
                    Some(Reply::new(200, "x-linked-size: 7\r\n").body(&bytes[..7]))
                }
                _ if request.path.starts_with("/cdn/") => None,
                _ => {
                    let location = format!("{endpoint}/cdn/{WEIGHTS}");
                    Some(Reply::new(302, format!("location: {location}\r\nx-linked-size: 7\r\n")))
                }
            }
        });
        let (fetched, seen) = fetch(&hub, dir.path(), hasty());
        let failed = fetched.unwrap_err();
        match kind {
            // What the Hub says first has precedence over what its store says.
            1 => assert!(matches!(failed, HubError::Digest { .. } | HubError::Network { .. })),
            _ => assert!(matches!(failed, HubError::Range { .. }), "{failed}"),
        }
        assert_eq!(seen.pauses, 5, "{kind}");
        assert!(!dir.path().join(WEIGHTS).exists());
    }
}

#[test]
fn an_unreachable_hub_is_retried_once() {
    let mut seen = Seen::default();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let web = Web::new(&format!("http://{nobody}"), None, hasty()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let opened = Repository::open(web, ("org/name", "main"), dir.path(), &mut seen);
    assert!(matches!(opened.err(), Some(HubError::Network { .. })));
    assert_eq!(seen.pauses, 1);
}
