//! Writing ONNX files: for networks that are made by a description, and for tests.

use super::tensor::ElementType;

/// An attribute of a node to be written.
#[derive(Clone, PartialEq, Debug)]
pub enum NewAttribute {
    /// A whole number.
    Whole(i64),
    /// A 32-bit float.
    Float(f32),
    /// A text of UTF-8.
    Text(String),
    /// A list of whole numbers.
    Wholes(Vec<i64>),
    /// A list of floats.
    Floats(Vec<f32>),
    /// A tensor with its values.
    Tensor(NewTensor),
}

/// A tensor to be written.
#[derive(Clone, PartialEq, Debug)]
pub struct NewTensor {
    /// The name of the tensor.
    pub name: String,
    /// Its shape, the slowest axis first.
    pub dims: Vec<u64>,
    /// The type of its elements.
    pub element: ElementType,
    /// The bytes of its elements.
    pub data: NewData,
}

/// Where the little-endian bytes of a tensor lie, row after row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NewData {
    /// In the model's file.
    Here(Vec<u8>),
    /// In another file.
    External {
        /// The name of the file beside the model's.
        location: String,
        /// The first byte.
        offset: u64,
    },
}

impl NewTensor {
    /// A tensor of floats.
    pub fn floats(name: &str, dims: &[u64], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self {
            name: name.to_owned(),
            dims: dims.to_vec(),
            element: ElementType::F32,
            data: NewData::Here(bytes),
        }
    }

    /// A list of whole numbers.
    pub fn wholes(name: &str, values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let dims = vec![values.len() as u64];
        Self { name: name.to_owned(), dims, element: ElementType::I64, data: NewData::Here(bytes) }
    }
}

/// A node to be written.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct NewNode {
    /// The name of the node.
    pub name: String,
    /// The name of its operator.
    pub operator: String,
    /// Names of the values that it reads.
    pub inputs: Vec<String>,
    /// Names of the values that it computes.
    pub outputs: Vec<String>,
    /// Its attributes by their names.
    pub attributes: Vec<(String, NewAttribute)>,
}

impl NewNode {
    /// A node of an operator with what it reads and the value that it computes, whose name it has.
    pub fn new(operator: &str, inputs: &[&str], output: &str) -> Self {
        Self {
            name: output.to_owned(),
            operator: operator.to_owned(),
            inputs: inputs.iter().map(|name| (*name).to_owned()).collect(),
            outputs: vec![output.to_owned()],
            attributes: Vec::new(),
        }
    }

    /// The node with an attribute more.
    pub fn with(mut self, name: &str, attribute: NewAttribute) -> Self {
        self.attributes.push((name.to_owned(), attribute));
        self
    }
}

/// A model to be written.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct NewModel {
    /// The version of the operators.
    pub opset: i64,
    /// Its nodes, each after those that it reads from.
    pub nodes: Vec<NewNode>,
    /// Its stored tensors.
    pub tensors: Vec<NewTensor>,
    /// Its inputs: names, and shapes in which an axis may be open.
    pub inputs: Vec<(String, Vec<Option<u64>>)>,
    /// The names of its results.
    pub outputs: Vec<String>,
}

impl NewModel {
    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        self.bytes_with(&[])
    }

    /// The bytes of the file with these texts under these keys.
    pub fn bytes_with(&self, metadata: &[(&str, &str)]) -> Vec<u8> {
        let mut graph = Message::default();
        for node in &self.nodes {
            graph.message(1, written(node));
        }
        graph.text(2, "graph");
        for tensor in &self.tensors {
            graph.message(5, of_tensor(tensor));
        }
        for (name, dims) in &self.inputs {
            graph.message(11, declared(name, Some(dims)));
        }
        for name in &self.outputs {
            graph.message(12, declared(name, None));
        }
        let mut opset = Message::default();
        opset.text(1, "");
        opset.varint(2, self.opset as u64);
        let mut model = Message::default();
        // The version of the format of files in which this version of operators came.
        model.varint(1, 8);
        model.message(7, graph);
        model.message(8, opset);
        for (key, text) in metadata {
            model.message(14, entry(key, text));
        }
        model.0
    }
}

/// A message of protocol buffers.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }
    fn varint(&mut self, field: u64, number: u64) {
        self.number(field << 3);
        self.number(number);
    }
    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.number(field << 3 | 2);
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }
    fn text(&mut self, field: u64, text: &str) {
        self.bytes(field, text.as_bytes());
    }
    fn message(&mut self, field: u64, message: Self) {
        self.bytes(field, &message.0);
    }
    fn float(&mut self, field: u64, value: f32) {
        self.number(field << 3 | 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }
}

fn written(node: &NewNode) -> Message {
    let mut message = Message::default();
    node.inputs.iter().for_each(|name| message.text(1, name));
    node.outputs.iter().for_each(|name| message.text(2, name));
    message.text(3, &node.name);
    message.text(4, &node.operator);
    for (name, attribute) in &node.attributes {
        message.message(5, of_attribute(name, attribute));
    }
    message
}

fn of_attribute(name: &str, attribute: &NewAttribute) -> Message {
    let mut message = Message::default();
    message.text(1, name);
    let kind = match attribute {
        NewAttribute::Float(value) => {
            message.float(2, *value);
            1
        }
        NewAttribute::Whole(value) => {
            message.varint(3, *value as u64);
            2
        }
        NewAttribute::Text(text) => {
            message.text(4, text);
            3
        }
        NewAttribute::Tensor(tensor) => {
            message.message(5, of_tensor(tensor));
            4
        }
        NewAttribute::Floats(values) => {
            values.iter().for_each(|value| message.float(7, *value));
            6
        }
        NewAttribute::Wholes(values) => {
            values.iter().for_each(|value| message.varint(8, *value as u64));
            7
        }
    };
    message.varint(20, kind);
    message
}

fn of_tensor(tensor: &NewTensor) -> Message {
    let mut message = Message::default();
    tensor.dims.iter().for_each(|side| message.varint(1, *side));
    message.varint(2, tensor.element.number() as u64);
    message.text(8, &tensor.name);
    match &tensor.data {
        NewData::Here(bytes) => message.bytes(9, bytes),
        NewData::External { location, offset } => {
            for (key, value) in [("location", location), ("offset", &offset.to_string())] {
                message.message(13, entry(key, value));
            }
            message.varint(14, 1);
        }
    }
    message
}

/// A text under a key.
fn entry(key: &str, text: &str) -> Message {
    let mut message = Message::default();
    message.text(1, key);
    message.text(2, text);
    message
}

/// What a file says of an input or result of floats.
fn declared(name: &str, dims: Option<&Vec<Option<u64>>>) -> Message {
    let mut tensor = Message::default();
    tensor.varint(1, 1);
    if let Some(dims) = dims {
        let mut shape = Message::default();
        for side in dims {
            let mut axis = Message::default();
            match side {
                Some(side) => axis.varint(1, *side),
                None => axis.text(2, "n"),
            }
            shape.message(1, axis);
        }
        tensor.message(2, shape);
    }
    let mut kind = Message::default();
    kind.message(1, tensor);
    let mut message = Message::default();
    message.text(1, name);
    message.message(2, kind);
    message
}
