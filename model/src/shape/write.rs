//! Writes random weights into safetensors files, as fast as the disk takes them.

use super::{Fill, Tensor, WriteError};
use crate::random::{BUFFER, Numbers, flushed};
use galaxy_common::WeightFormat;
use half::{
    bf16, f16,
    slice::{HalfBitsSliceExt, HalfFloatSliceExt},
};
use serde_json::{Map, Value, json};
use std::{
    fs::File,
    io::{self, Write},
    path::Path,
};

/// The largest weight: of a uniform distribution with the deviation of 0.02 that models are
/// initialised with.
const AMPLITUDE: f32 = 0.0346;

/// Writes the tensors into `dir`, in files of at most `shard_bytes`.
pub(super) fn write(
    dir: &Path,
    tensors: &[Tensor],
    layers: u32,
    format: WeightFormat,
    shard_bytes: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<(), WriteError> {
    let bytes = |tensor: &Tensor| format.bytes(1, tensor.values());
    let mut shards: Vec<Vec<&Tensor>> = vec![Vec::new()];
    let mut filled = 0;
    for tensor in tensors {
        if filled > 0 && filled + bytes(tensor) > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes(tensor);
        if let Some(last) = shards.last_mut() {
            last.push(tensor);
        }
    }
    // Each of L layers adds to the residual twice: together, all of them add as much as one would.
    let residual = AMPLITUDE / (2.0 * layers.max(1) as f32).sqrt();
    let mut buffer = Buffer::new(format, residual);
    let count = shards.len();
    let mut places = Map::new();
    for (i, mut shard) in shards.into_iter().enumerate() {
        // The order in which the format's own writer stores tensors.
        shard.sort_by(|a, b| a.name.cmp(&b.name));
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let path = dir.join(&name);
        file(&path, &shard, &mut buffer, progress).map_err(WriteError::at(&path))?;
        places.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone().into())));
    }
    if count > 1 {
        let total: u64 = tensors.iter().map(bytes).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": places });
        json_file(&dir.join("model.safetensors.index.json"), &index)?;
    }
    Ok(())
}

/// Writes JSON as `transformers` does, indented by two.
pub(super) fn json_file(path: &Path, value: &Value) -> Result<(), WriteError> {
    let mut text = format!("{value:#}");
    text.push('\n');
    std::fs::write(path, text).map_err(WriteError::at(path))
}

fn file(
    path: &Path,
    tensors: &[&Tensor],
    buffer: &mut Buffer,
    progress: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let (dtype, value) = (buffer.format.name().to_uppercase(), buffer.format.bytes(1, 1) as usize);
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut at = 0;
    for tensor in tensors {
        let end = at + buffer.format.bytes(1, tensor.values());
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [at, end] });
        header.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    flushed(&mut file, |put| {
        for tensor in tensors {
            let mut numbers = Numbers::new(&tensor.name);
            let mut left = tensor.values();
            while left > 0 {
                let bytes = buffer.fill(tensor.fill, &mut numbers, left);
                put(bytes)?;
                progress(bytes.len() as u64);
                left -= (bytes.len() / value) as u64;
            }
        }
        Ok(())
    })
}

/// The buffers in which a part of a tensor is computed and encoded.
struct Buffer {
    format: WeightFormat,
    residual: f32,
    values: Vec<f32>,
    halves: Vec<u16>,
    bytes: Vec<u8>,
}

impl Buffer {
    fn new(format: WeightFormat, residual: f32) -> Self {
        let count = BUFFER / format.bytes(1, 1) as usize;
        let halves = if format == WeightFormat::F32 { 0 } else { count };
        Self {
            format,
            residual,
            values: vec![0.0; count],
            halves: vec![0; halves],
            bytes: vec![0; BUFFER],
        }
    }

    /// Computes the next values of a tensor, at most `left`, and returns them encoded.
    fn fill(&mut self, fill: Fill, numbers: &mut Numbers, left: u64) -> &[u8] {
        let count = left.min(self.values.len() as u64) as usize;
        let (center, amplitude) = match fill {
            Fill::Norm => (1.0, 0.05),
            Fill::Bias => (0.0, 0.01),
            Fill::Weight => (0.0, AMPLITUDE),
            Fill::Residual => (0.0, self.residual),
        };
        let values = &mut self.values[..count];
        numbers.fill(values, center, amplitude);
        let bytes = &mut self.bytes[..self.format.bytes(1, count as u64) as usize];
        if self.format == WeightFormat::F32 {
            for (out, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *out = value.to_le_bytes();
            }
            return bytes;
        }
        let halves = &mut self.halves[..count];
        if self.format == WeightFormat::F16 {
            halves.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values);
        } else {
            halves.reinterpret_cast_mut::<bf16>().convert_from_f32_slice(values);
        }
        for (out, half) in bytes.as_chunks_mut().0.iter_mut().zip(halves) {
            *out = half.to_le_bytes();
        }
        bytes
    }
}
