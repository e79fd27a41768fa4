//! Batches: sequences packed into programs of at most so many rows.

use crate::error::RequestError;
use galaxy_common::{BatchShape, Segment, Wanted};
use std::sync::Arc;

/// The sequences of one program.
pub(super) struct Batch {
    /// Which sequences of the request, in the order of the segments.
    pub(super) indices: Vec<usize>,
    /// Their shape.
    pub(super) shape: BatchShape,
    /// Their tokens, one behind another.
    pub(super) tokens: Arc<[u32]>,
}

/// Packs sequences into batches of at most `max_rows` rows. Sequences of like length come
/// together, so that the rows of devices and the tiles are alike. Each sequence fits.
pub(super) fn pack(
    sequences: &[Vec<u32>],
    max_rows: u32,
    wanted: Wanted,
) -> Result<Vec<Batch>, RequestError> {
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by_key(|&i| sequences[i].len());
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut rows = 0;
    for index in order {
        let length = sequences[index].len();
        match groups.last_mut() {
            Some(group) if rows + length <= max_rows as usize => {
                rows += length;
                group.push(index);
            }
            _ => {
                rows = length;
                groups.push(vec![index]);
            }
        }
    }
    groups.into_iter().map(|indices| batch(sequences, indices, wanted)).collect()
}

fn batch(
    sequences: &[Vec<u32>],
    mut indices: Vec<usize>,
    wanted: Wanted,
) -> Result<Batch, RequestError> {
    indices.sort_unstable();
    let wrong = |why: String| RequestError::Invalid { why };
    let segments: Result<Vec<Segment>, RequestError> = indices
        .iter()
        .enumerate()
        .map(|(slot, &index)| {
            let number = |n: usize| u32::try_from(n).map_err(|e| wrong(e.to_string()));
            let rows = number(sequences[index].len())?;
            Ok(Segment { slot: number(slot)?, past: 0, rows, wanted })
        })
        .collect();
    let shape = BatchShape::new(segments?).map_err(|e| wrong(e.to_string()))?;
    let tokens = indices.iter().flat_map(|&i| sequences[i].iter().copied()).collect();
    Ok(Batch { indices, shape, tokens })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_sequence_is_run_once_and_no_batch_is_too_large(
            lengths in proptest::collection::vec(1_usize..=20, 1..60),
        ) {
            let sequences: Vec<Vec<u32>> =
                lengths.iter().enumerate().map(|(i, n)| vec![i as u32; *n]).collect();
            let batches = pack(&sequences, 20, Wanted::Hidden).unwrap();
            let mut seen = vec![0; sequences.len()];
            for batch in &batches {
                prop_assert!(batch.shape.rows() <= 20);
                prop_assert_eq!(batch.shape.rows() as usize, batch.tokens.len());
                for ((rows, _), index) in batch.shape.placed().zip(&batch.indices) {
                    prop_assert_eq!(&batch.tokens[rows.range()], &sequences[*index][..]);
                    seen[*index] += 1;
                }
            }
            prop_assert!(seen.iter().all(|n| *n == 1));
        }
    }

    #[test]
    fn few_short_texts_are_one_program() {
        let sequences = vec![vec![1; 5], vec![2; 9], vec![3; 2]];
        let batches = pack(&sequences, 64, Wanted::Classes).unwrap();
        assert_eq!(batches.len(), 1);
        assert_eq!(batches[0].indices, [0, 1, 2]);
    }
}
