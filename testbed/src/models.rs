//! Models with random weights in the shapes of well-known ones, for measuring.

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

/// Writes a BERT of this shape with random f32 weights to `cache/name`, once.
///
/// # Errors
/// When the disk refuses.
pub fn bert(cache: &Path, name: &str, layers: u32, hidden: u32, heads: u32) -> Result<PathBuf> {
    let dir = cache.join(name);
    if dir.join("model.safetensors").exists() {
        return Ok(dir);
    }
    std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let (inner, vocabulary, positions) = (4 * hidden, 1000, 512);
    let config = json!({
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "vocab_size": vocabulary, "max_position_embeddings": positions, "type_vocab_size": 2,
        "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    });
    let mut tensors: Vec<(String, Vec<u32>)> = vec![
        ("embeddings.word_embeddings.weight".into(), vec![vocabulary, hidden]),
        ("embeddings.position_embeddings.weight".into(), vec![positions, hidden]),
        ("embeddings.token_type_embeddings.weight".into(), vec![2, hidden]),
        ("embeddings.LayerNorm.weight".into(), vec![hidden]),
        ("embeddings.LayerNorm.bias".into(), vec![hidden]),
    ];
    for layer in 0..layers {
        let mut linear = |part: &str, out: u32, input: u32| {
            let name = format!("encoder.layer.{layer}.{part}");
            tensors.push((format!("{name}.weight"), vec![out, input]));
            tensors.push((format!("{name}.bias"), vec![out]));
        };
        for part in ["query", "key", "value"] {
            linear(&format!("attention.self.{part}"), hidden, hidden);
        }
        linear("attention.output.dense", hidden, hidden);
        linear("intermediate.dense", inner, hidden);
        linear("output.dense", hidden, inner);
        for norm in ["attention.output.LayerNorm", "output.LayerNorm"] {
            for part in ["weight", "bias"] {
                tensors.push((format!("encoder.layer.{layer}.{norm}.{part}"), vec![hidden]));
            }
        }
    }
    write(&dir.join("model.safetensors"), &tensors)?;
    std::fs::write(dir.join("config.json"), serde_json::to_vec_pretty(&config)?)?;
    Ok(dir)
}

/// Writes the tensors with small random values, norm weights near one.
fn write(path: &Path, tensors: &[(String, Vec<u32>)]) -> Result<()> {
    let count = |shape: &[u32]| -> u64 { shape.iter().map(|&n| u64::from(n)).product() };
    let mut header = Map::new();
    let mut at = 0;
    for (name, shape) in tensors {
        let end = at + count(shape) * 4;
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [at, end]});
        header.insert(name.clone(), entry);
        at = end;
    }
    let mut header = serde_json::to_vec(&Value::Object(header))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let part = path.with_extension("part");
    let mut file = BufWriter::with_capacity(1 << 20, File::create(&part)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    for (name, shape) in tensors {
        let norm = name.contains("LayerNorm.weight");
        for _ in 0..count(shape) {
            // xorshift: speed matters more than quality here.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let unit = (random >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
            let value = if norm { 1.0 + 0.1 * unit } else { 0.07 * unit };
            file.write_all(&value.to_le_bytes())?;
        }
    }
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?;
    std::fs::rename(part, path)?;
    Ok(())
}
