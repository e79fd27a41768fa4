//! The key of a model's shape, by which profiles of devices are stored.

use crate::{HeadSpec, ModelDir, ModelSpec};
use galaxy_common::Activations;

impl ModelDir {
    /// A key of the model's sizes and number types: equal for models whose operations cost the
    /// same.
    ///
    /// It begins with a readable part, as "bert-l24-h1024x16-i4096-f32", and ends with eight digits
    /// of a digest of the whole description, because not everything that costs time is in the
    /// readable part.
    pub fn shape_key(&self) -> String {
        let spec = self.spec();
        let ModelSpec { family, layers, hidden, heads, intermediate, .. } = spec;
        let format = self.format();
        let activations = match self.formats().activations() {
            other if other != Activations::default() && self.formats().has_blocks() => {
                format!("-{other}")
            }
            _ => String::new(),
        };
        let digits = digits(spec);
        format!(
            "{family}-l{layers}-h{hidden}x{heads}-i{intermediate}-{format}{activations}-{digits}"
        )
    }
}

fn digits(spec: &ModelSpec) -> String {
    let mut spec = spec.clone();
    // The names and meaning of classes cost no time.
    if let HeadSpec::Classes(head) = &mut spec.head {
        head.names.clear();
        (head.problem, head.padding) = (None, None);
    }
    spec.headless = None;
    // A description that cannot be serialised is named by its Debug form.
    let text = serde_json::to_string(&spec).unwrap_or_else(|_| format!("{spec:?}"));
    let hash = blake3::hash(text.as_bytes()).to_hex();
    hash.as_str().chars().take(8).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::shape::Shape;
    use galaxy_common::WeightFormat;

    fn key(shape: Shape) -> String {
        let dir = tempfile::tempdir().unwrap();
        shape.write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        ModelDir::open(dir.path()).unwrap().shape_key()
    }

    #[test]
    fn models_of_equal_shape_share_a_shape_key() {
        let shape = Shape::bert(2, 64, 4);
        assert_eq!(key(shape), key(shape));
        assert!(key(shape).starts_with("bert-l2-h64x4-i256-f32-"), "{}", key(shape));
        for other in [
            Shape { layers: 3, ..shape },
            Shape { vocabulary: 999, ..shape },
            Shape { format: WeightFormat::F16, ..shape },
        ] {
            assert_ne!(key(shape), key(other));
        }
    }

    #[test]
    fn class_names_do_not_change_the_shape_key() {
        let head = |name: &str| crate::ClassHead {
            row: crate::ClassRow::First,
            dense: None,
            dense_bias: false,
            norm: false,
            labels: 1,
            bias: true,
            names: vec![name.to_owned()],
            problem: None,
            padding: None,
        };
        let dir = tempfile::tempdir().unwrap();
        Shape::bert(2, 64, 4).write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        let spec = ModelDir::open(dir.path()).unwrap().spec().clone();
        let with =
            |name| digits(&ModelSpec { head: HeadSpec::Classes(head(name)), ..spec.clone() });
        assert_eq!(with("a"), with("b"));
        assert_ne!(with("a"), digits(&spec));
    }
}
