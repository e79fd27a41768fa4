//! How values of few bits are coded: what codes stand for, and where their scales and minima are.
// Hot path: no locks, no logging, no allocation.
#![allow(unsafe_code)]

use super::vectors::Vectors;
use crate::weights::PANEL;
use galaxy_model::blocks::{FLOATS, NOT_LINEAR};

/// A way of coding.
///
/// A value is `scale * (code - OFFSET) + minimum`, where a code is a number of `BITS` bits, or what `TABLE` has
/// for it. Scales and minima of a block of a panel stand in a header: fields of one or two bytes, each with those
/// of all 16 columns side by side.
pub(crate) trait Coding: Copy {
    /// Bits of a code: 4, 5, 6 or 8.
    const BITS: usize;
    /// The number that is subtracted from a code.
    const OFFSET: i32;
    /// Whether there are minima.
    const MINIMA: bool;
    /// Whether scales are for 16 inputs, not for 32.
    const HALVES: bool;
    /// The values of codes of 4 bits, plus [`Coding::OFFSET`], where they are not the codes themselves.
    const TABLE: Option<[u8; 16]>;
    /// Groups of 32 inputs in a block.
    const GROUPS: usize;
    /// Bytes of a header for each column.
    const HEADER: usize;

    /// The scales of the columns from `column` on, and what minima add, zero without any, of half `half` of
    /// group `group` of a block.
    ///
    /// # Safety
    /// `header` begins a header, and a vector of columns begins at `column` of it. The processor has the
    /// instructions of `v`.
    // SAFETY: a declaration; what callers promise stands above.
    unsafe fn scales<V: Vectors>(
        v: V,
        header: *const u8,
        group: usize,
        half: usize,
        column: usize,
    ) -> (V::Floats, V::Floats);
}

/// The values that codes stand for, plus `offset`, so that none is below zero.
const fn table(values: [i8; 16], offset: i16) -> Option<[u8; 16]> {
    let mut codes = [0; 16];
    let mut at = 0;
    while at < 16 {
        codes[at] = (values[at] as i16 + offset) as u8;
        at += 1;
    }
    Some(codes)
}

macro_rules! codings {
    ($($(#[$doc:meta])* $name:ident {
        bits: $bits:literal, offset: $offset:literal, table: $table:expr, halves: $halves:literal,
        minima: $minima:literal, groups: $groups:literal, header: $header:literal,
        scales: |$v:ident, $at:ident, $group:ident, $half:ident| $body:expr
    })+) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Coding for $name {
            const BITS: usize = $bits;
            const OFFSET: i32 = $offset;
            const MINIMA: bool = $minima;
            const HALVES: bool = $halves;
            const TABLE: Option<[u8; 16]> = $table;
            const GROUPS: usize = $groups;
            const HEADER: usize = $header;

            // SAFETY: callers promise what the trait asks.
            #[inline(always)]
            unsafe fn scales<V: Vectors>(
                $v: V,
                header: *const u8,
                $group: usize,
                $half: usize,
                column: usize,
            ) -> (V::Floats, V::Floats) {
                let _ = ($group, $half);
                let $at = Fields { header, column };
                // SAFETY: all fields lie in the header, by its size.
                unsafe { $body }
            }
        }
    )+ };
}

/// Where the fields of a header are.
#[derive(Clone, Copy)]
struct Fields {
    header: *const u8,
    column: usize,
}

impl Fields {
    /// The address of field `at` of two bytes; these stand first.
    #[inline(always)]
    fn word(self, at: usize) -> *const u8 {
        self.header.wrapping_add(2 * (PANEL * at + self.column))
    }
    /// The address of field `at` of one byte, behind `words` fields of two.
    #[inline(always)]
    fn byte(self, words: usize, at: usize) -> *const u8 {
        self.header.wrapping_add(PANEL * (2 * words + at) + self.column)
    }
}

codings! {
    /// 32 values of 8 bits and a scale.
    Q8_0 {
        bits: 8, offset: 128, table: None, halves: false, minima: false, groups: 1, header: 2,
        scales: |v, at, group, half| (v.halves(at.word(0)), v.zero())
    }
    /// 32 values of 4 bits and a scale.
    Q4_0 {
        bits: 4, offset: 8, table: None, halves: false, minima: false, groups: 1, header: 2,
        scales: |v, at, group, half| (v.halves(at.word(0)), v.zero())
    }
    /// 32 values of 4 bits, a scale and a minimum.
    Q4_1 {
        bits: 4, offset: 0, table: None, halves: false, minima: true, groups: 1, header: 4,
        scales: |v, at, group, half| (v.halves(at.word(0)), v.halves(at.word(1)))
    }
    /// 32 values of 5 bits and a scale.
    Q5_0 {
        bits: 5, offset: 16, table: None, halves: false, minima: false, groups: 1, header: 2,
        scales: |v, at, group, half| (v.halves(at.word(0)), v.zero())
    }
    /// 32 values of 5 bits, a scale and a minimum.
    Q5_1 {
        bits: 5, offset: 0, table: None, halves: false, minima: true, groups: 1, header: 4,
        scales: |v, at, group, half| (v.halves(at.word(0)), v.halves(at.word(1)))
    }
    /// 256 values of 4 bits; scales and minima of 32 have 6 bits.
    Q4K {
        bits: 4, offset: 0, table: None, halves: false, minima: true, groups: 8, header: 16,
        scales: |v, at, group, half| six_bits(v, at, group)
    }
    /// 256 values of 5 bits; scales and minima of 32 have 6 bits.
    Q5K {
        bits: 5, offset: 0, table: None, halves: false, minima: true, groups: 8, header: 16,
        scales: |v, at, group, half| six_bits(v, at, group)
    }
    /// 256 values of 6 bits; scales of 16 have 8 bits.
    Q6K {
        bits: 6, offset: 32, table: None, halves: true, minima: false, groups: 8, header: 18,
        scales: |v, at, group, half| {
            let scale = v.signed(at.byte(1, 2 * group + half));
            (v.mul(v.halves(at.word(0)), scale), v.zero())
        }
    }
    /// 32 values out of 16 that are not evenly apart, and a scale.
    Iq4Nl {
        bits: 4, offset: 128, table: table(NOT_LINEAR, 128), halves: false, minima: false, groups: 1, header: 2,
        scales: |v, at, group, half| (v.halves(at.word(0)), v.zero())
    }
    /// 256 values out of 16 that are not evenly apart; scales of 32 have 6 bits.
    Iq4Xs {
        bits: 4, offset: 128, table: table(NOT_LINEAR, 128), halves: false, minima: false, groups: 8, header: 10,
        scales: |v, at, group, half| {
            let scale = v.signed(at.byte(1, group));
            (v.mul(v.halves(at.word(0)), scale), v.zero())
        }
    }
    /// 32 floats of 4 bits, and an exponent.
    Mxfp4 {
        bits: 4, offset: 12, table: table(FLOATS, 12), halves: false, minima: false, groups: 1, header: 1,
        scales: |v, at, group, half| (v.exponents(at.byte(0, 0)), v.zero())
    }
}

/// Scales and minima of 6 bits, in 12 fields as a block of a file has them.
///
/// # Safety
/// As [`Coding::scales`].
// SAFETY: callers promise what is asked above.
#[inline(always)]
unsafe fn six_bits<V: Vectors>(v: V, at: Fields, group: usize) -> (V::Floats, V::Floats) {
    let field = |field| at.byte(2, field);
    // SAFETY: the twelve fields lie in the header.
    unsafe {
        let (scale, least) = match group {
            0..4 => (v.low_six(field(group)), v.low_six(field(group + 4))),
            _ => {
                let both = field(group + 4);
                (v.low_and_top(both, field(group - 4)), v.high_and_top(both, field(group)))
            }
        };
        let (d, least_d) = (v.halves(at.word(0)), v.halves(at.word(1)));
        (v.mul(d, scale), v.minus(v.mul(least_d, least)))
    }
}

/// Evaluates `$body` with `$name` the [`Coding`] of a [`galaxy_common::WeightFormat`] in blocks, and `$other` where
/// values stand by themselves.
macro_rules! each_coding {
    ($format:expr, $name:ident => $body:expr, $other:expr) => {
        $crate::compute::kernels::blocks::coding::each_coding!(@ $format, $name, $body, $other,
            Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4K Q5K Q6K Iq4Nl Iq4Xs Mxfp4)
    };
    (@ $format:expr, $name:ident, $body:expr, $other:expr, $($coding:ident)+) => {
        match $format {
            $(galaxy_common::WeightFormat::$coding => {
                type $name = $crate::compute::kernels::blocks::coding::$coding;
                $body
            })+
            _ => $other,
        }
    };
}
pub(crate) use each_coding;

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_common::{WeightBlock, WeightFormat};

    #[test]
    fn codings_match_the_blocks_of_their_weight_formats() {
        for format in WeightFormat::ALL {
            let Some(block) = format.block() else { continue };
            let own = each_coding!(
                format,
                C => WeightBlock {
                    values: WeightBlock::GROUP * C::GROUPS as u32,
                    bits: C::BITS as u32,
                    scales: C::HEADER as u32,
                    ..block
                },
                unreachable!("it has blocks")
            );
            assert_eq!(own, block, "{format}");
        }
    }
}
