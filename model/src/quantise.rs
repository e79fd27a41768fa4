//! A model whose matrices are rounded to formats of few bits as they are read.
//!
//! Whoever reads such a model, by [`ModelDir::quantised`], finds its matrices in blocks, as if its files had them so:
//! they have other formats, and the model has another fingerprint. Blocks are rounded by themselves, so that every
//! device has the same bits, whichever part of a matrix it reads. What is in the files, and so how a model is cut in
//! pieces and what these hold, stays as it is.

use crate::{
    Matrix, ModelDir,
    blocks::{self, encodes},
    error::ModelError,
    fields::Warning,
    spec::HeadSpec,
};
use galaxy_common::WeightFormat;
use std::{fmt, str::FromStr};

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

/// A number of bits that nobody knows.
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

    /// The format of a matrix, or table, with so many inputs: none where no whole blocks fit into its rows, or it is
    /// none of those that are rounded.
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
        // Rows that are no multiple of 256 values.
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

/// How many matrices are named that are not as asked.
const NAMED: usize = 3;
/// Stands between the digest of a fingerprint and the name of what matrices are rounded to.
const ROUNDED: char = '-';

/// The fingerprint of the files of a model, and to what its matrices are rounded, by the fingerprint that a plan names.
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

/// What rounding does to a matrix.
#[derive(Clone, PartialEq, Debug)]
pub struct Rounded {
    /// Which.
    pub matrix: Matrix,
    /// Name of its tensor.
    pub tensor: String,
    /// In which format it is in the files,
    pub stored: WeightFormat,
    /// and what it is rounded to: the same, where rows are no multiple of 32 values or a matrix is none of those that
    /// are rounded.
    pub format: WeightFormat,
    /// The root mean square of the error over that of the values.
    pub error: f64,
}

/// Squares of errors and of values.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Squares {
    errors: f64,
    values: f64,
}

impl Squares {
    /// Adds values that were rounded.
    pub(crate) fn add(&mut self, values: &[f32], rounded: &[f32]) {
        let square = |value: f32| f64::from(value) * f64::from(value);
        self.errors += values.iter().zip(rounded).map(|(a, b)| square(a - b)).sum::<f64>();
        self.values += values.iter().map(|value| square(*value)).sum::<f64>();
    }

    /// The root mean square of the errors over that of the values.
    pub(crate) fn relative(self) -> f64 {
        match self.values > 0.0 {
            true => (self.errors / self.values).sqrt(),
            false => 0.0,
        }
    }
}

impl ModelDir {
    /// The model with its matrices rounded as they are read: those of layers and the language head, with the table of
    /// words where it is the head.
    ///
    /// # Errors
    /// When it has matrices of few bits already, or none whose rows have whole blocks.
    pub fn quantised(mut self, to: Quantisation) -> Result<Self, ModelError> {
        let mut any = false;
        for which in Matrix::all(self.spec()) {
            let source = self.matrix(which)?;
            if source.format().block().is_some() {
                let have = format!("{} in {}", source.name(), source.format());
                return Err(ModelError::FewBits { path: self.opened().to_owned(), have });
            }
            any |= to.format(which, source.rows()).is_some();
        }
        if !any {
            return Err(ModelError::NoneFit { path: self.opened().to_owned(), to });
        }
        self.round_to(to);
        let mut model = self.checked()?;
        if let Some(text) = model.rounding_in_words() {
            let path = model.opened().to_owned();
            model.warn(Warning { path, text });
        }
        Ok(model)
    }

    /// What is rounded to what, and by name what is not as it was asked; nothing where nothing is rounded. A warning
    /// says it, too.
    pub fn rounding_in_words(&self) -> Option<String> {
        let to = self.quantisation()?;
        let other = self.not_as_asked();
        let most = self.format();
        let text =
            format!("its matrices are rounded to {to} ({most}) as they are read, which is lossy");
        if other.is_empty() {
            return Some(text);
        }
        let named = |(name, format): &(String, WeightFormat)| format!("{name} ({format})");
        let mut names: Vec<_> = other.iter().take(NAMED).map(named).collect();
        if other.len() > NAMED {
            names.push(format!("{} more", other.len() - NAMED));
        }
        let names = names.join(", ");
        Some(format!(
            "{text}; in another format, because their rows are no multiple of its blocks: {names}"
        ))
    }

    /// [`ModelDir::quantised`], if matrices are to be rounded.
    ///
    /// # Errors
    /// As there.
    pub fn quantised_to(self, to: Option<Quantisation>) -> Result<Self, ModelError> {
        match to {
            Some(to) => self.quantised(to),
            None => Ok(self),
        }
    }

    /// Matrices that keep their own format though others of layers are rounded, or that take another format than most
    /// because their rows are no multiple of 256 values: by their names, and what is done with them.
    pub fn not_as_asked(&self) -> Vec<(String, WeightFormat)> {
        let Some(to) = self.quantisation() else { return Vec::new() };
        let other = |which: Matrix| {
            let source = self.matrix(which).ok()?;
            let wanted = to.format(which, 256)?;
            (source.format() != wanted).then(|| (source.name.clone(), source.format()))
        };
        Matrix::all(self.spec()).filter_map(other).collect()
    }

    /// What rounding does to each matrix, which takes reading all of them. `progress` is told how many were read, and
    /// how many there are.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub fn rounding(
        &self,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<Rounded>, ModelError> {
        let all: Vec<Matrix> = Matrix::all(self.spec()).collect();
        let mut found = Vec::with_capacity(all.len());
        for (at, which) in all.iter().enumerate() {
            progress(at, all.len());
            found.push(self.rounding_of(*which)?);
        }
        progress(all.len(), all.len());
        Ok(found)
    }

    /// What rounding does to a matrix.
    fn rounding_of(&self, which: Matrix) -> Result<Rounded, ModelError> {
        let source = self.matrix(which)?;
        let (format, stored) = (source.format(), source.stored);
        let mut squares = Squares::default();
        if format != stored {
            let mut rounded = Vec::new();
            let outputs = 0..source.columns();
            source.each_run(0..source.rows(), outputs, &mut Vec::new(), |_, _, values| {
                rounded.clear();
                rounded.extend_from_slice(values);
                blocks::round(format, &mut rounded);
                squares.add(values, &rounded);
            })?;
        }
        let (tensor, error) = (source.name.clone(), squares.relative());
        Ok(Rounded { matrix: which, tensor, stored, format, error })
    }

    /// Whether the table of words is the language head, too.
    pub(crate) fn tied(&self) -> bool {
        matches!(self.spec().head, HeadSpec::Language { tied: true, .. })
    }

    /// To what the rows of the table of words are rounded: as the language head where it is that, else not at all,
    /// since devices do not hold it.
    pub(crate) fn words_format(&self) -> Option<WeightFormat> {
        let to = self.quantisation().filter(|_| self.tied())?;
        to.format(Matrix::LanguageHead, self.spec().hidden)
    }
}

#[cfg(test)]
mod tests;
