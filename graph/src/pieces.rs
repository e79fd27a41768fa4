//! The pieces in which a shard is read from disk: its matrices, or columns of them.

use crate::holdings::{Held, Part};
use galaxy_common::{
    Assignment, Bytes, Column, DevicePlan, PIECE_ALIGNMENT, Span, Streaming, WeightFormat,
};
use galaxy_model::ModelSpec;

/// Pieces are cut between so many columns: what a kernel takes at a time.
const CUT: u32 = 2 * WeightFormat::PANEL;
/// Bytes of the checksum behind each piece.
const CHECKSUM: u64 = 4;

/// One of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Of which matrix.
    pub held: Held,
    /// The columns of the product that it makes.
    pub columns: Span<Column>,
    /// What of the model's matrices is in it.
    pub parts: Vec<Part>,
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
    pub fn first_planes(&self, spec: &ModelSpec, format: WeightFormat, planes: u32) -> Self {
        let planes = planes.min(format.planes());
        let held = |inputs, outputs| format.held_planes(inputs, outputs, planes);
        Self { bytes: self.held.bytes_by(spec, &self.parts, held), ..self.clone() }
    }
}

/// The pieces of the shard of an assignment, in the order in which a program needs them first, in this format;
/// a piece has at most so many bytes, if it can be cut.
///
/// Queries, keys and values stay together: what follows their product goes over whole heads.
pub fn pieces(
    spec: &ModelSpec,
    assignment: &Assignment,
    format: WeightFormat,
    most: Bytes,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for held in Held::in_order(spec) {
        let parts = held.parts(spec, assignment);
        let Some(first) = parts.first() else { continue };
        let rows = first.inputs.clone();
        let bytes = |parts: &[Part]| held.bytes(spec, format, parts);
        let all = bytes(&parts);
        if matches!(held, Held::Qkv(_)) {
            let columns: usize = parts.iter().map(|part| part.outputs.len()).sum();
            let columns = Span::first(columns as u32);
            pieces.push(Piece { held, columns, parts, bytes: all });
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
            let cut = |part: &Part| {
                let start = part.outputs.start;
                let outputs = start + columns.start()..start + columns.end();
                Part { matrix: part.matrix, inputs: rows.clone(), outputs }
            };
            let parts: Vec<Part> = parts.iter().map(cut).collect();
            pieces.push(Piece { held, columns, bytes: bytes(&parts), parts });
        }
    }
    pieces
}

/// The pieces of a device that reads its weights from disk; none of one that does not.
pub fn of_device(spec: &ModelSpec, device: &DevicePlan) -> Vec<Piece> {
    let streaming = device.streaming.as_ref();
    let pieces = |s: &Streaming| pieces(spec, &device.prefill, s.format, s.piece);
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
    for Piece { held, columns, parts, bytes } in pieces {
        // Other words only make a file foreign, and then it is written again.
        tell(&format!("{held:?} {columns:?} {parts:?} {bytes}"));
    }
    *hasher.finalize().as_bytes()
}
