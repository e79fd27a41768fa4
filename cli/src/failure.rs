//! How a command fails: what, where, what to do.

use galaxy_client::ClientError;
use std::fmt;

/// Why a command has no result. Shown as `error: what; where; what to do`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    what: String,
    place: Option<String>,
    todo: Option<String>,
    usage: bool,
    enough: bool,
}

impl Failure {
    /// A failure of the command; the process exits with 1.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), place: None, todo: None, usage: false, enough: false }
    }
    /// The end of a command whose output nobody reads any more, which is no error.
    pub fn enough() -> Self {
        Self { enough: true, ..Self::new("nobody reads the result") }
    }
    /// Whether nobody reads the output any more, so that this is no error.
    pub fn is_enough(&self) -> bool {
        self.enough
    }
    /// A failure of the arguments; the process exits with 2.
    pub fn usage(what: impl Into<String>) -> Self {
        Self { usage: true, ..Self::new(what) }
    }
    /// Adds where it went wrong.
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.place = Some(place.to_string());
        self
    }
    /// Adds what to do about it.
    pub fn todo(mut self, todo: impl Into<String>) -> Self {
        self.todo = Some(todo.into());
        self
    }
    /// The message without `error: `, as a part of another line.
    pub fn words(&self) -> String {
        let parts = [&self.place, &self.todo].into_iter().flatten();
        parts.fold(self.what.clone(), |words, part| words + "; " + part)
    }
    /// What the process exits with: 2 for bad usage, else 1.
    pub fn exit_code(&self) -> u8 {
        if self.usage { 2 } else { 1 }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.words())
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let mut failure = Self::new(error.to_string());
        if let Some(device) = error.device()
            && !failure.what.contains(device)
        {
            failure = failure.at(format_args!("device {device:?}"));
        }
        let todo = match error.code() {
            "connection_refused" | "timed_out" => {
                Some("start galaxy-coord, or say where it listens with --coordinator")
            }
            "bad_address" => Some("correct --coordinator"),
            "connection_broken" => Some("name your identity with --identity"),
            "not_loopback" => Some("name your identity with --identity"),
            "identity" | "certificate_refused" | "foreign_authority" => {
                Some("`galaxy keys issue NAME --role client` makes an identity")
            }
            "permission_denied" => {
                Some("name an identity of the role that it takes with --identity")
            }
            "wrong_name" => Some("correct --coordinator, or name it with --coordinator-name"),
            "deadline" => Some("give it more time with --timeout, or look at `galaxy status`"),
            "draining" => Some("`galaxy drain --off` lets it take requests again"),
            "no_plan" => Some("`galaxy plan` says what would help"),
            "unavailable" | "device_lost" => Some("look at `galaxy status`, then try again"),
            _ if error.retryable() => Some("try again later"),
            _ => None,
        };
        match todo {
            Some(todo) => failure.todo(todo),
            None => failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_shows_its_cause_place_and_remedy() {
        let failure = Failure::new("no such file").at("ids.json").todo("correct --ids");
        assert_eq!(failure.to_string(), "error: no such file; ids.json; correct --ids");
        assert_eq!(failure.exit_code(), 1);
        let failure = Failure::usage("--all-rows is for logits").todo("leave it out");
        assert_eq!(failure.to_string(), "error: --all-rows is for logits; leave it out");
        assert_eq!(failure.exit_code(), 2);
    }

    fn refused(code: &str, message: &str, device: Option<&str>, retryable: bool) -> String {
        Failure::from(ClientError::Refused {
            code: code.to_owned(),
            message: message.to_owned(),
            retryable,
            device: device.map(str::to_owned),
        })
        .to_string()
    }

    #[test]
    fn each_fault_shows_its_device_and_remedy() {
        assert_eq!(
            refused("device_lost", "it went silent", Some("pi-2"), true),
            "error: it went silent; device \"pi-2\"; look at `galaxy status`, then try again"
        );
        assert_eq!(
            refused("overloaded", "the queue of 64 is full", None, true),
            "error: the queue of 64 is full; try again later"
        );
        assert_eq!(refused("empty_text", "text 3 is empty", None, false), "error: text 3 is empty");
        assert_eq!(
            refused("text_too_long", "text 0 has 900 tokens, limit 256", None, false),
            "error: text 0 has 900 tokens, limit 256"
        );
    }
}
