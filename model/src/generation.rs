//! How text is generated where nobody says otherwise: the settings that a model's author left in
//! `generation_config.json`, and where a text ends.

mod ending;

pub use ending::Ending;

use crate::{
    config::{Fields, short},
    directory::ModelDir,
    error::ModelError,
    fields::{Fate, Table, Warning, accepted},
    store::{MAX_JSON_BYTES, read_bounded},
};
use galaxy_common::{
    GenerateOptions, SamplingParams,
    sampling::{MOST_BIASES, SamplingError},
};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The file of these settings. Models from before it have them in `config.json`.
const FILE: &str = "generation_config.json";
/// The field that names the tokens that end a text.
const ENDS: &str = "eos_token_id";
/// Taken from the logits of `suppress_tokens`: as good as nothing is left of their probability.
const SUPPRESSED: f32 = -1e4;
/// The `max_length` that transformers wrote into files whose author had said nothing.
const UNSAID_LENGTH: u32 = 20;

/// The fields of `generation_config.json` that transformers reads, and what is made of each.
pub(crate) const FIELDS: Table = &[
    ("do_sample", Fate::Read),
    ("temperature", Fate::Read),
    ("top_k", Fate::Read),
    ("top_p", Fate::Read),
    ("min_p", Fate::Read),
    ("repetition_penalty", Fate::Read),
    ("suppress_tokens", Fate::Read),
    ("max_new_tokens", Fate::Read),
    ("max_length", Fate::Read),
    ("stop_strings", Fate::Read),
    (ENDS, Fate::Read),
    // They choose other tokens.
    ("typical_p", Fate::Only(&["1"], "typical sampling is not done")),
    ("top_h", Fate::Only(&[], "a bound on entropy is not done")),
    ("epsilon_cutoff", Fate::Only(&["0"], "epsilon sampling is not done")),
    ("eta_cutoff", Fate::Only(&["0"], "eta sampling is not done")),
    ("encoder_repetition_penalty", Fate::Only(&["1"], "a penalty of the prompt alone is not done")),
    ("no_repeat_ngram_size", Fate::Only(&["0"], "repetitions are not forbidden")),
    ("encoder_no_repeat_ngram_size", Fate::Only(&["0"], "repetitions are not forbidden")),
    ("bad_words_ids", Fate::Only(&["[]"], "words are not forbidden")),
    ("begin_suppress_tokens", Fate::Only(&["[]"], "the first token is chosen as the others")),
    ("sequence_bias", Fate::Only(&["[]", "{}"], "biases are of single tokens")),
    ("forced_bos_token_id", Fate::Only(&[], "no token is forced")),
    ("forced_eos_token_id", Fate::Only(&[], "no token is forced")),
    ("min_length", Fate::Only(&["0"], "no text is kept from its end")),
    ("min_new_tokens", Fate::Only(&["0"], "no text is kept from its end")),
    ("exponential_decay_length_penalty", Fate::Only(&[], "ends become no likelier")),
    ("guidance_scale", Fate::Only(&["1"], "guidance is not done")),
    ("watermarking_config", Fate::Only(&[], "watermarks are not made")),
    ("token_healing", Fate::Only(&["false"], "the prompt stays as it is")),
    ("num_beams", Fate::Only(&["1"], "beams are not searched")),
    ("num_beam_groups", Fate::Only(&["1"], "beams are not searched")),
    ("diversity_penalty", Fate::Only(&["0"], "beams are not searched")),
    ("constraints", Fate::Only(&["[]"], "beams are not searched")),
    ("force_words_ids", Fate::Only(&["[]"], "beams are not searched")),
    ("penalty_alpha", Fate::Only(&["0"], "contrastive search is not done")),
    ("dola_layers", Fate::Only(&[], "layers are not contrasted")),
    ("num_return_sequences", Fate::Only(&["1"], "one text is made of each prompt")),
    ("max_time", Fate::Only(&[], "texts have the time that the request gives them")),
    // Of beams alone.
    ("early_stopping", Fate::Needless),
    ("length_penalty", Fate::Needless),
    // Scores are normalised for whoever looks at them; ours always are.
    ("renormalize_logits", Fate::Needless),
    // What is no number is never chosen.
    ("remove_invalid_values", Fate::Needless),
    // Batches are not padded, and texts begin with their prompt.
    ("pad_token_id", Fate::Needless),
    ("bos_token_id", Fate::Needless),
    ("decoder_start_token_id", Fate::Needless),
    // How it is computed, which leaves the text as it is.
    ("use_cache", Fate::Needless),
    ("cache_implementation", Fate::Needless),
    ("cache_config", Fate::Needless),
    ("max_cache_len", Fate::Needless),
    ("compile_config", Fate::Needless),
    ("disable_compile", Fate::Needless),
    ("continuous_batching_config", Fate::Needless),
    ("low_memory", Fate::Needless),
    ("prefill_chunk_size", Fate::Needless),
    ("use_mtp", Fate::Needless),
    ("is_assistant", Fate::Needless),
    ("num_assistant_tokens", Fate::Needless),
    ("num_assistant_tokens_schedule", Fate::Needless),
    ("assistant_confidence_threshold", Fate::Needless),
    ("assistant_early_exit", Fate::Needless),
    ("assistant_lookbehind", Fate::Needless),
    ("assistant_ensemble_weight", Fate::Needless),
    ("target_lookbehind", Fate::Needless),
    ("prompt_lookup_num_tokens", Fate::Needless),
    ("max_matching_ngram_size", Fate::Needless),
    ("speculation_type", Fate::Needless),
    // What else is handed out of Python.
    ("output_attentions", Fate::Needless),
    ("output_hidden_states", Fate::Needless),
    ("output_scores", Fate::Needless),
    ("output_logits", Fate::Needless),
    ("return_dict_in_generate", Fate::Needless),
    ("return_legacy_cache", Fate::Needless),
    // Who wrote it.
    ("transformers_version", Fate::Needless),
    ("_from_model_config", Fate::Needless),
    ("_commit_hash", Fate::Needless),
    ("_name_or_path", Fate::Needless),
];

/// What a model's files say of generating text.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Generation {
    /// Tokens that end a text; none where the model names none.
    pub ends: Vec<u32>,
    /// Strings that end a text.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens that are generated.
    pub max_new_tokens: Option<u32>,
    /// Most tokens of a text and its prompt together.
    pub max_length: Option<u32>,
    /// Where these settings stand.
    path: PathBuf,
    /// Settings that would change the text and are not carried out.
    not_done: Vec<String>,
}

/// Why the defaults of a model do not hold for a request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SettingsError {
    /// The text would be another than its author meant.
    #[error("{}: {}; without the settings of that file texts can be had: --generation-config none", path.display(), what.join(", "))]
    NotDone {
        /// The file.
        path: PathBuf,
        /// What is not carried out.
        what: Vec<String>,
    },
    /// The prompt is as long as the whole text may be.
    #[error("the prompt has {prompt} tokens, and max_length = {max_length} in {} leaves no room behind it: say max_tokens", path.display())]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Tokens of the prompt.
        prompt: u32,
        /// Tokens that a text may have.
        max_length: u32,
    },
}

impl Generation {
    /// What is asked, with the author's settings where the request says nothing, and its fallback where they
    /// say nothing either; without a fallback, as it is asked. The prompt has so many tokens.
    ///
    /// # Errors
    /// When the author's settings are not carried out, or leave no room for a text.
    pub fn settle(
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
}

impl ModelDir {
    /// What its files say of generating text.
    ///
    /// # Errors
    /// When a file is there and cannot be read, or has a value that makes no sense.
    pub fn generation(&self) -> Result<Generation, ModelError> {
        let read = |name: &str| {
            let path = self.path().join(name);
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
            None => config.map_or(Ok(Generation::default()), |(path, text)| settings(&path, &text)),
        }
    }

    /// The settings that requests which leave them open are refused for.
    pub(crate) fn generation_warnings(&self) -> Option<Warning> {
        let generation = self.generation().ok().filter(|g| !g.not_done.is_empty())?;
        let what = generation.not_done.join(", ");
        let text = format!(
            "{what}; text is generated without these settings only: --generation-config none"
        );
        Some(Warning { path: generation.path, text })
    }
}

/// The settings of a file.
pub(crate) fn settings(path: &Path, text: &[u8]) -> Result<Generation, ModelError> {
    let value = json(path, text)?;
    let fields = Fields::new(path, &value)?;
    let count = |name| fields.count_or_none(&[name], u32::MAX);
    let not_done = FIELDS.iter().filter_map(|&(name, fate)| {
        let (_, value) = fields.get(&[name])?;
        match fate {
            Fate::Only(values, why) if !accepted(value, values) => {
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

/// The tokens that end a text, as a file names them; nothing where it says nothing of them.
fn named(path: &Path, text: &[u8]) -> Result<Option<Vec<u32>>, ModelError> {
    let value = json(path, text)?;
    tokens(&Fields::new(path, &value)?, ENDS)
}

/// A token, or a list of tokens.
fn tokens(fields: &Fields<'_>, name: &'static str) -> Result<Option<Vec<u32>>, ModelError> {
    let Some((_, value)) = fields.get(&[name]) else { return Ok(None) };
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        let problem = || format!("is {}: a token id is wanted, or a list of them", short(value));
        token.ok_or_else(|| fields.wrong(name, problem()))
    };
    listed(value).iter().map(token).collect::<Result<_, _>>().map(Some)
}

/// A string, or a list of strings.
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
    use galaxy_common::Fallback;

    /// A request that says nothing.
    fn silent() -> GenerateOptions {
        let fallback = Some(Fallback { temperature: 1.0, max_tokens: 16 });
        GenerateOptions { fallback, ..GenerateOptions::default() }
    }

    /// A directory of a decoder with this `generation_config.json`, if any, and these fields of `config.json`.
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
    fn the_end_is_where_the_files_say() {
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
    fn a_request_that_is_silent_is_answered_as_the_author_says() {
        let text = r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
            "repetition_penalty": 1.05, "max_new_tokens": 40, "max_length": 9, "stop_strings": "END",
            "suppress_tokens": [3, 500000], "num_beams": 1, "typical_p": 1.0, "bad_words_ids": null}"#;
        let generation = read(text).expect("settings");
        let settled = generation.settle(silent(), 4, 97).expect("settled");
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
        assert_eq!(generation.settle(said.clone(), 4, 97), Ok(said));
        let aside = GenerateOptions { fallback: None, ..silent() };
        assert_eq!(generation.settle(aside.clone(), 4, 97), Ok(aside), "the file is not asked");
    }

    #[test]
    fn whether_it_samples_is_for_the_author_to_say() {
        for (text, temperature, most) in [
            ("{}", 1.0, 16),
            (r#"{"do_sample": false, "temperature": 0.6, "max_length": 20}"#, 0.0, 16),
            (r#"{"do_sample": true, "max_length": 30}"#, 1.0, 26),
            (r#"{"do_sample": null, "temperature": 0.6}"#, 0.6, 16),
        ] {
            let settled = read(text).expect(text).settle(silent(), 4, 97).expect(text);
            assert_eq!(settled.sampling.temperature, Some(temperature), "{text}");
            assert_eq!(settled.max_tokens, most, "{text}");
        }
    }

    #[test]
    fn older_models_say_it_in_their_config() {
        let fields = [("do_sample", true.into()), ("top_k", 7.into()), ("eos_token_id", 4.into())];
        let generation = model(None, &fields).1.generation().expect("settings");
        assert_eq!((generation.ends, generation.sampling.top_k), (vec![4], Some(7)));
        assert_eq!(generation.sampling.temperature, Some(1.0));
    }

    #[test]
    fn what_is_not_carried_out_is_refused_by_name() {
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
            let error = generation.settle(silent(), 4, 97);
            let error = error.expect_err("refused").to_string();
            assert!(error.contains(field) && error.contains("--generation-config none"), "{error}");
        }
        let long = read(r#"{"max_length": 4}"#).expect("settings");
        let error = long.settle(silent(), 4, 97);
        assert!(error.expect_err("no room").to_string().contains("max_length = 4"));
    }

    #[test]
    fn values_that_make_no_sense_are_named() {
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
    fn a_field_that_is_not_known_is_named() {
        let (_dir, model) = model(Some(r#"{"colour": 1, "top_k": 3, "use_cache": true}"#), &[]);
        let said: Vec<_> = model.warnings().iter().map(ToString::to_string).collect();
        assert!(said.len() == 1 && said[0].contains("\"colour\""), "{said:?}");
    }
}
