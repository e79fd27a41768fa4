//! Where the rows of a batch are cut between devices.
//!
//! Rows follow row weights, to the row. Where attention is cut by rows and a batch has several texts, a cut
//! moves to the end of a text that lies near: a device then holds whole texts, and needs no keys and values of
//! others for them. A cut takes at most a sixteenth of what either of its neighbours has, so that no device has
//! more than an eighth on top of its share, which is what budgets count.

use galaxy_common::{
    BatchShape, Mode, Plan, Row, Span,
    plan::{Phase, own_rows},
};

/// The part of a device's rows that a cut takes at most: one in so many.
const TAKEN: u32 = 16;

/// The rows of each device of a batch.
pub(super) fn cuts(plan: &Plan, phase: Phase, shape: &BatchShape) -> Vec<Span<Row>> {
    let shares = own_rows(plan, phase, shape.rows());
    if !cuts_move(plan) {
        return shares;
    }
    let ends: Vec<u32> = shape.placed().map(|(text, _)| text.end()).collect();
    at_ends(shares, &ends, TAKEN)
}

/// Whether cuts move to the ends of texts: where devices exchange keys and values of rows.
pub(crate) fn cuts_move(plan: &Plan) -> bool {
    plan.modes.iter().any(|modes| modes.attention == Mode::Sequence)
}

/// The most rows that a device may have on top of `rows`, which are its share or a part of it.
pub fn farthest(rows: u32) -> u32 {
    rows.div_ceil(TAKEN / 2)
}

/// Moves the cuts between `shares` to the nearest of `ends`, which ascend, where that takes at most one in
/// `taken` of the rows of a device.
pub fn at_ends(mut shares: Vec<Span<Row>>, ends: &[u32], taken: u32) -> Vec<Span<Row>> {
    let sizes: Vec<u32> = shares.iter().map(|share| share.len()).collect();
    let mut before: Option<usize> = None;
    for at in (0..sizes.len()).filter(|&at| sizes[at] > 0) {
        if let Some(before) = before {
            let cut = shares[at].start();
            let reach = sizes[before].min(sizes[at]) / taken;
            let after = ends.partition_point(|&end| end < cut);
            let near = ends[after.saturating_sub(1)..].iter().take(2).copied();
            let near = near.filter(|end| end.abs_diff(cut) <= reach);
            if let Some(end) = near.min_by_key(|end| end.abs_diff(cut)) {
                shares[before] = Span::new(shares[before].start(), end);
                shares[at] = Span::new(end, shares[at].end());
            }
        }
        before = Some(at);
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_common::apportion;
    use proptest::prelude::{Strategy as Arbitrary, *};

    /// Lengths of the devices' rows, of texts of these lengths.
    fn sizes(weights: &[u32], texts: &[u32]) -> Vec<u32> {
        let (rows, ends) = placed(weights, texts);
        at_ends(rows, &ends, TAKEN).iter().map(|rows| rows.len()).collect()
    }

    fn placed(weights: &[u32], texts: &[u32]) -> (Vec<Span<Row>>, Vec<u32>) {
        let grow = |sum: &mut u32, rows: &u32| {
            *sum += rows;
            Some(*sum)
        };
        let ends: Vec<u32> = texts.iter().scan(0, grow).collect();
        (apportion(ends[ends.len() - 1], weights), ends)
    }

    #[test]
    fn cuts_move_to_ends_of_sequences_that_are_near() {
        // 682.7 rows each, of which 42 are near, and texts end at 704 and at 1344.
        assert_eq!(sizes(&[1, 1, 1], &[64; 32]), [704, 640, 704]);
        assert_eq!(sizes(&[2, 1, 1], &[64; 32]), [1024, 512, 512]);
        assert_eq!(sizes(&[16, 10, 6], &[64; 32]), [1024, 640, 384]);
        assert_eq!(sizes(&[1, 1, 1], &[64; 4]), [86, 85, 85]);
        // 170.7 rows each: 21 to the nearest end, and 10 are near.
        assert_eq!(sizes(&[1, 1, 1], &[64; 8]), [171, 171, 170]);
        assert_eq!(sizes(&[2, 1, 1], &[64; 4]), [128, 64, 64]);
        // One text stays as it was cut.
        assert_eq!(sizes(&[1, 1], &[100]), [50, 50]);
        // Of two ends, the nearer one.
        assert_eq!(sizes(&[1, 1], &[95, 7, 98]), [102, 98]);
    }

    #[test]
    fn devices_without_rows_stay_without_rows_when_cuts_move() {
        assert_eq!(sizes(&[0, 1, 0, 1, 0], &[64, 70]), [0, 64, 0, 70, 0]);
        assert_eq!(sizes(&[0, 1], &[3, 4]), [0, 7]);
        assert_eq!(sizes(&[1, 1, 1], &[1, 1]), [1, 1, 0]);
        // Few rows are not given away.
        assert_eq!(sizes(&[1, 50], &[3, 48]), [1, 50]);
    }

    fn any_batch() -> impl Arbitrary<Value = (Vec<u32>, Vec<u32>)> {
        let weights = prop::collection::vec(0u32..9, 1..7)
            .prop_filter("somebody has rows", |weights| weights.iter().any(|&w| w > 0));
        (weights, prop::collection::vec(1u32..90, 1..20))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
        #[test]
        fn cuts_cover_all_rows_and_move_at_most_the_limit((weights, texts) in any_batch()) {
            let (shares, ends) = placed(&weights, &texts);
            let cut = at_ends(shares.clone(), &ends, TAKEN);
            prop_assert_eq!(at_ends(shares.clone(), &ends, TAKEN), cut.clone());
            let mut at = 0;
            for (share, rows) in shares.iter().zip(&cut) {
                prop_assert_eq!(share.is_empty(), rows.is_empty());
                prop_assert!(rows.len() <= share.len() + farthest(share.len()));
                if !rows.is_empty() {
                    prop_assert_eq!(rows.start(), at);
                    at = rows.end();
                    // Where a cut moved, a text ends.
                    prop_assert!(rows.end() == share.end() || ends.contains(&rows.end()));
                }
            }
            prop_assert_eq!(at, ends[ends.len() - 1]);
        }
    }
}
