//! Reads the small files of a model, such as its config, as a whole.

use crate::{error::ModelError, recognise};
use std::{fs::File, io::Read, path::Path};

/// The largest JSON file that is read. A config has labels at most; no real one is nearly as large.
pub(crate) const MAX_JSON_BYTES: u64 = 16 << 20;

/// Reads a small file as a whole, which has at most `limit` bytes.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let metadata = std::fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        let wanted = "regular file".to_owned();
        return Err(ModelError::NotThere { path: path.to_owned(), wanted });
    }
    let mut bytes = Vec::new();
    // One byte more than allowed, so that a file that grows meanwhile is noticed too.
    let file = File::open(path).map_err(io)?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        let bytes = metadata.len().max(limit + 1);
        return Err(ModelError::TooLarge { path: path.to_owned(), bytes, limit });
    }
    recognise::stand_in(path, &bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_file_above_its_bound_is_rejected() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("x");
        std::fs::write(&path, [0; 9]).expect("a file");
        assert!(read_bounded(&path, 9).is_ok());
        assert!(matches!(read_bounded(&path, 8), Err(ModelError::TooLarge { bytes: 9, .. })));
        assert!(read_bounded(directory.path(), 8).is_err());
    }
}
