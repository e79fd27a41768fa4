//! Masks: which tokens may be chosen for a sequence at a step.

use std::sync::Arc;

/// Bits of a word of a mask.
const BITS: u32 = 32;

/// A bit for each token of the vocabulary, the lowest of the first word for token 0: only tokens whose bit
/// is set may be chosen. Tokens beyond the bits may not.
///
/// A mask is bound for a step, so that a grammar can give another with each token; a clone shares its bits.
/// Every device of a ring has to be given the same, and applies it to its slice of the vocabulary before
/// penalties, bounds and the draw. Reported log-probabilities are those of the logits without a mask.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenMask(Arc<[u32]>);

impl TokenMask {
    /// A mask of these bits.
    pub fn new(bits: impl Into<Arc<[u32]>>) -> Self {
        Self(bits.into())
    }

    /// A mask that allows these tokens and no others.
    pub fn of(tokens: &[u32]) -> Self {
        let words = tokens.iter().max().map_or(0, |most| most / BITS + 1);
        let mut bits = vec![0; words as usize];
        tokens.iter().for_each(|token| bits[(token / BITS) as usize] |= 1 << (token % BITS));
        Self::new(bits)
    }

    /// Whether the token may be chosen.
    pub fn allows(&self, token: u32) -> bool {
        let word = self.0.get((token / BITS) as usize);
        word.is_some_and(|word| word >> (token % BITS) & 1 == 1)
    }

    /// Sets the scores of tokens that may not be chosen to minus infinity. `scores` are those of the
    /// tokens from `first` on.
    pub(super) fn apply(&self, scores: &mut [f32], first: u32) {
        for (token, score) in (first..).zip(scores) {
            if !self.allows(token) {
                *score = f32::NEG_INFINITY;
            }
        }
    }
}
