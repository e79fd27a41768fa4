//! A network of operators with all shapes fixed: what is left of an ONNX file once its shapes are known, and all that
//! follows from these is worked out.

use super::{
    array::Array,
    file::{Attribute, Axis, Declared, Node, OnnxFile, is_own},
    fold,
    node::{Known, KnownNode},
    operator::Operator,
    operators,
    tensor::{self, ElementType, StoredTensor},
};
use crate::error::ModelError;
use std::collections::{BTreeMap, HashMap};

/// The most elements of a stored tensor whose values are read when a network is loaded.
const MAX_READ: u64 = 1 << 12;

/// The most values that are worked out when a network is loaded, of all nodes together.
const MAX_KNOWN: usize = 1 << 22;

/// A value of a network, by its place in [`Network::values`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ValueId(pub u32);

/// Where a value comes from.
#[derive(Clone, PartialEq, Debug)]
pub enum Source {
    /// It is given when the network runs.
    Input,
    /// A node computes it.
    Node,
    /// It is stored in the model's files, in another shape perhaps.
    Stored(StoredTensor),
    /// It is the same number everywhere.
    Filled(f64),
    /// It was worked out when the network was loaded.
    Known(Array),
}

/// A tensor of a network.
#[derive(Clone, PartialEq, Debug)]
pub struct Value {
    /// Its name in the file.
    pub name: String,
    /// Its shape, the slowest axis first.
    pub dims: Vec<u64>,
    /// The type of its elements.
    pub element: ElementType,
    /// Where it comes from.
    pub source: Source,
}

impl Value {
    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        self.dims.iter().product::<u64>() * self.element.bytes()
    }

    /// Whether it depends on nothing that is given when the network runs.
    pub fn is_constant(&self) -> bool {
        !matches!(self.source, Source::Input | Source::Node)
    }
}

/// An operator of a network with what it reads and computes.
#[derive(Clone, PartialEq, Debug)]
pub struct NetworkNode {
    /// The node and its operator in the file, for messages.
    pub shown: String,
    /// The operator with its attributes.
    pub operator: Operator,
    /// The values that it reads.
    pub reads: Vec<ValueId>,
    /// The values that it computes.
    pub makes: Vec<ValueId>,
}

/// A network of operators with all shapes fixed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Network {
    /// All values, by their ids.
    pub values: Vec<Value>,
    /// The nodes, each after those that it reads from.
    pub nodes: Vec<NetworkNode>,
    /// The values that are given when it runs, in the order of the file.
    pub inputs: Vec<ValueId>,
    /// The values that it computes, in the order of the file.
    pub outputs: Vec<ValueId>,
}

/// What is fixed of a file's inputs when a network is loaded.
#[derive(Clone, Debug, Default)]
pub struct Fixed {
    /// Shapes of inputs by their names.
    pub shapes: BTreeMap<String, Vec<u64>>,
    /// Values of inputs by their names, which are not asked for again when the network runs.
    pub values: BTreeMap<String, Array>,
}

impl Network {
    /// The network of a file whose inputs are fixed so.
    ///
    /// # Errors
    /// When the shape of an input is not known, or a node cannot be computed, by its name.
    pub fn of(file: &OnnxFile, fixed: &Fixed) -> Result<Self, ModelError> {
        let wrong = |why: String| ModelError::Onnx { path: file.path().to_owned(), why };
        file.check_external(file.initializers.iter())?;
        let mut builder = Builder {
            file,
            network: Self::default(),
            names: HashMap::new(),
            left_out: HashMap::new(),
            known: 0,
            number: 0,
        };
        for tensor in &file.initializers {
            builder.stored(&tensor.name, tensor)?;
        }
        let known = |name: &String| file.inputs().any(|input| input.name == *name);
        if let Some(name) = fixed.shapes.keys().chain(fixed.values.keys()).find(|name| !known(name))
        {
            let names: Vec<&str> = file.inputs().map(|input| input.name.as_str()).collect();
            return Err(wrong(format!("it has no input {name:?}: its inputs are {names:?}")));
        }
        for input in file.inputs() {
            builder.input(input, fixed).map_err(wrong)?;
        }
        for (number, node) in file.nodes.iter().enumerate() {
            builder.number = number;
            builder.node(node)?;
        }
        for output in &file.outputs {
            let id =
                builder.named(&output.name).map_err(|why| wrong(format!("its output is {why}")))?;
            builder.network.outputs.push(id);
        }
        if file.outputs.is_empty() {
            return Err(wrong("it has no outputs".to_owned()));
        }
        Ok(builder.network.without_needless())
    }

    /// A value by its id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Bytes of all stored values.
    pub fn weight_bytes(&self) -> u64 {
        self.values.iter().filter(|value| value.is_constant()).map(Value::bytes).sum()
    }

    /// The same network without nodes and values that no output needs.
    fn without_needless(self) -> Self {
        let mut needed = vec![false; self.values.len()];
        for id in self.outputs.iter().chain(&self.inputs) {
            needed[id.0 as usize] = true;
        }
        let mut kept = vec![false; self.nodes.len()];
        for (at, node) in self.nodes.iter().enumerate().rev() {
            kept[at] = node.makes.iter().any(|id| needed[id.0 as usize]);
            if kept[at] {
                for id in node.reads.iter().chain(&node.makes) {
                    needed[id.0 as usize] = true;
                }
            }
        }
        let mut new = vec![ValueId(0); self.values.len()];
        let mut values = Vec::new();
        for (at, value) in self.values.into_iter().enumerate() {
            if needed[at] {
                new[at] = ValueId(values.len() as u32);
                values.push(value);
            }
        }
        let renamed = |ids: Vec<ValueId>| ids.into_iter().map(|id| new[id.0 as usize]).collect();
        let nodes = self.nodes.into_iter().zip(kept).filter(|(_, kept)| *kept);
        let nodes = nodes.map(|(node, _)| NetworkNode {
            reads: renamed(node.reads),
            makes: renamed(node.makes),
            ..node
        });
        Self {
            nodes: nodes.collect(),
            values,
            inputs: renamed(self.inputs),
            outputs: renamed(self.outputs),
        }
    }
}

struct Builder<'a> {
    file: &'a OnnxFile,
    network: Network,
    /// The value of each name so far.
    names: HashMap<String, ValueId>,
    /// Values that are not computed, by their names: the numbers of the nodes that should.
    left_out: HashMap<String, usize>,
    /// How many values were worked out, or read from other files.
    known: usize,
    /// The number of the node that is read.
    number: usize,
}

impl Builder<'_> {
    fn wrong(&self, why: String) -> ModelError {
        ModelError::Onnx { path: self.file.path().to_owned(), why }
    }

    /// The value of a name.
    fn named(&self, name: &str) -> Result<ValueId, String> {
        match (self.names.get(name), self.left_out.get(name)) {
            (Some(id), _) => Ok(*id),
            (None, Some(number)) => Err(format!(
                "{name:?}, which {} has as a further output, and which is not computed here",
                self.file.nodes[*number].shown()
            )),
            (None, None) => Err(format!("{name:?}, which no node before it computes")),
        }
    }

    fn value(
        &mut self,
        name: &str,
        dims: Vec<u64>,
        element: ElementType,
        source: Source,
    ) -> Result<ValueId, String> {
        if tensor::count(&dims).is_none() || dims.len() > tensor::MAX_AXES {
            return Err(format!("{name:?} would be of shape {dims:?}, which is too large"));
        }
        let id = ValueId(self.network.values.len() as u32);
        if self.names.insert(name.to_owned(), id).is_some() {
            return Err(format!("the value {name:?} is there twice"));
        }
        self.network.values.push(Value { name: name.to_owned(), dims, element, source });
        Ok(id)
    }

    fn array(&mut self, name: &str, array: Array) -> Result<ValueId, String> {
        self.value(name, array.dims.clone(), array.element, Source::Known(array))
    }

    /// Counts values that are worked out: a file of few bytes may ask for many.
    fn count(&mut self, values: usize) -> Result<(), String> {
        self.known = self.known.saturating_add(values);
        match self.known <= MAX_KNOWN {
            true => Ok(()),
            false => {
                Err(format!("more than {MAX_KNOWN} values would be worked out as it is loaded"))
            }
        }
    }

    /// A tensor of the file, whose values are read if they are few.
    fn stored(&mut self, name: &str, tensor: &StoredTensor) -> Result<(), ModelError> {
        let (dims, element) = (tensor.dims.clone(), tensor.element);
        if element.bytes() == 0 {
            let why =
                format!("the tensor {name:?} holds {} values, which are not read", element.name());
            return Err(self.wrong(why));
        }
        let made = match tensor.count() <= MAX_READ {
            true => {
                if tensor.is_external() {
                    self.count(tensor.count() as usize).map_err(|why| self.wrong(why))?;
                }
                let bytes = self.file.bytes(tensor)?;
                self.array(name, Array::of_bytes(dims, element, &bytes))
            }
            false => self.value(name, dims, element, Source::Stored(tensor.clone())),
        };
        made.map(|_| ()).map_err(|why| self.wrong(why))
    }

    fn input(&mut self, input: &Declared, fixed: &Fixed) -> Result<(), String> {
        let name = &input.name;
        if let Some(array) = fixed.values.get(name) {
            return self.array(name, array.clone()).map(|_| ());
        }
        let declared = input.axes.as_deref();
        let dims = match (fixed.shapes.get(name), declared) {
            (Some(dims), None) => dims.clone(),
            (Some(dims), Some(axes)) => {
                let fits = |(dim, axis): (&u64, &Axis)| {
                    matches!(axis, Axis::Open(_)) || *axis == Axis::Fixed(*dim)
                };
                if dims.len() != axes.len() || !dims.iter().zip(axes).all(fits) {
                    return Err(format!(
                        "the shape {dims:?} does not fit its input {name:?}, which is {}",
                        shown(axes)
                    ));
                }
                dims.clone()
            }
            // A batch of one, where nothing else is open.
            (None, Some(axes))
                if axes.iter().skip(1).all(|axis| matches!(axis, Axis::Fixed(_))) =>
            {
                let side = |axis: &Axis| if let Axis::Fixed(side) = axis { *side } else { 1 };
                axes.iter().map(side).collect()
            }
            (None, axes) => {
                let shape = axes.map_or("of any shape".to_owned(), shown);
                let side = |axis: &Axis| match axis {
                    Axis::Fixed(side) => side.to_string(),
                    Axis::Open(_) => "N".to_owned(),
                };
                let template = axes
                    .map_or_else(|| vec!["N".to_owned()], |axes| axes.iter().map(side).collect());
                let template = template.join("x");
                return Err(format!(
                    "its input {name:?} is {shape}: say how large it is, as --shape {name}={template} with a number for each N"
                ));
            }
        };
        if input.element.bytes() == 0 {
            return Err(format!(
                "its input {name:?} is of {} values, which are not read",
                input.element.name()
            ));
        }
        let id = self.value(name, dims, input.element, Source::Input)?;
        self.network.inputs.push(id);
        Ok(())
    }

    fn node(&mut self, node: &Node) -> Result<(), ModelError> {
        let wrong = |why: String| self.wrong(format!("{}: {why}", node.shown()));
        if !is_own(&node.domain) {
            return Err(wrong(format!(
                "operators of the domain {:?} are not known here",
                node.domain
            )));
        }
        let unread = node.attributes.iter().find_map(|(name, attribute)| match attribute {
            Attribute::Other(what) => Some((name, what)),
            _ => None,
        });
        if let Some((name, what)) = unread {
            return Err(wrong(format!("its attribute {name:?} is {what}, which is not read")));
        }
        let mut ids = Vec::new();
        for name in &node.inputs {
            ids.push(match (name.is_empty(), self.names.get(name)) {
                (true, _) => None,
                (false, Some(id)) => Some(*id),
                (false, None) => {
                    return Err(wrong(format!(
                        "it reads {name:?}, which no node before it computes"
                    )));
                }
            });
        }
        let result = match node.operator.as_str() {
            "Constant" => return self.constant(node),
            _ => self.computed(node, &ids),
        };
        result.map_err(|why| self.wrong(format!("{}: {why}", node.shown())))
    }

    /// A node of which all is in an attribute.
    fn constant(&mut self, node: &Node) -> Result<(), ModelError> {
        let Some(name) = node.outputs.first() else { return Ok(()) };
        let list = |values: Vec<f64>, dims: Vec<u64>, element| {
            Array::new(dims, element, super::array::Values::Floats(values))
        };
        let made = match node.attributes.iter().next() {
            Some((key, Attribute::Tensor(tensor))) if key == "value" => {
                self.file.check_external(std::iter::once(tensor))?;
                return self.stored(name, tensor);
            }
            Some((_, Attribute::Float(value))) => {
                list(vec![(*value).into()], vec![], ElementType::F32)
            }
            Some((_, Attribute::Floats(values))) => {
                let dims = vec![values.len() as u64];
                list(values.iter().map(|value| f64::from(*value)).collect(), dims, ElementType::F32)
            }
            Some((_, Attribute::Whole(value))) => {
                Array { dims: vec![], ..Array::wholes(vec![*value]) }
            }
            Some((_, Attribute::Wholes(values))) => Array::wholes(values.clone()),
            _ => return Err(self.wrong(format!("{}: it has no value that is read", node.shown()))),
        };
        self.array(name, made).map(|_| ()).map_err(|why| self.wrong(why))
    }

    /// A node whose values are worked out now, or computed when the network runs.
    fn computed(&mut self, node: &Node, ids: &[Option<ValueId>]) -> Result<(), String> {
        let values = &self.network.values;
        let known = |id: &Option<ValueId>| {
            let value = &values[id.as_ref()?.0 as usize];
            let array = match &value.source {
                Source::Known(array) => Some(array),
                _ => None,
            };
            Some(Known { dims: &value.dims, element: value.element, array })
        };
        let known = KnownNode::new(node, self.file.opset, ids.iter().map(known).collect());
        if let Some(arrays) = self.by_shapes(&known)? {
            return self.arrays(node, arrays);
        }
        if node.operator == "ConstantOfShape" {
            let (dims, element, value) = self.filled(&known)?;
            let source = match tensor::count(&dims).is_some_and(|count| count <= MAX_READ) {
                true => {
                    let count = dims.iter().product::<u64>() as usize;
                    self.count(count)?;
                    let values = super::array::Values::Floats(vec![value; count]);
                    Source::Known(Array::new(dims.clone(), element, values))
                }
                false => Source::Filled(value),
            };
            let Some(name) = node.outputs.first() else { return Ok(()) };
            return self.value(name, dims, element, source).map(|_| ());
        }
        let made = operators::read(&known)?;
        // Another shape of what is stored is stored, too.
        let of = |at: usize| ids.get(at).copied().flatten();
        if let (Operator::View, Some(id), Some(name)) =
            (&made.operator, of(0), node.outputs.first())
        {
            let value = self.network.values[id.0 as usize].clone();
            if value.is_constant() {
                let dims = made.outputs[0].0.clone();
                let source = match value.source {
                    Source::Stored(tensor) => {
                        Source::Stored(StoredTensor { dims: dims.clone(), ..tensor })
                    }
                    Source::Known(array) => Source::Known(Array { dims: dims.clone(), ..array }),
                    other => other,
                };
                return self.value(name, dims, value.element, source).map(|_| ());
            }
        }
        operators::check_types(&known, &made)?;
        if let Operator::Resize(resize) = &made.operator {
            let taps = resize.axes.iter().flatten().flatten().map(|taps| 1 + taps.len()).sum();
            self.count(taps)?;
        }
        let reads = made.reads.iter().filter_map(|at| of(*at)).collect();
        for name in node.outputs.iter().skip(made.outputs.len()) {
            self.left_out.insert(name.clone(), self.number);
        }
        let mut makes = Vec::new();
        for (at, (dims, element)) in made.outputs.into_iter().enumerate() {
            let name = node.outputs.get(at).filter(|name| !name.is_empty());
            // What nobody wants has a name that no file has.
            let name = name.cloned().unwrap_or_else(|| format!("\0{}", self.network.values.len()));
            makes.push(self.value(&name, dims, element, Source::Node)?);
        }
        let node = NetworkNode { shown: node.shown(), operator: made.operator, reads, makes };
        self.network.nodes.push(node);
        Ok(())
    }

    /// What a node computes from shapes or known values alone.
    fn by_shapes(&self, node: &KnownNode<'_>) -> Result<Option<Vec<Array>>, String> {
        match node.node.operator.as_str() {
            "Shape" => {
                let dims = node.input(0)?.dims;
                let of = dims.len() as i64;
                let end = |name, default| -> Result<usize, String> {
                    let number = node.whole(name, default)?;
                    Ok((if number < 0 { number + of } else { number }).clamp(0, of) as usize)
                };
                let (start, end) = (end("start", 0)?, end("end", of)?);
                node.check_all_read()?;
                let sides = dims.get(start..end).unwrap_or_default();
                Ok(Some(vec![Array::wholes(sides.iter().map(|side| *side as i64).collect())]))
            }
            "Size" => {
                let count = tensor::count(node.input(0)?.dims).unwrap_or(0);
                Ok(Some(vec![Array { dims: vec![], ..Array::wholes(vec![count as i64]) }]))
            }
            "ConstantOfShape" => Ok(None),
            _ => fold::evaluate(node),
        }
    }

    fn arrays(&mut self, node: &Node, arrays: Vec<Array>) -> Result<(), String> {
        for (name, array) in node.outputs.iter().zip(arrays) {
            self.count(array.len())?;
            if !name.is_empty() {
                self.array(name, array)?;
            }
        }
        Ok(())
    }

    /// The shape, type and number of a tensor that is the same everywhere.
    fn filled(&self, node: &KnownNode<'_>) -> Result<(Vec<u64>, ElementType, f64), String> {
        let sides = node.array(0)?.list()?.iter().map(|side| u64::try_from(*side));
        let dims =
            sides.collect::<Result<Vec<_>, _>>().map_err(|_| "an axis is shorter than nothing")?;
        let (element, value) = match node.tensor("value")? {
            None => (ElementType::F32, 0.0),
            Some(tensor) => {
                let bytes = self.file.bytes(tensor).map_err(|error| error.to_string())?;
                (
                    tensor.element,
                    Array::of_bytes(tensor.dims.clone(), tensor.element, &bytes).one()?,
                )
            }
        };
        node.check_all_read()?;
        Ok((dims, element, value))
    }
}

/// Axes, for messages.
fn shown(axes: &[Axis]) -> String {
    let axis = |axis: &Axis| match axis {
        Axis::Fixed(side) => side.to_string(),
        Axis::Open(name) if name.is_empty() => "?".to_owned(),
        Axis::Open(name) => name.clone(),
    };
    let axes: Vec<String> = axes.iter().map(axis).collect();
    format!("[{}]", axes.join(", "))
}
