//! A model as an operator graph: values, the operators that compute them, and weights by id.
//!
//! [`OperatorGraph::of`] builds it from a [`galaxy_model::ModelSpec`]. Operations of programs name operators
//! of it, and whoever runs, proves or costs an operation asks the operator, never the model's description.
//! Each kind of operator is one file: what it reads and computes, how devices may share it, what its result
//! consists of, and how much work it is.

mod activate;
mod add;
mod attention;
mod axes;
mod build;
mod content;
mod embed;
mod input;
mod norm;
mod pool;
mod product;

pub use activate::Activate;
pub use add::Add;
pub use attention::Attention;
pub use axes::{Axes, Reach, Window};
pub use content::{Content, OperandMismatch, Sums};
pub use embed::Embed;
pub use input::Input;
pub use norm::Norm;
pub use pool::{Pool, Pooling};
pub(crate) use product::shared;
pub use product::{HeadNorms, Heads, Product, Rotary, Slices, Within};

pub use crate::ids::{OperatorId, ValueId, WeightId};

use crate::program::{Element, OpKind, Operation, Region, Tensor, TensorId};
use galaxy_common::{Assignment, Share, Span};
use galaxy_model::{ClassActivation, Matrix, Vector};
use smallvec::SmallVec;
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// A value of the graph.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Value {
    /// Its name, for messages.
    pub name: &'static str,
    /// The layer that it belongs to; the number of layers for what follows them.
    pub layer: u32,
    /// Its axes, where one device has all of it.
    pub axes: Axes,
}

impl Value {
    /// Columns of a row, where one device has all of it.
    pub fn columns(&self) -> u32 {
        self.axes.columns()
    }
}

/// A weight of the graph, by its name in the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Weight {
    /// A weight of two axes.
    Matrix(Matrix),
    /// A weight of one axis.
    Vector(Vector),
}

/// What is counted along an axis by which operators are cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Axis {
    /// Query heads of attention.
    Heads,
    /// Columns of the intermediate size of an MLP.
    Columns,
    /// Tokens of the vocabulary.
    Tokens,
}

impl Axis {
    /// What is counted, for messages.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Heads => "heads",
            Self::Columns => "columns",
            Self::Tokens => "tokens",
        }
    }
}

/// The side of an operator on which an axis is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CutSide {
    /// A share computes some columns, from all that is read.
    Outputs,
    /// A share reads some columns, and what it computes is a term of a sum.
    Inputs,
}

/// How devices may share an operator, besides by rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cut {
    /// The axis along which it is cut.
    pub axis: Axis,
    /// The side on which that axis is.
    pub side: CutSide,
    /// How many shares the whole has.
    pub count: u32,
}

impl Cut {
    /// The shares that a device of this assignment has, in a layer.
    pub fn held(&self, assignment: &Assignment, layer: u32) -> Span<Share> {
        match self.axis {
            Axis::Heads => assignment.block(layer).heads.of(),
            Axis::Columns => assignment.block(layer).columns.of(),
            Axis::Tokens => assignment.vocabulary.of(),
        }
    }
}

/// Sizes of an operation.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Sizes {
    /// Rows that it computes.
    pub rows: u32,
    /// Columns that it reads.
    pub inputs: u32,
    /// Columns that it computes.
    pub outputs: u32,
    /// Pairs of a query row and a key row that it sees.
    pub pairs: f64,
}

impl Sizes {
    /// The sizes of an operation, but for pairs.
    pub(crate) fn of(op: &Operation) -> Self {
        let columns = |region: Option<&Region>| region.map_or(0, |region| region.columns.len());
        let rows = op.writes.first().map_or(0, |region| region.rows.len());
        let (inputs, outputs) = (columns(op.reads.first()), columns(op.writes.first()));
        Self { rows, inputs, outputs, pairs: 0.0 }
    }
}

/// The work of an operation, however it is done.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Work {
    /// Multiplications and additions; 0 where an operation only passes over rows.
    pub operations: f64,
    /// The matrix that is read, as (inputs, outputs).
    pub weights: (u64, u64),
}

/// What every operator answers.
pub trait Operate {
    /// Its name, with those of its attributes that an engine may not support: for messages.
    fn name(&self) -> String;

    /// The values that it reads. Further regions that an operation reads have the axes of its result.
    fn reads(&self) -> SmallVec<[ValueId; 2]>;

    /// The value that it computes.
    fn makes(&self) -> ValueId;

    /// The weights that it reads.
    fn weights(&self) -> SmallVec<[WeightId; 8]> {
        SmallVec::new()
    }

    /// The axes of its result, from those of what it reads.
    ///
    /// # Errors
    /// The reason why they do not fit, for people.
    fn shape(&self, read: &[Axes]) -> Result<Axes, String>;

    /// Whether devices share it by rows alone, and each has all of it.
    fn is_by_rows(&self) -> bool {
        false
    }

    /// How devices may share it, besides by rows; `None` where they cannot.
    fn cut(&self) -> Option<Cut> {
        None
    }

    /// Columns that a share reads first, and columns that it computes; none of an operator that is not cut.
    fn share_columns(&self, _share: Span<Share>) -> Option<(u32, u32)> {
        None
    }

    /// Which rows of a text or image it reads at `at` to compute some rows.
    fn reach(&self, _at: usize) -> Reach {
        Reach::Same
    }

    /// Which pixels of a row of an image it reads at `at` to compute some pixels.
    fn reach_in_row(&self, _at: usize) -> Reach {
        Reach::All
    }

    /// Which of the values that it reads it may overwrite with its result, element by element.
    fn in_place(&self) -> Option<usize> {
        None
    }

    /// Bytes that an operation of these sizes works in, besides what it reads and computes.
    fn workspace(&self, _sizes: Sizes) -> u64 {
        0
    }

    /// The element type of what it reads, and of what it computes.
    fn elements(&self) -> (Element, Element) {
        (Element::F32, Element::F32)
    }

    /// What a share of it computes from what is read: unless it says something else, the value that it
    /// computes, from the whole values that it reads.
    ///
    /// # Errors
    /// What should have been read.
    fn content(
        &self,
        _id: OperatorId,
        _share: Span<Share>,
        read: &[Option<Content>],
    ) -> Result<Content, OperandMismatch> {
        let mut values = self.reads().into_iter().enumerate();
        values.try_for_each(|(at, value)| OperandMismatch::unless(read, at, value))?;
        Ok(Content::Value(self.makes()))
    }

    /// The work of an operation of these sizes.
    fn work(&self, _sizes: Sizes) -> Work {
        Work::default()
    }
}

/// An operator with its attributes.
#[derive(Clone, PartialEq, Debug)]
pub enum Operator {
    /// The embedding, which gives the first rows of the residual stream.
    Embed(Embed),
    /// An input of the model, as it is.
    Input(Input),
    /// A norm of whole rows.
    Norm(Norm),
    /// A matrix product with what follows it on each row.
    Product(Product),
    /// Attention over the rows of a text.
    Attention(Attention),
    /// A residual addition.
    Add(Add),
    /// Pooling of an image.
    Pool(Pool),
    /// An activation function on its own.
    Activate(Activate),
}

impl Operator {
    /// The operator, by the answers that all of them give.
    pub fn operate(&self) -> &dyn Operate {
        match self {
            Self::Embed(operator) => operator,
            Self::Input(operator) => operator,
            Self::Norm(operator) => operator,
            Self::Product(operator) => operator,
            Self::Attention(operator) => operator,
            Self::Add(operator) => operator,
            Self::Pool(operator) => operator,
            Self::Activate(operator) => operator,
        }
    }
}

/// A residual addition, and the norm that follows it at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddNorm {
    /// The residual addition.
    pub add: OperatorId,
    /// The norm that follows it.
    pub norm: OperatorId,
}

/// The operators of a layer of a transformer, by their place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerOperators {
    /// The norm that computes the rows that attention reads; `None` where they are the residual itself.
    pub norm: Option<OperatorId>,
    /// The product that computes queries, keys and values.
    pub qkv: OperatorId,
    /// The attention over these.
    pub attention: OperatorId,
    /// The output product of attention.
    pub output: OperatorId,
    /// The first product of the MLP.
    pub up: OperatorId,
    /// The second product of the MLP.
    pub down: OperatorId,
    /// The residual addition and norm after attention.
    pub after_attention: AddNorm,
    /// The residual addition and norm after the MLP; with a parallel residual it is the same as after attention.
    pub after_mlp: AddNorm,
}

/// The classification head, which reads one row.
#[derive(Clone, PartialEq, Debug)]
pub struct ClassOperators {
    /// A dense layer, and the activation function that follows it.
    pub dense: Option<(OperatorId, Option<ClassActivation>)>,
    /// The norm behind the dense layer.
    pub norm: Option<Norm>,
    /// The product that gives the logits.
    pub output: OperatorId,
    /// How many classes there are.
    pub labels: u32,
}

/// A model as values, operators and weights.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct OperatorGraph {
    /// All values, by their ids.
    pub values: Vec<Value>,
    /// Values that come from outside, which no operator computes.
    pub inputs: Vec<ValueId>,
    /// The operators, each after those that it reads from.
    pub operators: Vec<Operator>,
    /// All weights, by their ids.
    pub weights: Vec<Weight>,
    /// The length of each weight that is a vector; 0 of a matrix.
    pub widths: Vec<u32>,
    /// The operators of each layer.
    pub layers: Vec<LayerOperators>,
    /// The operator that computes the first rows.
    pub embed: OperatorId,
    /// The operators that are applied to each of these rows before the first block.
    pub entry: Vec<OperatorId>,
    /// The rows after the last norm, which heads read.
    pub last: ValueId,
    /// The product that gives logits of the vocabulary; `None` without a language head.
    pub language: Option<OperatorId>,
    /// The operators that give logits of classes; `None` without a classification head.
    pub classes: Option<ClassOperators>,
    /// The id of each weight.
    ids: HashMap<Weight, WeightId>,
}

impl OperatorGraph {
    /// An operator; none where the id points nowhere.
    pub fn get(&self, id: OperatorId) -> Option<&Operator> {
        self.operators.get(id.0 as usize)
    }
    /// A product; none where the id is of something else.
    pub fn product(&self, id: OperatorId) -> Option<&Product> {
        match self.get(id)? {
            Operator::Product(product) => Some(product),
            _ => None,
        }
    }
    /// The operation that computes a device's share of a product of a layer, with this assignment; none where
    /// the id is of something else.
    pub fn product_of(&self, id: OperatorId, part: &Assignment, layer: u32) -> Option<OpKind> {
        let product = self.product(id)?;
        let share = product.cut.map_or(Span::empty(), |cut| cut.held(part, layer));
        Some(OpKind::Product { operator: id, kernel: product.kernel, share })
    }
    /// A norm; none where the id is of something else.
    pub fn norm(&self, id: OperatorId) -> Option<&Norm> {
        match self.get(id)? {
            Operator::Norm(norm) => Some(norm),
            _ => None,
        }
    }
    /// An attention; none where the id is of something else.
    pub fn attention(&self, id: OperatorId) -> Option<&Attention> {
        match self.get(id)? {
            Operator::Attention(attention) => Some(attention),
            _ => None,
        }
    }
    /// A residual addition; none where the id is of something else.
    pub fn add(&self, id: OperatorId) -> Option<&Add> {
        match self.get(id)? {
            Operator::Add(add) => Some(add),
            _ => None,
        }
    }
    /// The heads of the first layer's queries, keys and values; none without layers. All layers have heads of
    /// the same width.
    pub fn heads(&self) -> Option<&Heads> {
        self.product(self.layers.first()?.qkv)?.heads.as_ref()
    }
    /// The rotary positions that its layers have, each once.
    pub fn rotations(&self) -> Vec<Arc<Rotary>> {
        let mut all: Vec<Arc<Rotary>> = Vec::new();
        for layer in &self.layers {
            let heads = self.product(layer.qkv).and_then(|product| product.heads.as_ref());
            let Some(rotary) = heads.and_then(|heads| heads.rotary.as_ref()) else { continue };
            if !all.iter().any(|known| Arc::ptr_eq(known, rotary)) {
                all.push(rotary.clone());
            }
        }
        all
    }
    /// How many classes its head tells apart; 0 without a classification head.
    pub fn labels(&self) -> u32 {
        self.classes.as_ref().map_or(0, |classes| classes.labels)
    }
    /// The id of a weight; none where the model does not have it.
    pub fn weight(&self, weight: Weight) -> Option<WeightId> {
        self.ids.get(&weight).copied()
    }
    /// The ids and attentions of all layers, in order.
    pub fn attentions(&self) -> impl Iterator<Item = (OperatorId, &Attention)> {
        self.layers.iter().filter_map(|layer| {
            self.attention(layer.attention).map(|attention| (layer.attention, attention))
        })
    }
    /// What an operation reads that it may overwrite, as each element that it computes takes the place of one
    /// that it has read: (the tensor that is read, the one that is written).
    pub(crate) fn in_place(&self, op: &Operation, of: &[Tensor]) -> Option<(TensorId, TensorId)> {
        let at = self.get(op.kind.operator()?)?.operate().in_place()?;
        let (read, made) = (op.reads.get(at)?, op.writes.first()?);
        let place = |tensor: TensorId| {
            let Tensor { rows, width, memory, element, .. } = *of.get(tensor.0 as usize)?;
            Some((rows, width, memory, element))
        };
        let alike = (read.rows, read.columns) == (made.rows, made.columns)
            && place(read.tensor) == place(made.tensor);
        let once = op.reads.iter().filter(|region| region.tensor == read.tensor).count() == 1;
        (alike && once).then_some((read.tensor, made.tensor))
    }
    /// The products whose matrices devices share, in the order in which they are needed.
    pub fn shared(&self) -> impl Iterator<Item = (OperatorId, &Product)> {
        let all = (0..).map(OperatorId).zip(&self.operators);
        all.filter_map(|(id, operator)| match operator {
            Operator::Product(product) if product.cut.is_some() => Some((id, product)),
            _ => None,
        })
    }
    /// The vectors that each device holds: all but the biases of shared products.
    pub fn vectors(&self) -> impl Iterator<Item = (WeightId, Vector)> {
        let shared: HashSet<WeightId> =
            self.shared().flat_map(|(_, product)| product.biases.iter().copied()).collect();
        let all = (0..).map(WeightId).zip(&self.weights);
        all.filter_map(move |(id, weight)| match weight {
            Weight::Vector(vector) if !shared.contains(&id) => Some((id, *vector)),
            _ => None,
        })
    }
    /// The shares of a product that a device of this assignment has.
    pub fn share(&self, product: &Product, assignment: &Assignment) -> Span<Share> {
        let layer = self.layer(product);
        product.cut.map_or(Span::empty(), |cut| cut.held(assignment, layer))
    }
    /// The biases of a product, one for each of its matrices where it has any.
    pub fn biases(&self, product: &Product) -> impl Iterator<Item = Vector> {
        product.biases.iter().filter_map(|id| match self.weights.get(id.0 as usize)? {
            Weight::Vector(vector) => Some(*vector),
            Weight::Matrix(_) => None,
        })
    }
    /// The layer of a product; the number of layers for what follows them.
    pub fn layer(&self, product: &Product) -> u32 {
        self.values.get(product.output.0 as usize).map_or(0, |value| value.layer)
    }

    /// Checks that values, operators and weights fit together: each operator reads what others computed
    /// before, and its result has as many columns as its rule says.
    ///
    /// # Errors
    /// The operator that does not fit, and the reason, for people.
    pub fn check(&self) -> Result<(), String> {
        let mut made = vec![false; self.values.len()];
        for input in &self.inputs {
            made[input.0 as usize] = true;
        }
        for (at, operator) in self.operators.iter().enumerate() {
            let wrong = |why: String| Err(format!("operator {at} ({operator:?}): {why}"));
            let operate = operator.operate();
            let mut read = SmallVec::<[Axes; 2]>::new();
            for value in operate.reads() {
                if !made.get(value.0 as usize).copied().unwrap_or(false) {
                    return wrong(format!("value {} is not made before", value.0));
                }
                read.push(self.values[value.0 as usize].axes);
            }
            if operate.weights().iter().any(|id| id.0 as usize >= self.weights.len()) {
                return wrong("it names a weight that is not there".to_owned());
            }
            let out = operate.makes();
            let Some(value) = self.values.get(out.0 as usize) else {
                return wrong("it makes a value that is not there".to_owned());
            };
            match operate.shape(&read) {
                Ok(made) if made == value.axes => {}
                Ok(made) => return wrong(format!("it makes {made:?} of {:?}", value.axes)),
                Err(why) => return wrong(why),
            }
            made[out.0 as usize] = true;
        }
        Ok(())
    }
}
