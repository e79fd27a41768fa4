//! The numbers of bits to which matrices may be rounded: their names, and the formats that they stand for.

use crate::{blocks::encodes, tensor::Matrix};
use galaxy_common::WeightFormat;
use std::{fmt, str::FromStr};

/// The character between the digest of a fingerprint and the name of what matrices are rounded to.
const ROUNDED: char = '-';

/// To how many bits the matrices of a model are rounded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Quantisation {
    /// 8 bits: `q8_0`.
    Q8,
    /// 6 bits: `q6_k`.
    Q6,
    /// 4 bits: `q4_0`, and `q6_k` for the language head, whose errors show in every token.
    Q4,
}

/// The error for a number of bits that is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not known: q8, q6 and q4 are")]
pub struct UnknownQuantisation(String);

impl Quantisation {
    /// All of them, the most exact first.
    pub const ALL: [Self; 3] = [Self::Q8, Self::Q6, Self::Q4];

    /// Its name in files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q8 => "q8",
            Self::Q6 => "q6",
            Self::Q4 => "q4",
        }
    }

    /// The format to which a matrix, or a table, with so many inputs is rounded; `None` where its rows are no whole
    /// blocks, or it is not one of those that are rounded.
    pub(crate) fn format(self, which: Matrix, inputs: u32) -> Option<WeightFormat> {
        let wanted = match (which, self) {
            (Matrix::Patch | Matrix::ClassDense | Matrix::ClassOutput, _) => return None,
            (_, Self::Q8) => WeightFormat::Q8_0,
            (_, Self::Q6) | (Matrix::LanguageHead, Self::Q4) => WeightFormat::Q6K,
            (_, Self::Q4) => WeightFormat::Q4_0,
        };
        let fits = |format: &WeightFormat| {
            format.block().is_some_and(|block| inputs.is_multiple_of(block.values))
        };
        debug_assert!(encodes(wanted), "{wanted}");
        // `q8_0` is for rows that are no multiple of 256 values.
        [wanted, WeightFormat::Q8_0].into_iter().find(fits)
    }
}

impl fmt::Display for Quantisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Quantisation {
    type Err = UnknownQuantisation;
    fn from_str(text: &str) -> Result<Self, UnknownQuantisation> {
        let found = Self::ALL.into_iter().find(|bits| bits.name().eq_ignore_ascii_case(text));
        found.ok_or_else(|| UnknownQuantisation(text.to_owned()))
    }
}

/// Splits a fingerprint into that of the model's files, and the number of bits to which its matrices are rounded, if
/// they are.
pub fn of_fingerprint(fingerprint: &str) -> (&str, Option<Quantisation>) {
    let parts = fingerprint.split_once(ROUNDED);
    match parts.and_then(|(files, name)| Some((files, name.parse().ok()?))) {
        Some((files, rounded)) => (files, Some(rounded)),
        None => (fingerprint, None),
    }
}

/// The fingerprint of a model whose matrices are rounded, by that of its files.
pub(crate) fn named_fingerprint(files: &str, to: Quantisation) -> String {
    format!("{files}{ROUNDED}{to}")
}
