//! An ONNX file as it is written: nodes with their attributes, and where its tensors lie.

use super::{
    array::Array,
    tensor::{self, ElementType, Storage, StoredTensor},
    wire::{Field, Wire},
};
use crate::{
    error::{HeaderProblem, ModelError},
    positioned::Problem,
};
use std::{
    collections::{BTreeMap, HashSet},
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// The most nodes, inputs and tensors that a file may list, of each kind.
const MAX_LISTED: usize = 1 << 18;
/// The last version of the operators that is known.
const LATEST: i64 = 27;
/// Bytes of a tensor that are read at a time.
const READ_BYTES: u64 = 1 << 20;
/// The most characters of a node's name in a message.
const MAX_SHOWN: usize = 100;
/// The most bytes of a text that an exporter has written under a key.
const MAX_METADATA: u64 = 1 << 21;
/// The most values of a list in an attribute.
const MAX_LIST: usize = 1 << 20;

/// An attribute of a node.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Attribute {
    Float(f32),
    Whole(i64),
    Text(String),
    Tensor(StoredTensor),
    Floats(Vec<f32>),
    Wholes(Vec<i64>),
    /// Something that no operator here has, by what it is.
    Other(&'static str),
}

/// A node: an operator of the file's graph.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) operator: String,
    pub(super) domain: String,
    /// Names of the values that it reads; empty where an optional one is left out.
    pub(super) inputs: Vec<String>,
    /// Names of the values that it computes; empty where an optional one is not wanted.
    pub(super) outputs: Vec<String>,
    pub(super) attributes: BTreeMap<String, Attribute>,
}

impl Node {
    /// The node and its operator, for messages.
    pub(super) fn shown(&self) -> String {
        let name = match self.name.is_empty() {
            true => self.outputs.first().map_or("", String::as_str),
            false => &self.name,
        };
        let name: String = name.chars().take(MAX_SHOWN).collect();
        format!("node {name:?} ({})", self.operator)
    }
}

/// An axis of a declared input.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Axis {
    /// An axis of this length.
    Fixed(u64),
    /// An axis whose length is open, by its name; empty without one.
    Open(String),
}

/// An input or output of the graph, as the file declares it.
#[derive(Clone, PartialEq, Debug)]
pub struct Declared {
    /// The name of the input or output.
    pub name: String,
    /// The type of its elements.
    pub element: ElementType,
    /// Its axes; `None` where the file does not say how many there are.
    pub axes: Option<Vec<Axis>>,
}

/// An ONNX file: its graph, and where its tensors lie. Nothing of the tensors is read before it is asked for.
#[derive(Debug)]
pub struct OnnxFile {
    path: PathBuf,
    file: File,
    /// The version of ONNX's own operators.
    pub opset: i64,
    pub(super) nodes: Vec<Node>,
    pub(super) initializers: Vec<StoredTensor>,
    /// The inputs that the model is given when it runs.
    pub(super) inputs: Vec<Declared>,
    pub(super) outputs: Vec<Declared>,
    /// Texts of the exporter by their keys: where they lie.
    metadata: Vec<(String, Range<u64>)>,
}

/// What is known of a file while it is parsed.
#[derive(Default)]
struct Parsed {
    opset: Option<i64>,
    graph: Option<Range<u64>>,
    functions: usize,
    nodes: Vec<Node>,
    initializers: Vec<StoredTensor>,
    inputs: Vec<Declared>,
    outputs: Vec<Declared>,
    metadata: Vec<(String, Range<u64>)>,
}

impl OnnxFile {
    /// Opens a file, and reads what it says of its graph.
    ///
    /// # Errors
    /// When the file cannot be read, is no ONNX file, or has a tensor that cannot be.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut wire = Wire::new(&file);
        let parsed = parse(&mut wire, size).map_err(|problem| match problem {
            Problem::Io(source) => io(source),
            Problem::Text(text) => {
                ModelError::Header { path: path.to_owned(), problem: HeaderProblem::Onnx { text } }
            }
        })?;
        let Parsed { opset, nodes, initializers, mut inputs, outputs, metadata, .. } = parsed;
        // Old files list what is stored as inputs, too.
        let stored: HashSet<&str> =
            initializers.iter().map(|tensor| tensor.name.as_str()).collect();
        inputs.retain(|input| !stored.contains(input.name.as_str()));
        let why = match opset {
            Some(opset) if (1..=LATEST).contains(&opset) => None,
            Some(opset) => Some(format!(
                "version {opset} of the operators is not known: 1 to {LATEST} are; export it for one of these"
            )),
            None => Some("it does not say which version of the operators it has".to_owned()),
        };
        let (path, opset) = match (why, opset) {
            (Some(why), _) => return Err(ModelError::Onnx { path: path.to_owned(), why }),
            (None, opset) => (path.to_owned(), opset.unwrap_or(LATEST)),
        };
        Ok(Self { path, file, opset, nodes, initializers, inputs, outputs, metadata })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The inputs that the model is given when it runs.
    pub fn inputs(&self) -> impl Iterator<Item = &Declared> {
        self.inputs.iter()
    }

    /// The text that the exporter has written under a key, if it has.
    ///
    /// # Errors
    /// When it cannot be read, or is no text of a sensible length.
    pub fn metadata(&self, key: &str) -> Result<Option<String>, ModelError> {
        let Some((_, range)) = self.metadata.iter().find(|(of, _)| of == key) else {
            return Ok(None);
        };
        let wrong = |why: &str| {
            let why = format!("what it says under {key:?} {why}");
            ModelError::Onnx { path: self.path.clone(), why }
        };
        if range.end - range.start > MAX_METADATA {
            return Err(wrong("is longer than a text is read"));
        }
        let bytes = Wire::new(&self.file).bytes(range.clone());
        let bytes = bytes.map_err(|problem| at(&self.path, problem))?;
        String::from_utf8(bytes).map(Some).map_err(|_| wrong("is not UTF-8"))
    }

    /// The bytes of a tensor, as they are stored.
    ///
    /// # Errors
    /// When they cannot be read, or lie outside the model's directory.
    pub fn bytes(&self, tensor: &StoredTensor) -> Result<Vec<u8>, ModelError> {
        let mut all = Vec::new();
        self.read(tensor, &mut |bytes| all.extend_from_slice(bytes))?;
        Ok(all)
    }

    /// The values of a tensor as 32-bit floats, whatever they are stored as.
    ///
    /// # Errors
    /// As for [`Self::bytes`].
    pub fn floats(&self, tensor: &StoredTensor) -> Result<Vec<f32>, ModelError> {
        let mut all = Vec::with_capacity(tensor.count() as usize);
        self.read(tensor, &mut |bytes| match tensor.element {
            ElementType::F32 => {
                let values = bytes.chunks_exact(4);
                all.extend(values.map(|of| f32::from_le_bytes([of[0], of[1], of[2], of[3]])));
            }
            element => all.extend(element.floats(bytes).iter().map(|value| *value as f32)),
        })?;
        Ok(all)
    }

    /// Gives the bytes of a tensor part by part; each part has whole elements.
    fn read(&self, tensor: &StoredTensor, each: &mut dyn FnMut(&[u8])) -> Result<(), ModelError> {
        let (path, other, start) = match &tensor.storage {
            Storage::Here(here) => {
                each(here);
                return Ok(());
            }
            Storage::Within(range) => (self.path.clone(), None, range.start),
            Storage::External { name, offset, .. } => {
                let path = self.beside(tensor, name)?;
                let file = File::open(&path);
                let file = file.map_err(|source| ModelError::Io { path: path.clone(), source })?;
                (path, Some(file), *offset)
            }
        };
        let file = other.as_ref().unwrap_or(&self.file);
        let all = tensor.bytes();
        let mut part = vec![0; all.min(READ_BYTES) as usize];
        let mut at = 0;
        while at < all {
            let part = &mut part[..(all - at).min(READ_BYTES) as usize];
            let read = file.read_exact_at(part, start.saturating_add(at));
            read.map_err(|source| ModelError::Io { path: path.clone(), source })?;
            each(part);
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Checks that external tensors lie in files beside this one that are long enough.
    ///
    /// # Errors
    /// The first tensor whose bytes are not there.
    pub(super) fn check_external<'a>(
        &self,
        tensors: impl Iterator<Item = &'a StoredTensor>,
    ) -> Result<(), ModelError> {
        let mut lengths: BTreeMap<&str, u64> = BTreeMap::new();
        for tensor in tensors {
            let Storage::External { name, offset, .. } = &tensor.storage else { continue };
            let path = self.beside(tensor, name)?;
            let have = match lengths.get(name.as_str()) {
                Some(have) => *have,
                None => {
                    let known = std::fs::metadata(&path);
                    let have = known
                        .map_err(|source| ModelError::Io { path: path.clone(), source })?
                        .len();
                    lengths.insert(name, have);
                    have
                }
            };
            let end = offset.saturating_add(tensor.bytes());
            if end > have {
                let tensor = tensor.name.clone();
                return Err(ModelError::Truncated { path, tensor, end, have });
            }
        }
        Ok(())
    }

    fn beside(&self, tensor: &StoredTensor, name: &str) -> Result<PathBuf, ModelError> {
        tensor::beside(&self.path, name).map_err(|why| ModelError::Onnx {
            path: self.path.clone(),
            why: format!("tensor {:?} has {why}", tensor.name),
        })
    }
}

/// Reads a tensor that is a file of its own, as the conformance tests of ONNX have them.
///
/// # Errors
/// When the file cannot be read, or holds no tensor.
pub fn read_tensor(path: &Path) -> Result<Array, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let size = file.metadata().map_err(io)?.len();
    let mut wire = Wire::new(&file);
    let mut read = || -> Result<Array, Problem> {
        let tensor = tensor::read(&mut wire, 0..size)?;
        let bytes = match &tensor.storage {
            Storage::Within(range) => wire.bytes(range.clone())?,
            Storage::Here(bytes) => bytes.to_vec(),
            Storage::External { .. } => return Err("its values lie in another file".into()),
        };
        Ok(Array::of_bytes(tensor.dims, tensor.element, &bytes))
    };
    read().map_err(|problem| at(path, problem))
}

/// The error of a file in which a problem was found.
fn at(path: &Path, problem: Problem) -> ModelError {
    let path = path.to_owned();
    match problem {
        Problem::Io(source) => ModelError::Io { path, source },
        Problem::Text(text) => ModelError::Header { path, problem: HeaderProblem::Onnx { text } },
    }
}

/// Reads the message of a model.
fn parse(wire: &mut Wire<'_>, size: u64) -> Result<Parsed, Problem> {
    let mut of = Parsed::default();
    let mut is_model = false;
    wire.fields(0..size, |wire, number, field| {
        match number {
            1 => is_model = field.whole().is_ok(),
            7 => of.graph = Some(field.place()?),
            8 => {
                let (mut domain, mut version) = (String::new(), 0);
                wire.fields(field.place()?, |wire, number, field| {
                    match number {
                        1 => domain = wire.text(&field)?,
                        2 => version = field.whole()?,
                        _ => {}
                    }
                    Ok(())
                })?;
                if is_own(&domain) {
                    of.opset = Some(version);
                }
            }
            14 => of.metadata.extend(metadata(wire, field.place()?)?),
            25 => of.functions += 1,
            _ => {}
        }
        match of.metadata.len() > MAX_LISTED {
            true => Err(format!("it lists more than {MAX_LISTED} texts").into()),
            false => Ok(()),
        }
    })?;
    let Some(graph) = of.graph.clone().filter(|_| is_model) else {
        return Err("it has no version and graph: it is no ONNX model".into());
    };
    if of.functions > 0 {
        return Err(format!(
            "it has {} functions of its own, which are not read: export it with functions inlined",
            of.functions
        )
        .into());
    }
    wire.fields(graph, |wire, number, field| {
        match number {
            1 => of.nodes.push(node(wire, field.place()?)?),
            5 => of.initializers.push(tensor::read(wire, field.place()?)?),
            11 => of.inputs.push(declared(wire, field.place()?)?),
            12 => of.outputs.push(declared(wire, field.place()?)?),
            15 => return Err("it has a sparse tensor, which is not read".into()),
            _ => {}
        }
        let lists = [of.nodes.len(), of.initializers.len(), of.inputs.len(), of.outputs.len()];
        if lists.iter().any(|listed| *listed > MAX_LISTED) {
            return Err(format!("it lists more than {MAX_LISTED} nodes or tensors").into());
        }
        Ok(())
    })?;
    Ok(of)
}

/// Reads the key of a text and where the text lies; none where the key is no name.
fn metadata(
    wire: &mut Wire<'_>,
    range: Range<u64>,
) -> Result<Option<(String, Range<u64>)>, Problem> {
    let (mut key, mut place) = (None, 0..0);
    wire.fields(range, |wire, number, field| {
        match number {
            1 => {
                key = match wire.text(&field) {
                    Err(Problem::Text(_)) => None,
                    text => Some(text?),
                }
            }
            2 => place = field.place()?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(key.map(|key| (key, place)))
}

/// Whether a domain is that of ONNX's own operators.
pub(super) fn is_own(domain: &str) -> bool {
    matches!(domain, "" | "ai.onnx")
}

/// Reads the message of a node.
fn node(wire: &mut Wire<'_>, range: Range<u64>) -> Result<Node, Problem> {
    let mut node = Node::default();
    wire.fields(range, |wire, number, field| {
        match number {
            1 => node.inputs.push(wire.text(&field)?),
            2 => node.outputs.push(wire.text(&field)?),
            3 => node.name = wire.text(&field)?,
            4 => node.operator = wire.text(&field)?,
            5 => {
                let (name, attribute) = attribute(wire, field.place()?)?;
                if node.attributes.insert(name.clone(), attribute).is_some() {
                    return Err(format!("{} has the attribute {name:?} twice", node.shown()).into());
                }
            }
            7 => node.domain = wire.text(&field)?,
            _ => {}
        }
        if node.inputs.len().max(node.outputs.len()) > MAX_LISTED {
            return Err("a node has more inputs or outputs than any".into());
        }
        Ok(())
    })?;
    Ok(node)
}

/// Reads the message of an attribute, with its name.
fn attribute(wire: &mut Wire<'_>, range: Range<u64>) -> Result<(String, Attribute), Problem> {
    let mut name = String::new();
    let mut kind = 0;
    let (mut floats, mut wholes) = (Vec::new(), Vec::new());
    let (mut one, mut is_reference) = (None, false);
    wire.fields(range, |wire, number, field| {
        match (number, &field) {
            (1, field) => name = wire.text(field)?,
            (20, field) => kind = field.whole()?,
            (21, _) => is_reference = true,
            (2, Field::Fixed32(bytes)) => one = Some(Attribute::Float(f32::from_le_bytes(*bytes))),
            (3, field) => one = Some(Attribute::Whole(field.whole()?)),
            // Texts are UTF-8 mostly; any bytes may stand there, and as many as one likes.
            (4, field) => {
                let text = wire.text(field).map(Attribute::Text);
                one = Some(match text {
                    Err(Problem::Text(_)) => Attribute::Other("a long text, or none of UTF-8"),
                    text => text?,
                });
            }
            (5, field) => one = Some(Attribute::Tensor(tensor::read(wire, field.place()?)?)),
            (6 | 11, _) => one = Some(Attribute::Other("a subgraph")),
            (7, Field::Fixed32(bytes)) => floats.push(f32::from_le_bytes(*bytes)),
            (7, Field::Bytes(range)) => {
                let bytes = wire.bytes(range.clone())?;
                floats.extend(ElementType::F32.floats(&bytes).iter().map(|value| *value as f32));
            }
            (8, Field::Varint(number)) => wholes.push(*number as i64),
            (8, Field::Bytes(range)) => wire.varints(range.clone(), |n| wholes.push(n as i64))?,
            (9 | 10 | 14 | 15 | 22 | 23, _) => {
                one = Some(Attribute::Other("a list of texts, tensors or types"))
            }
            _ => {}
        }
        if floats.len().max(wholes.len()) > MAX_LIST {
            return Err("an attribute has a longer list than any".into());
        }
        Ok(())
    })?;
    if is_reference {
        one = Some(Attribute::Other("a reference to an attribute of a function"));
    }
    // Fields of value 0 and lists without values may be left out: then the kind says what is meant.
    let attribute = match (one, kind) {
        (Some(one), _) => one,
        (None, 1) => Attribute::Float(0.0),
        (None, 2) => Attribute::Whole(0),
        (None, 3) => Attribute::Text(String::new()),
        (None, 6) => Attribute::Floats(floats),
        (None, 7) => Attribute::Wholes(wholes),
        // Old files do not say the kind.
        (None, 0) if !floats.is_empty() => Attribute::Floats(floats),
        (None, 0) => Attribute::Wholes(wholes),
        _ => Attribute::Other("of a kind that is not known"),
    };
    Ok((name, attribute))
}

/// Reads the message about an input or output.
fn declared(wire: &mut Wire<'_>, range: Range<u64>) -> Result<Declared, Problem> {
    let (mut name, mut element, mut axes) = (String::new(), ElementType::Other(0), None);
    wire.fields(range, |wire, number, field| match number {
        1 => {
            name = wire.text(&field)?;
            Ok(())
        }
        2 => wire.fields(field.place()?, |wire, number, field| match number {
            1 => wire.fields(field.place()?, |wire, number, field| {
                match number {
                    1 => element = ElementType::of(field.whole()?),
                    2 => axes = Some(shape(wire, field.place()?)?),
                    _ => {}
                }
                Ok(())
            }),
            _ => Ok(()),
        }),
        _ => Ok(()),
    })?;
    Ok(Declared { name, element, axes })
}

/// Reads the message of a declared shape.
fn shape(wire: &mut Wire<'_>, range: Range<u64>) -> Result<Vec<Axis>, Problem> {
    let mut axes = Vec::new();
    wire.fields(range, |wire, number, field| {
        if number != 1 {
            return Ok(());
        }
        let mut axis = Axis::Open(String::new());
        wire.fields(field.place()?, |wire, number, field| {
            match number {
                1 => {
                    let length = field.whole()?;
                    axis = u64::try_from(length).map_or(Axis::Open(String::new()), Axis::Fixed);
                }
                2 => axis = Axis::Open(wire.text(&field)?),
                _ => {}
            }
            Ok(())
        })?;
        axes.push(axis);
        match axes.len() > tensor::MAX_AXES {
            true => Err(format!("an input has more than {} axes", tensor::MAX_AXES).into()),
            false => Ok(()),
        }
    })?;
    Ok(axes)
}
