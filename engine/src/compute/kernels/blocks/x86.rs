//! Vectors of columns in AVX-512 with VNNI, in AVX2, and in AVX2 with VNNI.
// Hot path: no locks, no logging, no allocation.
#![allow(unsafe_code)]

use super::vectors::{Vectors, vectors};
use std::arch::x86_64::*;

#[inline(always)]
fn fetch(line: *const u8) {
    // SAFETY: a hint, which reads nothing; all of 64 bits have it.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}

/// AVX-512 with VNNI, whose vectors are a whole panel. Activations are in planes of 8 bits.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<const PLANES: usize>;

impl<const PLANES: usize> Vectors for Avx512<PLANES> {
    const LANES: usize = 16;
    const PACKED: usize = 32 * PLANES;
    type Codes = __m512i;
    type Sum = [__m512i; PLANES];
    type Floats = __m512;

    #[inline(always)]
    fn fetch(self, line: *const u8) {
        fetch(line);
    }
    fn pack(group: &[i16; 32], out: &mut [u8]) {
        super::pack_planes(group, out);
    }

    vectors! {
        fn load(self, from: *const u8) -> __m512i { _mm512_loadu_si512(from.cast()) }
        fn low(self, codes: __m512i) -> __m512i { _mm512_and_si512(codes, _mm512_set1_epi8(15)) }
        fn high(self, codes: __m512i) -> __m512i {
            _mm512_and_si512(_mm512_srli_epi16::<4>(codes), _mm512_set1_epi8(15))
        }
        fn fifth(self, codes: __m512i, bits: __m512i, line: usize) -> __m512i {
            let bits = match line {
                0..4 => _mm512_sll_epi16(bits, _mm_cvtsi32_si128(4 - line as i32)),
                _ => _mm512_srl_epi16(bits, _mm_cvtsi32_si128(line as i32 - 4)),
            };
            // codes | bits & mask
            _mm512_ternarylogic_epi32::<0xf8>(codes, bits, _mm512_set1_epi8(0x10))
        }
        fn sixth(self, codes: __m512i, bits: __m512i, line: usize) -> __m512i {
            let bits = match line {
                0 => _mm512_slli_epi16::<4>(bits),
                1 => _mm512_slli_epi16::<2>(bits),
                2 => bits,
                _ => _mm512_srli_epi16::<2>(bits),
            };
            _mm512_ternarylogic_epi32::<0xf8>(codes, bits, _mm512_set1_epi8(0x30))
        }
        fn signed_codes(self, codes: __m512i) -> __m512i { codes }
        fn lookup(self, table: &[u8; 16], codes: __m512i) -> __m512i {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, codes)
        }
        fn start(self, from: i32) -> Self::Sum {
            let mut sum = [_mm512_setzero_si512(); PLANES];
            sum[0] = _mm512_set1_epi32(from);
            sum
        }
        fn dot(self, sum: Self::Sum, codes: __m512i, packed: *const u8, line: usize) -> Self::Sum {
            let mut sum = sum;
            for (plane, sum) in sum.iter_mut().enumerate() {
                let four = packed.add(32 * plane + 4 * line).cast::<i32>().read_unaligned();
                *sum = _mm512_dpbusd_epi32(*sum, codes, _mm512_set1_epi32(four));
            }
            sum
        }
        fn end(self, sum: Self::Sum) -> __m512 {
            let mut all = sum[0];
            for high in &sum[1..] {
                all = _mm512_add_epi32(all, _mm512_slli_epi32::<8>(*high));
            }
            _mm512_cvtepi32_ps(all)
        }
        fn zero(self) -> __m512 { _mm512_setzero_ps() }
        fn splat(self, value: f32) -> __m512 { _mm512_set1_ps(value) }
        fn floats(self, from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
        fn store(self, to: *mut f32, values: __m512) { _mm512_storeu_ps(to, values) }
        fn mul(self, a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn minus(self, a: __m512) -> __m512 { _mm512_xor_ps(a, _mm512_set1_ps(-0.0)) }
        fn halves(self, from: *const u8) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        fn signed(self, from: *const u8) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
        }
        fn exponents(self, from: *const u8) -> __m512 {
            let e = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
            let small = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
            let is_small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
            _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_small, normal, small))
        }
        fn low_six(self, from: *const u8) -> __m512 {
            widen512(_mm_and_si128(_mm_loadu_si128(from.cast()), _mm_set1_epi8(63)))
        }
        fn low_and_top(self, from: *const u8, top: *const u8) -> __m512 {
            widen512(low_and_top(_mm_loadu_si128(from.cast()), _mm_loadu_si128(top.cast())))
        }
        fn high_and_top(self, from: *const u8, top: *const u8) -> __m512 {
            let high = _mm_srli_epi16::<4>(_mm_loadu_si128(from.cast()));
            widen512(low_and_top(high, _mm_loadu_si128(top.cast())))
        }
    }
}

// SAFETY: to be called only where the processor has AVX-512.
#[inline(always)]
unsafe fn widen512(bytes: __m128i) -> __m512 {
    // SAFETY: as above.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)) }
}

/// The low four bits of bytes, and above them the two highest of others.
// SAFETY: to be called only where the processor has SSE2, as all of 64 bits do.
#[inline(always)]
unsafe fn low_and_top(low: __m128i, top: __m128i) -> __m128i {
    // SAFETY: as above.
    unsafe {
        let top = _mm_and_si128(_mm_srli_epi16::<2>(top), _mm_set1_epi8(0x30));
        _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)), top)
    }
}

/// AVX2, whose vectors are half a panel. Activations are 16 bits wide.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;
/// AVX2 with VNNI, whose vectors are half a panel. Activations are in planes of 8 bits.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni<const PLANES: usize>;

/// The functions that both have in common.
macro_rules! half_panels {
    () => {
        vectors! {
            fn load(self, from: *const u8) -> __m256i { _mm256_loadu_si256(from.cast()) }
            fn low(self, codes: __m256i) -> __m256i { _mm256_and_si256(codes, _mm256_set1_epi8(15)) }
            fn high(self, codes: __m256i) -> __m256i {
                _mm256_and_si256(_mm256_srli_epi16::<4>(codes), _mm256_set1_epi8(15))
            }
            fn fifth(self, codes: __m256i, bits: __m256i, line: usize) -> __m256i {
                let bits = match line {
                    0..4 => _mm256_sll_epi16(bits, _mm_cvtsi32_si128(4 - line as i32)),
                    _ => _mm256_srl_epi16(bits, _mm_cvtsi32_si128(line as i32 - 4)),
                };
                _mm256_or_si256(codes, _mm256_and_si256(bits, _mm256_set1_epi8(0x10)))
            }
            fn sixth(self, codes: __m256i, bits: __m256i, line: usize) -> __m256i {
                let bits = match line {
                    0 => _mm256_slli_epi16::<4>(bits),
                    1 => _mm256_slli_epi16::<2>(bits),
                    2 => bits,
                    _ => _mm256_srli_epi16::<2>(bits),
                };
                _mm256_or_si256(codes, _mm256_and_si256(bits, _mm256_set1_epi8(0x30)))
            }
            fn signed_codes(self, codes: __m256i) -> __m256i { codes }
            fn lookup(self, table: &[u8; 16], codes: __m256i) -> __m256i {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                _mm256_shuffle_epi8(table, codes)
            }
            fn zero(self) -> __m256 { _mm256_setzero_ps() }
            fn splat(self, value: f32) -> __m256 { _mm256_set1_ps(value) }
            fn floats(self, from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
            fn store(self, to: *mut f32, values: __m256) { _mm256_storeu_ps(to, values) }
            fn mul(self, a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
            fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
            fn minus(self, a: __m256) -> __m256 { _mm256_xor_ps(a, _mm256_set1_ps(-0.0)) }
            fn halves(self, from: *const u8) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
            fn signed(self, from: *const u8) -> __m256 {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)))
            }
            fn exponents(self, from: *const u8) -> __m256 {
                let e = _mm256_cvtepu8_epi32(_mm_loadu_si64(from));
                let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
                let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
                let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
                _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small))
            }
            fn low_six(self, from: *const u8) -> __m256 {
                widen256(_mm_and_si128(_mm_loadu_si64(from), _mm_set1_epi8(63)))
            }
            fn low_and_top(self, from: *const u8, top: *const u8) -> __m256 {
                widen256(low_and_top(_mm_loadu_si64(from), _mm_loadu_si64(top)))
            }
            fn high_and_top(self, from: *const u8, top: *const u8) -> __m256 {
                let high = _mm_srli_epi16::<4>(_mm_loadu_si64(from));
                widen256(low_and_top(high, _mm_loadu_si64(top)))
            }
        }
    };
}

// SAFETY: to be called only where the processor has AVX2.
#[inline(always)]
unsafe fn widen256(bytes: __m128i) -> __m256 {
    // SAFETY: as above.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)) }
}

impl Vectors for Avx2 {
    const LANES: usize = 8;
    type Codes = __m256i;
    type Sum = __m256i;
    type Floats = __m256;

    #[inline(always)]
    fn fetch(self, line: *const u8) {
        fetch(line);
    }
    /// Packs of each four activations the even ones, then the odd ones.
    fn pack(group: &[i16; 32], out: &mut [u8]) {
        for (out, four) in out.as_chunks_mut::<8>().0.iter_mut().zip(group.as_chunks::<4>().0) {
            for (out, at) in out.as_chunks_mut().0.iter_mut().zip([0, 2, 1, 3]) {
                *out = four[at].to_ne_bytes();
            }
        }
    }

    half_panels!();
    vectors! {
        fn start(self, from: i32) -> __m256i { _mm256_set1_epi32(from) }
        fn dot(self, sum: __m256i, codes: __m256i, packed: *const u8, line: usize) -> __m256i {
            let pairs = packed.add(8 * line).cast::<i32>();
            let even = _mm256_and_si256(codes, _mm256_set1_epi16(255));
            let even = _mm256_madd_epi16(even, _mm256_set1_epi32(pairs.read_unaligned()));
            let odd = _mm256_srli_epi16::<8>(codes);
            let odd = _mm256_madd_epi16(odd, _mm256_set1_epi32(pairs.add(1).read_unaligned()));
            _mm256_add_epi32(sum, _mm256_add_epi32(even, odd))
        }
        fn end(self, sum: __m256i) -> __m256 { _mm256_cvtepi32_ps(sum) }
    }
}

impl<const PLANES: usize> Vectors for AvxVnni<PLANES> {
    const LANES: usize = 8;
    const PACKED: usize = 32 * PLANES;
    type Codes = __m256i;
    type Sum = [__m256i; PLANES];
    type Floats = __m256;

    #[inline(always)]
    fn fetch(self, line: *const u8) {
        fetch(line);
    }
    fn pack(group: &[i16; 32], out: &mut [u8]) {
        super::pack_planes(group, out);
    }

    half_panels!();
    vectors! {
        fn start(self, from: i32) -> Self::Sum {
            let mut sum = [_mm256_setzero_si256(); PLANES];
            sum[0] = _mm256_set1_epi32(from);
            sum
        }
        fn dot(self, sum: Self::Sum, codes: __m256i, packed: *const u8, line: usize) -> Self::Sum {
            let mut sum = sum;
            for (plane, sum) in sum.iter_mut().enumerate() {
                let four = packed.add(32 * plane + 4 * line).cast::<i32>().read_unaligned();
                *sum = _mm256_dpbusd_avx_epi32(*sum, codes, _mm256_set1_epi32(four));
            }
            sum
        }
        fn end(self, sum: Self::Sum) -> __m256 {
            let mut all = sum[0];
            for high in &sum[1..] {
                all = _mm256_add_epi32(all, _mm256_slli_epi32::<8>(*high));
            }
            _mm256_cvtepi32_ps(all)
        }
    }
}
