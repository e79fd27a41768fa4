//! ONNX files: networks of operators, as frameworks export them. [`OnnxFile::open`] reads what a file says of its
//! graph, and where its tensors lie; [`Network::of`] fixes all shapes, and works out what follows from them.
//!
//! Nothing of a tensor is read before it is asked for, but for those of few values. An operator, an attribute or a type
//! that is not known is an error that names the node.

mod array;
mod classes;
mod file;
mod fold;
mod network;
mod node;
mod operator;
mod operators;
mod tensor;
#[cfg(test)]
mod tests;
mod wire;
mod write;

pub use array::{Array, Values};
pub use classes::Scores;
pub use file::{Axis, Declared, OnnxFile, read_tensor};
pub use network::{Fixed, Network, NetworkNode, Source, Value, ValueId};
pub use operator::{
    Binary, Conv, ConvTranspose, Gemm, Operator, PadMode, Pool, PoolKind, Reduce, ReduceKind,
    Resize, SliceAxis, Softmax, Tap, Unary, Window,
};
pub use tensor::{ElementType, StoredTensor};
pub use write::{NewAttribute, NewData, NewModel, NewNode, NewTensor};
