//! A model whose matrices are rounded to formats of few bits as they are read.
//!
//! The matrices of a model that [`ModelDir::quantised`] returns read as if its files had them in blocks: they have
//! other formats, and the model has another fingerprint. Each block is rounded by itself, so that every device gets the
//! same bits, whichever part of a matrix it reads. The files, and so how a model is cut into pieces and what these
//! hold, stay as they are.

pub use crate::quantisation::{Quantisation, UnknownQuantisation, of_fingerprint};

use crate::{Matrix, ModelDir, blocks, error::ModelError, spec::HeadSpec, warning::Warning};
use galaxy_common::WeightFormat;

/// The most matrices that a message names.
const NAMED: usize = 3;
/// What rounding did to a matrix.
#[derive(Clone, PartialEq, Debug)]
pub struct Rounded {
    /// The matrix that was rounded; for a token embedding table of its own, the language head.
    pub matrix: Matrix,
    /// The name of the tensor that holds it.
    pub tensor: String,
    /// The format in the files.
    pub stored: WeightFormat,
    /// The format after rounding: equal to `stored` where rows are no multiple of 32 values, or the matrix is not one
    /// of those that are rounded.
    pub format: WeightFormat,
    /// The relative error: the root mean square of the errors over that of the values.
    pub error: f64,
}

/// Sums of squared errors and of squared values.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct SquaredErrors {
    errors: f64,
    values: f64,
}

impl SquaredErrors {
    /// Adds values and what they were rounded to.
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
    /// Rounds the model's matrices as they are read: those of layers and the language head, and with it a token
    /// embedding table that is tied to it.
    ///
    /// # Errors
    /// When the model has matrices of few bits already, or none whose rows are whole blocks.
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

    /// A sentence about what matrices are rounded to, and by name which are in another format; `None` where nothing is
    /// rounded. It is among the warnings, too.
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

    /// [`ModelDir::quantised`], if matrices are to be rounded; the same model otherwise.
    ///
    /// # Errors
    /// As for `quantised`.
    pub fn quantised_to(self, to: Option<Quantisation>) -> Result<Self, ModelError> {
        match to {
            Some(to) => self.quantised(to),
            None => Ok(self),
        }
    }

    /// The matrices that keep their own format though others of layers are rounded, or that are in another format than
    /// most because their rows are no multiple of 256 values: the name of each, and its format.
    pub fn not_as_asked(&self) -> Vec<(String, WeightFormat)> {
        let Some(to) = self.quantisation() else { return Vec::new() };
        let other = |which: Matrix| {
            let source = self.matrix(which).ok()?;
            let wanted = to.format(which, 256)?;
            (source.format() != wanted).then(|| (source.name.clone(), source.format()))
        };
        Matrix::all(self.spec()).filter_map(other).collect()
    }

    /// Computes what rounding does to each matrix, for which all are read. `progress` is called with the number of
    /// matrices that were read, and that of all.
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

    /// Computes what rounding does to a matrix.
    fn rounding_of(&self, which: Matrix) -> Result<Rounded, ModelError> {
        let source = self.matrix(which)?;
        let (format, stored) = (source.format(), source.stored);
        let mut squares = SquaredErrors::default();
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

    /// Whether the language head shares the token embedding table.
    pub(crate) fn tied(&self) -> bool {
        matches!(self.spec().head, HeadSpec::Language { tied: true, .. })
    }

    /// The format to which rows of the token embedding table are rounded: that of the language head where it is tied,
    /// or else none, since devices do not hold the table.
    pub(crate) fn embedding_format(&self) -> Option<WeightFormat> {
        let to = self.quantisation().filter(|_| self.tied())?;
        to.format(Matrix::LanguageHead, self.spec().hidden)
    }
}

#[cfg(test)]
mod tests;
