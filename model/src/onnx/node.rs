//! A node whose inputs are known by shape, type and, for some, value: what operators are read from.

use super::{
    array::Array,
    file::{Attribute, Node},
    operator::Operator,
    tensor::{ElementType, StoredTensor},
};
use std::cell::RefCell;

/// What is known of a value when a network is loaded.
#[derive(Clone, Debug)]
pub(super) struct Known<'a> {
    pub(super) dims: &'a [u64],
    pub(super) element: ElementType,
    /// Its values, where they are few and do not depend on what the model is given.
    pub(super) array: Option<&'a Array>,
}

/// A node with what is known of its inputs.
pub(super) struct KnownNode<'a> {
    pub(super) node: &'a Node,
    pub(super) opset: i64,
    pub(super) inputs: Vec<Option<Known<'a>>>,
    /// The attributes that were asked for.
    asked: RefCell<Vec<&'static str>>,
}

/// What a node is: its operator, which of its inputs that reads, and what it computes.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) operator: Operator,
    /// Places of inputs; others were read when the network was loaded.
    pub(super) reads: Vec<usize>,
    /// Shapes and types of its outputs.
    pub(super) outputs: Vec<(Vec<u64>, ElementType)>,
}

impl Made {
    /// An operator that reads the first input and computes one value of the same type.
    pub(super) fn of_first(
        node: &KnownNode<'_>,
        operator: Operator,
        dims: Vec<u64>,
    ) -> Result<Self, String> {
        let element = node.input(0)?.element;
        Ok(Self { operator, reads: vec![0], outputs: vec![(dims, element)] })
    }
}

impl<'a> KnownNode<'a> {
    pub(super) fn new(node: &'a Node, opset: i64, inputs: Vec<Option<Known<'a>>>) -> Self {
        Self { node, opset, inputs, asked: RefCell::default() }
    }

    /// An input that has to be there.
    pub(super) fn input(&self, at: usize) -> Result<&Known<'a>, String> {
        let count = self.node.inputs.len();
        self.optional(at).ok_or_else(|| format!("it has {count} inputs, and input {at} is missing"))
    }

    /// An input that may be left out.
    pub(super) fn optional(&self, at: usize) -> Option<&Known<'a>> {
        self.inputs.get(at)?.as_ref()
    }

    /// The places of all inputs that are there.
    pub(super) fn present(&self) -> Vec<usize> {
        (0..self.inputs.len()).filter(|at| self.inputs[*at].is_some()).collect()
    }

    /// The values of an input that has to be there, and known.
    pub(super) fn array(&self, at: usize) -> Result<&'a Array, String> {
        self.input(at)?.array.ok_or_else(|| {
            let name = &self.node.inputs[at];
            format!("its input {at} ({name:?}) depends on what the model is given, and has to be fixed when it is loaded")
        })
    }

    /// The values of an input that may be left out; it is as if it were where it has no values.
    pub(super) fn optional_array(&self, at: usize) -> Result<Option<&'a Array>, String> {
        match self.optional(at) {
            None => Ok(None),
            Some(_) => self.array(at).map(|array| Some(array).filter(|array| !array.is_empty())),
        }
    }

    fn attribute(&self, name: &'static str) -> Option<&'a Attribute> {
        self.asked.borrow_mut().push(name);
        self.node.attributes.get(name)
    }

    /// Whether an attribute is there.
    pub(super) fn has(&self, name: &'static str) -> bool {
        self.attribute(name).is_some()
    }

    /// An attribute that is a whole number.
    pub(super) fn whole(&self, name: &'static str, default: i64) -> Result<i64, String> {
        match self.attribute(name) {
            None => Ok(default),
            Some(Attribute::Whole(number)) => Ok(*number),
            Some(other) => Err(wrong(name, "a whole number", other)),
        }
    }

    /// An attribute that is 0 or 1.
    pub(super) fn flag(&self, name: &'static str, default: bool) -> Result<bool, String> {
        match self.whole(name, default.into())? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("its attribute {name} is {other}: 0 or 1 are known")),
        }
    }

    /// An attribute that is a float.
    pub(super) fn float(&self, name: &'static str, default: f32) -> Result<f32, String> {
        match self.attribute(name) {
            None => Ok(default),
            Some(Attribute::Float(number)) => Ok(*number),
            Some(other) => Err(wrong(name, "a float", other)),
        }
    }

    /// An attribute that is a list of whole numbers.
    pub(super) fn wholes(&self, name: &'static str) -> Result<Option<&'a [i64]>, String> {
        match self.attribute(name) {
            None => Ok(None),
            Some(Attribute::Wholes(numbers)) => Ok(Some(numbers)),
            Some(other) => Err(wrong(name, "a list of whole numbers", other)),
        }
    }

    /// An attribute that is a list of floats.
    pub(super) fn floats(&self, name: &'static str) -> Result<Option<&'a [f32]>, String> {
        match self.attribute(name) {
            None => Ok(None),
            Some(Attribute::Floats(numbers)) => Ok(Some(numbers)),
            // A list without values does not say its kind in old files.
            Some(Attribute::Wholes(numbers)) if numbers.is_empty() => Ok(Some(&[])),
            Some(other) => Err(wrong(name, "a list of floats", other)),
        }
    }

    /// An attribute that is a text.
    pub(super) fn text(
        &self,
        name: &'static str,
        default: &'static str,
    ) -> Result<&'a str, String> {
        match self.attribute(name) {
            None => Ok(default),
            Some(Attribute::Text(text)) => Ok(text),
            Some(other) => Err(wrong(name, "a text", other)),
        }
    }

    /// An attribute that is a tensor.
    pub(super) fn tensor(&self, name: &'static str) -> Result<Option<&'a StoredTensor>, String> {
        match self.attribute(name) {
            None => Ok(None),
            Some(Attribute::Tensor(tensor)) => Ok(Some(tensor)),
            Some(other) => Err(wrong(name, "a tensor", other)),
        }
    }

    /// Checks that every attribute was asked for.
    pub(super) fn check_all_read(&self) -> Result<(), String> {
        let asked = self.asked.borrow();
        match self.node.attributes.keys().find(|name| !asked.contains(&name.as_str())) {
            Some(name) => Err(format!(
                "its attribute {name:?} is not known in version {} of the operators",
                self.opset
            )),
            None => Ok(()),
        }
    }
}

fn wrong(name: &str, expected: &str, have: &Attribute) -> String {
    let have = match have {
        Attribute::Float(_) => "a float",
        Attribute::Whole(_) => "a whole number",
        Attribute::Text(_) => "a text",
        Attribute::Tensor(_) => "a tensor",
        Attribute::Floats(_) => "a list of floats",
        Attribute::Wholes(_) => "a list of whole numbers",
        Attribute::Other(what) => what,
    };
    format!("its attribute {name} is {have}, and should be {expected}")
}

/// The axis that a number means, of so many; negative numbers count from behind.
pub(super) fn axis(number: i64, of: usize) -> Result<usize, String> {
    let at = if number < 0 { number + of as i64 } else { number };
    let at = usize::try_from(at).ok().filter(|at| *at < of);
    at.ok_or_else(|| format!("axis {number} is not one of {of}"))
}

/// The axes that numbers mean, in ascending order, each once.
pub(super) fn axes(numbers: &[i64], of: usize) -> Result<Vec<usize>, String> {
    let mut axes = numbers.iter().map(|n| axis(*n, of)).collect::<Result<Vec<_>, _>>()?;
    axes.sort_unstable();
    match axes.windows(2).any(|pair| pair[0] == pair[1]) {
        true => Err(format!("axes {numbers:?} name one twice")),
        false => Ok(axes),
    }
}
