//! What a sentence-transformers directory says about vectors: pooling, normalisation, lengths.

use crate::{
    config::{Fields, short},
    directory::ModelDir,
    error::ModelError,
    store::{MAX_JSON_BYTES, read_bounded},
};
use galaxy_common::Pooling;
use serde_json::Value;
use std::path::{Component, Path, PathBuf};

const POOLING_MODES: &str = "cls, mean, mean_sqrt_len_tokens, max, lasttoken";

/// How rows become the vector of a text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SentenceConfig {
    /// How rows become one vector.
    pub pooling: Pooling,
    /// Whether the vector is scaled to length one.
    pub normalise: bool,
    /// Longer texts are cut to this many tokens, special ones included.
    pub max_tokens: Option<u32>,
    /// Whether text is lower-cased before the tokenizer sees it.
    pub lower_case: bool,
    /// Put before every text for which nothing else is asked.
    pub prompt: Option<String>,
}

impl Default for SentenceConfig {
    /// What sentence-transformers does with a plain model: mean pooling, not normalised.
    fn default() -> Self {
        Self {
            pooling: Pooling::Mean,
            normalise: false,
            max_tokens: None,
            lower_case: false,
            prompt: None,
        }
    }
}

impl ModelDir {
    /// Reads `modules.json` and the files that it names.
    ///
    /// # Errors
    /// When one is damaged, or asks for a module or a pooling that this build does not know.
    pub fn sentence(&self) -> Result<SentenceConfig, ModelError> {
        read(self.path())
    }
}

pub(crate) fn read(directory: &Path) -> Result<SentenceConfig, ModelError> {
    let mut sentence = SentenceConfig::default();
    let path = directory.join("modules.json");
    if !path.exists() {
        return Ok(sentence);
    }
    let value = json(&path)?;
    let wrong = |problem: String| ModelError::Field {
        path: path.clone(),
        field: "modules".to_owned(),
        problem,
    };
    let list = value.as_array().ok_or_else(|| wrong("is missing: a list is wanted".to_owned()))?;
    // Each kind may stand once, and in this order.
    let mut stage = 0;
    for module in list {
        let fields = Fields::new(&path, module)?;
        let full = fields.text(&["type"])?.unwrap_or_default();
        let kind = full.rsplit('.').next().unwrap_or(full);
        let place = module_place(directory, &fields)?;
        let known = "Transformer, Pooling, Normalize";
        let next = match kind {
            "Transformer" => 1,
            "Pooling" => 2,
            "Normalize" => 3,
            _ => return Err(fields.unknown("module", full, known)),
        };
        if next <= stage || (next == 1 && stage != 0) || (stage == 0 && next != 1) {
            return Err(wrong(format!("has {kind} out of order; known is {known}")));
        }
        stage = next;
        match kind {
            "Transformer" => {
                if place != directory {
                    let problem = format!("puts the model into {place:?}: open that directory");
                    return Err(wrong(problem));
                }
            }
            "Pooling" => sentence.pooling = pooling(&place.join("config.json"))?,
            _ => sentence.normalise = true,
        }
    }
    if stage < 2 {
        return Err(wrong("has no Pooling, and so no vector of a text".to_owned()));
    }
    // The name says which class wrote it first; the content is the same.
    for name in ["sentence_bert_config.json", "sentence_distilbert_config.json"] {
        let path = directory.join(name);
        if path.is_file() {
            let value = json(&path)?;
            let fields = Fields::new(&path, &value)?;
            sentence.max_tokens = fields.count_or_none(&["max_seq_length"], 1 << 24)?;
            sentence.lower_case = fields.flag("do_lower_case", false)?;
            break;
        }
    }
    let path = directory.join("config_sentence_transformers.json");
    if path.is_file() {
        let value = json(&path)?;
        let fields = Fields::new(&path, &value)?;
        if let Some(name) = fields.text(&["default_prompt_name"])? {
            let prompts = fields.inner(&["prompts"])?;
            let text = prompts.and_then(|p| {
                p.entries().find(|(n, _)| *n == name).and_then(|(_, text)| text.as_str())
            });
            let text = text.ok_or_else(|| {
                fields.wrong("default_prompt_name", format!("is {name:?}, which prompts lacks"))
            })?;
            sentence.prompt = Some(text.to_owned()).filter(|t| !t.is_empty());
        }
    }
    Ok(sentence)
}

fn json(path: &Path) -> Result<Value, ModelError> {
    serde_json::from_slice(&read_bounded(path, MAX_JSON_BYTES)?)
        .map_err(|source| ModelError::Json { path: path.to_owned(), source })
}

/// The directory of a module, inside the model's.
fn module_place(directory: &Path, fields: &Fields<'_>) -> Result<PathBuf, ModelError> {
    let inner = Path::new(fields.text(&["path"])?.unwrap_or_default());
    if inner.components().all(|c| matches!(c, Component::Normal(_))) {
        Ok(if inner.as_os_str().is_empty() { directory.to_owned() } else { directory.join(inner) })
    } else {
        Err(fields.wrong("path", format!("is {inner:?}: it must lie inside the directory")))
    }
}

fn pooling(path: &Path) -> Result<Pooling, ModelError> {
    let value = json(path)?;
    let fields = Fields::new(path, &value)?;
    // Newer: one name, or a list. Older: a flag for each.
    let modes: Vec<String> = match fields.get(&["pooling_mode"]) {
        Some((_, Value::String(mode))) => vec![mode.clone()],
        Some((_, Value::Array(list))) => {
            list.iter().map(|v| v.as_str().map_or_else(|| short(v), str::to_owned)).collect()
        }
        Some((name, other)) => {
            return Err(fields.wrong(name, format!("is {}: a name is wanted", short(other))));
        }
        None => fields
            .entries()
            .filter(|(_, value)| **value == Value::Bool(true))
            .filter_map(|(name, _)| name.strip_prefix("pooling_mode_"))
            .map(|name| match name {
                "cls_token" => "cls".to_owned(),
                "mean_tokens" => "mean".to_owned(),
                "max_tokens" => "max".to_owned(),
                other => other.to_owned(),
            })
            .collect(),
    };
    match modes.as_slice() {
        [one] => match one.as_str() {
            "cls" => Ok(Pooling::Cls),
            "mean" => Ok(Pooling::Mean),
            "mean_sqrt_len_tokens" => Ok(Pooling::MeanSqrtLen),
            "max" => Ok(Pooling::Max),
            "lasttoken" => Ok(Pooling::LastToken),
            other => Err(fields.unknown("pooling mode", other, POOLING_MODES)),
        },
        [] => Err(fields.wrong("pooling_mode", format!("is missing; known are {POOLING_MODES}"))),
        several => {
            let found = several.join(" + ");
            Err(fields.unknown("pooling mode", &found, format!("one of {POOLING_MODES}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn sentence(files: &[(&str, &str)]) -> Result<SentenceConfig, ModelError> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        }
        read(directory.path())
    }

    const MODULES: &str = r#"[
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    ]"#;

    #[test]
    fn the_usual_directory() {
        assert_eq!(sentence(&[]).expect("a plain model"), SentenceConfig::default());
        let flags = r#"{"word_embedding_dimension": 384, "pooling_mode_cls_token": false,
            "pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": false}"#;
        let full = sentence(&[
            ("modules.json", MODULES),
            ("1_Pooling/config.json", flags),
            ("sentence_bert_config.json", r#"{"max_seq_length": 256, "do_lower_case": false}"#),
            (
                "config_sentence_transformers.json",
                r#"{"prompts": {"q": "query: "}, "default_prompt_name": "q"}"#,
            ),
        ]);
        let want = SentenceConfig {
            normalise: true,
            max_tokens: Some(256),
            prompt: Some("query: ".to_owned()),
            ..SentenceConfig::default()
        };
        assert_eq!(full.expect("a config"), want);
    }

    #[test]
    fn every_known_pooling() {
        let cases = [
            (r#"{"pooling_mode_cls_token": true}"#, Pooling::Cls),
            (r#"{"pooling_mode_mean_tokens": true}"#, Pooling::Mean),
            (r#"{"pooling_mode_max_tokens": true}"#, Pooling::Max),
            (r#"{"pooling_mode_mean_sqrt_len_tokens": true}"#, Pooling::MeanSqrtLen),
            (r#"{"pooling_mode_lasttoken": true}"#, Pooling::LastToken),
            (r#"{"pooling_mode": "lasttoken", "include_prompt": true}"#, Pooling::LastToken),
            (r#"{"pooling_mode": ["max"]}"#, Pooling::Max),
        ];
        for (text, want) in cases {
            let have = sentence(&[("modules.json", MODULES), ("1_Pooling/config.json", text)]);
            assert_eq!(have.expect(text).pooling, want);
        }
    }

    #[test]
    fn what_is_unknown_is_named() {
        let poolings = [
            (r#"{"pooling_mode_weightedmean_tokens": true}"#, "weightedmean"),
            (r#"{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}"#, "cls + max"),
            (r#"{"pooling_mode": ["mean", "max"]}"#, "mean + max"),
            (r#"{"pooling_mode": 3}"#, "a name is wanted"),
            (r#"{}"#, "known are cls, mean"),
            ("[", "not valid"),
        ];
        for (text, want) in poolings {
            let files = [("modules.json", MODULES), ("1_Pooling/config.json", text)];
            let error = sentence(&files).expect_err(text).to_string();
            assert!(error.contains(want), "{error}");
        }
        let modules = [
            (r#"[{"path": "", "type": "a.Transformer"}]"#, "no Pooling"),
            (
                r#"[{"path": "", "type": "a.Transformer"}, {"path": "2_Dense", "type": "a.Dense"}]"#,
                "Dense",
            ),
            (r#"[{"path": "", "type": "a.Pooling"}]"#, "order"),
            (r#"[{"path": "0_T", "type": "a.Transformer"}]"#, "open that directory"),
            (
                r#"[{"path": "", "type": "a.Transformer"}, {"path": "../x", "type": "a.Pooling"}]"#,
                "inside",
            ),
            (
                r#"[{"path": "", "type": "a.Transformer"}, {"path": "/x", "type": "a.Pooling"}]"#,
                "inside",
            ),
            (r#"{}"#, "a list"),
        ];
        for (text, want) in modules {
            let error = sentence(&[("modules.json", text)]).expect_err(text).to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
