//! The probabilities of logits.

/// The softmax of logits: probabilities that add up to one.
pub fn softmax(logits: &[f32]) -> Vec<f32> {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let raised: Vec<f64> = logits.iter().map(|&logit| f64::from(logit - top).exp()).collect();
    let sum: f64 = raised.iter().sum();
    raised.into_iter().map(|power| (power / sum) as f32).collect()
}
