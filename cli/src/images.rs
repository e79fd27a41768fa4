//! Images as arguments: files, and the values of files in safetensors.

use super::failure::Failure;
use galaxy_proto::convert;
use safetensors::{Dtype, SafeTensors};
use std::{io::Read, path::Path};

/// The largest file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Reads an image file.
pub fn file(path: &Path) -> Result<Vec<u8>, Failure> {
    bounded(path, MAX_FILE_BYTES)
}

/// Reads a file of at most `most` bytes.
pub fn bounded(path: &Path, most: u64) -> Result<Vec<u8>, Failure> {
    let failed = |error| Failure::new(format!("cannot read it: {error}")).at(path.display());
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        let what = format!("it is above the limit of {most} bytes");
        return Err(Failure::new(what).at(path.display()));
    }
    Ok(bytes)
}

/// Reads the images of a safetensors file: each of its tensors is one, `[channels, height, width]`,
/// or several, with their number in front.
pub fn pixels(path: &Path) -> Result<Vec<Vec<f32>>, Failure> {
    let bytes = file(path)?;
    let wrong = |what: String| Failure::new(what).at(path.display());
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|error| wrong(format!("it is no safetensors file: {error}")))?;
    let mut named = tensors.tensors();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    let mut images = Vec::new();
    for (name, tensor) in named {
        let shape = tensor.shape();
        let one = shape.len().checked_sub(3).filter(|rest| *rest <= 1);
        let Some(one) = one.filter(|_| tensor.dtype() == Dtype::F32) else {
            let what = format!(
                "tensor {name:?} is {:?} {shape:?}: f32 [channels, height, width] is wanted",
                tensor.dtype()
            );
            return Err(wrong(what));
        };
        let values: usize = shape[one..].iter().product();
        let all = convert::floats(tensor.data());
        images.extend(all.chunks_exact(values.max(1)).map(<[f32]>::to_vec));
    }
    Ok(images)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use safetensors::tensor::{TensorView, serialize_to_file};

    #[test]
    fn pixel_tensors_hold_one_image_or_several() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pixels.safetensors");
        let bytes = convert::bytes(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let view = |shape: &[usize]| TensorView::new(Dtype::F32, shape.to_vec(), &bytes).unwrap();
        let write = |shape: &[usize]| serialize_to_file([("x", view(shape))], None, &path).unwrap();
        write(&[3, 1, 2]);
        assert_eq!(pixels(&path).unwrap(), [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]);
        write(&[2, 3, 1, 1]);
        assert_eq!(pixels(&path).unwrap(), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        write(&[6]);
        assert!(pixels(&path).unwrap_err().to_string().contains("[6]"));
        std::fs::write(&path, "no").unwrap();
        assert!(pixels(&path).unwrap_err().to_string().contains("safetensors"));
    }
}
