//! The metadata fields of a GGUF file that is written, apart from the tokenizer's.

use super::{header::Field, tokenizer};
use crate::{
    ModelDir, Positions,
    error::ModelError,
    gguf::encoder::MAX_TOKENS,
    sentence::{PoolingMode, SentenceConfig},
    small_file::{MAX_JSON_BYTES, read_bounded},
    spec::NormKind,
};
use galaxy_common::WeightFormat;
use serde_json::Value as Json;

/// The families that can be written, each with its architecture in GGUF files.
const FAMILIES: [(&str, &str); 5] = [
    ("bert", "bert"),
    ("llama", "llama"),
    ("mistral", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
];
/// The formats that `general.file_type` can name, and their numbers.
const FILE_TYPES: [(WeightFormat, u32); 6] = [
    (WeightFormat::F32, 0),
    (WeightFormat::F16, 1),
    (WeightFormat::Q4_0, 2),
    (WeightFormat::Q8_0, 7),
    (WeightFormat::Q6K, 18),
    (WeightFormat::Bf16, 32),
];

/// The architecture as which a model is written.
pub(super) struct Architecture {
    name: &'static str,
    /// Whether files store the rows of queries and keys in pairs.
    pub(super) in_pairs: bool,
    /// The model's `config.json`.
    config: Json,
}

impl Architecture {
    /// The architecture of a model.
    ///
    /// # Errors
    /// When the model's family cannot be written.
    pub(super) fn of(model: &ModelDir) -> Result<Self, ModelError> {
        let family = &model.spec().family;
        let found = FAMILIES.iter().find(|(known, _)| known == family);
        let Some((_, name)) = found else {
            let known = FAMILIES.map(|(family, _)| family).join(", ");
            let why = format!(
                "GGUF files are written of {known}, and it is {family:?}: set weights_format in the cluster file, \
                 or --weights-format, and it is rounded when it is placed"
            );
            return Err(refused(model, why));
        };
        let path = model.path().join("config.json");
        let text = read_bounded(&path, MAX_JSON_BYTES)?;
        let config = serde_json::from_slice(&text)
            .map_err(|error| refused(model, format!("its config.json: {error}")))?;
        Ok(Self { name, in_pairs: *name == "llama", config })
    }

    /// All metadata fields of the file.
    ///
    /// # Errors
    /// When the model has something that no field can express.
    pub(super) fn fields(&self, model: &ModelDir) -> Result<Vec<(String, Field)>, ModelError> {
        let spec = model.spec();
        let most = model.formats().most();
        let file_type = FILE_TYPES.iter().find(|(format, _)| *format == most);
        let mut fields = vec![
            ("general.architecture".to_owned(), Field::Text(self.name.to_owned())),
            ("general.type".to_owned(), Field::Text("model".to_owned())),
            ("general.name".to_owned(), Field::Text(model.name().to_owned())),
            ("general.quantization_version".to_owned(), Field::Whole(2)),
        ];
        if let Some((_, number)) = file_type {
            fields.push(("general.file_type".to_owned(), Field::Whole(*number)));
        }
        let mut put = |name: &str, field| fields.push((format!("{}.{name}", self.name), field));
        put("vocab_size", Field::Whole(spec.vocabulary));
        put("context_length", Field::Whole(spec.position_limit()));
        put("embedding_length", Field::Whole(spec.hidden));
        put("block_count", Field::Whole(spec.layers));
        put("feed_forward_length", Field::Whole(spec.intermediate));
        put("attention.head_count", Field::Whole(spec.heads));
        put("attention.head_count_kv", Field::Whole(spec.kv_heads));
        put("attention.key_length", Field::Whole(spec.head_width));
        put("attention.value_length", Field::Whole(spec.head_width));
        match spec.norm {
            NormKind::Rms => {
                put("attention.layer_norm_rms_epsilon", Field::Float(spec.norm_epsilon))
            }
            NormKind::Layer => put("attention.layer_norm_epsilon", Field::Float(spec.norm_epsilon)),
        }
        if !spec.causal {
            put("attention.causal", Field::Flag(false));
        }
        let sentence = model.sentence()?;
        let number = pooling(&sentence).filter(|_| model.root().join("modules.json").is_file());
        if let Some(number) = number {
            put("pooling_type", Field::Whole(number));
        }
        if let Positions::Rotary { limit, inverse_frequencies, .. } = &spec.positions {
            self.rotary(model, *limit, inverse_frequencies.len(), &mut put)?;
        }
        if spec.token_types > 0 {
            fields.push((
                "tokenizer.ggml.token_type_count".to_owned(),
                Field::Whole(spec.token_types),
            ));
        }
        if let Some(rows) = sentence.max_tokens {
            fields.push((MAX_TOKENS.to_owned(), Field::Whole(rows)));
        }
        fields.extend(tokenizer::fields(model).map_err(|why| refused(model, why))?);
        Ok(fields)
    }

    /// Puts the fields of rotary positions.
    fn rotary(
        &self,
        model: &ModelDir,
        limit: u32,
        frequencies: usize,
        put: &mut impl FnMut(&str, Field),
    ) -> Result<(), ModelError> {
        put("rope.dimension_count", Field::Whole(2 * frequencies as u32));
        put("rope.freq_base", Field::Float(self.theta() as f32));
        match self.stretched() {
            Some(("linear", by)) => {
                put("rope.scaling.type", Field::Text("linear".to_owned()));
                put("rope.scaling.factor", Field::Float(number(by, "factor") as f32));
            }
            Some(("yarn", by)) => {
                put("rope.scaling.type", Field::Text("yarn".to_owned()));
                put("rope.scaling.factor", Field::Float(number(by, "factor") as f32));
                let original = by["original_max_position_embeddings"].as_u64();
                let original = original.and_then(|rows| u32::try_from(rows).ok()).unwrap_or(limit);
                put("rope.scaling.original_context_length", Field::Whole(original));
            }
            Some(("llama3" | "default", _)) | None => {}
            Some((other, _)) => {
                let why = format!("its positions are stretched by {other:?}, which no field says");
                return Err(refused(model, why));
            }
        }
        Ok(())
    }

    /// The divisors of rotary frequencies that the fields do not express; `None` where there are
    /// none.
    ///
    /// # Errors
    /// When there are some, and readers of this architecture do not apply them.
    pub(super) fn divisors(&self, model: &ModelDir) -> Result<Option<Vec<f32>>, ModelError> {
        let Positions::Rotary { inverse_frequencies, .. } = &model.spec().positions else {
            return Ok(None);
        };
        if self.stretched().is_some_and(|(kind, _)| matches!(kind, "linear" | "yarn")) {
            return Ok(None);
        }
        let (theta, columns) = (self.theta(), 2.0 * inverse_frequencies.len() as f64);
        let divisor = |(at, inverse): (usize, &f32)| {
            (theta.powf(-2.0 * at as f64 / columns) / f64::from(*inverse)) as f32
        };
        let divisors: Vec<f32> = inverse_frequencies.iter().enumerate().map(divisor).collect();
        if divisors.iter().all(|divisor| (divisor - 1.0).abs() < 1e-5) {
            return Ok(None);
        }
        match self.in_pairs {
            true => Ok(Some(divisors)),
            false => {
                let why = format!("files of {} do not divide frequencies of positions", self.name);
                Err(refused(model, why))
            }
        }
    }

    /// The base of the rotary frequencies.
    fn theta(&self) -> f64 {
        let inside = &self.config["rope_parameters"]["rope_theta"];
        inside.as_f64().or_else(|| self.config["rope_theta"].as_f64()).unwrap_or(10_000.0)
    }

    /// The scaling rule of rotary positions, and the object that holds its parameters.
    fn stretched(&self) -> Option<(&str, &Json)> {
        let all = ["rope_scaling", "rope_parameters"].map(|name| &self.config[name]);
        let found = all.into_iter().find(|by| by.as_object().is_some_and(|by| !by.is_empty()))?;
        let kind = found["rope_type"].as_str().or_else(|| found["type"].as_str());
        Some((kind.unwrap_or("default"), found))
    }
}

/// The number of the way in which rows become a vector, if it has one; what no field says is seen when the file is read.
fn pooling(sentence: &SentenceConfig) -> Option<u32> {
    match sentence.only_pooling()? {
        PoolingMode::Mean => Some(1),
        PoolingMode::Cls => Some(2),
        PoolingMode::LastToken => Some(3),
        _ => None,
    }
}

fn number(of: &Json, name: &str) -> f64 {
    of[name].as_f64().unwrap_or(1.0)
}

fn refused(model: &ModelDir, why: String) -> ModelError {
    ModelError::Unwritten { path: model.opened().to_owned(), why }
}
