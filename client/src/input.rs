//! What calls are given: texts with options, and sequences as they are.

use galaxy_proto::{convert, v1};
use std::num::NonZeroU32;

/// What happens to a text with more tokens than the model takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TooLong {
    /// The call fails with `text_too_long`.
    #[default]
    Refuse,
    /// The text is cut.
    Truncate,
}

/// What is put before each text that is embedded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Prefix {
    /// A prompt of the model's files, by its name.
    Named(String),
    /// A text of the caller.
    Text(String),
}

/// How texts become vectors. The default is what the model's files say.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EmbedOptions {
    /// What happens to texts that are too long.
    pub too_long: TooLong,
    /// What is put before each text, instead of the prompt that the model's files use by default.
    pub prefix: Option<Prefix>,
    /// The length that vectors are truncated to, instead of what the model's files say.
    pub dimensions: Option<NonZeroU32>,
    /// Whether vectors are scaled to length one in the end, whatever the model's files say.
    pub normalise: bool,
}

impl From<TooLong> for EmbedOptions {
    fn from(too_long: TooLong) -> Self {
        Self { too_long, ..Self::default() }
    }
}

impl EmbedOptions {
    /// A request with these options and nothing to embed yet.
    pub(crate) fn request(&self) -> v1::EmbedRequest {
        let (prompt_name, prompt) = match &self.prefix {
            None => (None, None),
            Some(Prefix::Named(name)) => (Some(name.clone()), None),
            Some(Prefix::Text(text)) => (None, Some(text.clone())),
        };
        v1::EmbedRequest {
            truncate: self.too_long == TooLong::Truncate,
            dimensions: self.dimensions.map_or(0, NonZeroU32::get),
            normalise: self.normalise,
            prompt_name,
            prompt,
            ..v1::EmbedRequest::default()
        }
    }
}

/// One raw sequence, for [`Client::run_inputs`](crate::Client::run_inputs).
#[derive(Clone, PartialEq, Debug)]
pub enum Input {
    /// The token ids of a text.
    Ids(Vec<u32>),
    /// An image file, PNG or JPEG.
    Image(Vec<u8>),
    /// The values of an image as the model reads them: `[channels, height, width]`.
    Pixels(Vec<f32>),
}

impl Input {
    /// The bytes that it takes in a message, at most.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Ids(ids) => ids.len().saturating_mul(5),
            Self::Image(file) => file.len(),
            Self::Pixels(values) => values.len().saturating_mul(4),
        }
    }

    pub(crate) fn message(&self) -> v1::Sequence {
        let nothing = v1::Sequence::default();
        match self {
            Self::Ids(ids) => v1::Sequence { ids: ids.clone(), ..nothing },
            Self::Image(file) => v1::Sequence { image: file.clone(), ..nothing },
            Self::Pixels(values) => v1::Sequence { pixels: convert::bytes(values), ..nothing },
        }
    }
}
