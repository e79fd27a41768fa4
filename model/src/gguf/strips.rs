//! White space beside special tokens that is left out of a text, as GGUF files say it.
//!
//! llama.cpp tells it by the model's name alone. A file that was written here lists the tokens, too, in fields of our
//! own.

use super::{Gguf, MetadataValue};
use std::collections::BTreeSet;

/// The fields that list the tokens before which, and behind which, white space is left out.
pub(super) const FIELDS: [&str; 2] =
    ["tokenizer.huggingface.lstrip", "tokenizer.huggingface.rstrip"];

/// The parts of a model's name by which llama.cpp strips behind the special tokens of Phi-3.
const PHI3: [&str; 2] = ["phi-3", "phi3"];
/// Tokens that a vocabulary must have under such a name, and behind all of which but the first nothing is stripped.
const OF_PHI3: [&str; 4] = ["</s>", "<unk>", "<s>", "<|endoftext|>"];
/// The part of a model's name by which llama.cpp strips before the mask.
const MODERN_BERT: &str = "modern-bert";
const MASK: &str = "[MASK]";

/// The tokens beside which white space is left out, by their ids.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Strips {
    pub(super) before: BTreeSet<usize>,
    pub(super) behind: BTreeSet<usize>,
}

impl Strips {
    /// What llama.cpp strips in a model of this name, given the texts of all tokens and which of them are special;
    /// `None` where it does not take a vocabulary like this one under such a name.
    pub(super) fn by_name<'a>(
        name: &str,
        texts: impl Iterator<Item = &'a str> + Clone,
        special: impl Fn(usize) -> bool,
    ) -> Option<Self> {
        let name = name.to_lowercase();
        let id = |text: &str| texts.clone().position(|other| other == text);
        let mut strips = Self::default();
        if PHI3.iter().any(|part| name.contains(part)) {
            let [end, others @ ..] = OF_PHI3.map(id);
            strips.behind =
                texts.clone().enumerate().map(|(at, _)| at).filter(|at| special(*at)).collect();
            strips.behind.insert(end?);
            for other in others {
                strips.behind.remove(&other?);
            }
        } else if name.contains(MODERN_BERT) {
            strips.before.extend(id(MASK));
        }
        Some(strips)
    }

    /// The name under which llama.cpp strips the same as these, if there is one that begins with `name`: of two that
    /// strip the same, the shorter one. Where there is none, a name under which it strips nothing, if `name` is one.
    pub(super) fn named<'a>(
        &self,
        name: &str,
        texts: impl Iterator<Item = &'a str> + Clone,
        special: impl Fn(usize) -> bool,
    ) -> Option<String> {
        let by = |name: &str| Self::by_name(name, texts.clone(), &special);
        let names = [name.to_owned(), format!("{name} (phi3)"), format!("{name} (modern-bert)")];
        let found = names.iter().find(|name| by(name).as_ref() == Some(self)).cloned();
        found.or_else(|| (by(name) == Some(Self::default())).then(|| name.to_owned()))
    }
}

impl Gguf {
    /// The tokens beside which white space is left out: those that fields of our own list, or else those that the
    /// model's name says.
    pub(super) fn strips(&self, texts: &[&str], special: impl Fn(usize) -> bool) -> Strips {
        if FIELDS.iter().all(|field| self.list(field).is_none()) {
            let name = self.text("general.name").unwrap_or_default();
            return Strips::by_name(name, texts.iter().copied(), special).unwrap_or_default();
        }
        let [before, behind] = FIELDS.map(|field| {
            let ids = self.list(field).unwrap_or_default().iter();
            let ids = ids.filter_map(|id| match id {
                MetadataValue::Whole(id) => usize::try_from(*id).ok(),
                _ => None,
            });
            ids.collect()
        });
        Strips { before, behind }
    }
}
