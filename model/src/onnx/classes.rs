//! Classes of networks: the labels that exporters write into files, and whether results are probabilities.

use super::{
    file::OnnxFile,
    network::{Network, ValueId},
    operator::{Operator, Softmax, Unary},
};
use crate::error::ModelError;

/// Keys under which exporters write labels: Ultralytics and YOLOv5, tools around them, PaddleOCR's converters.
const KEYS: [&str; 5] = ["names", "class_names", "classes", "labels", "character"];

/// What the values of a result say of classes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scores {
    /// Their softmax gives probabilities.
    Logits,
    /// They are probabilities already, of one class among all or of each by itself.
    Probabilities,
}

impl Network {
    /// What the values of a result are, by the last operator that computes and does not only move them.
    pub fn scores(&self, result: ValueId) -> Scores {
        let mut id = result;
        while let Some(node) = self.nodes.iter().find(|node| node.makes.contains(&id)) {
            match (&node.operator, node.reads.first()) {
                (Operator::View | Operator::Cast, Some(from)) => id = *from,
                (Operator::Unary(Unary::Sigmoid | Unary::HardSigmoid { .. }), _) => {
                    return Scores::Probabilities;
                }
                // The sum over all classes is one, not that over something else. Logarithms are logits, too.
                (Operator::Softmax(Softmax { first, end, log: false }), _) => {
                    let dims = &self.value(id).dims;
                    let count = |dims: &[u64]| dims.iter().product::<u64>();
                    return match count(&dims[*first..*end]) == count(dims) {
                        true => Scores::Probabilities,
                        false => Scores::Logits,
                    };
                }
                _ => return Scores::Logits,
            }
        }
        Scores::Logits
    }
}

impl OnnxFile {
    /// The labels that the file names, under the key of them that comes first here: `names`, `class_names`, `classes`,
    /// `labels`, `character`.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn labels(&self) -> Result<Option<Vec<String>>, ModelError> {
        for key in KEYS {
            if let Some(text) = self.metadata(key)? {
                return listed(&text).map(Some).ok_or_else(|| ModelError::Onnx {
                    path: self.path().to_owned(),
                    why: format!("what it says under {key:?} is no list of labels"),
                });
            }
        }
        Ok(None)
    }
}

/// Labels as exporters write them: a dictionary or list of Python or JSON, lines, or words between commas.
fn listed(text: &str) -> Option<Vec<String>> {
    let text = text.trim();
    let within = |open: char, close: char| text.strip_prefix(open)?.strip_suffix(close);
    if let Some(inner) = within('{', '}') {
        return literal(inner, true);
    }
    if let Some(inner) = within('[', ']') {
        return literal(inner, false);
    }
    let words = |by: char| text.split(by).map(|word| word.trim().to_owned()).collect();
    Some(if text.contains('\n') { words('\n') } else { words(',') })
}

/// The entries of a list, or of a dictionary whose keys are the numbers from 0 on, in any order.
fn literal(text: &str, keyed: bool) -> Option<Vec<String>> {
    let mut entries = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let mut number = entries.len();
        if keyed {
            let (key, after) = entry(rest)?;
            number = key.parse().ok()?;
            rest = after.trim_start().strip_prefix(':')?.trim_start();
        }
        let (label, after) = entry(rest)?;
        entries.push((number, label));
        let after = after.trim_start();
        rest = match after.strip_prefix(',') {
            Some(next) => next.trim_start(),
            None if after.is_empty() => after,
            None => return None,
        };
    }
    entries.sort();
    let in_order = entries.iter().enumerate().all(|(at, (number, _))| at == *number);
    in_order.then(|| entries.into_iter().map(|(_, label)| label).collect())
}

/// The text in quotes, or the word without, that stands first, and what follows it.
fn entry(text: &str) -> Option<(String, &str)> {
    let Some(quote) = text.chars().next().filter(|first| matches!(first, '\'' | '"')) else {
        let end = text.find([',', ':', ' ', '\n', '{', '[', '\'', '"']).unwrap_or(text.len());
        return (end > 0).then(|| (text[..end].to_owned(), &text[end..]));
    };
    let mut label = String::new();
    let mut rest = text[1..].chars();
    loop {
        match rest.next()? {
            last if last == quote => return Some((label, rest.as_str())),
            '\\' => {
                let escaped = rest.next()?;
                let digits = match escaped {
                    'x' => 2,
                    'u' => 4,
                    'U' => 8,
                    _ => 0,
                };
                label.push(match escaped {
                    'n' => '\n',
                    't' => '\t',
                    'x' | 'u' | 'U' => {
                        let code = rest.as_str().get(..digits)?;
                        rest = rest.as_str()[digits..].chars();
                        char::from_u32(u32::from_str_radix(code, 16).ok()?)?
                    }
                    other => other,
                });
            }
            other => label.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::onnx::{Fixed, NewAttribute, NewModel, NewNode};
    use std::io::Write;

    fn opened(nodes: Vec<NewNode>, metadata: &[(&str, &str)]) -> (OnnxFile, Network) {
        let model = NewModel {
            opset: 17,
            nodes,
            inputs: vec![("x".into(), vec![Some(1), Some(3), Some(1), Some(2)])],
            outputs: vec!["y".into()],
            tensors: Vec::new(),
        };
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&model.bytes_with(metadata)).unwrap();
        let file = OnnxFile::open(file.path()).unwrap();
        let network = Network::of(&file, &Fixed::default()).unwrap();
        (file, network)
    }

    #[test]
    fn results_behind_a_softmax_over_all_classes_are_probabilities() {
        let scores = |nodes: Vec<NewNode>| {
            let (_, network) = opened(nodes, &[]);
            network.scores(network.outputs[0])
        };
        let softmax = |operator: &str, axis: i64, from: &str, to: &str| {
            NewNode::new(operator, &[from], to).with("axis", NewAttribute::Whole(axis))
        };
        let flat = |from: &str, to: &str| NewNode::new("Flatten", &[from], to);
        let last = |operator: &str| vec![flat("x", "f"), softmax(operator, 1, "f", "y")];
        assert_eq!(scores(last("Softmax")), Scores::Probabilities);
        assert_eq!(scores(last("LogSoftmax")), Scores::Logits);
        let flat_behind = vec![flat("x", "f"), softmax("Softmax", 1, "f", "s"), flat("s", "y")];
        assert_eq!(scores(flat_behind), Scores::Probabilities);
        let of_channels = vec![softmax("Softmax", 1, "x", "s"), flat("s", "y")];
        assert_eq!(scores(of_channels), Scores::Logits);
        let each = vec![NewNode::new("Sigmoid", &["x"], "s"), flat("s", "y")];
        assert_eq!(scores(each), Scores::Probabilities);
        assert_eq!(scores(vec![NewNode::new("Relu", &["x"], "y")]), Scores::Logits);
        let behind = vec![softmax("Softmax", 1, "x", "s"), NewNode::new("Relu", &["s"], "y")];
        assert_eq!(scores(behind), Scores::Logits);
    }

    #[test]
    fn labels_are_read_as_exporters_write_them() {
        let labels = |metadata: &[(&str, &str)]| {
            opened(vec![NewNode::new("Relu", &["x"], "y")], metadata).0.labels()
        };
        let three = Some(vec!["cat".to_owned(), "driver's \"dog\"".into(), "ä, b".into()]);
        for text in [
            r#"{0: 'cat', 1: 'driver\'s "dog"', 2: "ä, b"}"#,
            r#"{"2": "\u00e4, b", "0":"cat","1":"driver's \"dog\""}"#,
            r#"['cat', 'driver\'s "dog"', '\xe4, b',]"#,
            "cat\r\ndriver's \"dog\"\nä, b\n",
        ] {
            assert_eq!(labels(&[("stride", "32"), ("names", text)]).unwrap(), three, "{text}");
        }
        let words = labels(&[("character", "a, b"), ("author", "nobody")]).unwrap().unwrap();
        assert_eq!(words, ["a", "b"]);
        assert_eq!(labels(&[("author", "nobody")]).unwrap(), None);
        for text in ["{0: 'a', 2: 'b'}", "['a' 'b']", "{'a', 'b'}", "['a]", "['\\ud800']"] {
            let error = labels(&[("names", text)]).unwrap_err().to_string();
            assert!(error.contains("under \"names\""), "{text}: {error}");
        }
    }
}
