//! Quantisation to 8 bits, for the wire and the KV cache: codes, which are whole numbers from -127 to 127, and a scale in f32 for each 32 of them.
//!
//! Rounding is the same to the bit by whatever instructions, and what is not finite makes a scale that is not a
//! number: it is not hidden.
// Hot path: no locks, no logging, no allocation.

use galaxy_common::CacheType;

/// Values that share a scale. The last ones of a run may be fewer.
pub(crate) const GROUP: usize = CacheType::GROUP as usize;

/// The number that rounds another below 2^22 to a whole one when it is added, which then stands in the
/// lowest bits.
const ROUND: f32 = 12_582_912.0;

/// Rounds the values of one group to codes, and gives their scale.
#[inline(always)]
fn narrow_group(values: &[f32], codes: &mut [i8]) -> f32 {
    // Eight of each, so that none waits for the one before it.
    let (mut largest, mut poison) = ([0.0f32; 8], [0.0f32; 8]);
    let (eights, rest) = values.as_chunks::<8>();
    for eight in eights {
        for at in 0..8 {
            let size = eight[at].abs();
            largest[at] = if size > largest[at] { size } else { largest[at] };
            poison[at] += eight[at] * 0.0;
        }
    }
    for (at, value) in rest.iter().enumerate() {
        let size = value.abs();
        largest[at] = if size > largest[at] { size } else { largest[at] };
        poison[at] += value * 0.0;
    }
    let (mut most, mut bad) = (0.0f32, 0.0f32);
    for at in 0..8 {
        most = if largest[at] > most { largest[at] } else { most };
        bad += poison[at];
    }
    // Smaller numbers have no inverse.
    let by = if most < 1e-30 { 0.0 } else { 127.0 / most };
    for (code, value) in codes.iter_mut().zip(values) {
        *code = (value * by + ROUND).to_bits() as i8;
    }
    if by > 0.0 { most / 127.0 + bad } else { bad }
}

/// Rounds values to codes, with a scale for each group of them.
#[inline(always)]
pub(crate) fn narrow(values: &[f32], codes: &mut [i8], scales: &mut [f32]) {
    let groups = values.chunks(GROUP).zip(codes.chunks_mut(GROUP));
    for ((values, codes), scale) in groups.zip(scales) {
        *scale = narrow_group(values, codes);
    }
}

/// Computes the values of codes, with a scale for each group of them.
#[inline(always)]
pub(crate) fn widen(codes: &[i8], scales: &[f32], out: &mut [f32]) {
    let (whole, rest) = codes.as_chunks::<GROUP>();
    let (out, last) = out.split_at_mut(whole.len() * GROUP);
    let out = out.as_chunks_mut::<GROUP>().0;
    // In variables of their own, or the compiler sees that they may overlap, and takes one after the other.
    for ((codes, scale), out) in whole.iter().zip(scales).zip(out) {
        let (mut wide, scale) = ([0.0; GROUP], *scale);
        for at in 0..GROUP {
            wide[at] = f32::from(codes[at]) * scale;
        }
        *out = wide;
    }
    if let Some(scale) = scales.get(whole.len()) {
        for (out, code) in last.iter_mut().zip(rest) {
            *out = f32::from(*code) * scale;
        }
    }
}

/// Computes the values of `SIDE` runs whose codes stand side by side: `[values, SIDE]`, with scales `[groups,
/// SIDE]`.
#[inline(always)]
pub(crate) fn widen_side_by_side<const SIDE: usize>(codes: &[i8], scales: &[f32], out: &mut [f32]) {
    let groups = codes.chunks(GROUP * SIDE).zip(out.chunks_mut(GROUP * SIDE));
    for ((codes, out), scales) in groups.zip(scales.as_chunks::<SIDE>().0) {
        let scales = *scales;
        for (codes, out) in codes.as_chunks::<SIDE>().0.iter().zip(out.as_chunks_mut::<SIDE>().0) {
            let mut wide = [0.0; SIDE];
            for at in 0..SIDE {
                wide[at] = f32::from(codes[at]) * scales[at];
            }
            *out = wide;
        }
    }
}

/// Rounds values to those that their codes and scales stand for.
#[inline(always)]
pub(crate) fn round(values: &mut [f32]) {
    let mut codes = [0; GROUP];
    for values in values.chunks_mut(GROUP) {
        let codes = &mut codes[..values.len()];
        let scale = narrow_group(values, codes);
        for (value, code) in values.iter_mut().zip(codes) {
            *value = f32::from(*code) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing::Random, *};

    #[test]
    fn q8_round_trip_is_within_half_a_step() {
        let mut random = Random::default();
        for count in [1, 20, 31, 32, 33, 64, 80, 200] {
            let values = random.values(count);
            let (mut codes, mut scales) = (vec![0; count], vec![0.0; count.div_ceil(GROUP)]);
            let (mut back, mut rounded) = (vec![f32::NAN; count], values.clone());
            narrow(&values, &mut codes, &mut scales);
            widen(&codes, &scales, &mut back);
            round(&mut rounded);
            assert_eq!(back, rounded);
            for (group, back) in values.chunks(GROUP).zip(back.chunks(GROUP)) {
                let most = group.iter().fold(0.0f32, |most, value| most.max(value.abs()));
                for (value, back) in group.iter().zip(back) {
                    assert!((value - back).abs() <= most / 253.9, "{value} {back}");
                }
            }
            let (mut side, mut of_side) = (vec![0; 4 * count], vec![0.0; 4 * scales.len()]);
            side.iter_mut().skip(2).step_by(4).zip(&codes).for_each(|(to, from)| *to = *from);
            of_side.iter_mut().skip(2).step_by(4).zip(&scales).for_each(|(to, from)| *to = *from);
            let mut out = vec![f32::NAN; 4 * count];
            widen_side_by_side::<4>(&side, &of_side, &mut out);
            assert!(out.iter().skip(2).step_by(4).eq(&back));
        }
    }

    #[test]
    fn q8_groups_with_non_finite_values_become_nan_and_tiny_values_zero() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [0.5; 40];
            values[33] = bad;
            round(&mut values);
            assert!(values[..32].iter().all(|value| (value - 0.5).abs() < 1e-6), "{bad}");
            assert!(values[32..].iter().all(|value| value.is_nan()), "{bad}");
        }
        for small in [0.0, 1e-38, -1e-44] {
            let mut values = [small; 7];
            round(&mut values);
            assert_eq!(values, [0.0; 7]);
        }
    }
}
