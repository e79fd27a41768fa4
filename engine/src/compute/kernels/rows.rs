//! Kernels for rows between products: norms and residual additions.
// Hot path: no locks, no logging, no allocation.

use super::{
    area::{Area, AreaMut},
    threads::Threads,
    vector,
    wire::{self, Tile},
};
use galaxy_model::NormKind;

/// A norm with its vectors.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) kind: NormKind,
    pub(crate) epsilon: f32,
    /// The weights that columns are scaled by.
    pub(crate) weight: &'a [f32],
    /// The biases that are added to columns then; none where the norm has none.
    pub(crate) bias: Option<&'a [f32]>,
}

impl Norm<'_> {
    /// Normalises one row in place.
    pub(crate) fn apply(&self, row: &mut [f32]) {
        let Self { weight, bias, .. } = *self;
        match self.kind {
            NormKind::Layer => vector::layer_norm(row, weight, bias, self.epsilon),
            NormKind::Rms => vector::rms_norm(row, weight, self.epsilon),
        }
    }

    /// Normalises one row to another.
    pub(crate) fn apply_to(&self, out: &mut [f32], from: &[f32]) {
        let Self { weight, bias, .. } = *self;
        match self.kind {
            NormKind::Layer => vector::layer_norm_to(out, from, weight, bias, self.epsilon),
            NormKind::Rms => vector::rms_norm_to(out, from, weight, self.epsilon),
        }
    }
}

/// Copies rows, normed.
pub(crate) fn norm(threads: &Threads, norm: Norm<'_>, from: Area<'_>, out: AreaMut<'_>) {
    let values = 4 * out.rows() * out.columns();
    threads.each(out, 1, values, |first, mut out| {
        for at in 0..out.rows() {
            norm.apply_to(out.row(at), from.row(first + at));
        }
    });
}

/// Adds rows to others.
pub(crate) fn add(threads: &Threads, more: Area<'_>, out: AreaMut<'_>) {
    let values = 2 * out.rows() * out.columns();
    threads.each(out, 1, values, |first, mut out| {
        (0..out.rows()).for_each(|at| vector::add(out.row(at), more.row(first + at)));
    });
}

/// Norms each head of each row by itself: as many heads by each norm as `heads` says, one behind
/// another.
pub(crate) fn norm_heads(threads: &Threads, heads: [(usize, Norm<'_>); 2], rows: AreaMut<'_>) {
    let values = 2 * rows.rows() * rows.columns();
    threads.each(rows, 1, values, |_, mut rows| {
        for at in 0..rows.rows() {
            let mut rest = rows.row(at);
            for (count, norm) in heads {
                let width = norm.weight.len();
                let (some, more) = rest.split_at_mut(count * width);
                some.chunks_exact_mut(width).for_each(|head| norm.apply(head));
                rest = more;
            }
        }
    });
}

/// The inputs of a residual addition.
#[derive(Clone, Copy)]
pub(crate) struct AddNormInputs<'a> {
    pub(crate) residual: Area<'a>,
    /// The biases: one, or two where two sums are added at once.
    pub(crate) biases: [Option<&'a [f32]>; 2],
    pub(crate) partial: Option<Area<'a>>,
    pub(crate) staged: Option<Tile<'a>>,
    /// The norm of what is added, where there is one.
    pub(crate) sum_norm: Option<Norm<'a>>,
    pub(crate) norm: Norm<'a>,
}

/// Adds to the residual stream: residual' = residual + biases + (partial + staged). What is added is normed first where
/// there is a norm of it. `normed` takes the normed rows; without it the residual itself is normed.
pub(crate) fn add_norm(
    threads: &Threads,
    joined: AddNormInputs<'_>,
    residual: AreaMut<'_>,
    normed: Option<AreaMut<'_>>,
) {
    let AddNormInputs { residual: old, biases: [bias, other], partial, staged, sum_norm, norm } =
        joined;
    let values = 4 * residual.rows() * residual.columns();
    threads.each((residual, normed), 1, values, |first, (mut residual, mut normed)| {
        for at in 0..residual.rows() {
            let source = first + at;
            let row = residual.row(at);
            let from = old.row(source);
            let partial = partial.map(|partial| partial.row(source));
            // One pass for what is no tile.
            match (bias, partial, staged) {
                _ if sum_norm.is_some() => match partial {
                    Some(partial) => row.copy_from_slice(partial),
                    None => row.fill(0.0),
                },
                (Some(bias), Some(partial), None) => vector::sum_three(row, from, bias, partial),
                (None, Some(partial), None) => vector::sum_two(row, from, partial),
                (Some(bias), ..) => vector::sum_two(row, from, bias),
                _ => row.copy_from_slice(from),
            }
            if let Some(other) = other {
                vector::add(row, other);
            }
            match (partial, staged) {
                (_, Some(tile)) if sum_norm.is_some() => wire::add_tile(row, tile, source),
                (Some(partial), Some(tile)) => wire::add_sum(row, partial, tile, source),
                (None, Some(tile)) => wire::add_tile(row, tile, source),
                (_, None) => {}
            }
            if let Some(sum_norm) = sum_norm {
                if let Some(bias) = bias {
                    vector::add(row, bias);
                }
                sum_norm.apply(row);
                vector::add(row, from);
            }
            match &mut normed {
                Some(normed) => norm.apply_to(normed.row(at), row),
                None => norm.apply(row),
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::{super::testing::*, *};
    use galaxy_common::WireType;

    #[test]
    fn add_and_norm_matches_f64() {
        let mut random = Random::default();
        for (rows, columns) in [(1, 7), (3, 300), (40, 513)] {
            let size = rows * columns;
            let (old, sum, staged) =
                (random.values(size), random.values(size), random.values(size));
            let bias = random.values(columns);
            let weight = random.values(columns);
            let norm = Norm { kind: NormKind::Rms, epsilon: 1e-6, weight: &weight, bias: None };
            let tile_of = |wire| -> Vec<u8> {
                match wire {
                    WireType::F32 => bytemuck::cast_slice(&staged).to_vec(),
                    WireType::F16 => {
                        let half = staged.iter().map(|v| half::f16::from_f32(*v).to_bits());
                        half.flat_map(u16::to_le_bytes).collect()
                    }
                    WireType::Q8 => unreachable!("tiles of it are tested where they are made"),
                }
            };
            for threads in [1, 2] {
                let threads = Threads::new(threads);
                for (at, (partial, wire, post)) in [
                    (true, None, false),
                    (true, Some(WireType::F32), true),
                    (false, Some(WireType::F16), false),
                    (true, Some(WireType::F16), true),
                    (false, None, false),
                ]
                .into_iter()
                .enumerate()
                {
                    let other = at % 2 == 1;
                    // Room for any alignment that a tile needs.
                    let bytes = wire.map(tile_of);
                    let mut room = vec![0.0_f32; size];
                    let tile = bytes.as_ref().zip(wire).map(|(bytes, wire)| {
                        let area: &mut [u8] = bytemuck::cast_slice_mut(&mut room);
                        area[..bytes.len()].copy_from_slice(bytes);
                        Tile::new(area, wire, rows, columns).expect("a tile")
                    });
                    let mut residual = vec![f32::NAN; size];
                    let mut normed = vec![f32::NAN; size];
                    let joined = AddNormInputs {
                        sum_norm: None,
                        residual: whole(&old, rows, columns),
                        biases: [Some(&bias), other.then_some(&weight[..])],
                        partial: partial.then(|| whole(&sum, rows, columns)),
                        staged: tile,
                        norm,
                    };
                    add_norm(
                        &threads,
                        joined,
                        whole_mut(&mut residual, rows, columns),
                        (!post).then(|| whole_mut(&mut normed, rows, columns)),
                    );
                    let added = |i: usize| -> f64 {
                        let staged = match wire {
                            Some(WireType::F32) => f64::from(staged[i]),
                            Some(WireType::F16) => half::f16::from_f32(staged[i]).to_f64(),
                            Some(WireType::Q8) => unreachable!("none of these tiles"),
                            None => 0.0,
                        };
                        let partial = if partial { f64::from(sum[i]) } else { 0.0 };
                        let other = if other { f64::from(weight[i % columns]) } else { 0.0 };
                        let biases = f64::from(bias[i % columns]) + other;
                        f64::from(old[i]) + biases + partial + staged
                    };
                    let raw: Vec<f64> = (0..size).map(added).collect();
                    let norm: Vec<f64> = raw
                        .chunks(columns)
                        .flat_map(|row| {
                            let square = row.iter().map(|v| v * v).sum::<f64>() / columns as f64;
                            let by = 1.0 / (square + 1e-6).sqrt();
                            let weights = weight.iter().map(|w| f64::from(*w));
                            row.iter()
                                .zip(weights)
                                .map(move |(v, w)| v * by * w)
                                .collect::<Vec<_>>()
                        })
                        .collect();
                    let what = format!("{rows}x{columns} {partial} {wire:?} {post}");
                    if post {
                        close(&what, &residual, &norm);
                    } else {
                        close(&what, &residual, &raw);
                        close(&what, &normed, &norm);
                    }
                }
            }
        }
    }
}
