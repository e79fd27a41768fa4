//! The tokenizer of a GGUF file, in the form of the files that a checkpoint would have.

use super::{Gguf, MetadataValue};
use serde_json::{Map, Value as Json, json};
use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

/// How a text is split before its parts become tokens: the pre-tokenizer that `tokenizer.ggml.pre` names.
#[derive(Clone, Default)]
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    /// The regular expression that splits the text; `None` for that of GPT-2.
    pub(super) pattern: Option<Cow<'static, str>>,
    /// Whether digits are split one by one before that.
    pub(super) digits: bool,
    /// Whether a part of a text that is a token stays whole, whatever the merges say.
    pub(super) whole_words: bool,
    /// Whether the text is first brought to Unicode normal form C.
    pub(super) composed: bool,
}

impl PreTokenizer {
    /// The first name of the known pre-tokenizer that splits like `cut`.
    pub(super) fn name_of(cut: &Self) -> Option<&'static str> {
        let key = |cut: &Self| (cut.pattern.clone(), cut.digits, cut.whole_words, cut.composed);
        let found = CUTS.iter().find(|known| key(known) == key(cut))?;
        found.names.first().copied()
    }

    /// The regular expression of a known pre-tokenizer, if it has one.
    #[cfg(test)]
    pub(super) fn pattern_of(name: &str) -> Option<&'static str> {
        let found = CUTS.iter().find(|cut| cut.names.contains(&name))?;
        found.pattern.as_deref()
    }
}

const PLAIN: PreTokenizer =
    PreTokenizer { names: &[], pattern: None, digits: false, whole_words: false, composed: false };

static CUTS: [PreTokenizer; 7] = [
    PreTokenizer { names: &["gpt-2", "gpt2", "mpt", "olmo", "jais"], ..PLAIN },
    PreTokenizer { names: &["modern-bert"], composed: true, ..PLAIN },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"],
        digits: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "smaug-bpe"],
        pattern: Some(Cow::Borrowed(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )),
        whole_words: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        pattern: Some(Cow::Borrowed(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )),
        composed: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["gpt-4o"],
        pattern: Some(Cow::Borrowed(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )),
        ..PLAIN
    },
    PreTokenizer {
        names: &["tekken"],
        pattern: Some(Cow::Borrowed(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )),
        whole_words: true,
        ..PLAIN
    },
];

/// The types of tokens, by their numbers in files.
const UNKNOWN: i128 = 2;
const CONTROL: i128 = 3;
const USER_DEFINED: i128 = 4;

/// The longest token of SentencePiece that is accepted, in bytes.
const MAX_PIECE_BYTES: usize = 256;
/// The character that stands for a space in SentencePiece.
pub(super) const SPACE: &str = "\u{2581}";
/// The field with the merges of SentencePiece in their order, where scores do not say it. It is Galaxy's own: llama.cpp
/// goes by the scores.
pub(super) const MERGES: &str = "tokenizer.huggingface.merges";
/// What stands before a token of WordPiece that continues a word.
pub(super) const CONTINUED: &str = "##";

impl Gguf {
    fn tokens(&self) -> Result<Vec<&str>, String> {
        let list = self.list("tokenizer.ggml.tokens").ok_or("it has no tokens")?;
        list.iter().map(|value| text(value, "token")).collect()
    }

    fn token(&self, field: &str) -> Option<(u64, &str)> {
        let id = self.whole(&format!("tokenizer.ggml.{field}_token_id"))?;
        match self.list("tokenizer.ggml.tokens")?.get(usize::try_from(id).ok()?)? {
            MetadataValue::Text(text) => Some((id, text)),
            _ => None,
        }
    }

    /// Whether a token begins each text: as the file says, or else as is usual for its kind of tokenizer.
    pub(crate) fn begins(&self) -> bool {
        let model = self.text("tokenizer.ggml.model");
        // Whatever flags say, which converters set in several ways.
        if model == Some("bert") {
            return true;
        }
        let of_model = model == Some("llama");
        let of_cut = matches!(
            self.text("tokenizer.ggml.pre"),
            Some("llama-bpe" | "llama3" | "llama-v3" | "tekken")
        );
        self.flag("tokenizer.ggml.add_bos_token").unwrap_or(of_model || of_cut)
    }

    /// Whether the file has a tokenizer. A model whose file says that it has none takes token ids instead of text.
    pub(crate) fn has_tokenizer(&self) -> bool {
        self.text("tokenizer.ggml.model") != Some("none")
    }

    /// The model's `tokenizer.json`.
    ///
    /// # Errors
    /// A sentence about what the file lacks, or what it has that is not supported.
    pub(crate) fn tokenizer(&self) -> Result<Json, String> {
        let tokens = self.tokens()?;
        if self.flag("tokenizer.ggml.remove_extra_whitespaces") == Some(true) {
            let field = "tokenizer.ggml.remove_extra_whitespaces";
            return Err(format!("it asks for {field}, which is not done here"));
        }
        let kind = self.text("tokenizer.ggml.model").ok_or("it has no tokenizer.ggml.model")?;
        if self.list("tokenizer.ggml.precompiled_charsmap").is_some_and(|map| !map.is_empty()) {
            return Err("its tokenizer.ggml.precompiled_charsmap is not done here".to_owned());
        }
        let mut vocabulary = Map::with_capacity(tokens.len());
        let kinds = self.list("tokenizer.ggml.token_type").unwrap_or_default();
        for (id, token) in tokens.iter().enumerate() {
            let token = match kind {
                "bert" => word_piece_text(token, kinds.get(id)),
                _ => (*token).to_owned(),
            };
            // Unused tokens that pad a vocabulary may all have the same text.
            vocabulary.entry(token).or_insert_with(|| json!(id));
        }
        let added = self.added(&tokens, kinds);
        let mut whole = match kind {
            "bert" => self.word_piece(vocabulary)?,
            "gpt2" => self.byte_level(vocabulary)?,
            "llama" => self.sentence_piece(&tokens, vocabulary)?,
            other => {
                return Err(format!(
                    "its tokenizer is of kind {other:?}, which is not read from GGUF files: gpt2, llama and bert are"
                ));
            }
        };
        whole["version"] = json!("1.0");
        whole["truncation"] = Json::Null;
        whole["padding"] = Json::Null;
        whole["added_tokens"] = Json::Array(added);
        let first = self.first().filter(|_| self.begins());
        let last = self.last().filter(|_| self.ends());
        // Texts of a decoder whose file names no first token begin without one.
        if kind == "bert" && first.is_none() || self.ends() && last.is_none() {
            return Err("it names no token that begins or ends each text, and asks for it".into());
        }
        whole["post_processor"] = match (first, last) {
            (None, None) if kind == "gpt2" => {
                json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
            }
            (None, None) => Json::Null,
            (first, last) => around(first, last),
        };
        Ok(whole)
    }

    /// The tokens that are found in texts before anything else is, as `added_tokens` has them.
    fn added(&self, tokens: &[&str], kinds: &[MetadataValue]) -> Vec<Json> {
        let special = |id: usize| match kinds.get(id) {
            Some(MetadataValue::Whole(UNKNOWN | CONTROL)) => Some(true),
            Some(MetadataValue::Whole(USER_DEFINED)) => Some(false),
            _ => None,
        };
        let strips = self.strips(tokens, |id| special(id).is_some());
        let added = |(id, token): (usize, &&str)| {
            let special = special(id)?;
            let (before, behind) = (strips.before.contains(&id), strips.behind.contains(&id));
            Some(json!({
                "id": id, "content": token, "single_word": false, "lstrip": before,
                "rstrip": behind, "normalized": false, "special": special,
            }))
        };
        tokens.iter().enumerate().filter_map(added).collect()
    }

    /// The token that begins texts: the one with which classes are told, where no other is named.
    fn first(&self) -> Option<(u64, &str)> {
        self.token("bos").or_else(|| self.token("cls"))
    }

    /// The token that stands behind texts.
    fn last(&self) -> Option<(u64, &str)> {
        // The field's name is spelled like this.
        let separator = || self.token("seperator");
        match self.text("tokenizer.ggml.model") {
            Some("bert") => separator().or_else(|| self.token("eos")),
            _ => self.token("eos").or_else(separator),
        }
    }

    /// Whether a token stands behind each text.
    pub(super) fn ends(&self) -> bool {
        match self.text("tokenizer.ggml.model") {
            // Whatever flags say, which converters set in several ways.
            Some("bert") => true,
            _ => self.flag("tokenizer.ggml.add_eos_token").unwrap_or(false),
        }
    }

    /// The `tokenizer.json` of WordPiece.
    fn word_piece(&self, vocabulary: Map<String, Json>) -> Result<Json, String> {
        let (_, unknown) = self.token("unknown").ok_or("it names no unknown token")?;
        let lower = self.flag("tokenizer.ggml.normalizer.lowercase").unwrap_or(true);
        let accents = self.flag("tokenizer.ggml.normalizer.strip_accents");
        Ok(json!({
            "normalizer": {
                "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                "strip_accents": accents, "lowercase": lower,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": CONTINUED, "cleanup": true},
            "model": {
                "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": CONTINUED,
                "max_input_chars_per_word": 100, "vocab": vocabulary,
            },
        }))
    }

    /// The `tokenizer.json` of byte-level BPE.
    fn byte_level(&self, vocabulary: Map<String, Json>) -> Result<Json, String> {
        let pre = self.text("tokenizer.ggml.pre").unwrap_or("default");
        let cut = CUTS.iter().find(|cut| cut.names.contains(&pre)).ok_or_else(|| {
            let known: Vec<_> = CUTS.iter().flat_map(|cut| cut.names).copied().collect();
            format!(
                "text is cut as {pre:?} says (tokenizer.ggml.pre), which is not known: {} are",
                known.join(", ")
            )
        })?;
        let merges = self.list("tokenizer.ggml.merges").ok_or("it has no merges")?;
        let merges = merges.iter().map(pair).collect::<Result<Vec<_>, _>>()?;
        let bytes = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let mut steps = Vec::new();
        if cut.digits {
            steps.push(json!({"type": "Digits", "individual_digits": true}));
        }
        if let Some(pattern) = &cut.pattern {
            let pattern = json!({"Regex": pattern});
            steps.push(json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false}));
        }
        steps.push(bytes(cut.pattern.is_none()));
        Ok(json!({
            "normalizer": if cut.composed { json!({"type": "NFC"}) } else { Json::Null },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": bytes(true),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "ignore_merges": cut.whole_words, "vocab": vocabulary,
                "merges": merges,
            },
        }))
    }

    /// The `tokenizer.json` of SentencePiece: BPE whose merges follow from the scores of tokens, with bytes for what is
    /// in no token.
    fn sentence_piece(
        &self,
        tokens: &[&str],
        mut vocabulary: Map<String, Json>,
    ) -> Result<Json, String> {
        let scores = self.list("tokenizer.ggml.scores").ok_or("it has no scores")?;
        let score = |id: usize| match scores.get(id) {
            Some(MetadataValue::Float(score)) => *score,
            _ => 0.0,
        };
        // The merges that are tried grow with the square of a token's length; real tokens have some ten bytes.
        if let Some(token) = tokens.iter().find(|token| token.len() > MAX_PIECE_BYTES) {
            return Err(format!("a token has {} bytes: at most {MAX_PIECE_BYTES}", token.len()));
        }
        for (text, id) in bytes_as_text(tokens) {
            vocabulary.entry(text).or_insert_with(|| json!(id));
        }
        let merges = match self.list(MERGES) {
            Some(merges) => merges.iter().map(pair).collect::<Result<_, _>>()?,
            None => merges_of(tokens, score),
        };
        let merges: Vec<_> = merges.iter().map(|(left, right)| json!([left, right])).collect();
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let prefix = self.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
        let steps = match prefix {
            true => json!([{"type": "Prepend", "prepend": SPACE}, spaces]),
            false => json!([spaces]),
        };
        let mut back = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            back.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = self.token("unknown").map_or(Json::Null, |(_, text)| json!(text));
        Ok(json!({
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": null,
            "decoder": {"type": "Sequence", "decoders": back},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": unknown,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
                "byte_fallback": true, "ignore_merges": false, "vocab": vocabulary,
                "merges": merges,
            },
        }))
    }

    /// The model's `tokenizer_config.json`.
    pub(crate) fn tokenizer_config(&self) -> Json {
        let mut config = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
        let all = [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")];
        let of_encoders = [
            ("cls_token", "cls"),
            ("sep_token", "seperator"),
            ("pad_token", "padding"),
            ("mask_token", "mask"),
        ];
        let more = of_encoders.into_iter().filter(|_| self.sees_both_ways());
        for (key, field) in all.into_iter().chain(more) {
            if let Some((_, text)) = self.token(field) {
                config[key] = json!(text);
            }
        }
        if let Some(template) = self.text("tokenizer.chat_template") {
            config["chat_template"] = json!(template);
        }
        config
    }

    /// The model's `generation_config.json`, which lists the tokens that end a text.
    pub(crate) fn generation_config(&self) -> Json {
        let ends = ["eos", "eot", "eom"].iter().filter_map(|field| self.token(field));
        let mut ends: Vec<u64> = ends.map(|(id, _)| id).collect();
        ends.dedup();
        match self.token("bos") {
            Some((id, _)) => json!({"eos_token_id": ends, "bos_token_id": id}),
            None => json!({"eos_token_id": ends}),
        }
    }
}

/// The merges of SentencePiece: every two tokens that together are a third, the one with the highest score first.
pub(super) fn merges_of(tokens: &[&str], score: impl Fn(usize) -> f64) -> Vec<(String, String)> {
    let bytes = bytes_as_text(tokens);
    let mut ids: HashMap<&str, usize> =
        bytes.iter().map(|(text, id)| (text.as_str(), *id)).collect();
    ids.extend(tokens.iter().copied().zip(0..));
    let mut merges: Vec<(f64, &str, &str)> = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        let cuts = token.char_indices().skip(1).filter_map(|(at, _)| {
            let (left, right) = token.split_at(at);
            Some((*ids.get(left)?, *ids.get(right)?, left, right))
        });
        let mut cuts: Vec<_> = cuts.collect();
        cuts.sort_unstable();
        merges.extend(cuts.into_iter().map(|(_, _, left, right)| (score(id), left, right)));
    }
    // The sort is stable: among merges into the same token, the first stays first.
    merges.sort_by(|one, other| other.0.total_cmp(&one.0));
    merges.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect()
}

/// The characters of one byte that are tokens only as that byte, and a part of other tokens: Gemma has its tabs so. In
/// checkpoints the character is another text of the same token, so that the others can be merged from it.
pub(super) fn bytes_as_text(tokens: &[&str]) -> Vec<(String, usize)> {
    let parts: HashSet<char> =
        tokens.iter().filter(|token| token.len() > 1).flat_map(|token| token.chars()).collect();
    let mut found = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        // Characters that are no control characters are tokens of their own wherever they are a part of some.
        let Some(byte) = byte.filter(u8::is_ascii_control) else { continue };
        let text = char::from(byte).to_string();
        if parts.contains(&char::from(byte)) && !tokens.contains(&text.as_str()) {
            found.push((text, id));
        }
    }
    found
}

/// The two parts of a merge.
fn pair(merge: &MetadataValue) -> Result<(String, String), String> {
    let text = text(merge, "merge")?;
    let pair = text.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned()));
    pair.ok_or_else(|| format!("a merge is {text:?}"))
}

/// The text of a list's value, or an error that says what kind of value it is.
fn text<'a>(value: &'a MetadataValue, what: &str) -> Result<&'a str, String> {
    match value {
        MetadataValue::Text(text) => Ok(text),
        other => Err(format!("a {what} is {other:?}")),
    }
}

/// The text that a token of WordPiece has in `tokenizer.json`: files mark those that begin a word, and it those that
/// continue one.
fn word_piece_text(token: &str, kind: Option<&MetadataValue>) -> String {
    match token.strip_prefix(SPACE) {
        _ if matches!(kind, Some(MetadataValue::Whole(UNKNOWN | CONTROL))) => token.to_owned(),
        Some(begins) => begins.to_owned(),
        None => format!("{CONTINUED}{token}"),
    }
}

/// A post-processor that puts a token before each text, and one behind it, where they are given.
fn around(first: Option<(u64, &str)>, last: Option<(u64, &str)>) -> Json {
    let special = |token: Option<(u64, &str)>, type_id: u32| {
        token.map(|(_, text)| json!({"SpecialToken": {"id": text, "type_id": type_id}}))
    };
    let sequence =
        |name: &str, type_id: u32| Some(json!({"Sequence": {"id": name, "type_id": type_id}}));
    let single = [special(first, 0), sequence("A", 0), special(last, 0)];
    // Without a token that ends the first text, one begins the second.
    let between = special(last.or(first), 0);
    let pair = [special(first, 0), sequence("A", 0), between, sequence("B", 1), special(last, 1)];
    let listed = |parts: &[Option<Json>]| parts.iter().flatten().cloned().collect::<Vec<_>>();
    let tokens = [first, last].into_iter().flatten();
    let tokens = tokens
        .map(|(id, text)| (text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]})));
    json!({
        "type": "TemplateProcessing", "single": listed(&single), "pair": listed(&pair),
        "special_tokens": Map::from_iter(tokens),
    })
}
