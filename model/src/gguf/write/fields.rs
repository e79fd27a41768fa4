//! The metadata fields of a GGUF file that is written, apart from the tokenizer's.

use super::{
    architecture::Architecture,
    header::{Field, Fields},
    tokenizer, unwritten,
};
use crate::{
    ModelDir,
    error::ModelError,
    gguf::{
        dense::{self, WIDTHS},
        encoder::{MAX_TOKENS, PROMPTS},
    },
    sentence::{PoolingMode, Projection, SentenceConfig},
    spec::{Activation, NormKind},
};
use galaxy_common::WeightFormat;
use serde_json::json;

/// The formats that `general.file_type` can name, and their numbers.
const FILE_TYPES: [(WeightFormat, u32); 6] = [
    (WeightFormat::F32, 0),
    (WeightFormat::F16, 1),
    (WeightFormat::Q4_0, 2),
    (WeightFormat::Q8_0, 7),
    (WeightFormat::Q6K, 18),
    (WeightFormat::Bf16, 32),
];

impl Architecture {
    /// All metadata fields of the file.
    ///
    /// # Errors
    /// When the model has something that no field can express.
    pub(super) fn fields(&self, model: &ModelDir) -> Result<Fields, ModelError> {
        let refused = |why| unwritten(model, why);
        let mut fields = vec![
            ("general.architecture".to_owned(), Field::Text(self.layout.name.to_owned())),
            ("general.type".to_owned(), Field::Text("model".to_owned())),
        ];
        let (name, of_tokenizer) = tokenizer::fields(model).map_err(refused)?;
        fields.extend(name.map(|name| ("general.name".to_owned(), Field::Text(name))));
        fields.push(("general.quantization_version".to_owned(), Field::Whole(2)));
        let most = model.formats().most();
        if let Some((_, number)) = FILE_TYPES.iter().find(|(format, _)| *format == most) {
            fields.push(("general.file_type".to_owned(), Field::Whole(*number)));
        }
        let mut put = |name: &str, field| {
            fields.push((format!("{}.{name}", self.layout.name), field));
        };
        self.put_sizes(model, &mut put);
        self.put_rotary(model, &mut put)?;
        self.put_windows(model, &mut put)?;
        self.put_activation(model, &mut put)?;
        let sentence = model.sentence()?;
        let number = pooling(&sentence).filter(|_| model.root().join("modules.json").is_file());
        if let Some(number) = number {
            put("pooling_type", Field::Whole(number));
        }
        for ([inputs, outputs], matrix) in WIDTHS.into_iter().zip(self.dense(&sentence, model)) {
            put(inputs, Field::Whole(matrix.inputs));
            put(outputs, Field::Whole(matrix.outputs));
        }
        fields.extend(of_texts(&sentence));
        let types = model.spec().token_types;
        if types > 0 {
            fields.push(("tokenizer.ggml.token_type_count".to_owned(), Field::Whole(types)));
        }
        fields.extend(of_tokenizer);
        Ok(fields)
    }

    /// The two matrices that vectors are multiplied with behind the pooling, where files of the architecture have them;
    /// none in other models.
    pub(super) fn dense<'a>(
        &self,
        sentence: &'a SentenceConfig,
        model: &ModelDir,
    ) -> Vec<Projection<'a>> {
        let hidden = model.spec().hidden;
        let found = sentence.only_pooling().map_or(Vec::new(), |(_, matrices)| matrices);
        let fits = match found[..] {
            [first, second] => first.inputs == hidden && second.outputs == hidden,
            _ => false,
        };
        if fits && self.layout.name == dense::ARCHITECTURE { found } else { Vec::new() }
    }

    /// Puts the sizes of the model, and what its norms and its attention are like.
    fn put_sizes(&self, model: &ModelDir, put: &mut impl FnMut(&str, Field)) {
        let spec = model.spec();
        put("vocab_size", Field::Whole(spec.vocabulary));
        put("context_length", Field::Whole(spec.position_limit()));
        put("embedding_length", Field::Whole(spec.hidden));
        put("block_count", Field::Whole(spec.layers));
        put("feed_forward_length", Field::Whole(spec.intermediate));
        put("attention.head_count", Field::Whole(spec.heads));
        put("attention.head_count_kv", Field::Whole(spec.kv_heads));
        put("attention.key_length", Field::Whole(spec.head_width));
        put("attention.value_length", Field::Whole(spec.head_width));
        let norm = match spec.norm {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        put(norm, Field::Float(spec.norm_epsilon));
        if !spec.causal {
            put("attention.causal", Field::Flag(false));
        }
        for (name, cap) in [
            ("attn_logit_softcapping", spec.score_cap),
            ("final_logit_softcapping", spec.logit_cap),
        ] {
            if let Some(cap) = cap {
                put(name, Field::Float(cap));
            }
        }
    }

    /// Puts the activation function, where files of the architecture may have several.
    fn put_activation(
        &self,
        model: &ModelDir,
        put: &mut impl FnMut(&str, Field),
    ) -> Result<(), ModelError> {
        if self.layout.name != "modern-bert" {
            return Ok(());
        }
        let name = match model.spec().activation {
            Activation::Gelu => "gelu",
            Activation::Silu => "silu",
            other => {
                let why =
                    format!("its activation is {other:?}, which files of modern-bert do not say");
                return Err(unwritten(model, why));
            }
        };
        put("hidden_activation", Field::Text(name.to_owned()));
        Ok(())
    }
}

/// The fields of our own that say how texts become vectors.
fn of_texts(sentence: &SentenceConfig) -> Fields {
    let mut fields = Vec::new();
    if let Some(rows) = sentence.max_tokens {
        fields.push((MAX_TOKENS.to_owned(), Field::Whole(rows)));
    }
    let (prompts, usual) = sentence.prompts();
    if !prompts.is_empty() {
        let text = json!({ "prompts": prompts, "default_prompt_name": usual }).to_string();
        fields.push((PROMPTS.to_owned(), Field::Text(text)));
    }
    fields
}

/// The number of the way in which rows become a vector, if it has one; what no field says is seen when the file is read.
fn pooling(sentence: &SentenceConfig) -> Option<u32> {
    match sentence.only_pooling()?.0 {
        PoolingMode::Mean => Some(1),
        PoolingMode::Cls => Some(2),
        PoolingMode::LastToken => Some(3),
        _ => None,
    }
}
