//! Batches: sequences packed into programs of at most `max_rows` rows.

use crate::error::RequestError;
use galaxy_common::{BatchShape, Segment, Wanted};
use galaxy_engine::compute::Inputs;
use galaxy_model::ModelSpec;

/// The most pixel values of one program: far below what a message may have.
const MAX_VALUES: usize = 6 << 20;

/// One sequence of a request.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Sequence {
    /// How many rows it has: at least one.
    pub(super) rows: u32,
    pub(super) content: RowContent,
}

/// The inputs of a sequence's rows.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum RowContent {
    /// A token id for each row, and the type of each token; no types where all are 0.
    Tokens(Vec<u32>, Vec<u8>),
    /// The pixel values of image patches.
    Patches(Vec<f32>),
}

impl From<Vec<u32>> for Sequence {
    fn from(ids: Vec<u32>) -> Self {
        Self::typed(ids, Vec::new())
    }
}

impl Sequence {
    /// A sequence of tokens, each of its type; no types where all are 0.
    pub(super) fn typed(ids: Vec<u32>, types: Vec<u8>) -> Self {
        // Checked against the model's positions before.
        Self { rows: ids.len() as u32, content: RowContent::Tokens(ids, types) }
    }
}

/// The sequences, as far as the model reads them for what is wanted.
///
/// # Errors
/// When the model reads some tokens of one otherwise than they are run here.
pub(super) fn readable(
    spec: &ModelSpec,
    mut sequences: Vec<Sequence>,
    wanted: Wanted,
) -> Result<Vec<Sequence>, RequestError> {
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let RowContent::Tokens(ids, types) = &mut sequence.content else { continue };
        let count = spec.readable(ids, wanted);
        let invalid = |why| RequestError::Invalid { why: format!("sequence {index}: {why}") };
        ids.truncate(count.map_err(invalid)?);
        types.truncate(ids.len());
        sequence.rows = ids.len() as u32;
    }
    Ok(sequences)
}

impl RowContent {
    fn values(&self) -> usize {
        match self {
            Self::Tokens(..) => 0,
            Self::Patches(values) => values.len(),
        }
    }
}

/// The sequences of one program.
pub(super) struct Batch {
    /// Which sequences of the request these are, in the order of the segments.
    pub(super) indices: Vec<usize>,
    /// The shape of the batch.
    pub(super) shape: BatchShape,
    /// The inputs of its rows, one sequence after another.
    pub(super) inputs: Inputs,
}

/// Packs sequences of one kind into batches of at most `max_rows` rows. Sequences of like length come
/// together, so that the rows of devices and the tiles are alike. Each sequence fits.
pub(super) fn pack(
    sequences: &[Sequence],
    max_rows: u32,
    wanted: Wanted,
) -> Result<Vec<Batch>, RequestError> {
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by_key(|&i| sequences[i].rows);
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let (mut rows, mut values) = (0, 0);
    for index in order {
        let (length, more) = (sequences[index].rows, sequences[index].content.values());
        match groups.last_mut() {
            Some(group) if rows + length <= max_rows && values + more <= MAX_VALUES => {
                rows += length;
                values += more;
                group.push(index);
            }
            _ => {
                (rows, values) = (length, more);
                groups.push(vec![index]);
            }
        }
    }
    groups.into_iter().map(|indices| batch(sequences, indices, wanted)).collect()
}

fn batch(
    sequences: &[Sequence],
    mut indices: Vec<usize>,
    wanted: Wanted,
) -> Result<Batch, RequestError> {
    indices.sort_unstable();
    let segment = |(slot, &index): (u32, &usize)| {
        let rows = sequences[index].rows;
        Segment { slot, context_len: 0, cached: false, rows, wanted }
    };
    let segments = (0..).zip(&indices).map(segment).collect();
    let shape =
        BatchShape::new(segments).map_err(|e| RequestError::Invalid { why: e.to_string() })?;
    let (mut ids, mut types, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for &index in &indices {
        match &sequences[index].content {
            RowContent::Tokens(tokens, kinds) => {
                ids.extend_from_slice(tokens);
                types.extend_from_slice(kinds);
                types.resize(ids.len(), 0);
            }
            RowContent::Patches(patches) => values.extend_from_slice(patches),
        }
    }
    let inputs = match values.is_empty() {
        true => Inputs::typed(ids, types),
        false => Inputs::Patches { first: 0, values: values.into() },
    };
    Ok(Batch { indices, shape, inputs })
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
            let sequences: Vec<Sequence> =
                lengths.iter().enumerate().map(|(i, n)| vec![i as u32; *n].into()).collect();
            let batches = pack(&sequences, 20, Wanted::Hidden).unwrap();
            let mut seen = vec![0; sequences.len()];
            for batch in &batches {
                prop_assert!(batch.shape.rows() <= 20);
                let Inputs::Tokens(tokens) = &batch.inputs else { panic!("tokens") };
                prop_assert_eq!(batch.shape.rows() as usize, tokens.len());
                for ((rows, _), index) in batch.shape.placed().zip(&batch.indices) {
                    let sequence = Sequence::from(tokens[rows.range()].to_vec());
                    prop_assert_eq!(&sequence, &sequences[*index]);
                    seen[*index] += 1;
                }
            }
            prop_assert!(seen.iter().all(|n| *n == 1));
        }
    }

    #[test]
    fn token_types_stay_with_their_tokens_in_a_batch() {
        let pair = Sequence::typed(vec![1, 2, 3], vec![0, 1, 1]);
        let batches = pack(&[vec![7; 2].into(), pair], 64, Wanted::Classes).unwrap();
        let want = Inputs::typed(vec![7, 7, 1, 2, 3], vec![0, 0, 0, 1, 1]);
        assert_eq!(batches[0].inputs, want);
        assert!(matches!(want, Inputs::Typed { .. }));
    }

    #[test]
    fn a_few_short_texts_fit_into_one_batch() {
        let sequences = [vec![1; 5], vec![2; 9], vec![3; 2]].map(Sequence::from);
        let batches = pack(&sequences, 64, Wanted::Classes).unwrap();
        assert_eq!(batches.len(), 1);
        assert_eq!(batches[0].indices, [0, 1, 2]);
    }
}
