//! Raw requests: token ids or images in, tensors out.

use super::{
    Report, Session,
    answer::{Outcome, Vectors},
    batch::{RowContent, Sequence},
    limits::{MAX_RESULT_BYTES, check_count},
};
use crate::{
    client_memory::Caller,
    error::{self, RequestError},
};
use galaxy_common::Wanted;
use galaxy_model::{HeadSpec, image::ImageError};
use std::time::Duration;

/// The output that a raw request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunOutput {
    /// The model's own pooling and normalisation, as for [`Session::embed`].
    Sentence,
    /// One of the model's outputs, as it is.
    Wanted(Wanted),
}

/// One sequence of a raw request.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Token ids, which are used as they are.
    Tokens(Vec<u32>),
    /// An image file, PNG or JPEG.
    Image(Vec<u8>),
    /// Values of an image as the model reads them: `[channels, height, width]`.
    Pixels(Vec<f32>),
}

/// One result of a raw request.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// The extents of the tensor, the outermost first.
    pub shape: Vec<u32>,
    /// The values of the tensor, row after row.
    pub values: Vec<f32>,
}

/// The results of a raw request.
#[derive(Debug, Clone)]
pub struct Tensors {
    /// One tensor for each sequence, in their order.
    pub tensors: Vec<Tensor>,
    /// What the request cost.
    pub report: Report,
    /// Holds the memory of the results until they are taken.
    pub held: Caller,
}

impl Session {
    /// Runs a raw request: token ids or images in, tensors out.
    ///
    /// # Cancel safety
    /// As [`Session::embed`].
    ///
    /// # Errors
    /// Each kind is its own variant.
    pub async fn run(
        &self,
        sequences: Vec<Input>,
        output: RunOutput,
        timeout: Option<Duration>,
    ) -> Result<Tensors, RequestError> {
        let work = async {
            let (wanted, outcome) = match output {
                RunOutput::Sentence => {
                    let sentence = self.inner.files.sentence()?.clone();
                    (sentence.wanted(), Outcome::Vectors(Vectors::of(sentence)))
                }
                RunOutput::Wanted(wanted) => (self.supported(wanted)?, Outcome::AsItIs),
            };
            self.check(&sequences, wanted)?;
            let mut answer = self.begin()?.within(timeout);
            let (sequences, took) = self.prepare(sequences).await?;
            answer.tokenized(took);
            let tensors = answer.run(sequences, wanted, outcome).await?;
            Ok(Tensors { tensors, report: answer.end(), held: self.caller.clone() })
        };
        self.timed(timeout, work).await
    }

    /// The output as this model has it, or an error if it has none.
    pub(super) fn supported(&self, wanted: Wanted) -> Result<Wanted, RequestError> {
        let refuse = |name: &str, why: &str| RequestError::UnsupportedOutput {
            model: self.inner.model.name().to_owned(),
            wanted: name.to_owned(),
            why: why.to_owned(),
        };
        match (&self.spec().head, wanted) {
            (_, Wanted::Token(_) | Wanted::Nothing) => {
                Err(refuse("tokens", "the run API gives tensors: ask for logits"))
            }
            (_, Wanted::Hidden | Wanted::Pooled(_)) => Ok(wanted),
            (HeadSpec::Classes(_), Wanted::Classes | Wanted::LastLogits) => Ok(Wanted::Classes),
            (HeadSpec::Language { .. }, Wanted::LastLogits | Wanted::AllLogits) => Ok(wanted),
            (HeadSpec::Language { .. }, Wanted::Classes) => {
                Err(refuse("classes", "it predicts the next token: ask for logits"))
            }
            (HeadSpec::Classes(_), Wanted::AllLogits) => {
                Err(refuse("logits of all rows", "it classifies whole texts: ask for logits"))
            }
            (HeadSpec::None, wanted) => {
                let name = if wanted == Wanted::Classes { "classes" } else { "logits" };
                let why = self.spec().headless.as_deref();
                let why = why.unwrap_or("nothing stands on top of its layers");
                Err(refuse(name, &format!("{why}: ask for pooled or hidden")))
            }
        }
    }

    /// Checks the sequences of a raw request, as far as they can be seen before images are read.
    fn check(&self, sequences: &[Input], wanted: Wanted) -> Result<(), RequestError> {
        let spec = self.spec();
        check_count(sequences.len(), "sequences")?;
        let limit = self.text_limit(None);
        let mut rows = 0;
        for (index, input) in sequences.iter().enumerate() {
            let Input::Tokens(ids) = input else {
                rows += spec.patches.map_or(0, |patches| u64::from(patches.rows()));
                continue;
            };
            rows += ids.len() as u64;
            self.check_ids(index, ids, limit)?;
        }
        let values = match wanted {
            Wanted::Hidden => rows * u64::from(spec.hidden),
            Wanted::AllLogits => rows * u64::from(spec.vocabulary),
            Wanted::LastLogits => sequences.len() as u64 * u64::from(spec.vocabulary),
            Wanted::Pooled(_) | Wanted::Classes | Wanted::Token(_) | Wanted::Nothing => 0,
        };
        if values * 4 > MAX_RESULT_BYTES {
            return Err(RequestError::ResultTooLarge {
                bytes: values * 4,
                limit: MAX_RESULT_BYTES,
            });
        }
        // Results of devices become one result.
        self.caller.grow(2 * 4 * values)
    }

    /// Turns the inputs of a raw request into sequences, where blocking is allowed: images are read.
    pub(super) async fn prepare(
        &self,
        inputs: Vec<Input>,
    ) -> Result<(Vec<Sequence>, Duration), RequestError> {
        self.read(|session, gone| {
            let each = inputs.into_iter().enumerate();
            let sequences = each.map(|(index, input)| {
                gone.check()?;
                session.sequence(index, input)
            });
            sequences.collect()
        })
        .await
    }

    fn sequence(&self, index: usize, input: Input) -> Result<Sequence, RequestError> {
        let invalid =
            |why: String| RequestError::Invalid { why: format!("sequence {index}: {why}") };
        let of_text = || invalid("it is an image, and this model reads text".to_owned());
        let pixels = match input {
            Input::Tokens(ids) => return Ok(ids.into()),
            Input::Pixels(values) => values,
            Input::Image(file) => {
                let images = self.inner.files.images().ok_or_else(of_text)??;
                let wrong = |e: ImageError| invalid(e.to_string());
                let _decoding = self.caller.briefly(images.needs(&file).map_err(wrong)?)?;
                images.pixels(&file).map_err(wrong)?
            }
        };
        let patches = self.spec().patches.ok_or_else(of_text)?;
        let (have, want) = (pixels.len(), patches.pixels());
        if have != want {
            let shape = [patches.channels, patches.height, patches.width];
            return Err(invalid(format!("it has {have} values, and {shape:?} are {want}")));
        }
        let (rows, limit) = (patches.rows(), self.fleet_status().max_rows);
        if rows > limit {
            let limited_by = error::MAX_ROWS;
            let (what, tokens) = (format!("sequence {index}"), rows as usize);
            return Err(RequestError::TooLong { what, tokens, limit, limited_by });
        }
        // Its own, and the batch's.
        self.caller.grow(2 * 4 * want as u64)?;
        Ok(Sequence { rows, content: RowContent::Patches(patches.cut(&pixels)) })
    }
}
