//! The limits that no kernel can beat: loops that do nothing but multiply in registers, or nothing but
//! read.

use super::instructions::Instructions;
use rten_simd::{
    Isa, SimdOp,
    ops::{BitOps, NumOps},
};
use std::hint::black_box;

/// Independent sums of the multiplying loop. A fused multiplication takes 4 or 5 cycles, and cores
/// begin one or two each cycle, so 10 keep any of them busy; with two factors 12 still fit into
/// the 16 registers of AVX2.
const SUMS: usize = 12;

struct Multiply {
    turns: u64,
}

impl SimdOp for Multiply {
    type Output = f32;

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> f32 {
        let ops = isa.f32();
        // Sums go towards 2: neither overflow nor denormal numbers, which some cores do slowly.
        let (factor, addend) = (ops.splat(black_box(0.5)), ops.splat(black_box(1.0)));
        // Each begins elsewhere, or the compiler would make one of them.
        let mut sums: [I::F32; SUMS] = std::array::from_fn(|at| ops.splat(black_box(at as f32)));
        for _ in 0..self.turns {
            for sum in &mut sums {
                *sum = ops.mul_add(*sum, factor, addend);
            }
        }
        sums.into_iter().map(|sum| ops.sum(sum)).sum()
    }
}

struct Lanes;

impl SimdOp for Lanes {
    type Output = usize;

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> usize {
        isa.f32().len()
    }
}

/// Multiplies and adds in registers, `turns` times over, and returns how many operations that
/// were: a multiplication and an addition are two.
pub(crate) fn multiply(instructions: Instructions, turns: u64) -> u64 {
    black_box(instructions.run(Multiply { turns }));
    2 * turns * (SUMS * instructions.run(Lanes)) as u64
}

/// A way through a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pattern {
    /// From one end to the other.
    Straight,
    /// From one end to the other, with what comes later asked for early.
    Ahead,
    /// Four quarters side by side: as many streams for the prefetchers.
    Quarters,
}

impl Pattern {
    pub(crate) const ALL: [Self; 3] = [Self::Straight, Self::Ahead, Self::Quarters];
}

/// Vectors that are added up side by side: enough sums to hide the latency.
const READS: usize = 8;
/// How many values ahead [`Pattern::Ahead`] asks: 2 KB, beyond what a core has under way.
const DISTANCE: usize = 512;

struct Read<'a> {
    values: &'a [f32],
    pattern: Pattern,
}

impl SimdOp for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn eval<I: Isa>(self, isa: I) -> f32 {
        let ops = isa.f32();
        let mut sums = [ops.zero(); READS];
        let lanes = ops.len();
        if self.pattern == Pattern::Quarters {
            let quarter = self.values.len() / 4;
            let [a, b, c, d] = std::array::from_fn(|at| {
                self.values[at * quarter..][..quarter].chunks_exact(2 * lanes)
            });
            for (((a, b), c), d) in a.zip(b).zip(c).zip(d) {
                for (at, from) in [a, b, c, d].into_iter().enumerate() {
                    sums[2 * at] = ops.add(sums[2 * at], ops.load(from));
                    sums[2 * at + 1] = ops.add(sums[2 * at + 1], ops.load(&from[lanes..]));
                }
            }
        } else {
            for from in self.values.chunks_exact(READS * lanes) {
                if self.pattern == Pattern::Ahead {
                    for line in (0..READS * lanes).step_by(16) {
                        // A hint: it may point anywhere.
                        ops.prefetch(from.as_ptr().wrapping_add(DISTANCE + line));
                    }
                }
                for (at, sum) in sums.iter_mut().enumerate() {
                    *sum = ops.add(*sum, ops.load(&from[at * lanes..]));
                }
            }
        }
        sums.into_iter().map(|sum| ops.sum(sum)).sum()
    }
}

/// Reads all of `values`, but for a few at the end.
pub(crate) fn read(instructions: Instructions, values: &[f32], pattern: Pattern) {
    black_box(instructions.run(Read { values, pattern }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_read_pattern_reads_all_values_once() {
        let values: Vec<f32> = (0..4096).map(|v| (v % 7) as f32).collect();
        let want: f32 = values.iter().sum();
        for instructions in Instructions::all() {
            for pattern in Pattern::ALL {
                let got = instructions.run(Read { values: &values, pattern });
                assert!((got - want).abs() < 1.0, "{instructions} {pattern:?}: {got} and {want}");
            }
        }
    }

    #[test]
    fn operations_are_counted_and_sums_stay_finite() {
        for instructions in Instructions::all() {
            let lanes = instructions.run(Lanes) as u64;
            assert_eq!(multiply(instructions, 10), 2 * 10 * 12 * lanes);
            // All go to 2.
            let sum = instructions.run(Multiply { turns: 100 });
            assert!((sum - (2 * 12 * lanes) as f32).abs() < 1e-3, "{instructions}: {sum}");
        }
    }
}
