//! The settings of generation that a model's author left in `generation_config.json`: the sampling settings of requests
//! that name none, and what ends a text.

mod ending;

pub use ending::Ending;

use crate::{
    config::{Fields, short},
    error::ModelError,
    fields::{Table, Treatment, accepted},
    small_file::{MAX_JSON_BYTES, read_bounded},
    warning::Warning,
};
use galaxy_common::{
    GenerateOptions, SamplingParams,
    sampling::{MOST_BIASES, SamplingError},
};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The file of the settings. Older models have them in `config.json`.
const FILE: &str = "generation_config.json";
/// The field that lists the tokens that end a text.
const ENDS: &str = "eos_token_id";
/// The bias on the logits of `suppress_tokens`, which leaves next to nothing of their probability.
const SUPPRESSED: f32 = -1e4;
/// The `max_length` that transformers wrote into files whose author had set none.
const UNSAID_LENGTH: u32 = 20;

/// The fields of `generation_config.json` that transformers reads, and how each is treated.
pub(crate) const FIELDS: Table = &[
    ("do_sample", Treatment::Read),
    ("temperature", Treatment::Read),
    ("top_k", Treatment::Read),
    ("top_p", Treatment::Read),
    ("min_p", Treatment::Read),
    ("repetition_penalty", Treatment::Read),
    ("suppress_tokens", Treatment::Read),
    ("max_new_tokens", Treatment::Read),
    ("max_length", Treatment::Read),
    ("stop_strings", Treatment::Read),
    (ENDS, Treatment::Read),
    // These would choose other tokens.
    ("typical_p", Treatment::Only(&["1"], "typical sampling is not done")),
    ("top_h", Treatment::Only(&[], "a bound on entropy is not done")),
    ("epsilon_cutoff", Treatment::Only(&["0"], "epsilon sampling is not done")),
    ("eta_cutoff", Treatment::Only(&["0"], "eta sampling is not done")),
    (
        "encoder_repetition_penalty",
        Treatment::Only(&["1"], "a penalty of the prompt alone is not done"),
    ),
    ("no_repeat_ngram_size", Treatment::Only(&["0"], "repetitions are not forbidden")),
    ("encoder_no_repeat_ngram_size", Treatment::Only(&["0"], "repetitions are not forbidden")),
    ("bad_words_ids", Treatment::Only(&["[]"], "words are not forbidden")),
    ("begin_suppress_tokens", Treatment::Only(&["[]"], "the first token is chosen as the others")),
    ("sequence_bias", Treatment::Only(&["[]", "{}"], "biases are of single tokens")),
    ("forced_bos_token_id", Treatment::Only(&[], "no token is forced")),
    ("forced_eos_token_id", Treatment::Only(&[], "no token is forced")),
    ("min_length", Treatment::Only(&["0"], "no text is kept from its end")),
    ("min_new_tokens", Treatment::Only(&["0"], "no text is kept from its end")),
    ("exponential_decay_length_penalty", Treatment::Only(&[], "ends become no likelier")),
    ("guidance_scale", Treatment::Only(&["1"], "guidance is not done")),
    ("watermarking_config", Treatment::Only(&[], "watermarks are not made")),
    ("token_healing", Treatment::Only(&["false"], "the prompt stays as it is")),
    ("num_beams", Treatment::Only(&["1"], "beams are not searched")),
    ("num_beam_groups", Treatment::Only(&["1"], "beams are not searched")),
    ("diversity_penalty", Treatment::Only(&["0"], "beams are not searched")),
    ("constraints", Treatment::Only(&["[]"], "beams are not searched")),
    ("force_words_ids", Treatment::Only(&["[]"], "beams are not searched")),
    ("penalty_alpha", Treatment::Only(&["0"], "contrastive search is not done")),
    ("dola_layers", Treatment::Only(&[], "layers are not contrasted")),
    ("num_return_sequences", Treatment::Only(&["1"], "one sequence is generated for each prompt")),
    ("max_time", Treatment::Only(&[], "texts have the time that the request gives them")),
    // These concern beam search alone.
    ("early_stopping", Treatment::Ignored),
    ("length_penalty", Treatment::Ignored),
    // Scores are normalised for callers that look at them; ours always are.
    ("renormalize_logits", Treatment::Ignored),
    // Values that are not numbers are never chosen.
    ("remove_invalid_values", Treatment::Ignored),
    // Batches are not padded, and a text begins with its prompt.
    ("pad_token_id", Treatment::Ignored),
    ("bos_token_id", Treatment::Ignored),
    ("decoder_start_token_id", Treatment::Ignored),
    // These change how the text is computed, and not the text.
    ("use_cache", Treatment::Ignored),
    ("cache_implementation", Treatment::Ignored),
    ("cache_config", Treatment::Ignored),
    ("max_cache_len", Treatment::Ignored),
    ("compile_config", Treatment::Ignored),
    ("disable_compile", Treatment::Ignored),
    ("continuous_batching_config", Treatment::Ignored),
    ("low_memory", Treatment::Ignored),
    ("prefill_chunk_size", Treatment::Ignored),
    ("use_mtp", Treatment::Ignored),
    ("is_assistant", Treatment::Ignored),
    ("num_assistant_tokens", Treatment::Ignored),
    ("num_assistant_tokens_schedule", Treatment::Ignored),
    ("assistant_confidence_threshold", Treatment::Ignored),
    ("assistant_early_exit", Treatment::Ignored),
    ("assistant_lookbehind", Treatment::Ignored),
    ("assistant_ensemble_weight", Treatment::Ignored),
    ("target_lookbehind", Treatment::Ignored),
    ("prompt_lookup_num_tokens", Treatment::Ignored),
    ("max_matching_ngram_size", Treatment::Ignored),
    ("speculation_type", Treatment::Ignored),
    // These are about what Python returns besides.
    ("output_attentions", Treatment::Ignored),
    ("output_hidden_states", Treatment::Ignored),
    ("output_scores", Treatment::Ignored),
    ("output_logits", Treatment::Ignored),
    ("return_dict_in_generate", Treatment::Ignored),
    ("return_legacy_cache", Treatment::Ignored),
    // These are about who wrote the file.
    ("transformers_version", Treatment::Ignored),
    ("_from_model_config", Treatment::Ignored),
    ("_commit_hash", Treatment::Ignored),
    ("_name_or_path", Treatment::Ignored),
];

/// The settings of generation in a model's files.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Generation {
    /// The tokens that end a text; empty where the model names none.
    pub ends: Vec<u32>,
    /// The strings that end a text.
    pub stop: Vec<String>,
    /// The sampling settings, each `None` where the files do not say.
    pub sampling: SamplingParams,
    /// The most tokens that are generated for a prompt, if the files say.
    pub max_new_tokens: Option<u32>,
    /// The most tokens of a prompt and its text together, if the files say.
    pub max_length: Option<u32>,
    /// The file that the settings are from.
    path: PathBuf,
    /// Settings that would change the text and are not supported, each as a phrase for messages.
    not_done: Vec<String>,
}

/// Why the settings of a model cannot hold for a request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SettingsError {
    /// A setting is not supported, so that the text would be another than the author meant.
    #[error("{}: {}; without the settings of that file texts can be had: --generation-config none", path.display(), what.join(", "))]
    NotDone {
        /// The file that the settings are from.
        path: PathBuf,
        /// The unsupported settings, each as a phrase.
        what: Vec<String>,
    },
    /// The prompt alone is as long as the author allows a whole text to be.
    #[error("the prompt has {prompt} tokens, and max_length = {max_length} in {} leaves no room behind it: say max_tokens", path.display())]
    NoRoom {
        /// The file that the settings are from.
        path: PathBuf,
        /// How many tokens the prompt has.
        prompt: u32,
        /// The most tokens that a prompt and its text may have together.
        max_length: u32,
    },
}

impl Generation {
    /// Completes a request: what it leaves open is filled in from the author's settings, and what they leave open from
    /// the request's fallback. A request without a fallback stays as it is. `prompt` is the number of its prompt's
    /// tokens.
    ///
    /// # Errors
    /// When a setting is not supported, or the prompt leaves no room for a text.
    pub fn complete(
        &self,
        asked: GenerateOptions,
        prompt: u32,
        vocabulary: u32,
    ) -> Result<GenerateOptions, SettingsError> {
        let Some(fallback) = asked.fallback else { return Ok(asked) };
        let path = self.path.clone();
        if !self.not_done.is_empty() {
            return Err(SettingsError::NotDone { path, what: self.not_done.clone() });
        }
        let max_tokens = match (asked.max_tokens, self.max_new_tokens, self.max_length) {
            (0, Some(most), _) => most,
            (0, None, Some(max_length)) if max_length <= prompt => {
                return Err(SettingsError::NoRoom { path, prompt, max_length });
            }
            (0, None, Some(max_length)) => max_length - prompt,
            (0, None, None) => fallback.max_tokens,
            (most, _, _) => most,
        };
        let mut defaults = self.sampling.clone();
        defaults.bias.retain(|(token, _)| *token < vocabulary);
        defaults.temperature = defaults.temperature.or(Some(fallback.temperature));
        let stop = if asked.stop.is_empty() { self.stop.clone() } else { asked.stop };
        let sampling = asked.sampling.or(&defaults);
        Ok(GenerateOptions { sampling, max_tokens, stop, ..asked })
    }

    /// Reads the settings in the files of a model.
    pub(crate) fn read(directory: &Path) -> Result<Self, ModelError> {
        let read = |name: &str| {
            let path = directory.join(name);
            match path.is_file() {
                true => read_bounded(&path, MAX_JSON_BYTES).map(|text| Some((path, text))),
                false => Ok(None),
            }
        };
        let config = read("config.json")?;
        match read(FILE)? {
            Some((path, text)) => {
                let mut generation = settings(&path, &text)?;
                if let (Some((path, text)), None) = (config, named(&path, &text)?) {
                    generation.ends = named(&path, &text)?.unwrap_or_default();
                }
                Ok(generation)
            }
            None => config.map_or(Ok(Self::default()), |(path, text)| settings(&path, &text)),
        }
    }

    /// A warning about the settings that are not supported: requests that rely on the file are refused because of them.
    pub(crate) fn warning(self) -> Option<Warning> {
        if self.not_done.is_empty() {
            return None;
        }
        let what = self.not_done.join(", ");
        let text = format!(
            "{what}; text is generated without these settings only: --generation-config none"
        );
        Some(Warning { path: self.path, text })
    }
}

/// Parses the settings of a file.
pub(crate) fn settings(path: &Path, text: &[u8]) -> Result<Generation, ModelError> {
    let value = json(path, text)?;
    let fields = Fields::new(path, &value)?;
    let count = |name| fields.count_or_none(&[name], u32::MAX);
    let not_done = FIELDS.iter().filter_map(|&(name, fate)| {
        let (_, value) = fields.get(&[name])?;
        match fate {
            Treatment::Only(values, why) if !accepted(value, values) => {
                Some(format!("{name} = {}: {why}", short(value)))
            }
            _ => None,
        }
    });
    Ok(Generation {
        ends: tokens(&fields, ENDS)?.unwrap_or_default(),
        stop: strings(&fields, "stop_strings")?,
        sampling: sampling(&fields)?,
        max_new_tokens: count("max_new_tokens")?,
        max_length: count("max_length")?.filter(|&length| length != UNSAID_LENGTH),
        path: path.to_owned(),
        not_done: not_done.collect(),
    })
}

fn sampling(fields: &Fields<'_>) -> Result<SamplingParams, ModelError> {
    let number = |name: &'static str| match fields.get(&[name]) {
        None => Ok(None),
        Some((_, value)) => match value.as_f64() {
            Some(number) => Ok(Some(number as f32)),
            None => Err(fields.wrong(name, format!("is {}: a number is wanted", short(value)))),
        },
    };
    let top_k = match fields.get(&["top_k"]) {
        None => None,
        Some((_, value)) => match value.as_u64() {
            Some(k) => Some(u32::try_from(k).unwrap_or(u32::MAX)),
            None => {
                return Err(
                    fields.wrong("top_k", format!("is {}: a count is wanted", short(value)))
                );
            }
        },
    };
    let samples = fields.get(&["do_sample"]).is_some();
    let temperature = match (samples, fields.flag("do_sample", false)?) {
        (true, false) => Some(0.0),
        (true, true) => number("temperature")?.or(Some(1.0)),
        (false, _) => number("temperature")?,
    };
    let suppressed = tokens(fields, "suppress_tokens")?.unwrap_or_default();
    if suppressed.len() > MOST_BIASES {
        let problem = format!("has {} tokens: {MOST_BIASES} are taken", suppressed.len());
        return Err(fields.wrong("suppress_tokens", problem));
    }
    let params = SamplingParams {
        temperature,
        top_k,
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        repetition: number("repetition_penalty")?,
        bias: suppressed.into_iter().map(|token| (token, SUPPRESSED)).collect(),
        ..SamplingParams::default()
    };
    let known = SamplingParams { bias: Vec::new(), ..params.clone() };
    match known.complete(0).checked(u32::MAX) {
        Ok(_) => Ok(params),
        Err(SamplingError::Range { what, range, value }) => {
            Err(fields.wrong(what, format!("is {value}: {range} makes sense")))
        }
        Err(error) => Err(fields.wrong(error.parameter(), error.to_string())),
    }
}

/// The tokens that end a text, as a file lists them; `None` where it lists none.
fn named(path: &Path, text: &[u8]) -> Result<Option<Vec<u32>>, ModelError> {
    let value = json(path, text)?;
    tokens(&Fields::new(path, &value)?, ENDS)
}

/// The value of a field that is a token or a list of tokens.
fn tokens(fields: &Fields<'_>, name: &'static str) -> Result<Option<Vec<u32>>, ModelError> {
    let Some((_, value)) = fields.get(&[name]) else { return Ok(None) };
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        let problem = || format!("is {}: a token id is wanted, or a list of them", short(value));
        token.ok_or_else(|| fields.wrong(name, problem()))
    };
    listed(value).iter().map(token).collect::<Result<_, _>>().map(Some)
}

/// The value of a field that is a string or a list of strings.
fn strings(fields: &Fields<'_>, name: &'static str) -> Result<Vec<String>, ModelError> {
    let Some((_, value)) = fields.get(&[name]) else { return Ok(Vec::new()) };
    let string = |value: &Value| {
        let problem = || format!("is {}: a string is wanted, or a list of them", short(value));
        value.as_str().map(str::to_owned).ok_or_else(|| fields.wrong(name, problem()))
    };
    listed(value).iter().map(string).collect()
}

fn listed(value: &Value) -> &[Value] {
    value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice)
}

fn json(path: &Path, text: &[u8]) -> Result<Value, ModelError> {
    serde_json::from_slice(text)
        .map_err(|source| ModelError::Json { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelDir;
    use galaxy_common::Fallback;

    /// A request that leaves all settings open.
    fn silent() -> GenerateOptions {
        let fallback = Some(Fallback { temperature: 1.0, max_tokens: 16 });
        GenerateOptions { fallback, ..GenerateOptions::default() }
    }

    /// A directory with a decoder, this `generation_config.json`, if any, and these fields in its `config.json`.
    fn model(generation: Option<&str>, config: &[(&str, Value)]) -> (tempfile::TempDir, ModelDir) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/llama");
        let directory = tempfile::tempdir().expect("a temporary directory");
        let to = |name: &str| directory.path().join(name);
        std::fs::copy(golden.join("model.safetensors"), to("model.safetensors")).expect("a copy");
        let bytes = std::fs::read(golden.join("config.json")).expect("a file");
        let mut value: Value = serde_json::from_slice(&bytes).expect("JSON");
        for (name, field) in config {
            value[*name] = field.clone();
        }
        std::fs::write(to("config.json"), value.to_string()).expect("a file");
        if let Some(text) = generation {
            std::fs::write(to(FILE), text).expect("a file");
        }
        let model = ModelDir::open(directory.path()).expect("a model");
        (directory, model)
    }

    fn read(text: &str) -> Result<Generation, String> {
        model(Some(text), &[]).1.generation().map_err(|e| e.to_string())
    }

    #[test]
    fn end_of_text_tokens_are_read_from_the_config_files() {
        assert_eq!(read(r#"{"eos_token_id": 7}"#).expect("tokens").ends, [7]);
        assert_eq!(read(r#"{"eos_token_id": [7, 9]}"#).expect("tokens").ends, [7, 9]);
        for bad in [r#"{"eos_token_id": -1}"#, r#"{"eos_token_id": ["</s>"]}"#] {
            let error = read(bad).expect_err("no token");
            assert!(error.contains("eos_token_id"), "{error}");
        }
        assert!(read("{").is_err());
        let config = [("eos_token_id", 5.into()), ("temperature", 0.5.into())];
        let (_dir, both) = model(Some(r#"{"top_k": 3}"#), &config);
        let both = both.generation().expect("settings");
        assert_eq!((both.ends, both.sampling.temperature), (vec![5], None));
    }

    #[test]
    fn unset_request_settings_come_from_the_generation_config() {
        let text = r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
            "repetition_penalty": 1.05, "max_new_tokens": 40, "max_length": 9, "stop_strings": "END",
            "suppress_tokens": [3, 500000], "num_beams": 1, "typical_p": 1.0, "bad_words_ids": null}"#;
        let generation = read(text).expect("settings");
        let settled = generation.complete(silent(), 4, 97).expect("settled");
        let sampling = SamplingParams {
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            min_p: Some(0.1),
            repetition: Some(1.05),
            bias: vec![(3, SUPPRESSED)],
            ..SamplingParams::default()
        };
        let stop = vec!["END".to_owned()];
        let want = GenerateOptions { sampling, max_tokens: 40, stop, ..silent() };
        assert_eq!(settled, want);
        let sampling = SamplingParams {
            temperature: Some(0.0),
            top_k: Some(0),
            bias: vec![(3, 1.0)],
            ..want.sampling.clone()
        };
        let stop = vec!["x".to_owned()];
        let said = GenerateOptions { sampling, max_tokens: 5, stop, ..silent() };
        assert_eq!(generation.complete(said.clone(), 4, 97), Ok(said));
        let aside = GenerateOptions { fallback: None, ..silent() };
        assert_eq!(generation.complete(aside.clone(), 4, 97), Ok(aside), "the file is not asked");
    }

    #[test]
    fn do_sample_and_max_length_set_the_request_defaults() {
        for (text, temperature, most) in [
            ("{}", 1.0, 16),
            (r#"{"do_sample": false, "temperature": 0.6, "max_length": 20}"#, 0.0, 16),
            (r#"{"do_sample": true, "max_length": 30}"#, 1.0, 26),
            (r#"{"do_sample": null, "temperature": 0.6}"#, 0.6, 16),
        ] {
            let settled = read(text).expect(text).complete(silent(), 4, 97).expect(text);
            assert_eq!(settled.sampling.temperature, Some(temperature), "{text}");
            assert_eq!(settled.max_tokens, most, "{text}");
        }
    }

    #[test]
    fn generation_settings_of_older_models_are_read_from_config_json() {
        let fields = [("do_sample", true.into()), ("top_k", 7.into()), ("eos_token_id", 4.into())];
        let generation = model(None, &fields).1.generation().expect("settings");
        assert_eq!((generation.ends, generation.sampling.top_k), (vec![4], Some(7)));
        assert_eq!(generation.sampling.temperature, Some(1.0));
    }

    #[test]
    fn unsupported_generation_settings_are_rejected_by_name() {
        for (field, value) in [
            ("no_repeat_ngram_size", "3"),
            ("num_beams", "4"),
            ("typical_p", "0.9"),
            ("min_new_tokens", "5"),
            ("begin_suppress_tokens", "[1]"),
            ("guidance_scale", "1.5"),
        ] {
            let text = format!("{{\"{field}\": {value}}}");
            let (_dir, model) = model(Some(&text), &[]);
            let said = model.warnings().iter().map(ToString::to_string).collect::<String>();
            assert!(said.contains(&format!("{field} = {value}")), "{said}");
            let generation = model.generation().expect("settings");
            let error = generation.complete(silent(), 4, 97);
            let error = error.expect_err("refused").to_string();
            assert!(error.contains(field) && error.contains("--generation-config none"), "{error}");
        }
        let long = read(r#"{"max_length": 4}"#).expect("settings");
        let error = long.complete(silent(), 4, 97);
        assert!(error.expect_err("no room").to_string().contains("max_length = 4"));
    }

    #[test]
    fn invalid_generation_settings_are_named_in_the_error() {
        for (text, field) in [
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_p": 1.5}"#, "top_p"),
            (r#"{"top_k": -1}"#, "top_k"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"max_new_tokens": 0}"#, "max_new_tokens"),
            (r#"{"do_sample": "yes"}"#, "do_sample"),
            (r#"{"stop_strings": [1]}"#, "stop_strings"),
        ] {
            let error = read(text).expect_err(text);
            assert!(error.contains(field) && error.contains(FILE), "{error}");
        }
    }

    #[test]
    fn an_unknown_generation_field_is_named_in_a_warning() {
        let (_dir, model) = model(Some(r#"{"colour": 1, "top_k": 3, "use_cache": true}"#), &[]);
        let said: Vec<_> = model.warnings().iter().map(ToString::to_string).collect();
        assert!(said.len() == 1 && said[0].contains("\"colour\""), "{said:?}");
    }
}
