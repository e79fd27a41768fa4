//! Folders and files of one user: keys, and what is brought of models.
//!
//! Whoever may write into such a folder chooses whom this process trusts and what it computes with; whoever
//! may read a key is its holder. So a [`Folder`] is opened once, and its files through it: none is a symbolic
//! link, each belongs to the user of this process or to root, none may be written by others, and a secret
//! not be read by them. The path of a folder itself may lead over links: whoever names it means the folder there.

use crate::replace::{PUBLIC, SECRET};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, fchmod, fstat, mkdirat, openat},
    io::Errno,
    process::geteuid,
};
use std::{
    fs::{DirBuilder, File},
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::fs::DirBuilderExt},
    path::{Path, PathBuf},
};

/// The mode of a private folder: everything for its owner, nothing for others.
const FOLDER: u32 = 0o700;
/// The mode bits for others than the owner.
const OTHERS: u32 = 0o077;
/// The mode bits by which others may write.
const WRITABLE: u32 = 0o022;

/// Why a private folder or file is not used.
#[derive(Debug, thiserror::Error)]
pub enum PrivateError {
    /// It cannot be opened, read or written.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// The file or folder that was tried.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// It is there, and must not be replaced.
    #[error("{} exists already: keep it, or choose another directory", path.display())]
    Exists {
        /// The file that exists.
        path: PathBuf,
    },
    /// It is a symbolic link.
    #[error("{} is a symbolic link, and none is followed here: put what it leads to in its place", path.display())]
    Link {
        /// The path of the link.
        path: PathBuf,
    },
    /// It is something else than it should be.
    #[error("{} is not a {wanted}: move it away", path.display())]
    Kind {
        /// The path that was opened.
        path: PathBuf,
        /// What it should be: a file or a directory.
        wanted: &'static str,
    },
    /// It belongs to somebody else.
    #[error(
        "{} belongs to user {owner}, and this program runs as user {user}: run it as that user, or \
         `chown {user} {}`", path.display(), path.display()
    )]
    Owner {
        /// The file or folder that was refused.
        path: PathBuf,
        /// The user id of its owner.
        owner: u32,
        /// The user id of this process.
        user: u32,
    },
    /// Others may do with it what only its owner may.
    #[error(
        "other users of this machine may {may} {} (mode {mode:o}): `chmod {wanted:o} {}`",
        path.display(), path.display()
    )]
    Open {
        /// The file or folder that is open to others.
        path: PathBuf,
        /// What others may do with it, for the message.
        may: &'static str,
        /// The mode of the file or folder.
        mode: u32,
        /// The widest mode that it may have.
        wanted: u32,
    },
    /// It has more bytes than anything of its kind.
    #[error("{} has more than {most} bytes: it is something else", path.display())]
    Long {
        /// The file that is too long.
        path: PathBuf,
        /// The most bytes that are read.
        most: u64,
    },
}

impl PrivateError {
    /// Whether the error is that nothing of that name exists.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::File { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl From<PrivateError> for io::Error {
    fn from(error: PrivateError) -> Self {
        match error {
            PrivateError::File { source, .. } => source,
            error => Self::other(error),
        }
    }
}

/// A folder that belongs to the user of this process.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    handle: OwnedFd,
    /// The mode that was found, where it was open to others.
    closed: Option<u32>,
}

impl Folder {
    /// Opens a folder that exists.
    ///
    /// # Errors
    /// When it is not there, is no folder, belongs to somebody else or is open to others.
    pub fn open(path: &Path) -> Result<Self, PrivateError> {
        Self::named(path, false)
    }

    /// Opens a folder that exists and is known to be used for nothing else. If it is open to others it is closed, and
    /// [`Folder::was_open`] says so.
    ///
    /// # Errors
    /// When it is not there, is no folder, belongs to somebody else or cannot be closed.
    pub fn mend(path: &Path) -> Result<Self, PrivateError> {
        Self::named(path, true)
    }

    fn named(path: &Path, mend: bool) -> Result<Self, PrivateError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = openat(CWD, path, flags, Mode::empty());
        Self::checked(path.to_owned(), handle, mend)
    }

    /// Opens a folder for its owner only; creates it, and those above it, if they do not exist.
    ///
    /// # Errors
    /// As [`Folder::open`], or when it cannot be created.
    pub fn make(path: &Path) -> Result<Self, PrivateError> {
        let made = DirBuilder::new().recursive(true).mode(FOLDER).create(path);
        match made {
            Ok(()) => Self::open(path),
            Err(source) => match source.kind() {
                io::ErrorKind::AlreadyExists => Self::open(path),
                _ => Err(PrivateError::File { path: path.to_owned(), source }),
            },
        }
    }

    /// Opens a folder in this one. If it is open to others it is closed.
    ///
    /// # Errors
    /// As [`Folder::mend`], and when it is a link.
    pub fn inside(&self, name: &str) -> Result<Self, PrivateError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let handle = openat(&self.handle, name, flags, Mode::empty());
        Self::checked(self.path.join(name), handle, true)
    }

    /// Opens a folder in this one, and creates it if it does not exist. If it is open to others it is closed.
    ///
    /// # Errors
    /// As [`Folder::inside`], and when it cannot be created.
    pub fn folder(&self, name: &str) -> Result<Self, PrivateError> {
        match mkdirat(&self.handle, name, Mode::from_raw_mode(FOLDER)) {
            Ok(()) | Err(Errno::EXIST) => self.inside(name),
            Err(error) => {
                Err(PrivateError::File { path: self.path.join(name), source: error.into() })
            }
        }
    }

    fn checked(
        path: PathBuf,
        handle: Result<OwnedFd, Errno>,
        mend: bool,
    ) -> Result<Self, PrivateError> {
        let handle = match handle {
            Ok(handle) => handle,
            // A link is no directory either, where none is followed.
            Err(Errno::NOTDIR) if path.is_symlink() => return Err(PrivateError::Link { path }),
            Err(Errno::NOTDIR) => return Err(PrivateError::Kind { path, wanted: "directory" }),
            Err(error) => return Err(failed(path, error)),
        };
        let found = About::of(&handle, &path)?;
        found.belongs(&path)?;
        let mut closed = None;
        if found.owner == found.user && found.mode & OTHERS != 0 {
            let open = PrivateError::Open {
                path: path.clone(),
                may: "reach into",
                mode: found.mode,
                wanted: FOLDER,
            };
            if !mend || fchmod(&handle, Mode::from_raw_mode(FOLDER)).is_err() {
                return Err(open);
            }
            closed = Some(found.mode);
        } else if found.mode & WRITABLE != 0 {
            let (mode, wanted) = (found.mode, found.mode & !WRITABLE);
            return Err(PrivateError::Open { path, may: "write into", mode, wanted });
        }
        Ok(Self { path, handle, closed })
    }

    /// The path by which the folder was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The mode that it had, if it was open to others and was closed when it was opened here.
    pub fn was_open(&self) -> Option<u32> {
        self.closed
    }

    /// Reads a file that only its owner may read, of at most so many bytes.
    ///
    /// # Errors
    /// When it is not there, is a link, belongs to somebody else, is open to others or is longer.
    pub fn read_secret(&self, name: &str, most: u64) -> Result<Vec<u8>, PrivateError> {
        self.read(name, SECRET, most)
    }

    /// Reads a file that everybody may read and only its owner may write, of at most so many bytes.
    ///
    /// # Errors
    /// As [`Folder::read_secret`].
    pub fn read_public(&self, name: &str, most: u64) -> Result<Vec<u8>, PrivateError> {
        self.read(name, PUBLIC, most)
    }

    fn read(&self, name: &str, wanted: u32, most: u64) -> Result<Vec<u8>, PrivateError> {
        contents(self.opened(name, OFlags::RDONLY, wanted)?, self.path.join(name), most)
    }

    /// Writes a new file that only its owner may read.
    ///
    /// # Errors
    /// When there is something of that name, or it cannot be written.
    pub fn write_secret(&self, name: &str, bytes: &[u8]) -> Result<(), PrivateError> {
        self.write(name, SECRET, bytes)
    }

    /// Writes a new file that everybody may read who may look into the folder.
    ///
    /// # Errors
    /// As [`Folder::write_secret`].
    pub fn write_public(&self, name: &str, bytes: &[u8]) -> Result<(), PrivateError> {
        self.write(name, PUBLIC, bytes)
    }

    fn write(&self, name: &str, mode: u32, bytes: &[u8]) -> Result<(), PrivateError> {
        let mut file = self.opened(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, mode)?;
        let path = || self.path.join(name);
        file.write_all(bytes).map_err(|source| PrivateError::File { path: path(), source })
    }

    /// Opens a file to read and to write, and creates it for its owner only if it does not exist. An existing file
    /// may be readable by others, but not writable.
    ///
    /// # Errors
    /// When it is a link, belongs to somebody else, or others may write it.
    pub fn file(&self, name: &str) -> Result<File, PrivateError> {
        let flags = OFlags::RDWR | OFlags::CREATE | quiet();
        let file = openat(&self.handle, name, flags, Mode::from_raw_mode(SECRET));
        fitting(file, &self.path.join(name), PUBLIC)
    }

    /// Opens a file whose mode is at most `most`.
    fn opened(&self, name: &str, flags: OFlags, most: u32) -> Result<File, PrivateError> {
        let file = openat(&self.handle, name, flags | quiet(), Mode::from_raw_mode(most));
        fitting(file, &self.path.join(name), most)
    }
}

/// Reads a file that only its owner may read, of at most so many bytes, in a folder that may be used for other things.
///
/// # Errors
/// As [`Folder::read_secret`].
pub fn read_secret(path: &Path, most: u64) -> Result<Vec<u8>, PrivateError> {
    let file = openat(CWD, path, OFlags::RDONLY | quiet(), Mode::empty());
    contents(fitting(file, path, SECRET)?, path.to_owned(), most)
}

/// Checks that an opened file has at most this mode.
fn fitting(opened: Result<OwnedFd, Errno>, path: &Path, most: u32) -> Result<File, PrivateError> {
    let file = File::from(opened.map_err(|error| failed(path.to_owned(), error))?);
    About::of(&file, path)?.fits(path, most)?;
    Ok(file)
}

fn contents(file: File, path: PathBuf, most: u64) -> Result<Vec<u8>, PrivateError> {
    let mut bytes = Vec::new();
    match file.take(most.saturating_add(1)).read_to_end(&mut bytes) {
        Ok(_) if bytes.len() as u64 > most => Err(PrivateError::Long { path, most }),
        Ok(_) => Ok(bytes),
        Err(source) => Err(PrivateError::File { path, source }),
    }
}

/// How all files are opened: no link is followed, and no pipe waited for.
fn quiet() -> OFlags {
    OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC
}

fn failed(path: PathBuf, error: Errno) -> PrivateError {
    match error {
        Errno::LOOP | Errno::MLINK => PrivateError::Link { path },
        Errno::EXIST => PrivateError::Exists { path },
        error => PrivateError::File { path, source: error.into() },
    }
}

/// What the system says about an open file or folder, and about this process.
struct About {
    kind: FileType,
    mode: u32,
    owner: u32,
    user: u32,
}

impl About {
    fn of(handle: impl std::os::fd::AsFd, path: &Path) -> Result<Self, PrivateError> {
        let about = fstat(handle);
        let about =
            about.map_err(|e| PrivateError::File { path: path.to_owned(), source: e.into() })?;
        Ok(Self {
            kind: FileType::from_raw_mode(about.st_mode),
            mode: Mode::from_raw_mode(about.st_mode).as_raw_mode() & 0o7777,
            owner: about.st_uid,
            user: geteuid().as_raw(),
        })
    }

    /// Refuses what belongs neither to the user of this process nor to root.
    fn belongs(&self, path: &Path) -> Result<(), PrivateError> {
        let Self { owner, user, .. } = *self;
        match owner == user || owner == 0 {
            true => Ok(()),
            false => Err(PrivateError::Owner { path: path.to_owned(), owner, user }),
        }
    }

    /// Refuses what is not a file, belongs to somebody else, or lets others do more than `wanted` allows.
    fn fits(&self, path: &Path, wanted: u32) -> Result<(), PrivateError> {
        if self.kind != FileType::RegularFile {
            return Err(PrivateError::Kind { path: path.to_owned(), wanted: "file" });
        }
        self.belongs(path)?;
        let more = self.mode & OTHERS & !wanted;
        if more == 0 {
            return Ok(());
        }
        let may = if self.mode & WRITABLE & !wanted != 0 { "write" } else { "read" };
        Err(PrivateError::Open { path: path.to_owned(), may, mode: self.mode, wanted })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::{
        fs::{self, Permissions},
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    };

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    fn set(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn new_folders_and_secrets_are_private_to_their_owner() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::make(&dir.path().join("a/b")).unwrap();
        assert_eq!([mode(&dir.path().join("a")), mode(folder.path())], [FOLDER; 2]);
        let inner = folder.folder("c").unwrap();
        assert_eq!((mode(inner.path()), inner.was_open()), (FOLDER, None));
        inner.write_secret("key", b"k").unwrap();
        inner.write_public("name", b"n").unwrap();
        drop(inner.file("data").unwrap());
        let modes = ["key", "name", "data"].map(|name| mode(&inner.path().join(name)));
        assert_eq!(modes, [SECRET, PUBLIC, SECRET]);
        assert_eq!(inner.read_secret("key", 1).unwrap(), b"k");
        assert_eq!(inner.read_public("name", 1).unwrap(), b"n");
        assert!(matches!(inner.read_public("name", 0), Err(PrivateError::Long { .. })));
        assert!(matches!(inner.write_secret("key", b""), Err(PrivateError::Exists { .. })));
        assert!(inner.read_secret("other", 1).unwrap_err().is_absent());
        assert!(matches!(folder.read_secret("c", 1), Err(PrivateError::Kind { .. })));
        inner.write_secret("file", b"").unwrap();
        let error = inner.folder("file").unwrap_err();
        assert!(matches!(error, PrivateError::Kind { wanted: "directory", .. }), "{error}");
    }

    #[test]
    fn a_secret_in_an_open_folder_is_still_checked() {
        let dir = tempfile::tempdir().unwrap();
        set(dir.path(), 0o755);
        let (secret, link) = (dir.path().join("secret"), dir.path().join("link"));
        assert!(read_secret(&secret, 9).unwrap_err().is_absent());
        fs::write(&secret, "s").unwrap();
        set(&secret, 0o600);
        assert_eq!(read_secret(&secret, 1).unwrap(), b"s");
        assert!(matches!(read_secret(&secret, 0), Err(PrivateError::Long { .. })));
        symlink(&secret, &link).unwrap();
        assert!(matches!(read_secret(&link, 9), Err(PrivateError::Link { .. })));
        set(&secret, 0o644);
        assert!(matches!(read_secret(&secret, 9), Err(PrivateError::Open { .. })));
    }

    #[test]
    fn an_open_folder_is_closed_and_an_open_secret_refused() {
        let dir = tempfile::tempdir().unwrap();
        set(dir.path(), 0o777);
        let error = Folder::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("reach into") && error.contains("`chmod 700 "), "{error}");
        assert_eq!(mode(dir.path()), 0o777, "it may be used for something else");
        let folder = Folder::mend(dir.path()).unwrap();
        assert_eq!((folder.was_open(), mode(dir.path())), (Some(0o777), FOLDER));
        assert_eq!(Folder::open(dir.path()).unwrap().was_open(), None);
        folder.write_secret("key", b"k").unwrap();
        let key = dir.path().join("key");
        for (open, may) in [(0o640, "read"), (0o604, "read"), (0o620, "write"), (0o606, "write")] {
            set(&key, open);
            let error = folder.read_secret("key", 9).unwrap_err().to_string();
            let wanted = format!("may {may} {} (mode {open:o}): `chmod 600 ", key.display());
            assert!(error.contains(&wanted), "{error}");
        }
        set(&key, 0o400);
        assert_eq!(folder.read_secret("key", 9).unwrap(), b"k");
        set(&key, 0o644);
        assert!(folder.read_public("key", 9).is_ok() && folder.file("key").is_ok());
        set(&key, 0o666);
        assert!(folder.read_public("key", 9).is_err() && folder.file("key").is_err());
    }

    #[test]
    fn symlinks_inside_a_private_folder_are_not_followed() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let there = Folder::mend(other.path()).unwrap();
        there.write_secret("key", b"k").unwrap();
        let folder = Folder::mend(dir.path()).unwrap();
        for (name, to) in [("key", "key"), ("gone", "gone"), ("inner", "")] {
            symlink(other.path().join(to), dir.path().join(name)).unwrap();
        }
        for name in ["key", "gone"] {
            let error = folder.read_secret(name, 9).unwrap_err();
            assert!(matches!(error, PrivateError::Link { .. }), "{error}");
            assert!(matches!(folder.file(name), Err(PrivateError::Link { .. })), "{name}");
            assert!(folder.write_secret(name, b"").is_err(), "{name}");
        }
        assert!(matches!(folder.folder("inner"), Err(PrivateError::Link { .. })));
        assert!(!other.path().join("gone").exists());
        // Who names the folder by a link means what is there.
        assert!(Folder::open(&dir.path().join("inner")).is_ok());
    }

    #[test]
    fn files_of_another_user_are_refused() {
        let user = geteuid().as_raw();
        let path = Path::new("keys/key.pem");
        let of = |owner| About { kind: FileType::RegularFile, mode: SECRET, owner, user };
        assert!(of(user).fits(path, SECRET).is_ok() && of(0).fits(path, SECRET).is_ok());
        let error = of(user + 7).fits(path, SECRET).unwrap_err().to_string();
        let wanted = format!("belongs to user {}, and this program runs as user {user}", user + 7);
        assert!(error.contains(&wanted), "{error}");
    }
}
