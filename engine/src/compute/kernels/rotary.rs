//! Rotary positions: the angles of every position seen so far, and rotating rows by them.

use super::{area::AreaMut, threads::Threads, vector};
use galaxy_common::{BatchShape, Row, Span};
use galaxy_graph::operators::Rotary;
use galaxy_model::Pairs;

/// Where a row stands in its sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RowPosition {
    /// The position in the sequence, from 0.
    pub(crate) position: u32,
    /// The number of rows of the sequence, as far as this row knows of them.
    pub(crate) length: u32,
}

/// Cosines and sines of the positions from 0, as far as a batch has needed them.
#[derive(Default)]
pub(crate) struct RotaryTable {
    usual: Angles,
    /// The angles of long sequences.
    long: Angles,
    /// The number of rows above which a sequence is long.
    above: u32,
}

/// Cosines and sines by some frequencies.
#[derive(Default)]
struct Angles {
    /// The cosines of each position, then its sines, one for each frequency.
    values: Vec<f32>,
    frequencies: usize,
}

impl Angles {
    fn reach(&mut self, inverse_frequencies: &[f32], scale: f32, positions: u32) {
        self.frequencies = inverse_frequencies.len();
        let width = 2 * self.frequencies;
        let have = self.values.len().checked_div(width).unwrap_or(0);
        self.values.reserve_exact((positions as usize).saturating_sub(have) * width);
        for position in have..positions as usize {
            // In f64: at position 100 000 an f32 angle is off by half a percent of a turn.
            let angle = |f: &f32| position as f64 * f64::from(*f);
            let scaled = |value: f64| (value * f64::from(scale)) as f32;
            self.values.extend(inverse_frequencies.iter().map(|f| scaled(angle(f).cos())));
            self.values.extend(inverse_frequencies.iter().map(|f| scaled(angle(f).sin())));
        }
    }

    /// Cosines and sines of a position.
    fn of(&self, position: u32) -> (&[f32], &[f32]) {
        let width = 2 * self.frequencies;
        self.values[position as usize * width..][..width].split_at(self.frequencies)
    }
}

impl RotaryTable {
    /// Computes the angles that are missing of all positions of a sequence of up to `rows` rows.
    pub(crate) fn reach(&mut self, rotation: &Rotary, rows: u32) {
        let rows = rows.min(rotation.limit);
        let above = rotation.above();
        self.reach_both(rotation, rows.min(above), if rows > above { rows } else { 0 });
    }

    /// Computes the angles that are missing of the positions of these rows.
    pub(crate) fn reach_rows(&mut self, rotation: &Rotary, places: &[RowPosition]) {
        let (mut usual, mut long) = (0, 0);
        for place in places {
            let reach = if rotation.is_long(place.length) { &mut long } else { &mut usual };
            *reach = place.position.saturating_add(1).max(*reach);
        }
        self.reach_both(rotation, usual, long);
    }

    fn reach_both(&mut self, rotation: &Rotary, usual: u32, long: u32) {
        self.above = rotation.above();
        self.usual.reach(&rotation.inverse_frequencies, rotation.scale, usual);
        if let Some(of_long) = &rotation.long {
            self.long.reach(&of_long.inverse_frequencies, rotation.scale, long);
        }
    }

    /// Rotates the first `heads` heads of each row, by the place of each row.
    ///
    /// # Panics
    /// When the table does not reach one of these places.
    pub(crate) fn rotate(
        &self,
        threads: &Threads,
        rows: AreaMut<'_>,
        places: &[RowPosition],
        pairs: Pairs,
        heads: usize,
        head_width: usize,
    ) {
        let values = rows.rows() * heads * head_width;
        threads.each(rows, 1, values, |at, mut rows| {
            for row in 0..rows.rows() {
                let RowPosition { position, length } = places[at + row];
                let table = if length > self.above { &self.long } else { &self.usual };
                let (cosines, sines) = table.of(position);
                let heads = &mut rows.row(row)[..heads * head_width];
                match pairs {
                    Pairs::Halves => vector::turn(heads, head_width, cosines, sines),
                    Pairs::Neighbours => rotate_interleaved(heads, head_width, cosines, sines),
                }
            }
        });
    }
}

/// Rotates columns 2i and 2i + 1 of each head.
fn rotate_interleaved(heads: &mut [f32], width: usize, cosines: &[f32], sines: &[f32]) {
    for head in heads.chunks_exact_mut(width) {
        let (pairs, _) = head.as_chunks_mut();
        for ([low, high], (cosine, sine)) in pairs.iter_mut().zip(cosines.iter().zip(sines)) {
            (*low, *high) = (*low * cosine - *high * sine, *high * cosine + *low * sine);
        }
    }
}

/// The place of each of `rows` of the batch in its sequence. The length of a cached sequence is, to a row of
/// it, that of its prompt, which `asked` gives, or what there is up to that row, if that is more.
pub(crate) fn places(
    shape: &BatchShape,
    rows: Span<Row>,
    asked: impl Fn(u32) -> u32,
    out: &mut Vec<RowPosition>,
) {
    out.clear();
    for (own, segment) in shape.placed() {
        let all = segment.context_len.saturating_add(segment.rows);
        let prompt = segment.cached.then(|| asked(segment.slot));
        let place = |row: u32| {
            let position = segment.context_len.saturating_add(row - own.start());
            let length = prompt.map_or(all, |prompt| prompt.max(position.saturating_add(1)));
            RowPosition { position, length }
        };
        out.extend(own.intersect(rows).iter().map(place));
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing::*, *};
    use galaxy_model::LongFrequencies;

    const FREQUENCIES: [f32; 4] = [1.0, 0.3, 0.01, 0.0005];
    const SLOWER: [f32; 4] = [0.9, 0.1, 0.004, 0.0001];

    /// Rows of three heads, turned in f64.
    fn rotated(
        before: &[f32],
        places: &[RowPosition],
        pairs: [(usize, usize); 4],
        scale: f64,
        above: u32,
    ) -> Vec<f64> {
        let (width, heads) = (10, 3);
        let columns = before.len() / places.len();
        let mut want: Vec<f64> = before.iter().map(|v| f64::from(*v)).collect();
        for (row, place) in want.chunks_mut(columns).zip(places) {
            let frequencies = if place.length > above { SLOWER } else { FREQUENCIES };
            for head in row[..heads * width].chunks_mut(width) {
                for ((i, j), frequency) in pairs.into_iter().zip(frequencies) {
                    let angle = f64::from(place.position) * f64::from(frequency);
                    let (sine, cosine) = (angle.sin() * scale, angle.cos() * scale);
                    let (low, high) = (head[i], head[j]);
                    head[i] = low * cosine - high * sine;
                    head[j] = high * cosine + low * sine;
                }
            }
        }
        want
    }

    #[test]
    fn rows_of_a_cached_sequence_have_the_length_of_the_prompt() {
        use galaxy_common::{Segment, Wanted};
        let segment = |slot, context_len, cached, rows| Segment {
            slot,
            context_len,
            cached,
            rows,
            wanted: Wanted::Hidden,
        };
        let segments = vec![segment(0, 0, false, 3), segment(7, 4, true, 3)];
        let shape = BatchShape::new(segments).expect("a batch");
        let mut out = Vec::new();
        places(&shape, Span::new(1, 6), |slot| if slot == 7 { 6 } else { 0 }, &mut out);
        let got: Vec<_> = out.iter().map(|place| (place.position, place.length)).collect();
        assert_eq!(got, [(1, 3), (2, 3), (4, 6), (5, 6), (6, 7)]);
    }

    #[test]
    fn rotary_turns_heads_by_the_position_of_the_row() {
        let (width, heads, columns) = (10, 3, 37);
        let of_length = |length| move |position| RowPosition { position, length };
        let mut places: Vec<RowPosition> = [0, 7, 7, 3, 511].map(of_length(512)).to_vec();
        places.extend([0, 3, 5].map(of_length(6)));
        let rows = places.len();
        let before = Random::default().values(rows * columns);
        let long = LongFrequencies { above: 100, inverse_frequencies: SLOWER.to_vec() };
        let halves = [(0, 4), (1, 5), (2, 6), (3, 7)];
        let neighbours = [(0, 1), (2, 3), (4, 5), (6, 7)];
        for (pairs, columns_of_pairs, scale, long) in [
            (Pairs::Halves, halves, 1.0, None),
            (Pairs::Halves, halves, 1.25, Some(long.clone())),
            (Pairs::Neighbours, neighbours, 0.5, None),
        ] {
            let inverse_frequencies = FREQUENCIES.to_vec();
            let rotation = &Rotary { inverse_frequencies, long, scale, pairs, limit: 600 };
            let above = rotation.above();
            let want = rotated(&before, &places, columns_of_pairs, f64::from(scale), above);
            let mut table = RotaryTable::default();
            table.reach(rotation, 4);
            table.reach_rows(rotation, &places);
            for threads in [1, 2] {
                let mut got = before.clone();
                let area = whole_mut(&mut got, rows, columns);
                table.rotate(&Threads::new(threads), area, &places, pairs, heads, width);
                close("turned", &got, &want);
            }
        }
    }
}
