//! Products of rows with a matrix whose values stand in blocks of few bits, on one thread.
//!
//! Rows are rounded to whole numbers, 32 inputs at a time, each with a scale of its own: to 16 bits (an error of
//! 1/65278 of the largest of the 32), or to 8 where that is asked for (1/254 of it). Products of codes with them are
//! summed as whole numbers, exactly, and what 32 inputs give is added in f32, group after group: the same for every
//! number of rows.
// Hot path: no locks, no logging, no allocation once the scratch has grown.
#![allow(unsafe_code)]

pub(crate) mod coding;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod place;
#[cfg(test)]
mod tests;
mod tile;
mod vectors;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::{
    area::Area,
    instructions::Instructions,
    lines::Lines,
    packed::{Finish, MOST_PACKED, MOST_ROWS, Operand, PAIR, RowChunk},
};
use crate::weights::PANEL;
use coding::{Coding, each_coding};
use galaxy_common::{Activations, WeightBlock, WeightFormat};
use rten_simd::Isa;
use std::ops::Range;
use tile::{Tile, sum};
use vectors::{Arrays, Vectors};

/// Inputs that share a scale of activations.
pub(crate) const GROUP: usize = WeightBlock::GROUP as usize;
/// The number that the largest of a group of activations becomes in 16 bits: both of its bytes are signed.
const MOST: i16 = 127 * 256 + 127;
/// The number that the largest of a group of activations becomes in 8 bits.
const MOST_8: i16 = 127;
/// The sign bit of a float.
const SIGN: u32 = 1 << 31;
/// A float from which on floats of 32 bits are whole numbers, up to twice as large: what is added to it is rounded,
/// ties to even, and stands in the lowest bits. Half of that range is below zero.
const WHOLE: f32 = (3 << 22) as f32;
/// Bytes of a rounded group of a row: packed activations, and a tail behind them.
const fn record<V: Vectors>() -> usize {
    V::PACKED + size_of::<Tail>()
}

/// What stands behind the packed activations of a group.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Tail {
    /// The scale of the activations.
    by: f32,
    /// The sum of the activations, scaled.
    all: f32,
    /// The sums of the first and the second 16 activations, not scaled.
    sums: [i32; 2],
}

/// Bytes of a line of codes: four of each column.
const LINE: usize = 4 * PANEL;

/// The panels of a matrix in blocks, to be multiplied with.
#[derive(Clone, Copy)]
pub(crate) struct BlockPanels<'a> {
    /// The codes of all panels.
    pub(crate) codes: &'a [u8],
    /// The headers of all panels.
    pub(crate) headers: &'a [u8],
    pub(crate) format: WeightFormat,
    pub(crate) block: WeightBlock,
    /// The number of inputs that are multiplied with.
    pub(crate) inputs: usize,
    /// The first group of these inputs, of the `apart` groups that a panel has.
    pub(crate) first: usize,
    pub(crate) apart: usize,
    /// The place within its block of the first group of a panel.
    pub(crate) phase: usize,
    pub(crate) count: usize,
}

impl<'a> BlockPanels<'a> {
    /// The operand for a product by these instructions, with rows that are rounded so.
    pub(crate) fn by(self, instructions: Instructions, to: Activations) -> BlockOperand<'a> {
        BlockOperand { panels: self, kernel: Kernel::of(instructions, self.format, to) }
    }
}

/// The panels of a matrix in blocks, with the kernel that multiplies with them.
#[derive(Clone, Copy)]
pub(crate) struct BlockOperand<'a> {
    panels: BlockPanels<'a>,
    kernel: Kernel,
}

/// The kernel that multiplies with a matrix of some format.
#[derive(Clone, Copy)]
struct Kernel {
    // SAFETY: declarations; what both ask stands at `sum` and `round`.
    sum: unsafe fn(Tile),
    round: unsafe fn(&[f32], *mut u8, usize, i16),
    /// Bytes of a rounded group of a row.
    record: usize,
    /// The number that the largest of a group becomes.
    most: i16,
}

/// Rounds the inputs of a row, group by group, to records `apart` bytes from one another: the largest of a group
/// becomes `most`. What is not finite makes the scale of its group something that is not a number, and so the whole
/// product of the row.
///
/// # Safety
/// `out` has room for a record of `V` for each whole group of `row`.
// SAFETY: callers promise what is asked above.
#[inline(always)]
unsafe fn round<V: Vectors>(row: &[f32], out: *mut u8, apart: usize, most: i16) {
    let most = f32::from(most);
    for (at, group) in row.as_chunks::<GROUP>().0.iter().enumerate() {
        // As bits, sizes are in the same order, and what is not finite is larger than all others.
        let mut sizes = [0u32; 8];
        for eight in group.as_chunks::<8>().0 {
            for (size, value) in sizes.iter_mut().zip(eight) {
                *size = (*size).max(value.to_bits() & !SIGN);
            }
        }
        let largest = f32::from_bits(sizes.into_iter().fold(0, u32::max));
        let finite = largest.is_finite();
        // Smaller numbers have no inverse.
        let by = if finite && largest >= 1e-30 { most / largest } else { 0.0 };
        let mut whole = [0i32; GROUP];
        if finite {
            for (whole, value) in whole.iter_mut().zip(group) {
                *whole = (value * by + WHOLE).to_bits().wrapping_sub(WHOLE.to_bits()) as i32;
            }
        }
        let mut sums = [0; 2];
        for (sum, half) in sums.iter_mut().zip(whole.as_chunks::<{ GROUP / 2 }>().0) {
            *sum = half.iter().sum();
        }
        let mut short = [0i16; GROUP];
        for (short, whole) in short.iter_mut().zip(&whole) {
            *short = *whole as i16;
        }
        let scale = match finite {
            true if by > 0.0 => largest / most,
            true => 0.0,
            false => f32::NAN,
        };
        // SAFETY: by the promise; a record is the packed values and a tail.
        let record = unsafe { std::slice::from_raw_parts_mut(out.add(at * apart), record::<V>()) };
        let (packed, tail) = record.split_at_mut(V::PACKED);
        V::pack(&short, packed);
        let all = scale * (sums[0] + sums[1]) as f32;
        tail.copy_from_slice(bytemuck::bytes_of(&Tail { by: scale, all, sums }));
    }
}

/// Kernels of vectors that need these features of the processor.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! kernels {
    ($($name:ident: $features:literal, $v:path;)+) => { $(
        mod $name {
            use super::*;
            // SAFETY: to be called only where the processor has these; otherwise as `super::sum`.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn sum<C: Coding>(tile: Tile) {
                // SAFETY: as above.
                unsafe { super::sum::<_, C>($v, tile) }
            }
            // SAFETY: to be called only where the processor has these; otherwise as `super::round`.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn round(row: &[f32], out: *mut u8, apart: usize, most: i16) {
                // SAFETY: as above.
                unsafe { super::round::<$v>(row, out, apart, most) }
            }
            pub(super) fn kernel<C: Coding>(most: i16) -> Kernel {
                Kernel { sum: sum::<C>, round, record: record::<$v>(), most }
            }
        }
    )+ };
}
#[cfg(target_arch = "aarch64")]
kernels! {
    neon_dot: "neon,dotprod", neon::NeonDot::<2>;
    neon_dot_8: "neon,dotprod", neon::NeonDot::<1>;
    neon_plain: "neon", neon::Neon;
}
#[cfg(target_arch = "x86_64")]
kernels! {
    avx512: "avx512f,avx512vl,avx512bw,avx512dq,avx512vnni,f16c", x86::Avx512::<2>;
    avx512_8: "avx512f,avx512vl,avx512bw,avx512dq,avx512vnni,f16c", x86::Avx512::<1>;
    avx_vnni: "avx,avx2,fma,f16c,avxvnni", x86::AvxVnni::<2>;
    avx_vnni_8: "avx,avx2,fma,f16c,avxvnni", x86::AvxVnni::<1>;
    avx2: "avx,avx2,fma,f16c", x86::Avx2;
}

/// Low bytes of activations, then high bytes: `value = 256 * high + low`, both signed. In one plane there are low
/// bytes alone.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), expect(dead_code))]
#[inline(always)]
fn pack_planes(group: &[i16; GROUP], out: &mut [u8]) {
    let (low, high) = out.split_at_mut(GROUP);
    for (low, value) in low.iter_mut().zip(group) {
        *low = *value as u8;
    }
    for (high, value) in high.iter_mut().zip(group) {
        *high = ((i32::from(*value) + 128) >> 8) as u8;
    }
}

impl Kernel {
    fn of(instructions: Instructions, format: WeightFormat, to: Activations) -> Self {
        each_coding!(
            format,
            C => Self::by::<C>(instructions, to == Activations::A8),
            unreachable!("{format} has no blocks")
        )
    }

    /// The kernel for a coding. One for rows of 8 bits is another only where there are instructions for
    /// them.
    fn by<C: Coding>(instructions: Instructions, eight: bool) -> Self {
        let most = if eight { MOST_8 } else { MOST };
        #[cfg(target_arch = "x86_64")]
        match instructions {
            Instructions::Avx512 if std::is_x86_feature_detected!("avx512vnni") => {
                return match eight {
                    true => avx512_8::kernel::<C>(most),
                    false => avx512::kernel::<C>(most),
                };
            }
            Instructions::Avx512 | Instructions::Avx2 => {
                return match (std::is_x86_feature_detected!("avxvnni"), eight) {
                    (true, true) => avx_vnni_8::kernel::<C>(most),
                    (true, false) => avx_vnni::kernel::<C>(most),
                    (false, _) => avx2::kernel::<C>(most),
                };
            }
            _ => {}
        }
        #[cfg(target_arch = "aarch64")]
        if instructions == Instructions::Neon {
            return match (std::arch::is_aarch64_feature_detected!("dotprod"), eight) {
                (true, true) => neon_dot_8::kernel::<C>(most),
                (true, false) => neon_dot::kernel::<C>(most),
                (false, _) => neon_plain::kernel::<C>(most),
            };
        }
        let _ = instructions;
        // SAFETY: any processor has arrays; otherwise as `sum`.
        unsafe fn sum_arrays<C: Coding>(tile: Tile) {
            // SAFETY: as above.
            unsafe { sum::<_, C>(Arrays, tile) }
        }
        let record = record::<Arrays>();
        Self { sum: sum_arrays::<C>, round: round::<Arrays>, record, most }
    }
}

impl Operand for BlockOperand<'_> {
    const STEP: usize = GROUP;

    fn inputs(&self) -> usize {
        self.panels.inputs
    }

    fn count(&self) -> usize {
        self.panels.count
    }

    /// As many rows at a time as there is room for with all inputs: to read codes again costs less than to round
    /// rows again.
    fn parts(&self, rows: usize) -> (usize, usize) {
        let row = self.panels.inputs / GROUP * self.kernel.record;
        let most = (MOST_PACKED / row.max(1)).clamp(1, MOST_ROWS);
        (rows.div_ceil(most), 1)
    }

    #[inline(always)]
    fn pack<I: Isa>(&self, _: I, left: Area<'_>, part: &RowChunk, to: &mut Lines<f32>) {
        let (rows, inputs) = (part.rows.clone(), part.inputs.clone());
        let Kernel { round, record, most, .. } = self.kernel;
        let size = rows.len() * (inputs.len() / GROUP) * record;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(to.grow(size.div_ceil(size_of::<f32>())));
        for (at, row) in rows.clone().enumerate() {
            let row = &left.row(row)[inputs.clone()];
            let out = bytes[at * record..].as_mut_ptr();
            // SAFETY: the kernel is one of this processor; there is room for all groups of all rows, those of
            // a row as far apart as there are rows, and this is row `at`.
            unsafe { round(row, out, rows.len() * record, most) };
        }
    }

    #[inline(always)]
    fn pair<I: Isa>(
        &self,
        isa: I,
        part: &RowChunk,
        pair: usize,
        (packed, sums): (&[f32], &mut [f32]),
        mut finish: Finish<'_, '_>,
    ) {
        let rows = part.rows.len();
        let groups = part.inputs.len() / GROUP;
        let first = self.panels.first + part.inputs.start / GROUP;
        let size = rows * groups * self.kernel.record;
        assert!(size <= size_of_val(packed) && rows * PAIR <= sums.len());
        for panel in 0..(self.panels.count - 2 * pair).min(2) {
            let (codes, headers) = self.panels.of(2 * pair + panel, first..first + groups);
            let tile = Tile {
                codes: codes.as_ptr(),
                headers: headers.as_ptr(),
                first: self.panels.phase + first,
                groups,
                rows: packed.as_ptr().cast(),
                count: rows,
                sums: sums[panel * PANEL..].as_mut_ptr(),
                add: !part.begin,
            };
            // SAFETY: the kernel is one of this processor and of the panels' format; `of` gave the codes of these
            // groups and all headers of the panel, and by the assertion there are records and sums for all rows:
            // those of the last row begin at `PAIR * (rows - 1) + PANEL` at most, and are a panel.
            unsafe { (self.kernel.sum)(tile) };
        }
        if part.end {
            finish.rows(isa, &sums[..rows * PAIR], 0);
        }
    }
}

impl<'a> BlockPanels<'a> {
    /// The codes of these groups of a panel, and its headers.
    ///
    /// # Panics
    /// When it has fewer.
    fn of(&self, panel: usize, groups: Range<usize>) -> (&'a [u8], &'a [u8]) {
        let unit = PANEL * GROUP * self.block.bits as usize / 8;
        let codes = &self.codes[panel * self.apart * unit..][..self.apart * unit];
        let inputs = (self.apart * GROUP) as u64;
        let headers = PANEL * self.block.scales as usize * self.block.most(inputs) as usize;
        let in_block = self.block.values as usize / GROUP;
        assert!(self.phase < in_block && groups.end <= self.apart);
        (
            &codes[groups.start * unit..groups.end * unit],
            &self.headers[panel * headers..][..headers],
        )
    }
}
