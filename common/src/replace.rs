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
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    // One that was left behind, or laid there: it is not followed.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    // The name, too.
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn a_file_is_replaced_whole_and_no_link_is_followed() {
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
        fs::create_dir(dir.path().join("a.json.new")).unwrap();
        assert!(replace(&path, b"third", SECRET).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
    }
}
