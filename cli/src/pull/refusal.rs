//! The failures of a pull, for people: what went wrong, where, what to do.

use crate::failure::Failure;
use galaxy_cli::hub::{HubError, TlsFault};
use std::{fmt, path::Path, time::Duration};

const KEPT: &str = "what has come is kept";

/// The failure of a path that cannot be written.
pub(super) fn unwritten(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot write: {error}"))
        .at(path.display())
        .todo(format!("make room, or choose another place with --to; {KEPT}"))
}

/// The failure of a pull of a model at a revision.
pub(super) fn refused(error: &HubError, model: &str, revision: &str) -> Failure {
    match error {
        HubError::Endpoint { .. } => {
            Failure::usage(error.to_string()).todo("correct HF_ENDPOINT, like https://hf-mirror.com")
        }
        HubError::Token => Failure::usage(error.to_string())
            .todo("correct HF_TOKEN, or the file `token` in HF_HOME"),
        HubError::Authorities { .. } => {
            Failure::usage(error.to_string()).todo("correct SSL_CERT_FILE or SSL_CERT_DIR")
        }
        HubError::Disk { path, source } => unwritten(path, source),
        HubError::Status { from, status, code, words, wait } => {
            let said = (*status, code.as_str(), words.as_str(), *wait);
            of_status(from, said, (model, revision))
        }
        HubError::Tls { fault, .. } => Failure::new(error.to_string()).todo(match fault {
            TlsFault::Issuer => {
                "if your network has an authority of its own, name its certificate with SSL_CERT_FILE; \
                 else somebody may be listening"
            }
            TlsFault::Time => "look whether the clock of this machine is right",
            TlsFault::Other => "correct HF_ENDPOINT, or look at what is between here and there",
        }),
        HubError::Network { .. } => Failure::new(format!("the Hub cannot be reached: {error}"))
            .todo(format!(
                "look at the network and pull again, or pull on a machine with one and copy the \
                 directory here; {KEPT}"
            )),
        HubError::Digest { .. } | HubError::Range { .. } => {
            Failure::new(error.to_string()).todo("pull again, or from another HF_ENDPOINT")
        }
        HubError::Redirect { .. } | HubError::Answer { .. } => {
            Failure::new(format!("{model} cannot be brought: {error}"))
                .todo("look whether HF_ENDPOINT is a Hub, or choose another")
        }
    }
}

/// The failure of an answer whose status is a refusal.
fn of_status(
    from: &impl fmt::Display,
    (status, code, words, wait): (u16, &str, &str, Option<Duration>),
    (model, revision): (&str, &str),
) -> Failure {
    let page = format!("{from}/{model}");
    let waits = || match wait {
        Some(wait) => format!("asks to wait {} s", wait.as_secs()),
        None => "does not say how long to wait".to_owned(),
    };
    let failure = |what: String| Failure::new(what).at(from);
    match (status, code) {
        (_, "RevisionNotFound") => failure(format!("{model} has no revision {revision:?}"))
            .todo("choose another --revision"),
        (401 | 403, "GatedRepo") => failure(format!("{model} is not for everybody{words}")).todo(
            format!("accept its terms at {page}, and set HF_TOKEN to a token of that account"),
        ),
        (_, "DisabledRepo") => {
            failure(format!("{model} is disabled there{words}")).todo("choose another model")
        }
        (401 | 403, _) => {
            failure(format!("{model} is not there, or not for everybody ({status}{words})"))
                .todo("correct the name, or set HF_TOKEN to a token that may read it")
        }
        (404 | 410, _) => {
            failure(format!("there is no {model}")).todo("correct the name, or --revision")
        }
        (407, _) => failure("the proxy wants to know who asks".to_owned())
            .todo("put a user and a password into HTTPS_PROXY"),
        (429, _) => {
            failure(format!("the Hub takes no more requests for now, and {} (429)", waits()))
                .todo(format!("pull again then; HF_TOKEN may allow more requests; {KEPT}"))
        }
        (503, _) => failure(format!("the Hub is not available, and {} (503{words})", waits()))
            .todo(format!("pull again then; {KEPT}")),
        _ => failure(format!("the Hub answers {status}{words}"))
            .todo(format!("pull again later, or from another HF_ENDPOINT; {KEPT}")),
    }
}
