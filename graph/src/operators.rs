//! A model as an operator graph: values, the operators that make them, and weights by id.
//!
//! [`OperatorGraph::of`] makes it from a [`galaxy_model::ModelSpec`]. Operations of programs name operators
//! of it, and whoever runs, proves or costs an operation asks the operator, never the model's description.
//! Each kind of operator is one file: what it reads and makes, by what devices may share it, what its result
//! is made of, and what it takes.

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
pub use content::{Content, Sums, Unlike};
pub use embed::Embed;
pub use input::Input;
pub use norm::Norm;
pub use pool::{Pool, Pooling};
pub(crate) use product::shared;
pub use product::{HeadNorms, Heads, Product, Rotary, Slices, Within};

use crate::program::{Element, OpKind, Operation, Region, Tensor, TensorId};
use galaxy_common::{Assignment, Share, Span};
use galaxy_model::{ClassActivation, Matrix, Vector};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone,
            Copy,
            PartialEq,
            Eq,
            PartialOrd,
            Ord,
            Hash,
            Debug,
            Default,
            Serialize,
            Deserialize,
        )]
        pub struct $name(pub u32);
    };
}
id!(
    /// An index into [`OperatorGraph::operators`].
    OperatorId
);
id!(
    /// An index into [`OperatorGraph::values`].
    ValueId
);
id!(
    /// An index into [`OperatorGraph::weights`].
    WeightId
);

/// A value of the graph.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Value {
    /// What it is, for messages.
    pub name: &'static str,
    /// Of which layer; the number of layers for what follows them.
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
    /// Of two axes.
    Matrix(Matrix),
    /// Of one.
    Vector(Vector),
}

/// What is counted along an axis by which operators are cut.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Axis {
    /// Query heads.
    Heads,
    /// Inner columns of an MLP.
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

/// On which side of an operator the axis is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Side {
    /// A share makes some columns, of all that is read.
    Outputs,
    /// A share reads some columns, and what it makes is a term of a sum.
    Inputs,
}

/// By what devices may share an operator, besides rows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cut {
    /// Along which axis.
    pub axis: Axis,
    /// On which side.
    pub side: Side,
    /// Shares of the whole.
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
    /// Rows that it makes.
    pub rows: u32,
    /// Columns that it reads.
    pub inputs: u32,
    /// Columns that it makes.
    pub outputs: u32,
    /// Pairs of a query row and a key row that it sees.
    pub pairs: f64,
}

impl Sizes {
    /// Those of an operation, but for pairs.
    pub(crate) fn of(op: &Operation) -> Self {
        let columns = |region: Option<&Region>| region.map_or(0, |region| region.columns.len());
        let rows = op.writes.first().map_or(0, |region| region.rows.len());
        let (inputs, outputs) = (columns(op.reads.first()), columns(op.writes.first()));
        Self { rows, inputs, outputs, pairs: 0.0 }
    }
}

/// What an operation takes, however it is done.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Work {
    /// Multiplications and additions; of what only passes over rows 0.
    pub operations: f64,
    /// The matrix that is read, as (inputs, outputs).
    pub weights: (u64, u64),
}

/// What is asked of every operator.
pub trait Operate {
    /// What it is, with those of its attributes that an engine may not have: for messages.
    fn name(&self) -> String;

    /// The values that it reads. What an operation reads beside them counts as what it makes.
    fn reads(&self) -> SmallVec<[ValueId; 2]>;

    /// The value that it makes.
    fn makes(&self) -> ValueId;

    /// The weights that it reads.
    fn weights(&self) -> SmallVec<[WeightId; 8]> {
        SmallVec::new()
    }

    /// The axes of what it makes, from those of what it reads.
    ///
    /// # Errors
    /// In words: why they do not fit.
    fn shape(&self, read: &[Axes]) -> Result<Axes, String>;

    /// Whether devices share it by rows alone: each has it whole.
    fn is_by_rows(&self) -> bool {
        false
    }

    /// By what devices may share it, besides rows.
    fn cut(&self) -> Option<Cut> {
        None
    }

    /// Columns that a share reads first, and columns that it makes; none of an operator that is not cut.
    fn share_columns(&self, _share: Span<Share>) -> Option<(u32, u32)> {
        None
    }

    /// Which rows of a text or image it reads at `at` to make some rows.
    fn reach(&self, _at: usize) -> Reach {
        Reach::Same
    }

    /// Which pixels of a row of an image it reads at `at` to make some pixels.
    fn reach_in_row(&self, _at: usize) -> Reach {
        Reach::All
    }

    /// Which of what it reads it may overwrite with what it makes, element by element.
    fn in_place(&self) -> Option<usize> {
        None
    }

    /// Bytes that an operation of these sizes works in, besides what it reads and makes.
    fn workspace(&self, _sizes: Sizes) -> u64 {
        0
    }

    /// What each element is of what it reads, and of what it makes.
    fn elements(&self) -> (Element, Element) {
        (Element::F32, Element::F32)
    }

    /// What a share of it makes of what is read: unless it says something else, the value that it makes, of
    /// the whole values that it reads.
    ///
    /// # Errors
    /// What should have been read.
    fn content(
        &self,
        _id: OperatorId,
        _share: Span<Share>,
        read: &[Option<Content>],
    ) -> Result<Content, Unlike> {
        let mut values = self.reads().into_iter().enumerate();
        values.try_for_each(|(at, value)| Unlike::unless(read, at, value))?;
        Ok(Content::Value(self.makes()))
    }

    /// What an operation of these sizes takes.
    fn work(&self, _sizes: Sizes) -> Work {
        Work::default()
    }
}

/// An operator with its attributes.
#[derive(Clone, PartialEq, Debug)]
pub enum Operator {
    /// Rows of the residual stream, out of what came in.
    Embed(Embed),
    /// What came in, as it is.
    Input(Input),
    /// A norm of whole rows.
    Norm(Norm),
    /// A matrix product with what follows it on each row.
    Product(Product),
    /// Attention.
    Attention(Attention),
    /// The residual addition.
    Add(Add),
    /// Pooling of an image.
    Pool(Pool),
    /// An activation on its own.
    Activate(Activate),
}

impl Operator {
    /// It, as what is asked of all.
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
pub struct Join {
    /// The addition.
    pub add: OperatorId,
    /// The norm.
    pub norm: OperatorId,
}

/// The operators of a layer of a transformer, by their place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerOperators {
    /// What makes the rows that attention reads, where they are not the residual itself.
    pub norm: Option<OperatorId>,
    /// Queries, keys and values.
    pub qkv: OperatorId,
    /// Attention.
    pub attention: OperatorId,
    /// Its output product.
    pub output: OperatorId,
    /// The first product of the MLP.
    pub up: OperatorId,
    /// Its second.
    pub down: OperatorId,
    /// What follows attention,
    pub after_attention: Join,
    /// and what follows the MLP: the same where both stand beside each other.
    pub after_mlp: Join,
}

/// The head that tells classes apart, on top of one row.
#[derive(Clone, PartialEq, Debug)]
pub struct ClassOperators {
    /// A dense layer, and what follows it,
    pub dense: Option<(OperatorId, Option<ClassActivation>)>,
    /// the norm behind that,
    pub norm: Option<Norm>,
    /// and the product that gives logits.
    pub output: OperatorId,
    /// Classes.
    pub labels: u32,
}

/// A model as values, operators and weights.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct OperatorGraph {
    /// The values.
    pub values: Vec<Value>,
    /// Those that come in, and no operator makes.
    pub inputs: Vec<ValueId>,
    /// The operators, each after those that it reads from.
    pub operators: Vec<Operator>,
    /// The weights.
    pub weights: Vec<Weight>,
    /// Values of each of them that is a vector.
    pub widths: Vec<u32>,
    /// The operators of each layer.
    pub layers: Vec<LayerOperators>,
    /// What makes the first rows,
    pub embed: OperatorId,
    /// and what is done to each of them before the first block.
    pub entry: Vec<OperatorId>,
    /// The rows after the last norm, which heads read.
    pub last: ValueId,
    /// What makes logits of tokens.
    pub language: Option<OperatorId>,
    /// What makes logits of classes.
    pub classes: Option<ClassOperators>,
    /// Where each weight is in `weights`.
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
    /// The operation of a device of this assignment that is a product of a layer; none where the id is of
    /// something else.
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
    /// What follows the first layer's queries, keys and values; none without layers. All layers have heads of
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
    /// Classes that its head tells apart; 0 without a class head.
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
    /// What an operation reads that it may overwrite, as one element it makes takes the place of one that it
    /// has read: (the tensor that is read, the one that is written).
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

    /// Whether values, operators and weights fit together: each reads what others made before, and has as
    /// many columns as its rule says.
    ///
    /// # Errors
    /// In words: which does not, and why.
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
