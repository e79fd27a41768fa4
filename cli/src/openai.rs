//! What `galaxy serve` is asked and answers, as OpenAI's API has it. For the command and the fuzz targets: no
//! part of the interface.

pub mod answer;
mod body;
pub mod chat;
pub mod error;
pub mod rerank;
pub mod wire;
