//! The two dense layers behind the pooling of EmbeddingGemma, which its GGUF files hold as tensors.

use super::{GgmlType, Gguf};
use crate::{error::ModelError, widen::widen};
use serde_json::{Value as Json, json};
use std::{fs::File, os::unix::fs::FileExt, path::PathBuf};

/// The architecture whose files may have dense layers.
pub(super) const ARCHITECTURE: &str = "gemma-embedding";
/// The layers in their order: the name of the tensor, and that of the module in sentence-transformers.
pub(super) const LAYERS: [(&str, &str); 2] =
    [("dense_2.weight", "2_Dense"), ("dense_3.weight", "3_Dense")];
/// The fields of the architecture that give the widths of each, before it and behind it.
pub(super) const WIDTHS: [[&str; 2]; 2] =
    [["dense_2_feat_in", "dense_2_feat_out"], ["dense_3_feat_in", "dense_3_feat_out"]];
/// The most values of a layer; real ones have two millions.
const MAX_VALUES: u64 = 1 << 24;

/// A dense layer, as a file has it.
#[derive(Debug)]
pub(super) struct DenseLayer {
    module: &'static str,
    inputs: u64,
    outputs: u64,
    /// The weights, `[outputs, inputs]`, row-major.
    weight: Vec<f32>,
}

/// Whether a tensor is a dense layer behind the pooling.
pub(crate) fn is_dense(name: &str) -> bool {
    LAYERS.iter().any(|(tensor, _)| *tensor == name)
}

/// Reads the dense layers into the header of the first part; a checkpoint has them in files of their own.
///
/// # Errors
/// When the file cannot be read, or a layer is no matrix of a known type.
pub(crate) fn read_dense(parts: &mut [(PathBuf, File, Gguf)]) -> Result<(), ModelError> {
    let mut found = Vec::new();
    for (name, module) in LAYERS {
        for (path, file, gguf) in parts.iter() {
            let Some(tensor) = gguf.tensors.iter().find(|tensor| tensor.name == name) else {
                continue;
            };
            let wrong =
                |why: &str| ModelError::Gguf { path: path.clone(), why: format!("{name} {why}") };
            let GgmlType::Known(format) = tensor.kind else {
                return Err(wrong("is of no known type"));
            };
            let [outputs, inputs] = tensor.shape[..] else { return Err(wrong("is no matrix")) };
            let count =
                outputs.checked_mul(inputs).filter(|count| (1..=MAX_VALUES).contains(count));
            let count = count.ok_or_else(|| wrong("is larger than any that is read"))?;
            let mut bytes = vec![0; tensor.bytes as usize];
            let read = file.read_exact_at(&mut bytes, tensor.offset);
            read.map_err(|source| ModelError::Io { path: path.clone(), source })?;
            let mut weight = vec![0.0; count as usize];
            widen(format, &bytes, &mut weight);
            found.push(DenseLayer { module, inputs, outputs, weight });
        }
    }
    if let Some((.., first)) = parts.first_mut() {
        first.dense = found;
    }
    Ok(())
}

impl DenseLayer {
    pub(super) fn module(&self) -> &'static str {
        self.module
    }

    /// The config of the module.
    pub(super) fn config(&self) -> Json {
        json!({
            "in_features": self.inputs, "out_features": self.outputs, "bias": false,
            "activation_function": "torch.nn.modules.linear.Identity",
        })
    }

    /// The module's weights, as a safetensors file.
    pub(super) fn safetensors(&self) -> Vec<u8> {
        let bytes = 4 * self.weight.len();
        let header = json!({ "linear.weight": {
            "dtype": "F32", "shape": [self.outputs, self.inputs], "data_offsets": [0, bytes],
        } });
        let header = header.to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.into_bytes());
        file.extend(self.weight.iter().flat_map(|value| value.to_le_bytes()));
        file
    }
}
