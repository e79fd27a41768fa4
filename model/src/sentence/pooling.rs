//! Pools the hidden states of a text into one vector.

use galaxy_common::Pooling;

/// A way to pool rows into a vector. A model may have several, whose vectors are concatenated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolingMode {
    /// The first row that counts.
    Cls,
    /// The largest value of each column.
    Max,
    /// The mean of all rows.
    Mean,
    /// The sum of all rows over the square root of their number.
    MeanSqrtLen,
    /// The mean of all rows, each weighted by its position, counted from one.
    WeightedMean,
    /// The last row.
    LastToken,
}

impl PoolingMode {
    /// The names of the modes in the config of a Pooling, and the flags of older configs, in the order in which flags
    /// are read.
    pub(super) const ALL: [(&'static str, &'static str, Self); 6] = [
        ("cls", "pooling_mode_cls_token", Self::Cls),
        ("max", "pooling_mode_max_tokens", Self::Max),
        ("mean", "pooling_mode_mean_tokens", Self::Mean),
        ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens", Self::MeanSqrtLen),
        ("weightedmean", "pooling_mode_weightedmean_tokens", Self::WeightedMean),
        ("lasttoken", "pooling_mode_lasttoken", Self::LastToken),
    ];

    /// The same pooling as devices do it, if they can.
    pub(super) fn on_devices(self) -> Option<Pooling> {
        match self {
            Self::Cls => Some(Pooling::Cls),
            Self::Max => Some(Pooling::Max),
            Self::Mean => Some(Pooling::Mean),
            Self::MeanSqrtLen => Some(Pooling::MeanSqrtLen),
            Self::LastToken => Some(Pooling::LastToken),
            Self::WeightedMean => None,
        }
    }

    /// Appends the pooled vector of rows of `width` values, of which the first `skipped` do not count. At least one row
    /// must count.
    pub(super) fn pool(self, rows: &[f32], width: usize, skipped: usize, out: &mut Vec<f32>) {
        let counted = &rows[skipped * width..];
        let count = counted.len() / width;
        match self {
            Self::Cls => out.extend_from_slice(&counted[..width]),
            Self::LastToken => out.extend_from_slice(&counted[counted.len() - width..]),
            Self::Max => {
                let start = out.len();
                out.extend_from_slice(&counted[..width]);
                for row in counted.chunks_exact(width) {
                    for (most, value) in out[start..].iter_mut().zip(row) {
                        *most = most.max(*value);
                    }
                }
            }
            Self::Mean => weighted(counted, width, |_| 1.0, count as f64, out),
            Self::MeanSqrtLen => weighted(counted, width, |_| 1.0, (count as f64).sqrt(), out),
            Self::WeightedMean => {
                // A row is weighted by its place in the text, however many rows before it are skipped.
                let weight = |row: usize| (skipped + row + 1) as f64;
                let sum = (0..count).map(weight).sum();
                weighted(counted, width, weight, sum, out);
            }
        }
    }
}

/// Appends the weighted sum of rows, divided by `divisor`.
fn weighted(
    rows: &[f32],
    width: usize,
    weight: impl Fn(usize) -> f64,
    divisor: f64,
    out: &mut Vec<f32>,
) {
    let mut sums = vec![0.0_f64; width];
    for (index, row) in rows.chunks_exact(width).enumerate() {
        let weight = weight(index);
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += weight * f64::from(*value);
        }
    }
    out.extend(sums.into_iter().map(|sum| (sum / divisor) as f32));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pooling_mode_leaves_out_the_skipped_rows() {
        let rows = [1.0, 8.0, 2.0, 4.0, 4.0, 0.0, 9.0, -3.0];
        let pooled = |mode: PoolingMode, skipped| {
            let mut out = Vec::new();
            mode.pool(&rows, 2, skipped, &mut out);
            out
        };
        let root = 3_f32.sqrt();
        let of = [
            (PoolingMode::Cls, [1.0, 8.0], [2.0, 4.0]),
            (PoolingMode::Max, [9.0, 8.0], [9.0, 4.0]),
            (PoolingMode::Mean, [4.0, 2.25], [5.0, 1.0 / 3.0]),
            (PoolingMode::MeanSqrtLen, [8.0, 4.5], [15.0 / root, 1.0 / root]),
            (PoolingMode::WeightedMean, [5.3, 0.4], [52.0 / 9.0, -4.0 / 9.0]),
            (PoolingMode::LastToken, [9.0, -3.0], [9.0, -3.0]),
        ];
        for (mode, all, some) in of {
            for (have, want) in [(pooled(mode, 0), all), (pooled(mode, 1), some)] {
                let near = have.iter().zip(want).all(|(h, w)| (h - w).abs() < 1e-6);
                assert!(near && have.len() == 2, "{mode:?}: {have:?}, wanted {want:?}");
            }
        }
    }
}
