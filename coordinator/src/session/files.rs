//! What the model's files say of requests, or why they say nothing of them.

use crate::error::RequestError;
use galaxy_model::{
    ModelDir,
    generation::Generation,
    image::ImageProcessor,
    sentence::{CrossEncoder, SentenceConfig},
    tokenizer::Tokenizer,
};
use std::sync::Arc;

/// What the files of a model say of requests.
pub(super) struct Files {
    model: String,
    /// The tokenizer, or why there is none.
    tokenizer: Result<Tokenizer, String>,
    /// How vectors of texts are computed, or why that is not known.
    sentence: Result<Arc<SentenceConfig>, String>,
    /// How pairs of texts are scored, or whether the model is no cross-encoder, and why.
    cross_encoder: Result<CrossEncoder, (bool, String)>,
    /// The defaults of generation, or why there are none.
    generation: Result<Generation, String>,
    /// How image files are read, or why they cannot be; none for a model that reads text.
    images: Option<Result<ImageProcessor, String>>,
}

/// What was read, or the error that the model's files are at fault.
fn read<T>(read: &Result<T, String>) -> Result<&T, RequestError> {
    read.as_ref().map_err(|why| RequestError::Model { why: why.clone() })
}

impl Files {
    /// Reads the files. Blocks.
    pub(super) fn open(model: &ModelDir) -> Self {
        let sentence = model.sentence().map_err(|e| e.to_string());
        let cross_encoder = model.cross_encoder().map_err(|e| (e.is_caller(), e.to_string()));
        let lower_case = match (&sentence, &cross_encoder) {
            (Ok(sentence), _) => sentence.lower_case,
            (Err(_), Ok(cross_encoder)) => cross_encoder.lower_case,
            (Err(_), Err(_)) => false,
        };
        let tokenizer = Tokenizer::open(model.path());
        let tokenizer = tokenizer.map_err(|e| e.to_string()).map(|mut tokenizer| {
            if lower_case {
                tokenizer.lower_case();
            }
            tokenizer
        });
        let images = |patches| ImageProcessor::open(model.path(), patches);
        Self {
            model: model.name().to_owned(),
            tokenizer,
            sentence: sentence.map(Arc::new),
            cross_encoder,
            generation: model.generation().map_err(|e| e.to_string()),
            images: model.spec().patches.map(|p| images(p).map_err(|e| e.to_string())),
        }
    }

    /// The tokenizer, which turns texts into tokens.
    pub(super) fn tokenizer(&self) -> Result<&Tokenizer, RequestError> {
        read(&self.tokenizer)
    }

    /// How vectors of texts are computed.
    pub(super) fn sentence(&self) -> Result<&Arc<SentenceConfig>, RequestError> {
        read(&self.sentence)
    }

    /// How tokens are generated where the request does not say.
    pub(super) fn generation(&self) -> Result<&Generation, RequestError> {
        read(&self.generation)
    }

    /// What turns image files into pixels; none where the model reads text.
    pub(super) fn images(&self) -> Option<Result<&ImageProcessor, RequestError>> {
        self.images.as_ref().map(read)
    }

    /// How pairs of texts are scored.
    pub(super) fn cross_encoder(&self) -> Result<&CrossEncoder, RequestError> {
        self.cross_encoder.as_ref().map_err(|error| match error {
            (true, why) => RequestError::UnsupportedOutput {
                model: self.model.clone(),
                wanted: "score of a pair of texts".to_owned(),
                why: why.clone(),
            },
            (false, why) => RequestError::Model { why: why.clone() },
        })
    }

    /// How many tokens a text may have, and what limits them: the files of sentence-transformers,
    /// or else the tokenizer.
    pub(super) fn token_limit(&self, of_sentence: Option<u32>) -> Option<(u32, &'static str)> {
        let of_tokenizer = || self.tokenizer.as_ref().ok()?.max_tokens();
        match of_sentence {
            Some(limit) => Some((limit, "the model's sentence configuration")),
            None => of_tokenizer().map(|limit| (limit, "model_max_length of its tokenizer")),
        }
    }
}
