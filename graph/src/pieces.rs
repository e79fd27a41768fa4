//! The pieces in which a shard is read from disk: its matrices, or columns of them.

use crate::{
    holdings::WeightSlice,
    operators::{OperatorGraph, OperatorId},
};
use galaxy_common::{
    Assignment, Bytes, Column, DevicePlan, PIECE_ALIGNMENT, Span, Streaming, WeightFormat,
};

/// Pieces are cut between so many columns: what a kernel takes at a time.
const CUT: u32 = 2 * WeightFormat::PANEL;
/// Bytes of the checksum behind each piece.
const CHECKSUM: u64 = 4;

/// One of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Of which product.
    pub operator: OperatorId,
    /// The columns of the product that it makes.
    pub columns: Span<Column>,
    /// What of the model's matrices is in it.
    pub slices: Vec<WeightSlice>,
    /// Bytes of its values, packed as kernels read them.
    pub bytes: u64,
}

impl Piece {
    /// Bytes that it takes in a file, and in the buffer that it is read into: with its checksum, in whole
    /// blocks.
    pub fn stored(&self) -> u64 {
        (self.bytes + CHECKSUM).next_multiple_of(PIECE_ALIGNMENT)
    }

    /// Its first so many bit planes, where it is stored plane by plane, the most significant first: as many
    /// of its first bytes, and all that a request holds that selects no more of them.
    pub fn first_planes(&self, graph: &OperatorGraph, format: WeightFormat, planes: u32) -> Self {
        let planes = planes.min(format.planes());
        let held = |inputs, outputs| format.held_planes(inputs, outputs, planes);
        let product = graph.product(self.operator);
        let bytes = product.map_or(0, |product| product.bytes_of(&self.slices, held));
        Self { bytes, ..self.clone() }
    }
}

/// The pieces of the shard of an assignment, in the order in which a program needs them first, in this format;
/// a piece has at most so many bytes, if it can be cut.
///
/// Queries, keys and values stay together: what follows their product goes over whole heads.
pub fn pieces(
    graph: &OperatorGraph,
    assignment: &Assignment,
    format: WeightFormat,
    most: Bytes,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (operator, product) in graph.shared() {
        let slices = graph.slices(product, assignment);
        let Some(first) = slices.first() else { continue };
        let rows = first.inputs.clone();
        let bytes = |slices: &[WeightSlice]| product.bytes(format, slices);
        let all = bytes(&slices);
        if product.heads.is_some() {
            let columns: usize = slices.iter().map(|slice| slice.outputs.len()).sum();
            let columns = Span::first(columns as u32);
            pieces.push(Piece { operator, columns, slices, bytes: all });
            continue;
        }
        // Gate and up columns of a pair stand in one piece.
        let columns = first.outputs.len() as u32;
        let step = u64::from(columns).saturating_mul(most.0) / all.max(1);
        let step = (step.min(u64::from(columns)) as u32 / CUT * CUT).max(CUT);
        // As even as can be.
        let count = columns.div_ceil(step);
        let step = columns.div_ceil(count).next_multiple_of(CUT);
        for from in (0..columns).step_by(step as usize) {
            let columns = Span::new(from, columns.min(from + step));
            let cut = |slice: &WeightSlice| {
                let start = slice.outputs.start;
                let outputs = start + columns.start()..start + columns.end();
                WeightSlice { matrix: slice.matrix, inputs: rows.clone(), outputs }
            };
            let slices: Vec<_> = slices.iter().map(cut).collect();
            pieces.push(Piece { operator, columns, bytes: bytes(&slices), slices });
        }
    }
    pieces
}

/// The pieces of a device that reads its weights from disk; none of one that does not.
pub fn of_device(graph: &OperatorGraph, device: &DevicePlan) -> Vec<Piece> {
    let streaming = device.streaming.as_ref();
    let pieces = |s: &Streaming| pieces(graph, &device.holds(), s.format, s.piece);
    streaming.map_or_else(Vec::new, pieces)
}

/// What a file of these pieces is of: two that are equal hold the same bytes. `fingerprint` is the model's, and
/// `format` names how values are stored.
pub fn identity(fingerprint: &str, format: &str, pieces: &[Piece]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let mut tell = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    tell(fingerprint);
    tell(format);
    for Piece { operator, columns, slices, bytes } in pieces {
        // Other words only make a file foreign, and then it is written again.
        tell(&format!("{operator:?} {columns:?} {slices:?} {bytes}"));
    }
    *hasher.finalize().as_bytes()
}
