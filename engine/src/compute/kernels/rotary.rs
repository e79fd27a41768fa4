//! Rotary positions: the angles of every position seen so far, and turning rows by them.

use super::{area::AreaMut, threads::Threads, vector};
use galaxy_common::{BatchShape, Row, Span};
use galaxy_model::Pairs;

/// Cosines and sines of the positions from 0, as far as a batch has needed them.
#[derive(Default)]
pub(crate) struct RotaryTable {
    /// Of each position: the cosines, then the sines, one for each frequency.
    angles: Vec<f32>,
    frequencies: usize,
}

impl RotaryTable {
    /// Makes sure of positions below `positions`.
    pub(crate) fn reach(&mut self, inverse_frequencies: &[f32], positions: u32) {
        self.frequencies = inverse_frequencies.len();
        let width = 2 * self.frequencies;
        let have = self.angles.len().checked_div(width).unwrap_or(0);
        self.angles.reserve_exact((positions as usize).saturating_sub(have) * width);
        for position in have..positions as usize {
            // In f64: at position 100 000 an f32 angle is off by half a percent of a turn.
            let angle = |f: &f32| position as f64 * f64::from(*f);
            self.angles.extend(inverse_frequencies.iter().map(|f| angle(f).cos() as f32));
            self.angles.extend(inverse_frequencies.iter().map(|f| angle(f).sin() as f32));
        }
    }

    /// Turns the first `heads` heads of each row, by the position of each row.
    ///
    /// # Panics
    /// Where [`RotaryTable::reach`] did not reach.
    pub(crate) fn turn(
        &self,
        threads: &Threads,
        rows: AreaMut<'_>,
        positions: &[u32],
        pairs: Pairs,
        heads: usize,
        head_width: usize,
    ) {
        let values = rows.rows() * heads * head_width;
        let half = self.frequencies;
        threads.each(rows, 1, values, |at, mut rows| {
            for row in 0..rows.rows() {
                let angles = &self.angles[positions[at + row] as usize * 2 * half..][..2 * half];
                let (cosines, sines) = angles.split_at(half);
                let heads = &mut rows.row(row)[..heads * head_width];
                match pairs {
                    Pairs::Halves => vector::turn(heads, head_width, cosines, sines),
                    Pairs::Neighbours => turn_neighbours(heads, head_width, cosines, sines),
                }
            }
        });
    }
}

/// Turns columns 2i and 2i + 1 of each head.
fn turn_neighbours(heads: &mut [f32], width: usize, cosines: &[f32], sines: &[f32]) {
    for head in heads.chunks_exact_mut(width) {
        let (pairs, _) = head.as_chunks_mut();
        for ([low, high], (cosine, sine)) in pairs.iter_mut().zip(cosines.iter().zip(sines)) {
            (*low, *high) = (*low * cosine - *high * sine, *high * cosine + *low * sine);
        }
    }
}

/// The positions, each in its sequence, of `rows` of the batch.
pub(crate) fn positions(shape: &BatchShape, rows: Span<Row>, out: &mut Vec<u32>) {
    out.clear();
    for (own, segment) in shape.placed() {
        let some = own.intersect(rows);
        out.extend(some.iter().map(|row| segment.past.saturating_add(row - own.start())));
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing::*, *};

    #[test]
    fn heads_turn_by_the_position_of_their_row() {
        let (width, heads, columns) = (10, 3, 37);
        let frequencies = [1.0, 0.3, 0.01, 0.0005];
        let positions = [0, 7, 7, 3, 511];
        let rows = positions.len();
        let before = Random::default().values(rows * columns);
        let mut table = RotaryTable::default();
        table.reach(&frequencies, 4);
        table.reach(&frequencies, 512);
        for (pairs, places) in [
            (Pairs::Halves, [(0, 4), (1, 5), (2, 6), (3, 7)]),
            (Pairs::Neighbours, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ] {
            let mut want: Vec<f64> = before.iter().map(|v| f64::from(*v)).collect();
            for (row, position) in want.chunks_mut(columns).zip(positions) {
                for head in row[..heads * width].chunks_mut(width) {
                    for ((i, j), frequency) in places.into_iter().zip(frequencies) {
                        let angle = f64::from(position) * f64::from(frequency);
                        let (sine, cosine) = angle.sin_cos();
                        let (low, high) = (head[i], head[j]);
                        head[i] = low * cosine - high * sine;
                        head[j] = high * cosine + low * sine;
                    }
                }
            }
            for threads in [1, 2] {
                let mut got = before.clone();
                let area = whole_mut(&mut got, rows, columns);
                table.turn(&Threads::new(threads), area, &positions, pairs, heads, width);
                close("turned", &got, &want);
            }
        }
    }
}
