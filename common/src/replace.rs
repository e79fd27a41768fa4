//! Files that are replaced whole.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// The mode of a file that only its owner may read.
pub const SECRET: u32 = 0o600;
/// The mode of a file that everybody may read.
pub const PUBLIC: u32 = 0o644;

/// Replaces a file by one with these bytes and this mode, whole or not at all. It is on the disk when this returns.
///
/// # Errors
/// When it cannot be written, or its directory not be changed.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace_with(path, mode, |mut file, _| file.write_all(bytes))
}

/// Replaces a file by what `write` writes into a new file, which it gets with its path; with this mode, whole or not
/// at all. It is on the disk when this returns.
///
/// # Errors
/// What `write` fails with, and when the file cannot be created, or its directory not be changed. The file is as it
/// was then, and what was written is gone.
pub fn replace_with<T, E: From<io::Error>>(
    path: &Path,
    mode: u32,
    write: impl FnOnce(&File, &Path) -> Result<T, E>,
) -> Result<T, E> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    // A file that was left behind, or laid there: it is not followed if it is a link.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    let written = write(&file, new.as_ref()).and_then(|written| {
        file.sync_all()?;
        fs::rename(&new, path)?;
        Ok(written)
    });
    if written.is_err() {
        drop(fs::remove_file(&new));
    }
    let written = written?;
    // The name reaches the disk, too.
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(written)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn a_file_is_replaced_completely_or_kept_and_symlinks_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("a.json"), dir.path().join("other"));
        fs::write(&other, "kept").unwrap();
        for text in ["first", "second"] {
            symlink(&other, dir.path().join("a.json.new")).unwrap();
            replace(&path, text.as_bytes(), SECRET).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, SECRET);
        }
        assert_eq!(fs::read_to_string(&other).unwrap(), "kept");
        let failed: io::Result<()> = replace_with(&path, PUBLIC, |mut file, new| {
            file.write_all(b"half")?;
            assert!(new.exists());
            Err(ErrorKind::StorageFull.into())
        });
        assert!(failed.is_err() && !dir.path().join("a.json.new").exists());
        fs::create_dir(dir.path().join("a.json.new")).unwrap();
        assert!(replace(&path, b"third", SECRET).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
    }
}
