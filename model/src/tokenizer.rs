//! Text to token ids and back, as `tokenizer.json` says.

use crate::{error::ModelError, recognise, store::read_bounded};
use std::path::{Path, PathBuf};
use tokenizers::{PostProcessor, TruncationDirection};

/// The largest that are real have 35 MB.
const MAX_BYTES: u64 = 256 << 20;
/// Tokens before a text that are read with its first: some words.
const BEHIND: usize = 8;

/// A tokenizer. Neither pads nor cuts on its own, whatever its file says.
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    direction: TruncationDirection,
}

impl Tokenizer {
    /// Opens the `tokenizer.json` of a model directory.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let path = directory.join("tokenizer.json");
        if !path.is_file() {
            let remedy = recognise::tokenizer_files(directory);
            return Err(ModelError::NoTokenizer { path: directory.to_owned(), remedy });
        }
        let bytes = read_bounded(&path, MAX_BYTES)?;
        let wrong = |error: tokenizers::Error| ModelError::Tokenizer {
            path: path.clone(),
            problem: error.to_string(),
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(wrong)?;
        let direction = inner.get_truncation().map_or(TruncationDirection::Right, |t| t.direction);
        inner.with_padding(None);
        inner.with_truncation(None).map_err(wrong)?;
        Ok(Self { path, inner, direction })
    }

    /// The tokens of a text, special tokens added. With a limit, text is cut so that all special
    /// tokens stay.
    ///
    /// # Errors
    /// When the tokenizer refuses the text, or the limit leaves no room for it.
    pub fn encode(&self, text: &str, limit: Option<usize>) -> Result<Vec<u32>, ModelError> {
        let special = self.special_tokens();
        if let Some(limit) = limit.filter(|&l| l <= special) {
            return Err(ModelError::TokenLimit { limit, special });
        }
        let mut encoding = self.inner.encode_fast(text, false).map_err(|e| self.wrong(e))?;
        if let Some(limit) = limit {
            encoding.truncate(limit - special, 0, self.direction);
        }
        let encoding = self.inner.post_process(encoding, None, true).map_err(|e| self.wrong(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The tokens of a text and no others: special tokens are those that stand in it, as in a chat's.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode_alone(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| self.wrong(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, special ones left out.
    ///
    /// # Errors
    /// When the tokenizer refuses them.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(ids, true).map_err(|e| self.wrong(e))
    }

    /// Special tokens that are added to every text.
    pub fn special_tokens(&self) -> usize {
        self.inner.get_post_processor().map_or(0, |p| p.added_tokens(false))
    }

    /// Text that comes token by token, behind the last tokens of one that is known: the first token of a text may
    /// lose its space.
    pub fn stream(&self, behind: &[u32]) -> TextStream<'_> {
        let behind = &behind[behind.len().saturating_sub(BEHIND)..];
        TextStream { tokenizer: self, tokens: behind.to_vec(), before: 0, told: behind.len() }
    }

    fn wrong(&self, error: tokenizers::Error) -> ModelError {
        ModelError::Tokenizer { path: self.path.clone(), problem: error.to_string() }
    }
}

/// Tokens that become text as they come. A token may be part of a character, and may stand differently alone
/// than behind another: it is told with those before it, once it is whole.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Where the tokens begin that the next ones are read with,
    before: usize,
    /// and where those that were not told yet do.
    told: usize,
}

impl TextStream<'_> {
    /// What a token adds to the text; nothing where more are needed.
    ///
    /// # Errors
    /// When the tokenizer refuses it.
    pub fn push(&mut self, token: u32) -> Result<String, ModelError> {
        self.tokens.push(token);
        let (known, all) = self.read()?;
        if all.len() <= known.len() || all.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        (self.before, self.told) = (self.told, self.tokens.len());
        // What was told may have read otherwise; nothing is told twice.
        Ok(all.get(known.len()..).unwrap_or_default().to_owned())
    }

    /// What is left where no more tokens come.
    ///
    /// # Errors
    /// When the tokenizer refuses them.
    pub fn finish(self) -> Result<String, ModelError> {
        let (known, all) = self.read()?;
        Ok(all.get(known.len()..).unwrap_or_default().to_owned())
    }

    /// The text that was told lately, and the same with what was not.
    fn read(&self) -> Result<(String, String), ModelError> {
        let known = self.tokenizer.decode(&self.tokens[self.before..self.told])?;
        Ok((known, self.tokenizer.decode(&self.tokens[self.before..])?))
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(text: &str) -> Result<Tokenizer, ModelError> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(directory.path().join("tokenizer.json"), text).expect("a file");
        Tokenizer::open(directory.path())
    }

    /// Words, `[CLS] text [SEP]`, and padding and truncation as sentence-transformers leave them.
    const WORDS: &str = r#"{
        "version": "1.0",
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
        "added_tokens": [
            {"id": 1, "content": "[CLS]", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true},
            {"id": 2, "content": "[SEP]", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}
        ],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                "[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]},
                "[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]}}},
        "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {
            "[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "one": 4, "two": 5, "three": 6, "four": 7}}
    }"#;

    #[test]
    fn neither_pads_nor_cuts_unless_asked() {
        let tokenizer = open(WORDS).expect("a tokenizer");
        let encode = |text, limit| tokenizer.encode(text, limit).expect("tokens");
        assert_eq!(encode("One two THREE four five", None), [1, 4, 5, 6, 7, 3, 2]);
        assert_eq!(encode("one two three", Some(5)), [1, 4, 5, 6, 2]);
        assert_eq!(encode("one two three", Some(4)), [1, 4, 5, 2]);
        assert_eq!(encode("one two three", Some(3)), [1, 4, 2]);
        assert_eq!(encode("", None), [1, 2]);
        assert!(matches!(
            tokenizer.encode("one", Some(2)),
            Err(ModelError::TokenLimit { limit: 2, special: 2 })
        ));
        assert_eq!(tokenizer.decode(&[1, 4, 5, 2]).expect("text"), "one two");
        assert_eq!(tokenizer.special_tokens(), 2);
    }

    /// Every byte is a token.
    const BYTES: &str = r#"{
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "WordLevel", "unk_token": "<0x20>", "vocab": {
            "<0x20>": 0, "a": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}}
    }"#;

    #[test]
    fn text_comes_in_whole_characters() {
        let tokenizer = open(BYTES).expect("a tokenizer");
        let mut stream = tokenizer.stream(&[]);
        let mut push = |token| stream.push(token).expect("text");
        assert_eq!([1, 2, 3, 4, 1, 0, 1].map(&mut push), ["a", "", "", "€", "a", " ", "a"]);
        assert_eq!([2, 3].map(&mut push), ["", ""]);
        assert!(stream.finish().expect("text").starts_with(char::REPLACEMENT_CHARACTER));
        let words = open(WORDS).expect("a tokenizer");
        let mut stream = words.stream(&[]);
        let told = [4, 5, 2, 6].map(|token| stream.push(token).expect("text"));
        assert_eq!(told.concat(), "one two three");
    }

    /// As Llama 2's: a word has its space, and the first word of a text loses it.
    const SPACED: &str = r#"{
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": true},
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "WordLevel", "unk_token": "\u2581?", "vocab": {
            "\u2581?": 0, "\u2581once": 1, "\u2581upon": 2, "\u2581a": 3, "\u2581time": 4}}
    }"#;

    #[test]
    fn what_goes_on_keeps_its_first_space() {
        let tokenizer = open(SPACED).expect("a tokenizer");
        assert_eq!(tokenizer.encode("once upon", None).expect("tokens"), [1, 2]);
        let told = |behind: &[u32]| {
            let mut stream = tokenizer.stream(behind);
            [3, 4].map(|token| stream.push(token).expect("text")).concat()
        };
        assert_eq!(told(&[1, 2]), " a time");
        assert_eq!(told(&[2]), " a time");
        assert_eq!(told(&[]), "a time");
    }

    #[test]
    fn without_one_ids_are_the_way() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let error = Tokenizer::open(directory.path()).expect_err("none").to_string();
        assert!(error.contains("token ids instead"), "{error}");
        assert!(matches!(open("{"), Err(ModelError::Tokenizer { .. })));
    }
}
