//! What can be wrong with a model directory, or with a question about it.

use crate::{quantise::Quantisation, store::OF_GGUF};
use galaxy_common::WeightFormat;
use std::{io, path::PathBuf};

/// Why a model cannot be opened or read. [`ModelError::is_caller`] tells whose fault it is; a
/// retry helps only for [`ModelError::Io`].
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file system refused.
    #[error("cannot read {path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Activations of 8 bits, where no weights are multiplied with such.
    #[error(
        "activations = \"a8\" would change nothing: {name} has no weights in blocks of few bits; leave it out, or take a model that has some, as a GGUF file of Q8_0 or Q4_K"
    )]
    NoBlocks {
        /// The model.
        name: String,
    },
    /// A GGUF file of something that is not computed here.
    #[error("{path}: {why}")]
    Gguf {
        /// Which file.
        path: PathBuf,
        /// What.
        why: String,
    },
    /// A model that no GGUF file is written of.
    #[error("no GGUF file is written of {path}: {why}")]
    Unwritten {
        /// Which model.
        path: PathBuf,
        /// Why not, and what to do.
        why: String,
    },
    /// Matrices that are to be rounded, and are in few bits already.
    #[error(
        "{path} has {have} already, and only matrices of 16 or 32 bits are rounded: run it as it is, without a format for its weights"
    )]
    FewBits {
        /// Which model.
        path: PathBuf,
        /// What, and in which format.
        have: String,
    },
    /// Matrices that are to be rounded, of which none has rows of whole blocks.
    #[error(
        "{path} cannot be rounded to {to}: no matrix of it has a number of inputs that is a multiple of 32"
    )]
    NoneFit {
        /// Which model.
        path: PathBuf,
        /// To what.
        to: Quantisation,
    },
    /// Data of a model that is not there, and does not come.
    #[error("a part of the model in {path} is not there: {why}")]
    Absent {
        /// Where it should lie.
        path: PathBuf,
        /// Why it does not come.
        why: String,
    },
    /// A manifest that is none, or of another model.
    #[error("the manifest of the model is damaged: {why}; do both ends have the same version?")]
    Manifest {
        /// What is wrong.
        why: String,
    },
    /// A piece of a directory that is not what the manifest says.
    #[error(
        "{path}: piece {piece}, of the tensor {tensor:?}, is not what the manifest of the model says: the file was changed or damaged; copy it again, or take it away"
    )]
    Piece {
        /// Which file.
        path: PathBuf,
        /// Which piece.
        piece: u32,
        /// Of which tensor.
        tensor: String,
    },
    /// No model lies there.
    #[error(
        "{path} holds no {wanted}: give a Hugging Face directory with config.json and model.safetensors (or model.safetensors.index.json and its shards)"
    )]
    NotThere {
        /// Where it was looked for.
        path: PathBuf,
        /// The file that is missing.
        wanted: String,
    },
    /// Something else than what was expected, and it is known what.
    #[error("{path} is {found}: {remedy}")]
    Another {
        /// Which file or directory.
        path: PathBuf,
        /// What it is.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// A file above the bound that we read into memory.
    #[error("{path} has {bytes} bytes, above the limit of {limit} for such a file")]
    TooLarge {
        /// Which file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// What is allowed.
        limit: u64,
    },
    /// Not the JSON that it should be.
    #[error("{path} is not valid: {source}")]
    Json {
        /// Which file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A field that is missing, of a wrong type, or beyond what makes sense.
    #[error("{path}: field {field:?} {problem}")]
    Field {
        /// Which file.
        path: PathBuf,
        /// Which field.
        field: String,
        /// What is wrong, as the end of the sentence.
        problem: String,
    },
    /// A name that this build does not know.
    #[error("{path}: {what} {found:?} is unknown; known are {known}")]
    Unknown {
        /// Which file.
        path: PathBuf,
        /// What kind of name.
        what: &'static str,
        /// The name.
        found: String,
        /// Those that are known.
        known: String,
    },
    /// A setting that this build does not carry out.
    #[error("{path}: {field} = {value} is not supported: {remedy}")]
    Unsupported {
        /// Which file.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A safetensors header that cannot be right.
    #[error("{path} is damaged: {problem}; fetch it again")]
    Header {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        problem: HeaderProblem,
    },
    /// A tensor that ends beyond its file.
    #[error(
        "{path} is cut short: tensor {tensor:?} ends at byte {end} and the file has {have}; fetch it again"
    )]
    Truncated {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        tensor: String,
        /// Where it ends.
        end: u64,
        /// Length of the file.
        have: u64,
    },
    /// A tensor that stands in two shards.
    #[error("{path}: tensor {tensor:?} is in another shard too; fetch the model again")]
    Duplicate {
        /// The second of them.
        path: PathBuf,
        /// Which tensor.
        tensor: String,
    },
    /// A tensor that the spec needs, or that the index promises, and that is not there.
    #[error(
        "{path} has no tensor {tensor:?}, which its config needs: check that config and weights belong together"
    )]
    MissingTensor {
        /// The file or directory that should hold it.
        path: PathBuf,
        /// Which tensor.
        tensor: String,
    },
    /// A tensor whose shape is not what the spec says.
    #[error("{path}: tensor {tensor:?} has shape {have:?}, and its config says {want:?}")]
    Shape {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        tensor: String,
        /// By the config.
        want: Vec<u64>,
        /// By the header.
        have: Vec<u64>,
    },
    /// A tensor whose values this build cannot read.
    #[error("{path}: tensor {tensor:?} holds {dtype} values; known are {}", known(dtype))]
    TensorType {
        /// Which file.
        path: PathBuf,
        /// Which tensor.
        tensor: String,
        /// Its type by the header.
        dtype: String,
    },
    /// A shard whose name leads out of the directory.
    #[error("{path} names the shard {shard:?}: a shard is a plain file name beside the index")]
    ShardName {
        /// The index.
        path: PathBuf,
        /// The name.
        shard: String,
    },
    /// A layer, matrix or vector that the model does not have.
    #[error("the model has no {what}")]
    NotInModel {
        /// What was asked for.
        what: String,
    },
    /// A range beyond a matrix.
    #[error("{what} {start}..{end} of tensor {tensor:?} are asked for, and it has {have}")]
    Range {
        /// Which tensor.
        tensor: String,
        /// Inputs or outputs.
        what: &'static str,
        /// From.
        start: u32,
        /// To.
        end: u32,
        /// How many there are.
        have: u32,
    },
    /// An area to write to that is smaller than what should be written.
    #[error("{need} values of {tensor:?} do not fit into an area of {have}")]
    Area {
        /// Which tensor.
        tensor: String,
        /// Values that are needed, gaps included.
        need: u64,
        /// Values that are there.
        have: u64,
    },
    /// A row beyond a table.
    #[error("row {id} of table {tensor:?} is asked for, and it has {rows}")]
    Row {
        /// Which table.
        tensor: String,
        /// The row.
        id: u32,
        /// How many there are.
        rows: u32,
    },
    /// Raw values of another width than a tensor's.
    #[error("tensor {tensor:?} holds {format} values, which have another width")]
    Width {
        /// Which tensor.
        tensor: String,
        /// What it holds.
        format: WeightFormat,
    },
    /// No tokenizer.
    #[error("{path} has no tokenizer.json: {remedy}")]
    NoTokenizer {
        /// The model's directory.
        path: PathBuf,
        /// What to do, by what other files there are.
        remedy: String,
    },
    /// A tokenizer that cannot be read, or text that it refuses.
    #[error("tokenizer {path}: {problem}")]
    Tokenizer {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A limit that leaves no room for text.
    #[error(
        "a limit of {limit} tokens leaves no room beside {special} special tokens: raise it above {special}"
    )]
    TokenLimit {
        /// The limit.
        limit: usize,
        /// Special tokens that are always added.
        special: usize,
    },
}

/// Types of values that are read from files of its kind: in GGUF files, from blocks, too.
fn known(dtype: &str) -> String {
    let read = |format: &WeightFormat| dtype.starts_with(OF_GGUF) || format.block().is_none();
    let names =
        WeightFormat::ALL.into_iter().filter(read).map(|format| format.name().to_uppercase());
    names.collect::<Vec<_>>().join(", ")
}

impl ModelError {
    /// Whether the question was wrong, rather than the directory.
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

/// What is wrong with a safetensors header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderProblem {
    /// The head of a GGUF file.
    #[error("its head is not valid: {text}")]
    Gguf {
        /// Why.
        text: String,
    },
    /// Fewer bytes than the length of a header has.
    #[error("it has {have} bytes, and the length of the header alone takes 8")]
    Short {
        /// Length of the file.
        have: u64,
    },
    /// A header longer than the file, or than any header.
    #[error("its header claims {bytes} bytes; the file allows {allowed}")]
    Length {
        /// By its own word.
        bytes: u64,
        /// What there is room for, at most the limit of the format.
        allowed: u64,
    },
    /// Not the JSON of a header.
    #[error("its header is not valid: {text}")]
    Json {
        /// Where and why.
        text: String,
    },
    /// A tensor that stands twice.
    #[error("tensor {tensor:?} is there twice")]
    Twice {
        /// Which tensor.
        tensor: String,
    },
    /// A tensor that does not start where the one before it ends.
    #[error("tensor {tensor:?} starts at {start} where {expected} was expected")]
    Offsets {
        /// Which tensor.
        tensor: String,
        /// Its start.
        start: u64,
        /// End of the one before it.
        expected: u64,
    },
    /// A tensor whose bytes are not its shape times the width of its values.
    #[error("tensor {tensor:?} has {have} bytes where its shape and type take {want}")]
    Size {
        /// Which tensor.
        tensor: String,
        /// By shape and type.
        want: u64,
        /// By its offsets.
        have: u64,
    },
    /// Offsets that run backwards, or a shape whose product is beyond any file.
    #[error("tensor {tensor:?} has an impossible shape or impossible offsets")]
    Impossible {
        /// Which tensor.
        tensor: String,
    },
}
