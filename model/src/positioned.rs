//! Reading a file from a position on, without its cursor: for headers that are parsed while others read.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::FileExt,
};

/// Reads a file from a position on.
pub(crate) struct At<'a> {
    pub(crate) file: &'a File,
    pub(crate) at: u64,
}

impl Read for At<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(into, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for At<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.file.metadata()?.len().checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// Why a header cannot be parsed.
pub(crate) enum Problem {
    /// The file cannot be read.
    Io(io::Error),
    /// A sentence about what is wrong with it.
    Text(String),
}

impl From<String> for Problem {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Problem {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<io::Error> for Problem {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}
