//! What a model is: an ordinary Hugging Face directory read as a [`ModelSpec`] and as tensors by
//! byte range.
//!
//! [`ModelDir::open`] reads `config.json` and the headers of the safetensors files, never the
//! tensors. A model family is a small table (see `family`): fields of the config become a
//! [`ModelSpec`], and names of tensors become [`Matrix`] and [`Vector`]. After that nothing knows
//! the family. [`MatrixSource`] reads any part of a matrix with positioned reads into a bounded
//! buffer: no memory map, no whole tensor, no whole file.
//!
//! A model may also arrive in [`pieces`], listed by a [`manifest`], where there is no directory:
//! [`ModelDir::arriving`] is read like any other model, and reads wait for what is not there yet.
//!
//! Everything in a model directory is untrusted: lengths are bounded before they are allocated,
//! and every defect is a [`ModelError`].

pub mod blocks;
pub mod chat;
mod compressed;
mod config;
mod directory;
mod dtype;
mod error;
mod family;
mod fields;
pub mod files;
mod formats;
#[doc(hidden)]
pub mod fuzz;
pub mod generation;
mod gguf;
mod heads;
#[cfg(feature = "image")]
pub mod image;
mod key;
pub mod manifest;
mod matrix;
pub mod networks;
pub mod onnx;
pub mod pieces;
mod positioned;
pub mod proof;
mod quantisation;
pub mod quantise;
mod random;
mod recognise;
pub mod sentence;
pub mod shape;
mod small_file;
mod softmax;
pub mod spec;
mod store;
mod tensor;
#[cfg(test)]
mod testing;
#[cfg(feature = "tokenizer")]
pub mod tokenizer;
mod tokenizer_fields;
mod unknown_fields;
mod unused;
mod warning;
mod widen;

pub use directory::ModelDir;
pub use error::{HeaderProblem, ModelError};
pub use formats::Formats;
pub use gguf::meant as gguf_file;
pub use matrix::MatrixSource;
pub use quantisation::Quantisation;
pub use softmax::softmax;
pub use spec::*;
pub use store::Arrivals;
pub use tensor::{Matrix, Table, Vector};
pub use warning::Warning;
