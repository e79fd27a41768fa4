//! The directory of a pulled model: which files are there, and in which versions.

use super::{super::failure::Failure, files, unwritten};
use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    io::{self, Read},
    path::{Path, PathBuf},
};

/// The folder of partial downloads, inside the model's directory.
const UNFINISHED: &str = ".pull";
/// The file beside a model that says which version of each file was brought.
const VERSIONS: &str = ".galaxy-pulled";
/// The lock file, which the pull that writes there holds.
const LOCK: &str = "lock";
/// The most bytes that are read of the file of versions, which has an entry for each file.
const MAX_VERSIONS_BYTES: u64 = 4 << 20;

/// A directory that a model is pulled into. What has changed since is pulled again, and nothing else.
pub(super) struct Installed {
    to: PathBuf,
    unfinished: PathBuf,
    versions: BTreeMap<String, String>,
    /// Whether there was no such directory before.
    made: bool,
    /// The lock, held as long as this pull writes here.
    _lock: File,
}

impl Installed {
    /// Creates and locks a directory, and reads the versions of its files. A file of versions that cannot be read
    /// counts as empty.
    ///
    /// # Errors
    /// When the directory cannot be written, or another pull writes there.
    pub(super) fn open(to: &Path) -> Result<Self, Failure> {
        let (unfinished, made) = (to.join(UNFINISHED), !to.exists());
        let folders = fs::create_dir_all(to).and_then(|()| make_folder(&unfinished));
        folders.map_err(|error| unwritten(&unfinished, &error))?;
        let lock = unfinished.join(LOCK);
        let lock = replace_link(&lock).and_then(|()| File::create(&lock));
        let lock = lock.map_err(|error| unwritten(&unfinished, &error))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            return Err(Failure::new("another pull is writing there")
                .at(to.display())
                .todo("wait until it is done, or choose another place with --to"));
        }
        let mut text = Vec::new();
        let read = File::open(to.join(VERSIONS))
            .and_then(|file| file.take(MAX_VERSIONS_BYTES).read_to_end(&mut text));
        let versions = read.ok().and_then(|_| serde_json::from_slice(&text).ok());
        let versions = versions.unwrap_or_default();
        Ok(Self { to: to.to_owned(), unfinished, versions, made, _lock: lock })
    }

    /// The folder of partial downloads.
    pub(super) fn unfinished(&self) -> &Path {
        &self.unfinished
    }

    /// The path of a file in the directory.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.to.join(file)
    }

    /// Whether a file is there that no pull has brought.
    pub(super) fn is_foreign(&self, file: &str) -> bool {
        !self.versions.contains_key(file) && self.path(file).is_file()
    }

    /// Whether a pull has brought this version of a file.
    pub(super) fn has(&self, file: &str, version: &str) -> bool {
        self.versions.get(file).is_some_and(|v| v == version) && self.path(file).is_file()
    }

    /// Moves new files, given by name, version and present path, into their places. What was there gives way at once,
    /// and is never half of one version. Pulled files that are not among `all`, those of the model, are removed.
    ///
    /// # Errors
    /// When one cannot be put there. Pulling again goes on.
    pub(super) fn replace(
        &mut self,
        all: &[String],
        new: Vec<(String, String, PathBuf)>,
    ) -> Result<(), Failure> {
        self.remove_others(all).map_err(|error| unwritten(&self.to, &error))?;
        for (file, version, bytes) in new {
            let put = self.put(&file, version, &bytes);
            put.map_err(|error| unwritten(&self.path(&file), &error))?;
        }
        fs::remove_dir_all(&self.unfinished).map_err(|error| unwritten(&self.unfinished, &error))
    }

    /// Moves a file into its place, and notes its version.
    fn put(&mut self, file: &str, version: String, bytes: &Path) -> io::Result<()> {
        // If we are ended in the middle it is brought again.
        self.versions.insert(file.to_owned(), String::new());
        self.write()?;
        self.make_folders(file)?;
        fs::rename(bytes, self.path(file))?;
        self.versions.insert(file.to_owned(), version);
        self.write()
    }

    /// Removes files that were pulled and are no part of the model any more.
    fn remove_others(&mut self, all: &[String]) -> io::Result<()> {
        let known = self.versions.keys().filter(|file| !all.contains(file));
        for file in known.cloned().collect::<Vec<_>>() {
            // The notes may come with a directory from somewhere else.
            if files::is_plain(&file) && !self.leads_out(&file) {
                match fs::remove_file(self.path(&file)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            self.versions.remove(&file);
            self.write()?;
        }
        Ok(())
    }

    fn write(&self) -> io::Result<()> {
        let new = self.unfinished.join("versions");
        replace_link(&new)?;
        fs::write(&new, serde_json::to_vec(&self.versions)?)?;
        fs::rename(new, self.to.join(VERSIONS))
    }

    /// Makes the folders that a file lies in. A link in place of one would lead out of the directory.
    fn make_folders(&self, file: &str) -> io::Result<()> {
        let ends = file.match_indices('/').map(|(end, _)| end);
        ends.map(|end| self.to.join(&file[..end])).try_for_each(|folder| make_folder(&folder))
    }

    fn leads_out(&self, file: &str) -> bool {
        let mut ends = file.match_indices('/').map(|(end, _)| end);
        ends.any(|end| self.to.join(&file[..end]).is_symlink())
    }
}

impl Drop for Installed {
    /// Leaves no trace of a pull that has brought nothing. What has something in it stays.
    fn drop(&mut self) {
        let _ = fs::remove_file(self.unfinished.join(LOCK));
        let _ = fs::remove_dir(&self.unfinished);
        if self.made {
            let _ = fs::remove_dir(&self.to);
        }
    }
}

fn make_folder(folder: &Path) -> io::Result<()> {
    match fs::symlink_metadata(folder) {
        Ok(there) if there.is_dir() => Ok(()),
        Ok(_) => {
            let what = format!("{} is a link or a file, and no folder", folder.display());
            Err(io::Error::new(io::ErrorKind::NotADirectory, what))
        }
        Err(_) => fs::create_dir(folder),
    }
}

/// Removes a link, so that what is written next is not written behind it.
fn replace_link(path: &Path) -> io::Result<()> {
    if path.is_symlink() { fs::remove_file(path) } else { Ok(()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn ready(installed: &Installed, file: &str) -> Vec<(String, String, PathBuf)> {
        let bytes = installed.unfinished().join("bytes");
        fs::write(&bytes, "new").unwrap();
        vec![(file.to_owned(), "1".to_owned(), bytes)]
    }

    #[test]
    fn symlinks_out_of_the_directory_are_not_followed() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = "1_Pooling/config.json";
        symlink(other.path(), dir.path().join("1_Pooling")).unwrap();
        let mut installed = Installed::open(dir.path()).unwrap();
        let ready_files = ready(&installed, file);
        let refused = installed.replace(&[file.to_owned()], ready_files).err().unwrap().to_string();
        assert!(refused.contains("1_Pooling is a link"), "{refused}");
        assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);

        let dir = tempfile::tempdir().unwrap();
        symlink(other.path(), dir.path().join(UNFINISHED)).unwrap();
        assert!(Installed::open(dir.path()).is_err());
        assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_symlink_in_place_of_a_file_is_replaced_and_not_followed() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = other.path().join("mine");
        fs::write(&target, "mine").unwrap();
        symlink(&target, dir.path().join("config.json")).unwrap();
        fs::write(dir.path().join(VERSIONS), r#"{"config.json": "0"}"#).unwrap();
        let mut installed = Installed::open(dir.path()).unwrap();
        let ready_files = ready(&installed, "config.json");
        installed.replace(&["config.json".to_owned()], ready_files).unwrap();
        assert_eq!(fs::read(target).unwrap(), b"mine");
        assert_eq!(fs::read(dir.path().join("config.json")).unwrap(), b"new");
    }

    #[test]
    fn the_version_file_removes_nothing_outside_the_directory() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = other.path().join("mine");
        fs::write(&target, "mine").unwrap();
        symlink(other.path(), dir.path().join("link")).unwrap();
        fs::write(dir.path().join("gone"), "").unwrap();
        let notes =
            serde_json::json!({ target.to_str().unwrap(): "0", "link/mine": "0", "gone": "0" });
        fs::write(dir.path().join(VERSIONS), notes.to_string()).unwrap();
        Installed::open(dir.path()).unwrap().replace(&[], Vec::new()).unwrap();
        assert!(target.is_file());
        assert!(!dir.path().join("gone").exists() && !dir.path().join(UNFINISHED).exists());
    }

    #[test]
    fn two_pulls_do_not_write_into_one_directory() {
        let dir = tempfile::tempdir().unwrap();
        let first = Installed::open(dir.path()).unwrap();
        let refused = Installed::open(dir.path()).err().unwrap().to_string();
        assert!(refused.contains("another pull"), "{refused}");
        drop(first);
        Installed::open(dir.path()).unwrap();
    }
}
