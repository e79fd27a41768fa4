//! By which errors the system says that a link is closed.

use galaxy_engine::link::LinkError;
use std::io;

/// The error of a link: [`LinkError::Closed`] for all kinds of error by which the system says so.
pub(super) fn closed_or(error: io::Error) -> LinkError {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof,
    };
    match error.kind() {
        BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected | UnexpectedEof => {
            LinkError::Closed
        }
        _ => LinkError::Io(error),
    }
}
