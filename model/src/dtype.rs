//! The types of tensors, as the headers of safetensors files and manifests name them.

use galaxy_common::WeightFormat;

/// The prefix of the types of tensors from GGUF files, in messages and in manifests.
pub(crate) const OF_GGUF: &str = "GGUF ";

/// The prefix of the types of matrices that are read out of several tensors of a compressed-tensors checkpoint.
const OF_COMPRESSED: &str = "compressed-tensors ";

/// The type of a matrix of a compressed-tensors checkpoint.
pub(crate) fn of_compressed(format: WeightFormat) -> String {
    format!("{OF_COMPRESSED}{}", format.name().to_uppercase())
}

/// The type of a tensor from a GGUF file, with the number of heads whose rows are stored in pairs.
pub(crate) fn of_gguf(dtype: &str, paired: u64) -> String {
    match paired {
        0 => format!("{OF_GGUF}{dtype}"),
        heads => format!("{OF_GGUF}{dtype} in pairs of {heads}"),
    }
}

/// Parses what `of_gguf` and `of_compressed` wrote: the format, and the number of heads whose rows are stored in
/// pairs. `None` for any other tensor, or one of an unknown format.
pub(crate) fn in_blocks(dtype: &str) -> Option<(WeightFormat, u64)> {
    let text = dtype.strip_prefix(OF_GGUF).or_else(|| dtype.strip_prefix(OF_COMPRESSED))?;
    let (name, paired) = match text.split_once(" in pairs of ") {
        Some((name, heads)) => (name, heads.parse().ok()?),
        None => (text, 0),
    };
    let known = |format: &WeightFormat| format.name().eq_ignore_ascii_case(name);
    Some((WeightFormat::ALL.into_iter().find(known)?, paired))
}

/// Bits of a value of each type of safetensors; types that cannot be read are refused only when they are needed.
pub(crate) fn bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// The weight format of a safetensors type, if it can be read.
pub(crate) fn format(dtype: &str) -> Option<WeightFormat> {
    bits(dtype).and_then(|_| dtype.parse().ok())
}

/// The names of the formats that can be read from files of the same kind: only GGUF files have
/// blocks.
pub(crate) fn known(dtype: &str) -> String {
    let read = |format: &WeightFormat| dtype.starts_with(OF_GGUF) || format.block().is_none();
    let names =
        WeightFormat::ALL.into_iter().filter(read).map(|format| format.name().to_uppercase());
    names.collect::<Vec<_>>().join(", ")
}
