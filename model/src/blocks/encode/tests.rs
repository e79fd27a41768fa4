use super::*;

const KNOWN: [WeightFormat; 3] = [WeightFormat::Q8_0, WeightFormat::Q6K, WeightFormat::Q4_0];

/// Values whose error ggml's own tests bound: 0.1 + 2 cos(i).
fn waves() -> Vec<f32> {
    (0..4096).map(|at| 0.1 + 2.0 * (at as f32).cos()).collect()
}

/// Values distributed as weights are: sums of twelve uniform ones, nearly Gaussian with a variance of one.
fn bells(count: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut even = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (0..12).map(|_| even()).sum::<f32>() - 6.0).collect()
}

fn again(format: WeightFormat, values: &[f32]) -> Vec<f32> {
    let mut out = values.to_vec();
    round(format, &mut out);
    out
}

/// The root mean square of the rounding error over that of the values.
fn error(format: WeightFormat, values: &[f32]) -> f64 {
    let square = |value: f32| f64::from(value) * f64::from(value);
    let errors = values.iter().zip(again(format, values)).map(|(a, b)| square(a - b));
    (errors.sum::<f64>() / values.iter().map(|value| square(*value)).sum::<f64>()).sqrt()
}

#[test]
fn only_q8_0_q6_k_and_q4_0_blocks_can_be_encoded() {
    for format in WeightFormat::ALL {
        assert_eq!(encodes(format), KNOWN.contains(&format), "{format}");
        assert!(!encodes(format) || format.block().is_some_and(|b| b.bytes as usize <= MOST_BYTES));
    }
    let mut values = waves();
    round(WeightFormat::F16, &mut values);
    assert_eq!(values, waves());
}

#[test]
fn quantised_values_stay_close_to_the_originals() {
    let values = waves();
    for (format, most) in KNOWN.into_iter().zip([1e-4, 4e-4, 2e-3]) {
        let squares = values.iter().zip(again(format, &values)).map(|(a, b)| (a - b).powi(2));
        let error = squares.sum::<f32>().sqrt() / values.len() as f32;
        assert!(error <= most, "{format}: {error}");
    }
}

/// The bounds of Q8_0 and Q4_0 are the errors that the reference (`gguf.quants.quantize` of PyPI `gguf` 0.19) makes
/// with these values. It writes no Q6_K; the bound of that is the error where the largest of 16 values becomes 31.
#[test]
fn quantisation_error_does_not_exceed_the_gguf_reference() {
    let values = bells(1 << 18);
    for (format, most) in KNOWN.into_iter().zip([0.005_270_83, 0.019_040, 0.084_605]) {
        let error = error(format, &values);
        assert!(error <= most, "{format}: {error}");
    }
}

#[test]
fn quantised_zeros_stay_zero_and_extremes_stay_finite() {
    for format in KNOWN {
        assert_eq!(again(format, &[0.0; 256]), [0.0; 256], "{format}");
        assert_eq!(again(format, &[1e-38; 256]), [0.0; 256], "{format}");
        for large in [3e4f32, -3e4] {
            let rounded = again(format, &[large; 256]);
            assert!(rounded.iter().all(|value| (value - large).abs() < 250.0), "{format}");
        }
        assert!(again(format, &[f32::MAX; 256]).iter().all(|value| value.is_finite()), "{format}");
        let mut one = [0.0; 256];
        one[77] = -0.01;
        let rounded = again(format, &one);
        assert!((rounded[77] + 0.01).abs() < 1e-4, "{format}: {}", rounded[77]);
        assert_eq!(rounded.iter().filter(|value| **value != 0.0).count(), 1);
    }
}

#[test]
fn quantising_twice_gives_nearly_the_same_values() {
    for format in KNOWN {
        let once = again(format, &waves());
        let twice = again(format, &once);
        let off = twice.iter().zip(&once).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 2e-2, "{format}: {off}");
    }
}
