//! Typed errors across gRPC: a [`Fault`] in the details of a status.

use crate::v1;
use galaxy_common::printable::line;
use prost::Message;
use std::fmt;
use tonic::{Code, Status};

/// The most characters of a message: ours have some hundred.
const MAX_MESSAGE: usize = 4000;
/// The most characters of a code, and of a device's name.
const MAX_NAME: usize = 64;

/// The message that tonic gives an answer without one: its connection was closed.
const NO_MESSAGE: &str = "Missing response message.";

/// What went wrong at the other side, in a form that a program can branch on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// A stable name in snake case.
    pub code: String,
    /// The message for people.
    pub message: String,
    /// Whether the same call may succeed later.
    pub retryable: bool,
    /// The name of the device whose fault it is; empty if it is no device's.
    pub device: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.device.is_empty() && !self.message.contains(&self.device) {
            write!(f, "device {}: ", self.device)?;
        }
        f.write_str(&self.message)
    }
}
impl std::error::Error for Fault {}

impl Fault {
    /// A fault that is no device's.
    pub fn new(code: &str, message: impl Into<String>, retryable: bool) -> Self {
        Self { code: code.to_owned(), message: message.into(), retryable, device: String::new() }
    }
    /// The same fault, as that of a device.
    #[must_use]
    pub fn of(mut self, device: impl fmt::Display) -> Self {
        self.device = device.to_string();
        self
    }
}

/// Puts a fault into a status.
pub fn to_status(code: Code, fault: Fault) -> Status {
    let Fault { code: name, message, retryable, device } = fault;
    let wire = v1::Fault { code: name, message: message.clone(), retryable, device };
    Status::with_details(code, message, wire.encode_to_vec().into())
}

/// Reads the fault of a status, made safe to show and keep: whoever sent it may have put anything into it, and as
/// much as it liked. A status without details becomes a fault named after its gRPC code.
pub fn from_status(status: &Status) -> Fault {
    if !status.details().is_empty()
        && let Ok(fault) = v1::Fault::decode(status.details())
        && !fault.code.is_empty()
    {
        let v1::Fault { code, message, retryable, device } = fault;
        return Fault {
            code: line(&code, MAX_NAME),
            message: line(&message, MAX_MESSAGE),
            retryable,
            device: line(&device, MAX_NAME),
        };
    }
    // Only a status that was made on this side has a source: the transport broke, and nobody
    // answered.
    let broken = std::error::Error::source(status).is_some() || status.message() == NO_MESSAGE;
    let (code, retryable) = match status.code() {
        Code::Unknown | Code::Internal if broken => ("unavailable", true),
        Code::Unavailable => ("unavailable", true),
        Code::DeadlineExceeded => ("deadline_exceeded", true),
        Code::Cancelled => ("cancelled", true),
        Code::ResourceExhausted => ("overloaded", true),
        Code::PermissionDenied => ("permission_denied", false),
        Code::Unauthenticated => ("unauthenticated", false),
        Code::InvalidArgument => ("invalid_argument", false),
        Code::OutOfRange => ("out_of_range", false),
        Code::NotFound => ("not_found", false),
        Code::FailedPrecondition => ("failed_precondition", false),
        Code::Unimplemented => ("unimplemented", false),
        _ => ("internal", false),
    };
    let mut message = status.message().to_owned();
    // A transport error says little itself; its sources say what happened.
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        source = error.source();
    }
    Fault::new(code, line(&message, MAX_MESSAGE), retryable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_survives_the_wire() {
        let fault = Fault::new("overloaded", "the queue of 4 is full", true).of("pi-1");
        let status = to_status(Code::ResourceExhausted, fault.clone());
        assert_eq!(from_status(&status), fault);
        assert_eq!(fault.to_string(), "device pi-1: the queue of 4 is full");
    }

    #[test]
    fn a_broken_connection_is_a_retryable_fault() {
        let fault = from_status(&Status::from_error(Box::new(std::io::Error::other("cut off"))));
        assert_eq!((fault.code.as_str(), fault.retryable), ("unavailable", true), "{fault:?}");
        assert!(from_status(&Status::internal(NO_MESSAGE)).retryable);
        let said = from_status(&Status::unknown("no idea"));
        assert_eq!((said.code.as_str(), said.retryable), ("internal", false));
    }

    #[test]
    fn fault_messages_of_peers_are_escaped_and_shortened() {
        let evil = "lost\x1b[2J\r\nerror: all is well\u{202e}";
        let fault = Fault::new("lost\x1b", evil, true).of("pi-1\n");
        let said = from_status(&to_status(Code::Internal, fault));
        assert_eq!(said.message, "lost\\u{1b}[2J\\r\\nerror: all is well\\u{202e}");
        assert_eq!((said.code.as_str(), said.device.as_str()), ("lost\\u{1b}", "pi-1\\n"));
        let said = from_status(&Status::unknown(evil)).to_string();
        assert!(!said.contains(char::is_control), "{said:?}");
        // One that says much is cut.
        for status in [
            to_status(Code::Internal, Fault::new("lost", "x".repeat(1 << 20), true)),
            Status::unknown("x".repeat(1 << 20)),
        ] {
            let said = from_status(&status).message;
            assert!(said.len() < 5000 && said.contains("bytes more"), "{} bytes", said.len());
        }
    }

    #[test]
    fn garbage_in_status_details_falls_back_to_the_status_code() {
        let status =
            Status::with_details(Code::Unavailable, "gone", vec![0xff, 0xff, 1, 2, 3].into());
        let fault = from_status(&status);
        assert_eq!((fault.code.as_str(), fault.retryable), ("unavailable", true));
    }
}
