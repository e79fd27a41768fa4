//! Partial downloads: a file's bytes on disk, and their digest as they come.

use super::{
    answer::{About, Digest},
    error::HubError,
};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use std::{
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// Bytes that are read or written at once.
pub(super) const PIECE_BYTES: usize = 256 << 10;

/// A partial download of a file; or a whole one, until its digest was checked.
pub(super) struct PartialFile {
    path: PathBuf,
    file: File,
    length: u64,
    size: u64,
    version: String,
    check: Check,
}

/// The running digests of what has come, one of which the file's version should be; none where the version is no
/// digest.
struct Check {
    running: Vec<Context>,
    want: Vec<u8>,
}

impl PartialFile {
    /// Opens what has come of a file, or an empty file. Reads what is there for its digest.
    pub(super) fn open(path: PathBuf, about: &About) -> Result<Self, HubError> {
        let disk = |source| HubError::Disk { path: path.clone(), source };
        // A link would lead out of the directory.
        if fs::symlink_metadata(&path).is_ok_and(|there| !there.is_file()) {
            fs::remove_file(&path).map_err(disk)?;
        }
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(disk)?;
        let there = file.metadata().map_err(disk)?.len();
        let check = Check::new(&about.version, about.size);
        let (size, version) = (about.size, about.version.clone());
        let mut part = Self { path, file, length: 0, size, version, check };
        if there > size {
            part.clear()?;
        } else {
            part.read_back().map_err(|error| part.disk(error))?;
        }
        Ok(part)
    }

    /// Bytes that have come.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Whether all bytes have come.
    pub(super) fn is_whole(&self) -> bool {
        self.length == self.size
    }

    /// Appends the bytes that come next, unless they go beyond the end of the file.
    ///
    /// Returns whether they were appended.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<bool, HubError> {
        if bytes.len() as u64 > self.size - self.length {
            return Ok(false);
        }
        self.file.write_all(bytes).map_err(|error| self.disk(error))?;
        self.check.update(bytes);
        self.length += bytes.len() as u64;
        Ok(true)
    }

    /// Forgets all that has come.
    pub(super) fn clear(&mut self) -> Result<(), HubError> {
        let empty = self.file.set_len(0).and_then(|()| self.file.rewind());
        empty.map_err(|error| self.disk(error))?;
        self.length = 0;
        self.check = Check::new(&self.version, self.size);
        Ok(())
    }

    /// Whether what has come has the digest of the file, as far as one is known.
    pub(super) fn is_right(&self) -> bool {
        self.check.is_right()
    }

    /// Gives the whole file its name.
    pub(super) fn finish(self, name: &Path) -> Result<(), HubError> {
        // A name that outlives the bytes behind it, when the power goes, would pass for a whole file.
        let done = self.file.sync_all().and_then(|()| fs::rename(&self.path, name));
        done.map_err(|error| self.disk(error))
    }

    fn read_back(&mut self) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let count = match self.file.read(&mut piece) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            if count == 0 {
                return Ok(());
            }
            self.check.update(&piece[..count]);
            self.length += count as u64;
        }
    }

    fn disk(&self, source: io::Error) -> HubError {
        HubError::Disk { path: self.path.clone(), source }
    }
}

impl Check {
    fn new(version: &str, size: u64) -> Self {
        let (running, want) = match Digest::of(version) {
            None => (Vec::new(), Vec::new()),
            Some(Digest::Sha256(want)) => (vec![Context::new(&SHA256)], want.to_vec()),
            Some(Digest::Sha1(want)) => {
                // Of the bytes alone, and as git stores them.
                let plain = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                let mut git = plain.clone();
                git.update(format!("blob {size}\0").as_bytes());
                (vec![plain, git], want.to_vec())
            }
        };
        Self { running, want }
    }

    fn update(&mut self, bytes: &[u8]) {
        self.running.iter_mut().for_each(|context| context.update(bytes));
    }

    fn is_right(&self) -> bool {
        let same = |context: &Context| context.clone().finish().as_ref() == self.want;
        self.running.is_empty() || self.running.iter().any(same)
    }
}

/// Hexadecimal digits that stand for a version in the name of a file, whatever the version is.
pub(super) fn tag(version: &str) -> String {
    let mut tag = String::new();
    for byte in &digest(&SHA256, version.as_bytes()).as_ref()[..8] {
        // Writing to a string does not fail.
        let _ = write!(tag, "{byte:02x}");
    }
    tag
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(version: &str, size: u64) -> About {
        About { version: version.to_owned(), size }
    }

    /// `printf abc | git hash-object --stdin`, `sha1sum` and `sha256sum`.
    const DIGESTS: [&str; 3] = [
        "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f",
        "a9993e364706816aba3e25717850c26c9cd0d89d",
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    ];

    #[test]
    fn a_reopened_partial_file_resumes_and_matches_its_digest() {
        for version in DIGESTS {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("x.part");
            let mut part = PartialFile::open(path.clone(), &about(version, 3)).expect("a part");
            assert!(part.append(b"a").expect("room") && !part.is_whole());
            drop(part);
            let mut part = PartialFile::open(path, &about(version, 3)).expect("a part");
            assert_eq!(part.length(), 1);
            assert!(part.append(b"bc").expect("room"));
            assert!(part.is_whole() && part.is_right());
            assert!(!part.append(b"d").expect("room"), "there is no fourth");
            part.finish(&dir.path().join("x")).expect("a file");
            assert_eq!(fs::read(dir.path().join("x")).expect("a file"), b"abc");
        }
    }

    #[test]
    fn a_damaged_part_fails_its_digest_and_a_too_long_part_restarts() {
        for version in DIGESTS {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("x.part");
            fs::write(&path, "xbcd").expect("a file");
            let mut part = PartialFile::open(path.clone(), &about(version, 3)).expect("a part");
            assert_eq!(part.length(), 0);
            assert!(part.append(b"xbc").expect("room") && !part.is_right());
            part.clear().expect("an empty one");
            assert!(part.append(b"abc").expect("room") && part.is_right());
        }
    }

    #[test]
    fn a_symlink_in_place_of_a_partial_file_is_not_followed() {
        let dir = tempfile::tempdir().expect("a directory");
        let (path, other) = (dir.path().join("x.part"), dir.path().join("other"));
        fs::write(&other, "mine").expect("a file");
        std::os::unix::fs::symlink(&other, &path).expect("a link");
        let mut part = PartialFile::open(path, &about("v", 3)).expect("a part");
        assert!(part.append(b"abc").expect("room"));
        assert_eq!(fs::read(other).expect("a file"), b"mine");
    }
}
