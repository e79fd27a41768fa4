//! In which format each matrix of a model is.

use crate::Matrix;
use galaxy_common::{Activations, WeightFormat};
use std::{collections::BTreeMap, sync::Arc};

/// The format of each matrix of a model, in its files and as devices hold it. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Formats {
    most: WeightFormat,
    vectors: WeightFormat,
    activations: Activations,
    /// Of the matrices that are in another format than most.
    others: Arc<BTreeMap<Matrix, WeightFormat>>,
}

/// The matrices of a layer.
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
    /// One format for all matrices and vectors.
    pub fn all(format: WeightFormat) -> Self {
        Self { most: format, vectors: format, ..Self::default() }
    }

    /// The same with another format for a matrix.
    #[must_use]
    pub fn with(mut self, matrix: Matrix, format: WeightFormat) -> Self {
        let others = Arc::make_mut(&mut self.others);
        match format == self.most {
            true => others.remove(&matrix),
            false => others.insert(matrix, format),
        };
        self
    }

    /// The same with another format for vectors.
    #[must_use]
    pub fn with_vectors(self, format: WeightFormat) -> Self {
        Self { vectors: format, ..self }
    }

    /// The same, of devices that compute with such activations.
    #[must_use]
    pub fn with_activations(self, activations: Activations) -> Self {
        Self { activations, ..self }
    }

    /// The activations that devices compute with.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Whether any matrix stands in blocks of few bits.
    pub fn has_blocks(&self) -> bool {
        self.others.values().chain([&self.most]).any(|format| format.block().is_some())
    }

    /// The format in which devices hold a matrix, where nothing else speaks against it.
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

    /// The format of most of the model.
    pub fn most(&self) -> WeightFormat {
        self.most
    }

    /// The one of those that devices hold of which a value takes most.
    pub fn widest(&self) -> WeightFormat {
        let all = self.others.values().chain([&self.most]).map(|format| self.as_held(*format));
        all.max_by_key(|format| format.bytes(1 << 8, 1)).unwrap_or(self.most)
    }

    /// The format of its vectors. Devices hold them widened to f32, whatever it is.
    pub fn vectors(&self) -> WeightFormat {
        self.vectors
    }

    /// The same with another format in the place of each.
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

    /// The formats of a model whose layers are these layers of it.
    #[must_use]
    pub fn of_layers(&self, layers: impl IntoIterator<Item = u32>) -> Self {
        let mut others = BTreeMap::new();
        if !self.others.is_empty() {
            // What is of no layer stays.
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
    fn each_matrix_has_its_format() {
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
        // Of equal formats there is one form.
        let widened = formats.map(|_| WeightFormat::F32);
        assert_eq!(widened, Formats::default());
    }

    #[test]
    fn layers_are_taken_with_their_formats() {
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
