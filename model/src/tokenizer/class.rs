//! Tokenizer classes of transformers that rebuild everything but the vocabulary, whatever `tokenizer.json` says.

use crate::{
    config::{Fields, short},
    error::ModelError,
};
use serde_json::{Map, Value, json};

/// The regular expression by which Qwen2 splits text into words.
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A tokenizer class, with the rules by which it rebuilds a tokenizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// A class that leaves `tokenizer.json` as it is.
    Plain,
    Bert,
    DistilBert,
    MpNet,
    Roberta,
    XlmRoberta,
    Gpt2,
    Llama,
    Qwen2,
}

const NAMES: [(&str, Class); 8] = [
    ("BertTokenizer", Class::Bert),
    ("DistilBertTokenizer", Class::DistilBert),
    ("MPNetTokenizer", Class::MpNet),
    ("RobertaTokenizer", Class::Roberta),
    ("XLMRobertaTokenizer", Class::XlmRoberta),
    ("GPT2Tokenizer", Class::Gpt2),
    ("LlamaTokenizer", Class::Llama),
    ("Qwen2Tokenizer", Class::Qwen2),
];

/// The names of classes that leave `tokenizer.json` as it is.
const PLAIN: [&str; 4] =
    ["PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "BloomTokenizer"];

/// The default class of each model family. Other families leave `tokenizer.json` as it is.
const FAMILIES: [(&str, Class); 10] = [
    ("bert", Class::Bert),
    ("distilbert", Class::Bert),
    ("mpnet", Class::MpNet),
    ("roberta", Class::Roberta),
    ("xlm-roberta", Class::XlmRoberta),
    ("gpt2", Class::Gpt2),
    ("gptj", Class::Gpt2),
    ("opt", Class::Gpt2),
    ("qwen2", Class::Qwen2),
    ("qwen3", Class::Qwen2),
];

impl Class {
    /// The class that transformers takes, by the name in `tokenizer_config.json` or `config.json`, and by the family.
    /// `byte_level` says whether `tokenizer.json` is of byte-level BPE.
    ///
    /// # Errors
    /// When the rules of the class are not known here.
    pub(super) fn find(
        fields: &Fields<'_>,
        of_config: Option<&str>,
        family: &str,
        byte_level: impl FnOnce() -> bool,
    ) -> Result<Self, ModelError> {
        let own = FAMILIES.iter().find(|known| known.0 == family).map(|known| known.1);
        let named = fields.text(&["tokenizer_class"])?.or(of_config);
        let Some(name) = named.map(|name| name.strip_suffix("Fast").unwrap_or(name)) else {
            return Ok(own.unwrap_or(Self::Plain));
        };
        let known = NAMES.iter().find(|known| known.0 == name).map(|known| known.1);
        // The hub has models of this family with a wrong class.
        if family == "qwen2" {
            return Ok(Self::Qwen2);
        }
        if PLAIN.contains(&name) || family == "mistral" {
            return Ok(Self::Plain);
        }
        match known {
            Some(Self::Llama) if byte_level() => Ok(Self::Plain),
            Some(class) => Ok(class),
            None => {
                let known: Vec<_> = NAMES.iter().map(|known| known.0).collect();
                let known = format!("{}, PreTrainedTokenizerFast", known.join(", "));
                Err(fields.unknown("tokenizer class", name, known))
            }
        }
    }

    /// Whether models are given token types, where no file says so.
    pub(super) fn gives_types(self) -> bool {
        self == Self::Bert
    }

    /// The special tokens where no file names them.
    pub(super) fn special(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Plain => &[],
            Self::Bert | Self::DistilBert => &[
                ("unk_token", "[UNK]"),
                ("sep_token", "[SEP]"),
                ("pad_token", "[PAD]"),
                ("cls_token", "[CLS]"),
                ("mask_token", "[MASK]"),
            ],
            Self::MpNet => &[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("unk_token", "[UNK]"),
                ("sep_token", "</s>"),
                ("pad_token", "<pad>"),
                ("cls_token", "<s>"),
                ("mask_token", "<mask>"),
            ],
            Self::Roberta | Self::XlmRoberta => &[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("unk_token", "<unk>"),
                ("sep_token", "</s>"),
                ("pad_token", "<pad>"),
                ("cls_token", "<s>"),
                ("mask_token", "<mask>"),
            ],
            Self::Gpt2 => &[
                ("bos_token", "<|endoftext|>"),
                ("eos_token", "<|endoftext|>"),
                ("unk_token", "<|endoftext|>"),
            ],
            Self::Llama => &[("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")],
            Self::Qwen2 => &[
                ("eos_token", "<|endoftext|>"),
                ("unk_token", "<|endoftext|>"),
                ("pad_token", "<|endoftext|>"),
            ],
        }
    }

    /// Replaces parts of `tokenizer.json` by the class's own: all but the vocabulary, the merges and the
    /// post-processor. Added tokens are removed.
    pub(super) fn rebuild(
        self,
        fields: &Fields<'_>,
        tokenizer: &mut Map<String, Value>,
        unknown: &str,
    ) -> Result<(), ModelError> {
        if self == Self::Plain {
            return Ok(());
        }
        let normalizer = match self {
            Self::Bert | Self::DistilBert | Self::MpNet => json!({
                "type": "BertNormalizer",
                "clean_text": true,
                "handle_chinese_chars": fields.flag("tokenize_chinese_chars", true)?,
                "strip_accents": strip_accents(fields)?,
                "lowercase": fields.flag("do_lower_case", true)?,
            }),
            Self::XlmRoberta => precompiled(tokenizer.get("normalizer")),
            Self::Qwen2 => json!({ "type": "NFC" }),
            Self::Plain | Self::Roberta | Self::Gpt2 | Self::Llama => Value::Null,
        };
        let prefix = |default| fields.flag("add_prefix_space", default);
        let (words, decoder) = match self {
            Self::Plain | Self::Bert | Self::DistilBert | Self::MpNet => (
                json!({ "type": "BertPreTokenizer" }),
                json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }),
            ),
            Self::Roberta | Self::Gpt2 => {
                (byte_level(prefix(false)?, true), byte_level(true, true))
            }
            Self::Qwen2 => {
                let split = json!({
                    "type": "Split",
                    "pattern": { "Regex": QWEN2_WORDS },
                    "behavior": "Isolated",
                    "invert": false,
                });
                let bytes = byte_level(prefix(false)?, false);
                let words = json!({ "type": "Sequence", "pretokenizers": [split, bytes] });
                (words, byte_level(true, true))
            }
            Self::XlmRoberta => {
                // The reference takes null for false.
                let null = fields
                    .entries()
                    .any(|(name, value)| name == "add_prefix_space" && value.is_null());
                let scheme = if !null && prefix(true)? { "always" } else { "never" };
                let spaces = metaspace(scheme, true);
                let white = json!({ "type": "WhitespaceSplit" });
                let words = json!({ "type": "Sequence", "pretokenizers": [white, spaces.clone()] });
                (words, spaces)
            }
            Self::Llama => {
                let prefix = prefix(true)?;
                let scheme = match (prefix, fields.flag("legacy", false)?) {
                    (false, _) => "never",
                    (true, true) => "always",
                    (true, false) => "first",
                };
                let mut decoders = vec![
                    json!({ "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " }),
                    json!({ "type": "ByteFallback" }),
                    json!({ "type": "Fuse" }),
                ];
                if prefix {
                    decoders
                        .push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
                }
                (metaspace(scheme, false), json!({ "type": "Sequence", "decoders": decoders }))
            }
        };
        let model = self.model(fields, tokenizer, unknown)?;
        let parts = [
            ("normalizer", normalizer),
            ("pre_tokenizer", words),
            ("decoder", decoder),
            ("model", model),
            ("added_tokens", json!([])),
        ];
        tokenizer.extend(parts.map(|(name, part)| (name.to_owned(), part)));
        Ok(())
    }

    fn model(
        self,
        fields: &Fields<'_>,
        tokenizer: &mut Map<String, Value>,
        unknown: &str,
    ) -> Result<Value, ModelError> {
        let mut model = tokenizer.remove("model").unwrap_or_default();
        let mut take = |name| model.get_mut(name).map(Value::take).unwrap_or_default();
        let (vocabulary, merges) = (take("vocab"), take("merges"));
        let merges = if merges.is_null() { json!([]) } else { merges };
        let wrong = || {
            let problem = format!("is of a class whose vocabulary {} is not", short(&vocabulary));
            Err(fields.wrong("tokenizer_class", problem))
        };
        if self == Self::XlmRoberta {
            if !vocabulary.is_array() {
                return wrong();
            }
            return Ok(json!({
                "type": "Unigram", "unk_id": 3, "byte_fallback": false, "vocab": vocabulary,
            }));
        }
        if !vocabulary.is_object() {
            return wrong();
        }
        Ok(match self {
            Self::Bert | Self::DistilBert | Self::MpNet => json!({
                "type": "WordPiece",
                "unk_token": unknown,
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": vocabulary,
            }),
            Self::Llama => json!({
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                "ignore_merges": false, "vocab": vocabulary, "merges": merges,
            }),
            _ => json!({
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": false, "vocab": vocabulary, "merges": merges,
            }),
        })
    }

    /// The post-processor that puts the class's special tokens around a text or a pair, if the class has its own.
    /// `token` gives the special token of a name, and its id.
    pub(super) fn around(
        self,
        fields: &Fields<'_>,
        token: impl Fn(&'static str) -> Result<(String, u32), ModelError>,
    ) -> Result<Option<Value>, ModelError> {
        let roberta = |trim: bool, prefix: bool| -> Result<_, ModelError> {
            Ok(Some(json!({
                "type": "RobertaProcessing",
                "sep": token("sep_token")?,
                "cls": token("cls_token")?,
                "trim_offsets": trim,
                "add_prefix_space": prefix,
            })))
        };
        match self {
            Self::Plain | Self::Gpt2 | Self::Llama | Self::Qwen2 => Ok(None),
            Self::Bert | Self::DistilBert => {
                let (first, last) = (token("cls_token")?, token("sep_token")?);
                let (open, end) = (|kind| special(&first, kind), |kind| special(&last, kind));
                let single = [open(0), sequence("A", 0), end(0)];
                let pair = [open(0), sequence("A", 0), end(0), sequence("B", 1), end(1)];
                Ok(Some(template(&single, &pair, &[&first, &last])))
            }
            Self::XlmRoberta => {
                let (first, last) = (token("bos_token")?, token("eos_token")?);
                let (open, end) = (|| special(&first, 0), || special(&last, 0));
                let single = [open(), sequence("A", 0), end()];
                let pair = [open(), sequence("A", 0), end(), end(), sequence("B", 0), end()];
                Ok(Some(template(&single, &pair, &[&first, &last])))
            }
            Self::MpNet => roberta(true, false),
            Self::Roberta => {
                roberta(fields.flag("trim_offsets", true)?, fields.flag("add_prefix_space", false)?)
            }
        }
    }
}

fn strip_accents(fields: &Fields<'_>) -> Result<Value, ModelError> {
    match fields.get(&["strip_accents"]) {
        None => Ok(Value::Null),
        Some(_) => fields.flag("strip_accents", false).map(Value::Bool),
    }
}

/// The part of a normalizer with a precompiled table of characters, if it has one.
fn precompiled(normalizer: Option<&Value>) -> Value {
    let Some(normalizer) = normalizer else { return Value::Null };
    let list = normalizer.get("normalizers").and_then(Value::as_array);
    let mut all = list.into_iter().flatten().chain([normalizer]);
    let found =
        all.find(|one| one["type"] == "Precompiled" && one["precompiled_charsmap"].is_string());
    found.cloned().unwrap_or_default()
}

fn byte_level(prefix: bool, words: bool) -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": words,
    })
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({
        "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split,
    })
}

fn special(token: &(String, u32), kind: u32) -> Value {
    json!({ "SpecialToken": { "id": token.0, "type_id": kind } })
}

fn sequence(name: &str, kind: u32) -> Value {
    json!({ "Sequence": { "id": name, "type_id": kind } })
}

fn template(single: &[Value], pair: &[Value], tokens: &[&(String, u32)]) -> Value {
    let tokens = tokens
        .iter()
        .map(|(text, id)| (text.clone(), json!({ "id": text, "ids": [id], "tokens": [text] })));
    json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": tokens.collect::<Map<_, _>>(),
    })
}
