//! What a model's author is told about its files, besides errors.

use std::{fmt, path::PathBuf};

/// Something in a model's files that may not do here what its author meant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warning {
    /// The file that it was found in.
    pub path: PathBuf,
    /// What was found, and what it does or does not do here.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.text)
    }
}
