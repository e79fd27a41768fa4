//! The errors of model directories, and of questions about them.

use crate::{dtype::known, quantisation::Quantisation};
use galaxy_common::WeightFormat;
use std::{io, path::PathBuf};

/// Why a model cannot be opened or read. [`ModelError::is_caller`] tells whose fault it is; a retry
/// can help only for [`ModelError::Io`].
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read or written.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file that was accessed.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Activations of 8 bits are asked for, and no matrix of the model is in blocks of few bits.
    #[error(
        "activations = \"a8\" would change nothing: {name} has no weights in blocks of few bits; leave it out, or take a model that has some, as a GGUF file of Q8_0 or Q4_K"
    )]
    NoBlocks {
        /// The name of the model.
        name: String,
    },
    /// A GGUF file asks for something that this build does not support.
    #[error("{path}: {why}")]
    Gguf {
        /// The GGUF file that was read.
        path: PathBuf,
        /// A sentence about what is not supported.
        why: String,
    },
    /// An ONNX file asks for something that this build does not support, or does not fit together.
    #[error("{path}: {why}")]
    Onnx {
        /// The ONNX file that was read.
        path: PathBuf,
        /// A sentence about what is not supported, and of which node.
        why: String,
    },
    /// The model cannot be written as a GGUF file.
    #[error("no GGUF file is written of {path}: {why}")]
    Unwritten {
        /// The directory or file of the model.
        path: PathBuf,
        /// A sentence about why not, and what to do.
        why: String,
    },
    /// The matrices are to be rounded, and some are in blocks of few bits already.
    #[error(
        "{path} has {have} already, and only matrices of 16 or 32 bits are rounded: run it as it is, without a format for its weights"
    )]
    FewBits {
        /// The directory or file of the model.
        path: PathBuf,
        /// The name of the first such tensor, and its format.
        have: String,
    },
    /// The matrices are to be rounded, and none of them has rows that blocks fit into.
    #[error(
        "{path} cannot be rounded to {to}: no matrix of it has a number of inputs that is a multiple of 32"
    )]
    NoneFit {
        /// The directory or file of the model.
        path: PathBuf,
        /// The number of bits that was asked for.
        to: Quantisation,
    },
    /// A part of the model's data is not there, and does not arrive.
    #[error("a part of the model in {path} is not there: {why}")]
    Absent {
        /// The path that the arriving model was opened with.
        path: PathBuf,
        /// A sentence about why it does not arrive.
        why: String,
    },
    /// The manifest cannot be read, or belongs to another model.
    #[error("the manifest of the model is damaged: {why}; do both ends have the same version?")]
    Manifest {
        /// A sentence about what is wrong with it.
        why: String,
    },
    /// A piece of the model's files is not what its manifest says.
    #[error(
        "{path}: piece {piece}, of the tensor {tensor:?}, is not what the manifest of the model says: the file was changed or damaged; copy it again, or take it away"
    )]
    Piece {
        /// The file that holds the piece.
        path: PathBuf,
        /// The number of the piece.
        piece: u32,
        /// The tensor that the piece belongs to.
        tensor: String,
    },
    /// A file of the model is missing.
    #[error(
        "{path} holds no {wanted}: give a Hugging Face directory with config.json and model.safetensors (or model.safetensors.index.json and its shards)"
    )]
    NotThere {
        /// Where it was looked for.
        path: PathBuf,
        /// What was looked for, mostly the name of a file.
        wanted: String,
    },
    /// Something else lies where a model was expected, and it is known what.
    #[error("{path} is {found}: {remedy}")]
    Another {
        /// The file or directory that was looked at.
        path: PathBuf,
        /// What it is, as the end of a sentence.
        found: String,
        /// A sentence about what to do.
        remedy: String,
    },
    /// A file is larger than what is read into memory.
    #[error("{path} has {bytes} bytes, above the limit of {limit} for such a file")]
    TooLarge {
        /// The file that is too large.
        path: PathBuf,
        /// The length of the file in bytes.
        bytes: u64,
        /// The most bytes that such a file may have.
        limit: u64,
    },
    /// A file is not valid JSON, or not of the expected form.
    #[error("{path} is not valid: {source}")]
    Json {
        /// The file that should be JSON.
        path: PathBuf,
        /// The parser's error, with line and column.
        source: serde_json::Error,
    },
    /// A field is missing, has a wrong type, or a value out of range.
    #[error("{path}: field {field:?} {problem}")]
    Field {
        /// The file that the field belongs to.
        path: PathBuf,
        /// The name of the field.
        field: String,
        /// What is wrong, as the end of a sentence that begins with the field's name.
        problem: String,
    },
    /// A file names something that this build does not know.
    #[error("{path}: {what} {found:?} is unknown; known are {known}")]
    Unknown {
        /// The file that has the name.
        path: PathBuf,
        /// The kind of thing that is named, for example "tokenizer class".
        what: &'static str,
        /// The name that was found.
        found: String,
        /// The known names, separated by commas.
        known: String,
    },
    /// A setting has a value that this build does not support.
    #[error("{path}: {field} = {value} is not supported: {remedy}")]
    Unsupported {
        /// The file that has the setting.
        path: PathBuf,
        /// The name of the setting.
        field: &'static str,
        /// The value of the setting, shortened for the message.
        value: String,
        /// What to do, or which values are supported.
        remedy: &'static str,
    },
    /// The header of a file of weights is damaged.
    #[error("{path} is damaged: {problem}; fetch it again")]
    Header {
        /// The file of weights.
        path: PathBuf,
        /// The defect that was found.
        problem: HeaderProblem,
    },
    /// A tensor ends beyond the end of its file.
    #[error(
        "{path} is cut short: tensor {tensor:?} ends at byte {end} and the file has {have}; fetch it again"
    )]
    Truncated {
        /// The file of weights.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
        /// Where the tensor ends, in bytes from the start of the file.
        end: u64,
        /// The length of the file in bytes.
        have: u64,
    },
    /// A tensor is stored in two shards.
    #[error("{path}: tensor {tensor:?} is in another shard too; fetch the model again")]
    Duplicate {
        /// The second shard that has the tensor.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor that the config needs, or that the index lists, is missing.
    #[error(
        "{path} has no tensor {tensor:?}, which its config needs: check that config and weights belong together"
    )]
    MissingTensor {
        /// The file or directory that should hold the tensor.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor has another shape than its config says.
    #[error("{path}: tensor {tensor:?} has shape {have:?}, and its config says {want:?}")]
    Shape {
        /// The file that holds the tensor.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
        /// The shape that follows from the config.
        want: Vec<u64>,
        /// The shape in the header.
        have: Vec<u64>,
    },
    /// A tensor has values of a type that this build cannot read.
    #[error("{path}: tensor {tensor:?} holds {dtype} values; known are {}", known(dtype))]
    TensorType {
        /// The file that holds the tensor.
        path: PathBuf,
        /// The name of the tensor.
        tensor: String,
        /// The tensor's type in the header.
        dtype: String,
    },
    /// A matrix that stands in several tensors does not fit together, or is not of a kind that can be read.
    #[error("{path}: the matrix {tensor:?} is compressed, and {problem}")]
    Compressed {
        /// The file that holds the matrix.
        path: PathBuf,
        /// The name of the matrix, which is no tensor of its own.
        tensor: String,
        /// What is wrong, as the end of a sentence.
        problem: String,
    },
    /// A scale of a matrix is no number, or too large for 16 bits.
    #[error(
        "tensor {tensor:?} has the scale {scale}: it has to fit into a 16-bit float; fetch the model again, or quantise it anew"
    )]
    Scale {
        /// The name of the matrix that the scale belongs to.
        tensor: String,
        /// The scale in the file.
        scale: f32,
    },
    /// The index names a shard that is not a plain file name beside it.
    #[error("{path} names the shard {shard:?}: a shard is a plain file name beside the index")]
    ShardName {
        /// The index file.
        path: PathBuf,
        /// The name of the shard.
        shard: String,
    },
    /// The model lacks what was asked for: a matrix, a table, a piece or a head.
    #[error("the model has no {what}")]
    NotInModel {
        /// A description of what was asked for.
        what: String,
    },
    /// A range goes beyond a matrix.
    #[error("{what} {start}..{end} of tensor {tensor:?} are asked for, and it has {have}")]
    Range {
        /// The tensor of the matrix.
        tensor: String,
        /// The side of the matrix that the range is of: "inputs" or "outputs".
        what: &'static str,
        /// The first index that was asked for.
        start: u32,
        /// The end of the range, exclusive.
        end: u32,
        /// How many inputs or outputs the matrix has.
        have: u32,
    },
    /// A buffer is smaller or larger than the values that should be written to it.
    #[error("{need} values of {tensor:?} do not fit into an area of {have}")]
    Area {
        /// The tensor that was read.
        tensor: String,
        /// Values that are needed, gaps between rows included.
        need: u64,
        /// Values that the buffer has room for.
        have: u64,
    },
    /// A row goes beyond a table.
    #[error("row {id} of table {tensor:?} is asked for, and it has {rows}")]
    Row {
        /// The tensor of the table.
        tensor: String,
        /// The row that was asked for.
        id: u32,
        /// How many rows the table has.
        rows: u32,
    },
    /// Raw values are asked for of a width that the tensor does not have.
    #[error("tensor {tensor:?} holds {format} values, which have another width")]
    Width {
        /// The tensor that was read.
        tensor: String,
        /// The format that the tensor has.
        format: WeightFormat,
    },
    /// The model has no `tokenizer.json`.
    #[error("{path} has no tokenizer.json: {remedy}")]
    NoTokenizer {
        /// The model's directory.
        path: PathBuf,
        /// A sentence about what to do, given the other files of the directory.
        remedy: String,
    },
    /// A file of the tokenizer cannot be read, or the tokenizer refuses a text.
    #[error("tokenizer {path}: {problem}")]
    Tokenizer {
        /// The file that the problem is in.
        path: PathBuf,
        /// A sentence about what is wrong.
        problem: String,
    },
    /// A limit on tokens leaves no room for text.
    #[error(
        "a limit of {limit} tokens leaves no room beside {special} special tokens: raise it above {special}"
    )]
    TokenLimit {
        /// The most tokens that were allowed.
        limit: usize,
        /// How many special tokens are always added.
        special: usize,
    },
}

impl ModelError {
    /// Whether the caller asked for something impossible, rather than the model being damaged.
    pub fn is_caller(&self) -> bool {
        matches!(
            self,
            Self::NotInModel { .. }
                | Self::Range { .. }
                | Self::Area { .. }
                | Self::Row { .. }
                | Self::Width { .. }
                | Self::TokenLimit { .. }
        )
    }
}

/// A defect in the header of a file of weights: safetensors or GGUF.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderProblem {
    /// The header of a GGUF file is not valid.
    #[error("its head is not valid: {text}")]
    Gguf {
        /// A sentence about what is wrong.
        text: String,
    },
    /// An ONNX file is not valid.
    #[error("it is no valid ONNX file: {text}")]
    Onnx {
        /// A sentence about what is wrong.
        text: String,
    },
    /// The file is shorter than the length field of a safetensors header.
    #[error("it has {have} bytes, and the length of the header alone takes 8")]
    Short {
        /// The length of the file in bytes.
        have: u64,
    },
    /// The header claims to be longer than the file, or than the format allows.
    #[error("its header claims {bytes} bytes; the file allows {allowed}")]
    Length {
        /// The length that the header claims, in bytes.
        bytes: u64,
        /// The most bytes that the file and the format leave for a header.
        allowed: u64,
    },
    /// The header is not the JSON that it should be.
    #[error("its header is not valid: {text}")]
    Json {
        /// The parser's message, with line and column.
        text: String,
    },
    /// A tensor is listed twice.
    #[error("tensor {tensor:?} is there twice")]
    Twice {
        /// The name of the tensor.
        tensor: String,
    },
    /// A tensor does not start where the one before it ends.
    #[error("tensor {tensor:?} starts at {start} where {expected} was expected")]
    Offsets {
        /// The name of the tensor.
        tensor: String,
        /// Where the tensor starts, in bytes from the start of the data.
        start: u64,
        /// Where the tensor before it ends.
        expected: u64,
    },
    /// A tensor's bytes are not its shape times the width of its values.
    #[error("tensor {tensor:?} has {have} bytes where its shape and type take {want}")]
    Size {
        /// The name of the tensor.
        tensor: String,
        /// The bytes that follow from shape and type.
        want: u64,
        /// The bytes between the tensor's offsets.
        have: u64,
    },
    /// A tensor's offsets run backwards, or its shape has more values than can be counted.
    #[error("tensor {tensor:?} has an impossible shape or impossible offsets")]
    Impossible {
        /// The name of the tensor.
        tensor: String,
    },
}
