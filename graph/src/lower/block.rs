//! What a device computes in a block, whoever owns the rows and however they arrived.

use super::{
    Lowering,
    build::{Builder, TensorRows},
    kv_span, visible,
};
use crate::operators::AddNorm;
use crate::program::{Block, OpKind, Region, Role};
use galaxy_common::{BatchShape, BlockAssignment, Head, Row, Span};
use galaxy_model::{ModelSpec, NormPlace};

/// What the first products of a block compute, as far as the device takes part: queries, keys and values, or
/// intermediate rows of the MLP. With a parallel residual it is both.
#[derive(Clone, Copy, Default)]
pub(super) struct BlockInner {
    /// The tensor of queries, and that of keys and values: one and the same, except where rows are cut.
    pub qkv: Option<(TensorRows, TensorRows)>,
    /// Intermediate rows of the MLP.
    pub intermediate: Option<TensorRows>,
}

impl BlockInner {
    pub fn is_empty(self) -> bool {
        self.qkv.is_none() && self.intermediate.is_none()
    }
}

/// The blocks of a layer that rows go through one after another; a parallel residual counts as one.
pub(super) fn blocks(spec: &ModelSpec) -> &'static [Block] {
    match spec.parallel {
        true => &[Block::Attention],
        false => &[Block::Attention, Block::Mlp],
    }
}

/// Whether heads are computed in a block, and whether columns are.
fn inside(spec: &ModelSpec, block: Block) -> (bool, bool) {
    let attention = block == Block::Attention;
    (attention, !attention || spec.parallel)
}

/// Whether a device with this assignment computes in a block.
pub(super) fn computes(spec: &ModelSpec, part: &BlockAssignment, block: Block) -> bool {
    let (heads, columns) = inside(spec, block);
    heads && !part.heads.is_empty() || columns && !part.columns.is_empty()
}

/// Embeds rows, applies the operators that stand before the first block, and norms the rows where that block
/// reads normed ones.
pub(super) fn embed(b: &mut Builder, residual: Region, normed: Region) {
    let graph = b.graph.clone();
    let mut to = residual;
    let room =
        |b: &mut Builder| b.tensor(Role::Residual, residual.rows, residual.columns.len()).all();
    if !graph.entry.is_empty() {
        to = room(b);
    }
    b.compute(OpKind::Embed(graph.embed), &[], &[to]);
    for (at, operator) in graph.entry.iter().enumerate() {
        let from = to;
        to = if at + 1 == graph.entry.len() { residual } else { room(b) };
        b.compute(OpKind::Rows(*operator), &[from], &[to]);
    }
    norm_first(b, 0, residual, normed);
}

/// Norms rows for the first block of a layer, where it reads normed ones. Where it reads them as they are,
/// but not from the residual itself, they are copied.
pub(super) fn norm_first(b: &mut Builder, layer: u32, residual: Region, normed: Region) {
    let of = b.graph.layers.get(layer as usize);
    if let Some(norm) = of.and_then(|of| of.norm) {
        b.compute(OpKind::Rows(norm), &[residual], &[normed]);
    } else if normed.tensor != residual.tensor {
        b.compute(OpKind::Select, &[residual], &[normed]);
    }
}

/// Tensors for what the first products of a block compute of some rows.
pub(super) fn room(
    b: &mut Builder,
    spec: &ModelSpec,
    part: &BlockAssignment,
    block: Block,
    rows: Span<Row>,
) -> BlockInner {
    let (heads, columns) = inside(spec, block);
    let width = (part.heads.len() + 2 * kv_span(spec, part.heads).len()) * spec.head_width;
    let mut tensor = |there, role, width| (there && width > 0).then(|| b.tensor(role, rows, width));
    let qkv = tensor(heads, Role::Qkv, width);
    let intermediate = tensor(columns, Role::Intermediate, part.columns.len());
    BlockInner { qkv: qkv.map(|qkv| (qkv, qkv)), intermediate }
}

/// Runs the first products of a block on some rows.
pub(super) fn first_products(
    b: &mut Builder,
    layer: u32,
    normed: Region,
    inside: BlockInner,
    rows: Span<Row>,
) {
    let of = b.operators(layer);
    for (operator, to) in [(of.qkv, inside.qkv.map(|(qkv, _)| qkv)), (of.up, inside.intermediate)] {
        if let Some(to) = to {
            b.compute(b.product(layer, operator), &[normed], &[to.rows(rows)]);
        }
    }
}

/// Runs attention and the last products of a block on some rows; returns the device's partial sums.
pub(super) fn last_products(
    b: &mut Builder,
    lowering: Lowering<'_>,
    layer: u32,
    heads: Span<Head>,
    inside: BlockInner,
    rows: Span<Row>,
) -> TensorRows {
    let mut sum: Option<TensorRows> = None;
    let of = b.operators(layer);
    let mut product = |b: &mut Builder, operator, from: Region| {
        let out = b.tensor(Role::Partial, rows, lowering.spec.hidden);
        let mut reads = vec![from];
        reads.extend(sum.map(TensorRows::all));
        b.compute(b.product(layer, operator), &reads, &[out.all()]);
        sum = Some(out);
    };
    if let Some(qkv) = inside.qkv {
        let context = attend(b, lowering, layer, heads, qkv, rows);
        product(b, of.output, context.all());
    }
    if let Some(inner) = inside.intermediate {
        product(b, of.down, inner.rows(rows));
    }
    sum.expect("who computes in a block has one of its products")
}

/// The sum of a block, which is added to the residual after it.
#[derive(Clone, Copy)]
pub(super) struct BlockSum {
    /// The part of the sum that this device has computed or added up, if there is one.
    pub partial: Option<Region>,
    /// The part of the sum that came in wire format and is still to be added, if there is one.
    pub staged: Option<TensorRows>,
}

impl BlockSum {
    /// The regions of its parts.
    pub fn regions(self) -> impl Iterator<Item = Region> {
        self.partial.into_iter().chain(self.staged.map(TensorRows::all))
    }
}

impl From<TensorRows> for BlockSum {
    /// A sum that this device has computed all of.
    fn from(whole: TensorRows) -> Self {
        Self { partial: Some(whole.all()), staged: None }
    }
}

/// The residual addition after a block, with the norm that follows at once; and whether that norm has a
/// tensor of its own.
pub(super) fn add_norm_kind(
    b: &Builder,
    spec: &ModelSpec,
    layer: u32,
    block: Block,
    sum: BlockSum,
) -> (OpKind, bool) {
    let post = spec.norm_place == NormPlace::Post;
    let of = b.operators(layer);
    let AddNorm { add, norm } = match block {
        Block::Attention => of.after_attention,
        _ => of.after_mlp,
    };
    let (partial, staged) = (sum.partial.is_some(), sum.staged.is_some());
    (OpKind::AddNorm { add, norm, post, partial, staged }, !post)
}

/// Attention of `rows` over the queries, keys and values of the device's heads: queries stand first
/// in the rows of one tensor, keys and values last in the rows of the same or another.
fn attend(
    b: &mut Builder,
    lowering: Lowering<'_>,
    layer: u32,
    heads: Span<Head>,
    (from, over): (TensorRows, TensorRows),
    rows: Span<Row>,
) -> TensorRows {
    let Lowering { spec, shape, .. } = lowering;
    let kv_heads = kv_span(spec, heads);
    let queries = heads.len() * spec.head_width;
    let keys = 2 * kv_heads.len() * spec.head_width;
    let columns = Span::new(over.width - keys, over.width);
    // Where rows are cut, keys and values are cached as they are gathered.
    if from.id == over.id {
        append_kv(b, shape, layer, kv_heads, over.part(rows, columns));
    }
    let context = b.tensor(Role::Context, rows, queries);
    let reads = [
        from.part(rows, Span::first(queries)),
        over.part(visible(&b.graph, layer, shape, rows), columns),
    ];
    let operator = b.operators(layer).attention;
    b.compute(OpKind::Attend { operator, heads, kv_heads }, &reads, &[context.all()]);
    context
}

/// Puts into the KV cache the rows of `keys`, keys and values, if segments among them are to be cached.
pub(super) fn append_kv(
    b: &mut Builder,
    shape: &BatchShape,
    layer: u32,
    kv_heads: Span<Head>,
    keys: Region,
) {
    if shape.placed().any(|(text, segment)| segment.cached && text.overlaps(keys.rows)) {
        let operator = b.operators(layer).attention;
        b.compute(OpKind::AppendKv { operator, kv_heads }, &[keys], &[]);
    }
}
