//! The format of each matrix of a model.

use crate::Matrix;
use galaxy_common::{Activations, WeightFormat};
use std::{collections::BTreeMap, sync::Arc};

/// The format of each matrix of a model, in its files and as devices hold it. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Formats {
    most: WeightFormat,
    vectors: WeightFormat,
    activations: Activations,
    /// The formats of the matrices that differ from `most`.
    others: Arc<BTreeMap<Matrix, WeightFormat>>,
}

/// The matrices that each layer may have.
const IN_LAYER: [fn(u32) -> Matrix; 7] = [
    Matrix::Query,
    Matrix::Key,
    Matrix::Value,
    Matrix::AttentionOutput,
    Matrix::Gate,
    Matrix::Up,
    Matrix::Down,
];

impl Formats {
    /// The same format for all matrices and vectors.
    pub fn all(format: WeightFormat) -> Self {
        Self { most: format, vectors: format, ..Self::default() }
    }

    /// These formats, with another one for a matrix.
    #[must_use]
    pub fn with(mut self, matrix: Matrix, format: WeightFormat) -> Self {
        let others = Arc::make_mut(&mut self.others);
        match format == self.most {
            true => others.remove(&matrix),
            false => others.insert(matrix, format),
        };
        self
    }

    /// These formats, with another one for vectors.
    #[must_use]
    pub fn with_vectors(self, format: WeightFormat) -> Self {
        Self { vectors: format, ..self }
    }

    /// These formats, for devices that compute with such activations.
    #[must_use]
    pub fn with_activations(self, activations: Activations) -> Self {
        Self { activations, ..self }
    }

    /// The activations that devices compute with.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Whether any matrix is in blocks of few bits.
    pub fn has_blocks(&self) -> bool {
        self.others.values().chain([&self.most]).any(|format| format.block().is_some())
    }

    /// The format in which devices hold a matrix: its own, or f32 where it is in blocks and
    /// activations are f32.
    pub fn held(&self, matrix: Matrix) -> WeightFormat {
        self.as_held(self.of(matrix))
    }

    fn as_held(&self, format: WeightFormat) -> WeightFormat {
        match self.activations {
            Activations::F32 if format.block().is_some() => WeightFormat::F32,
            _ => format,
        }
    }

    /// The format of a matrix in the model's files.
    pub fn of(&self, matrix: Matrix) -> WeightFormat {
        if self.others.is_empty() {
            return self.most;
        }
        self.others.get(&matrix).copied().unwrap_or(self.most)
    }

    /// The format that most of the model has.
    pub fn most(&self) -> WeightFormat {
        self.most
    }

    /// The format with the most bytes per value, of those in which devices hold matrices.
    pub fn widest(&self) -> WeightFormat {
        let all = self.others.values().chain([&self.most]).map(|format| self.as_held(*format));
        all.max_by_key(|format| format.bytes(1 << 8, 1)).unwrap_or(self.most)
    }

    /// The format of the vectors in the files. Devices hold them as f32 in any case.
    pub fn vectors(&self) -> WeightFormat {
        self.vectors
    }

    /// These formats, each replaced by what `format` returns for it.
    #[must_use]
    pub fn map(&self, format: impl Fn(WeightFormat) -> WeightFormat) -> Self {
        let all = Self {
            most: format(self.most),
            vectors: format(self.vectors),
            others: Arc::default(),
            ..*self
        };
        self.others.iter().fold(all, |all, (matrix, of)| all.with(*matrix, format(*of)))
    }

    /// The formats of a model that consists of these layers of this one.
    #[must_use]
    pub fn of_layers(&self, layers: impl IntoIterator<Item = u32>) -> Self {
        let mut others = BTreeMap::new();
        if !self.others.is_empty() {
            // Matrices of no layer stay as they are.
            let elsewhere = |matrix: &Matrix| IN_LAYER.iter().all(|of| of(0) != matrix.at(|_| 0));
            let kept = self.others.iter().filter(|(matrix, _)| elsewhere(matrix));
            others.extend(kept.map(|(matrix, format)| (*matrix, *format)));
            for (at, layer) in (0..).zip(layers) {
                let other = |of: &fn(u32) -> Matrix| Some((of(at), *self.others.get(&of(layer))?));
                others.extend(IN_LAYER.iter().filter_map(other));
            }
        }
        Self { others: Arc::new(others), ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: WeightFormat = WeightFormat::F32;
    const MIXED: [WeightFormat; 2] = [WeightFormat::Q4K, WeightFormat::Q6K];

    #[test]
    fn each_matrix_keeps_its_own_weight_format() {
        let [most, other] = MIXED;
        let formats = Formats::all(most).with(Matrix::Value(1), other);
        let formats = formats.with(Matrix::LanguageHead, other).with_vectors(WeightFormat::F32);
        assert_eq!((formats.of(Matrix::Value(0)), formats.of(Matrix::Value(1))), (most, other));
        assert_eq!((formats.most(), formats.vectors()), (most, WeightFormat::F32));
        assert_eq!(formats.clone().with(Matrix::Value(1), most).of(Matrix::Value(1)), most);
        assert!(formats.has_blocks() && !formats.map(|_| WeightFormat::F16).has_blocks());
        let exact = formats.clone().with_activations(Activations::F32);
        assert_eq!(exact.of(Matrix::LanguageHead), other);
        assert_eq!((exact.held(Matrix::LanguageHead), exact.widest()), (F32, F32));
        assert_eq!(formats.held(Matrix::LanguageHead), other);
        // Equal formats have a single form.
        let widened = formats.map(|_| WeightFormat::F32);
        assert_eq!(widened, Formats::default());
    }

    #[test]
    fn selected_layers_keep_their_weight_formats() {
        let [most, other] = MIXED;
        let formats = Formats::all(most).with(Matrix::Value(2), other);
        let formats = formats.with(Matrix::LanguageHead, other);
        let taken = formats.of_layers([2, 0, 2]);
        let of = |layer| taken.of(Matrix::Value(layer));
        assert_eq!([of(0), of(1), of(2), of(3)], [other, most, other, most]);
        assert_eq!(taken.of(Matrix::LanguageHead), other);
        assert_eq!(formats.of_layers([0]), formats.of_layers([1]));
    }
}
