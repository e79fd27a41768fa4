//! What a device computes in a block, whoever's the rows are and however they came.

use super::{
    build::{Builder, Value},
    kv_span, visible,
};
use crate::program::{Block, JoinOf, NormOf, OpKind, Product, Region, Role};
use galaxy_common::{BatchShape, BlockAssignment, Head, Row, Span};
use galaxy_model::{ModelSpec, NormPlace};

/// What the first products of a block make, as far as a device computes in it. Where both blocks of a
/// layer stand beside each other it is both.
#[derive(Clone, Copy, Default)]
pub(super) struct Inside {
    /// The tensor of queries, and that of keys and values: the same, but where rows are cut.
    pub qkv: Option<(Value, Value)>,
    /// Inner rows of the MLP.
    pub inner: Option<Value>,
}

impl Inside {
    pub fn is_empty(self) -> bool {
        self.qkv.is_none() && self.inner.is_none()
    }
}

/// The blocks of a layer that rows go through one after another.
pub(super) fn blocks(spec: &ModelSpec) -> &'static [Block] {
    match spec.parallel {
        true => &[Block::Attention],
        false => &[Block::Attention, Block::Mlp],
    }
}

/// What is computed in a block: heads, and columns.
fn inside(spec: &ModelSpec, block: Block) -> (bool, bool) {
    let attention = block == Block::Attention;
    (attention, !attention || spec.parallel)
}

/// Whether a device of this part computes in a block.
pub(super) fn computes(spec: &ModelSpec, part: &BlockAssignment, block: Block) -> bool {
    let (heads, columns) = inside(spec, block);
    heads && !part.heads.is_empty() || columns && !part.columns.is_empty()
}

/// Room for what the first products of a block make of some rows.
pub(super) fn room(
    b: &mut Builder,
    spec: &ModelSpec,
    part: &BlockAssignment,
    block: Block,
    rows: Span<Row>,
) -> Inside {
    let (heads, columns) = inside(spec, block);
    let width = (part.heads.len() + 2 * kv_span(spec, part.heads).len()) * spec.head_width;
    let mut tensor = |there, role, width| (there && width > 0).then(|| b.tensor(role, rows, width));
    let qkv = tensor(heads, Role::Qkv, width);
    let inner = tensor(columns, Role::Inner, part.columns.len());
    Inside { qkv: qkv.map(|qkv| (qkv, qkv)), inner }
}

/// The first products of a block, of some rows.
pub(super) fn first_products(
    b: &mut Builder,
    layer: u32,
    normed: Region,
    inside: Inside,
    rows: Span<Row>,
) {
    let outputs = [(Product::Qkv, inside.qkv.map(|(qkv, _)| qkv)), (Product::Up, inside.inner)];
    for (product, to) in outputs {
        if let Some(to) = to {
            b.compute(OpKind::Product { layer, product }, &[normed], &[to.rows(rows)]);
        }
    }
}

/// Attention, and the last products of a block, of some rows: the device's partial sums.
pub(super) fn last_products(
    b: &mut Builder,
    (spec, shape): (&ModelSpec, &BatchShape),
    layer: u32,
    heads: Span<Head>,
    inside: Inside,
    rows: Span<Row>,
) -> Value {
    let mut sum: Option<Value> = None;
    let mut product = |b: &mut Builder, product, from: Region| {
        let out = b.tensor(Role::Partial, rows, spec.hidden);
        let mut reads = vec![from];
        reads.extend(sum.map(Value::all));
        b.compute(OpKind::Product { layer, product }, &reads, &[out.all()]);
        sum = Some(out);
    };
    if let Some(qkv) = inside.qkv {
        let context = attend(b, spec, shape, layer, heads, qkv, rows);
        product(b, Product::AttentionOutput, context.all());
    }
    if let Some(inner) = inside.inner {
        product(b, Product::Down, inner.rows(rows));
    }
    sum.expect("who computes in a block has one of its products")
}

/// The residual addition after a block, with the norm that follows at once; and whether the norm
/// has a tensor of its own.
pub(super) fn join_kind(
    spec: &ModelSpec,
    layer: u32,
    block: Block,
    partial: bool,
    staged: bool,
) -> (OpKind, bool) {
    let post = spec.norm_place == NormPlace::Post;
    // Where both blocks are one, it ends with the MLP.
    let attention = block == Block::Attention && !spec.parallel;
    let norm = match (attention, post) {
        (true, true) => NormOf::Attention(layer),
        (true, false) | (false, true) => NormOf::Mlp(layer),
        (false, false) if layer + 1 < spec.layers => NormOf::Attention(layer + 1),
        (false, false) => NormOf::Final,
    };
    let join = if attention { JoinOf::Attention } else { JoinOf::Mlp };
    (OpKind::Join { layer, join, norm, post, partial, staged }, !post)
}

/// Attention of `rows` over the queries, keys and values of the device's heads: queries stand first
/// in the rows of one tensor, keys and values last in the rows of the same or another.
fn attend(
    b: &mut Builder,
    spec: &ModelSpec,
    shape: &BatchShape,
    layer: u32,
    heads: Span<Head>,
    (from, over): (Value, Value),
    rows: Span<Row>,
) -> Value {
    let kv_heads = kv_span(spec, heads);
    let queries = heads.len() * spec.head_width;
    let keys = 2 * kv_heads.len() * spec.head_width;
    let columns = Span::new(over.width - keys, over.width);
    // Where rows are cut, keys and values are kept as they are gathered.
    if from.id == over.id {
        keep(b, shape, layer, kv_heads, over.part(rows, columns));
    }
    let context = b.tensor(Role::Context, rows, queries);
    let reads =
        [from.part(rows, Span::first(queries)), over.part(visible(spec, shape, rows), columns)];
    b.compute(OpKind::Attend { layer, heads, kv_heads }, &reads, &[context.all()]);
    context
}

/// Keeps those of the rows of `keys` that are to be kept: all that are read of keys and values.
pub(super) fn keep(
    b: &mut Builder,
    shape: &BatchShape,
    layer: u32,
    kv_heads: Span<Head>,
    keys: Region,
) {
    if shape.placed().any(|(text, segment)| segment.kept && text.overlaps(keys.rows)) {
        b.compute(OpKind::Keep { layer, kv_heads }, &[keys], &[]);
    }
}
