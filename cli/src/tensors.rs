//! Writes raw results as JSON, as safetensors, or for NumPy.

use super::{failure::Failure, npy};
use galaxy_client::{Output, Tensors};
use safetensors::tensor::{Dtype, TensorView};
use serde::Serialize;
use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    str::FromStr,
};

/// The file that a raw result goes to, and its format.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Destination {
    path: PathBuf,
    format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Json,
    Safetensors,
    Npz,
}

/// A tensor with a name.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub struct NamedTensor {
    /// The name of the tensor.
    pub name: String,
    /// The shape, the slowest axis first.
    pub shape: Vec<u64>,
    /// Its values, row after row.
    pub values: Vec<f32>,
}

impl FromStr for Destination {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let path = PathBuf::from(text);
        let format = match path.extension().and_then(|e| e.to_str()) {
            Some("json") => Format::Json,
            Some("safetensors") => Format::Safetensors,
            Some("npz") => Format::Npz,
            _ => return Err("the name must end in .json, .safetensors or .npz".to_owned()),
        };
        Ok(Self { path, format })
    }
}

/// What `galaxy run` prints or writes.
#[derive(Serialize)]
struct Document<'a> {
    output: String,
    #[serde(flatten)]
    tensors: &'a Tensors,
}

/// A raw result as one JSON object.
pub fn as_json(output: Output, tensors: &Tensors) -> Result<String, Failure> {
    super::json(&Document { output: output.to_string(), tensors })
}

/// The tensors of a raw result: `sequence.0`, `sequence.1`, ...
fn named(tensors: &Tensors) -> Vec<NamedTensor> {
    let named = |tensor: &galaxy_client::Tensor| NamedTensor {
        name: format!("sequence.{}", tensor.sequence),
        shape: tensor.shape.iter().map(|side| u64::from(*side)).collect(),
        values: tensor.values.clone(),
    };
    tensors.tensors.iter().map(named).collect()
}

/// Tensors as safetensors in f32, with what else is said of them.
fn as_safetensors(
    tensors: &[NamedTensor],
    about: HashMap<String, String>,
) -> Result<Vec<u8>, Failure> {
    let wrong = |e| Failure::new(format!("cannot write the result as safetensors: {e}"));
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|tensor| tensor.values.iter().flat_map(|v| v.to_le_bytes()).collect())
        .collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|(tensor, bytes)| {
            let shape = tensor.shape.iter().map(|side| *side as usize).collect();
            Ok((tensor.name.as_str(), TensorView::new(Dtype::F32, shape, bytes).map_err(wrong)?))
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    safetensors::serialize(views, Some(about)).map_err(wrong)
}

/// Tensors as an archive of NumPy.
fn as_npz(tensors: &[NamedTensor]) -> Result<Vec<u8>, Failure> {
    let mut archive = io::Cursor::new(Vec::new());
    let parts = tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice(), t.values.as_slice()));
    let written = npy::write_all(parts, &mut archive);
    written.map_err(|e| Failure::new(format!("cannot write the result for NumPy: {e}")))?;
    Ok(archive.into_inner())
}

impl Destination {
    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a raw result.
    pub fn write(&self, output: Output, tensors: &Tensors) -> Result<(), Failure> {
        let about = HashMap::from([("output".to_owned(), output.to_string())]);
        self.put(about, &named(tensors), || as_json(output, tensors))
    }

    /// Writes tensors by their names; as JSON, what `document` gives.
    pub fn write_named(
        &self,
        tensors: &[NamedTensor],
        document: impl FnOnce() -> Result<String, Failure>,
    ) -> Result<(), Failure> {
        self.put(HashMap::new(), tensors, document)
    }

    /// Writes beside the file first, so that the file is always whole.
    fn put(
        &self,
        mut about: HashMap<String, String>,
        tensors: &[NamedTensor],
        document: impl FnOnce() -> Result<String, Failure>,
    ) -> Result<(), Failure> {
        about.insert("producer".to_owned(), format!("galaxy {}", galaxy_proto::VERSION));
        let bytes = match self.format {
            Format::Json => document()?.into_bytes(),
            Format::Safetensors => as_safetensors(tensors, about)?,
            Format::Npz => as_npz(tensors)?,
        };
        let mut beside = self.path.clone().into_os_string();
        beside.push(".part");
        std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, &self.path)).map_err(
            |e| Failure::new(format!("cannot write the result: {e}")).at(self.path.display()),
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use galaxy_client::Tensor;
    use safetensors::SafeTensors;

    fn result() -> Tensors {
        let tensor = |sequence, shape: &[u32], values: &[f32]| Tensor {
            sequence,
            shape: shape.to_vec(),
            values: values.to_vec(),
        };
        Tensors {
            tensors: vec![
                tensor(0, &[2, 2], &[1.0, -2.5, 0.1, f32::MIN_POSITIVE]),
                tensor(1, &[2], &[3.0, 4.0]),
            ],
            report: None,
        }
    }

    #[test]
    fn the_file_extension_selects_the_format() {
        assert_eq!("a.json".parse::<Destination>().unwrap().format, Format::Json);
        assert_eq!("b/a.safetensors".parse::<Destination>().unwrap().format, Format::Safetensors);
        assert_eq!("a.npz".parse::<Destination>().unwrap().format, Format::Npz);
        assert!("a.npy".parse::<Destination>().unwrap_err().contains(".safetensors"));
    }

    #[test]
    fn json_keeps_every_bit() {
        let text = as_json(Output::Hidden, &result()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["output"], "hidden");
        assert_eq!(value["tensors"][0]["shape"], serde_json::json!([2, 2]));
        let values: Vec<f32> =
            serde_json::from_value(value["tensors"][0]["values"].clone()).unwrap();
        assert_eq!(values, result().tensors[0].values);
        assert!(value["report"].is_null());
    }

    #[test]
    fn tensor_files_are_written_and_write_errors_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.safetensors");
        let destination: Destination = path.to_str().unwrap().parse().unwrap();
        destination.write(Output::Logits, &result()).unwrap();
        let bytes = std::fs::read(destination.path()).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor("sequence.0").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[2, 2][..]));
        assert_eq!(tensor.data()[4..8], (-2.5f32).to_le_bytes());
        assert_eq!(file.tensor("sequence.1").unwrap().shape(), [2]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let nowhere: Destination =
            dir.path().join("no/out.json").to_str().unwrap().parse().unwrap();
        let failure = nowhere.write(Output::Logits, &result()).unwrap_err();
        assert!(failure.to_string().contains("out.json"), "{failure}");
    }
}
