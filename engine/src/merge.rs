//! Puts the results of devices together: one result for each segment of the batch.

use galaxy_common::{BatchShape, Pooling, Wanted};
use galaxy_graph::program::{Output, OutputKind, Reduce, TOKEN_VALUES};
use galaxy_model::ModelSpec;

/// The result of one segment.
#[derive(Clone, PartialEq, Debug)]
pub enum Merged {
    /// Hidden states, rows x hidden.
    Hidden(Vec<f32>),
    /// One pooled vector, hidden, not normalised.
    Vector(Vec<f32>),
    /// The class logits.
    Classes(Vec<f32>),
    /// The next token, as [`TOKEN_VALUES`] lists its values.
    Token(Vec<f32>),
    /// Nothing was wanted.
    Nothing,
    /// Next-token logits, rows x vocabulary: of the last row, or of all rows.
    Logits {
        /// The number of rows.
        rows: u32,
        /// The logits, row after row.
        values: Vec<f32>,
    },
}

impl Merged {
    /// The values, whatever they are.
    pub fn values(&self) -> &[f32] {
        match self {
            Self::Hidden(v) | Self::Vector(v) | Self::Classes(v) | Self::Token(v) => v,
            Self::Nothing => &[],
            Self::Logits { values, .. } => values,
        }
    }
}

/// Results that do not fit the batch: a device sent something else than its program says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// A result of the wrong size or kind.
    #[error("a device's result for sequence {segment} does not fit: {why}")]
    Mismatch {
        /// The number of the segment.
        segment: u32,
        /// The reason, for people.
        why: String,
    },
    /// The results of a segment are not complete.
    #[error("the results for sequence {segment} are not complete")]
    Missing {
        /// The number of the segment.
        segment: usize,
    },
}

/// Merges the outputs of all devices, given as (declared, values) for each.
///
/// Pooled partials become one vector. Order of devices is the order of addition.
///
/// # Errors
/// When something does not fit or is missing.
pub fn merge(
    spec: &ModelSpec,
    shape: &BatchShape,
    parts: &[(&[Output], &[Vec<f32>])],
) -> Result<Vec<Merged>, MergeError> {
    let mut segments: Vec<Segment> = shape
        .segments()
        .iter()
        .map(|s| Segment { wanted: s.wanted, rows: s.rows, values: Vec::new(), filled: 0 })
        .collect();
    for (outputs, values) in parts {
        for (output, values) in outputs.iter().zip(values.iter()) {
            let mismatch =
                |why: &str| MergeError::Mismatch { segment: output.segment, why: why.to_owned() };
            let segment = segments
                .get_mut(output.segment as usize)
                .ok_or_else(|| mismatch("there is no such sequence"))?;
            segment.add(spec, output.kind, values).map_err(mismatch)?;
        }
    }
    let finish = |(index, segment): (usize, Segment)| {
        segment.finish(spec).ok_or(MergeError::Missing { segment: index })
    };
    segments.into_iter().enumerate().map(finish).collect()
}

struct Segment {
    wanted: Wanted,
    rows: u32,
    values: Vec<f32>,
    /// The number of values that are there, or of rows that a pooled vector has.
    filled: u64,
}

impl Segment {
    fn add(
        &mut self,
        spec: &ModelSpec,
        kind: OutputKind,
        part: &[f32],
    ) -> Result<(), &'static str> {
        let hidden = spec.hidden as usize;
        match (self.wanted, kind) {
            (Wanted::Hidden, OutputKind::Hidden { rows }) => {
                self.values.resize(self.rows as usize * hidden, 0.0);
                let range = rows.start() as usize * hidden..rows.end() as usize * hidden;
                let place = self.values.get_mut(range).ok_or("rows beyond the sequence")?;
                if place.len() != part.len() {
                    return Err("not rows x hidden values");
                }
                place.copy_from_slice(part);
                self.filled += part.len() as u64;
            }
            (Wanted::Pooled(_), OutputKind::Pooled { reduce, rows }) => {
                if part.len() != hidden {
                    return Err("not hidden values");
                }
                if self.values.is_empty() {
                    self.values = part.to_vec();
                } else {
                    for (sum, &value) in self.values.iter_mut().zip(part) {
                        *sum = if reduce == Reduce::Max { sum.max(value) } else { *sum + value };
                    }
                }
                self.filled += u64::from(if reduce == Reduce::Row { self.rows } else { rows });
            }
            (Wanted::Classes, OutputKind::Classes) | (Wanted::Token(_), OutputKind::Token) => {
                self.values = part.to_vec();
                self.filled += part.len() as u64;
            }
            (Wanted::LastLogits | Wanted::AllLogits, OutputKind::Logits { rows, vocabulary }) => {
                let width = spec.vocabulary as usize;
                let first = self.first_row();
                self.values.resize((self.rows - first) as usize * width, 0.0);
                let slice = vocabulary.len() as usize;
                if part.len() != rows.len() as usize * slice || rows.start() < first {
                    return Err("not rows x slice values");
                }
                for (row, source) in rows.iter().zip(part.chunks_exact(slice.max(1))) {
                    let at = (row - first) as usize * width;
                    let range = at + vocabulary.start() as usize..at + vocabulary.end() as usize;
                    self.values
                        .get_mut(range)
                        .ok_or("beyond the vocabulary")?
                        .copy_from_slice(source);
                }
                self.filled += part.len() as u64;
            }
            _ => return Err("a result of another kind than was asked for"),
        }
        Ok(())
    }

    fn first_row(&self) -> u32 {
        if self.wanted.is_of_last_row() { self.rows - 1 } else { 0 }
    }

    fn finish(mut self, spec: &ModelSpec) -> Option<Merged> {
        let whole = match (self.wanted, &spec.head) {
            (Wanted::Hidden, _) => u64::from(self.rows) * u64::from(spec.hidden),
            (Wanted::Pooled(_), _) => u64::from(self.rows),
            (Wanted::Classes, galaxy_model::HeadSpec::Classes(head)) => u64::from(head.labels),
            (Wanted::Token(_), _) => u64::from(TOKEN_VALUES),
            (Wanted::Nothing, _) => 0,
            _ => u64::from(self.rows - self.first_row()) * u64::from(spec.vocabulary),
        };
        if self.filled != whole {
            return None;
        }
        let rows = self.rows - self.first_row();
        Some(match self.wanted {
            Wanted::Hidden => Merged::Hidden(self.values),
            Wanted::Classes => Merged::Classes(self.values),
            Wanted::Token(_) => Merged::Token(self.values),
            Wanted::Nothing => Merged::Nothing,
            Wanted::LastLogits | Wanted::AllLogits => Merged::Logits { rows, values: self.values },
            Wanted::Pooled(pooling) => {
                let divisor = match pooling {
                    Pooling::Mean => self.rows as f32,
                    Pooling::MeanSqrtLen => (self.rows as f32).sqrt(),
                    _ => 1.0,
                };
                self.values.iter_mut().for_each(|v| *v /= divisor);
                Merged::Vector(self.values)
            }
        })
    }
}
