//! Attention in f64: norms of heads, rotations, and what a row takes of the rows that it sees.

use super::{Reference, positions};
use galaxy_common::{Row, Span};
use galaxy_engine::compute::Binding;
use galaxy_graph::{
    lower::kv_span,
    program::{Operation, Program, Region},
};
use galaxy_model::{Pairs, Positions, Vector};

impl Reference {
    /// Norms the first `queries` of `heads` heads of each row by one norm, the others by another.
    pub(super) fn norm_heads(
        &self,
        layer: u32,
        queries: usize,
        heads: usize,
        rows: usize,
        sized: &mut [(f64, f64)],
    ) {
        if !self.spec().head_norm || sized.is_empty() {
            return;
        }
        let (width, epsilon) =
            (self.spec().head_width as usize, f64::from(self.spec().norm_epsilon));
        for row in sized.chunks_exact_mut(sized.len() / rows) {
            for (at, head) in row[..heads * width].chunks_exact_mut(width).enumerate() {
                let which = match at < queries {
                    true => Vector::QueryHeadNorm(layer),
                    false => Vector::KeyHeadNorm(layer),
                };
                let square = head.iter().map(|v| v.0.powi(2)).sum::<f64>() / width as f64;
                let by = 1.0 / (square + epsilon).sqrt();
                for ((value, size), weight) in head.iter_mut().zip(&self.vectors[&which]) {
                    *value *= by * weight;
                    *size *= by * weight.abs();
                }
            }
        }
    }

    /// Rotates the first heads of each row by its position.
    pub(super) fn rotate(
        &self,
        layer: u32,
        binding: &Binding,
        rows: Span<Row>,
        heads: usize,
        sized: &mut [(f64, f64)],
    ) {
        let Some(Positions::Rotary { inverse_frequencies, long, scale, pairs, .. }) =
            self.spec().rotary(layer)
        else {
            return;
        };
        let (width, half) = (self.spec().head_width as usize, inverse_frequencies.len());
        let positions = positions(&binding.shape, rows);
        let columns = sized.len() / positions.len();
        let scale = f64::from(*scale);
        for ((row, position), of) in sized.chunks_exact_mut(columns).zip(positions).zip(rows.iter())
        {
            let (_, text) = binding.shape.placed().find(|(own, _)| own.has(of)).unwrap();
            let frequencies = match long {
                Some(long) if text.context_len + text.rows > long.above => {
                    &long.inverse_frequencies
                }
                _ => inverse_frequencies,
            };
            for head in row[..heads * width].chunks_exact_mut(width) {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = (f64::from(position) * f64::from(*frequency)).sin_cos();
                    let (sin, cos) = (sin * scale, cos * scale);
                    let (one, other) = match pairs {
                        Pairs::Halves => (i, i + half),
                        Pairs::Neighbours => (2 * i, 2 * i + 1),
                    };
                    let ((low, a), (high, b)) = (head[one], head[other]);
                    head[one] = (low * cos - high * sin, scale * (a + b));
                    head[other] = (high * cos + low * sin, scale * (a + b));
                }
            }
        }
    }

    /// Attention of the device's heads, row by row.
    pub(super) fn attend(
        &mut self,
        program: &Program,
        operation: &Operation,
        binding: &Binding,
        layer: u32,
    ) -> Vec<f64> {
        let spec = self.spec().clone();
        let part = self.device.prefill.block(layer);
        let kv = kv_span(&spec, part.heads);
        let width = spec.head_width as usize;
        // The values of a row of a region.
        let of = |region: &Region, row: u32| {
            let tensor = program.tensor(region.tensor);
            let row = (row - tensor.rows.start()) as usize * tensor.width as usize;
            &self.tensors[&region.tensor][row + region.columns.start() as usize..]
        };
        let (heads, kv_heads) = (part.heads.len() as usize, kv.len() as usize);
        let (mut out, mut scale) = (Vec::new(), 0.0_f64);
        for row in operation.reads[0].rows.iter() {
            let (segment, _) = binding.shape.placed().find(|(own, _)| own.has(row)).unwrap();
            let (behind, ahead) = spec.sees(layer);
            let end = ahead.map_or(segment.end(), |rows| segment.end().min(row + 1 + rows));
            let first = behind.map_or(0, |rows| row.saturating_sub(rows)).max(segment.start());
            let queries = of(&operation.reads[0], row);
            let others: Vec<&[f64]> =
                (first..end).map(|other| of(&operation.reads[1], other)).collect();
            for head in 0..heads {
                let kv_head =
                    (part.heads.start() as usize + head) / spec.group() as usize - kv.range().start;
                let by = f64::from(spec.score_scale(layer));
                let query = &queries[head * width..(head + 1) * width];
                let scores: Vec<(f64, f64)> = (first..end)
                    .zip(&others)
                    .map(|(other, values)| {
                        let key = &values[kv_head * width..(kv_head + 1) * width];
                        let (sum, size) = Self::dot(query.iter().copied().zip(key.iter().copied()));
                        let apart = spec.relative_bias.map_or(0.0, |distances| {
                            let bucket = distances.bucket(i64::from(other) - i64::from(row));
                            let head = part.heads.start() as usize + head;
                            let at = bucket as usize * spec.heads as usize + head;
                            self.vectors[&Vector::RelativeBias][at]
                        });
                        let score = match spec.score_cap.map(f64::from) {
                            Some(most) => most * (sum * by / most).tanh(),
                            None => sum * by,
                        };
                        (score + apart, size * by + apart.abs())
                    })
                    .collect();
                let most = scores.iter().map(|s| s.0).fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s.0 - most).exp()).collect();
                let sum: f64 = weights.iter().sum();
                // An error of a score is one of its weight, relative to that.
                let worst = scores.iter().map(|s| s.1).fold(1.0, f64::max);
                for i in 0..width {
                    let column = (kv_heads + kv_head) * width + i;
                    let values = others.iter().map(|values| values[column]);
                    let (value, size) = Self::dot(weights.iter().copied().zip(values));
                    out.push(value / sum);
                    scale = scale.max(size / sum * worst);
                }
            }
        }
        self.scale = scale;
        out
    }
}
