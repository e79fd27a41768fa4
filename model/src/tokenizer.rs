//! Text to token ids and back, as the files of a tokenizer describe.

mod class;
mod settle;

use crate::error::ModelError;
use settle::{Settled, build};
use std::path::{Path, PathBuf};
use tokenizers::{
    PostProcessor, TruncationDirection, TruncationParams, TruncationStrategy, truncate_encodings,
};

/// How many tokens of known text new tokens are decoded together with: a few words.
const BEHIND: usize = 8;

/// A tokenizer. It neither pads nor truncates unless it is asked to, whatever its file says.
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    direction: TruncationDirection,
    /// Whether the model reads token types.
    types: bool,
    max_tokens: Option<u32>,
    clean_up: bool,
}

/// The tokens of a text or of a pair of texts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Encoded {
    /// The token ids, special tokens included.
    pub ids: Vec<u32>,
    /// The type of each token, which says to which of two texts it belongs; empty where all are 0.
    pub types: Vec<u8>,
}

impl From<Vec<u32>> for Encoded {
    fn from(ids: Vec<u32>) -> Self {
        Self { ids, types: Vec::new() }
    }
}

impl Tokenizer {
    /// Opens the `tokenizer.json` of a model directory, together with `tokenizer_config.json` and the older files
    /// beside it.
    ///
    /// # Errors
    /// When there is no `tokenizer.json`, or a file cannot be read.
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let Settled { inner, direction, types, max_tokens, clean_up } = build(directory)?;
        let path = directory.join("tokenizer.json");
        Ok(Self { path, inner, direction, types, max_tokens, clean_up })
    }

    /// The tokens of a text with the special tokens that belong around it. With a limit, the text is cut so that all
    /// special tokens stay.
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

    /// The tokens of two texts that are read together, with special tokens. With a limit, the longer text is cut first,
    /// and then both.
    ///
    /// # Errors
    /// When the tokenizer refuses the texts, or the limit leaves no room for them.
    pub fn encode_pair(
        &self,
        first: &str,
        second: &str,
        limit: Option<usize>,
    ) -> Result<Encoded, ModelError> {
        let special = self.inner.get_post_processor().map_or(0, |p| p.added_tokens(true));
        if let Some(limit) = limit.filter(|&l| l <= special) {
            return Err(ModelError::TokenLimit { limit, special });
        }
        let encode = |text| self.inner.encode_fast(text, false).map_err(|e| self.wrong(e));
        let (mut first, mut second) = (encode(first)?, encode(second)?);
        second.set_type_ids(vec![1; second.len()]);
        if let Some(limit) = limit {
            let cut = TruncationParams {
                direction: self.direction,
                max_length: limit - special,
                strategy: TruncationStrategy::LongestFirst,
                stride: 0,
            };
            let wrong = |e: tokenizers::Error| self.wrong(e);
            let cut = truncate_encodings(first, Some(second), &cut).map_err(wrong)?;
            (first, second) = (cut.0, cut.1.unwrap_or_default());
        }
        let pair = self.inner.post_process(first, Some(second), true);
        let pair = pair.map_err(|e| self.wrong(e))?;
        let kinds = pair.get_type_ids();
        let types = match self.types && kinds.iter().any(|kind| *kind > 0) {
            true => kinds.iter().map(|kind| u8::try_from(*kind).unwrap_or(u8::MAX)).collect(),
            false => Vec::new(),
        };
        Ok(Encoded { ids: pair.get_ids().to_vec(), types })
    }

    /// How many of a text's first tokens belong to a prompt before it. Special tokens that begin a text are among them,
    /// but not the one that ends it.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn prompt_tokens(&self, prompt: &str, limit: usize) -> Result<usize, ModelError> {
        let ids = self.encode(prompt, Some(limit))?;
        let added = self.inner.get_added_tokens_decoder();
        let ends = ids.last().and_then(|last| added.get(last)).is_some_and(|token| token.special);
        Ok(ids.len() - usize::from(ends))
    }

    /// Lower-cases texts before anything else, unless the tokenizer does so already.
    pub fn lower_case(&mut self) {
        use tokenizers::{
            NormalizerWrapper,
            normalizers::{Sequence, utils::Lowercase},
        };
        let before = self.inner.get_normalizer().cloned();
        let lowers =
            |normalizer: &NormalizerWrapper| matches!(normalizer, NormalizerWrapper::Lowercase(_));
        let all = match before {
            Some(NormalizerWrapper::Sequence(sequence)) => sequence.as_ref().to_vec(),
            Some(other) => vec![other],
            None => Vec::new(),
        };
        if !all.iter().any(lowers) {
            let lower = NormalizerWrapper::Lowercase(Lowercase);
            let all = [lower].into_iter().chain(all).collect();
            self.inner.with_normalizer(Some(Sequence::new(all)));
        }
    }

    /// The most tokens of a text, special ones included, if the tokenizer's files say.
    pub fn max_tokens(&self) -> Option<u32> {
        self.max_tokens
    }

    /// The tokens of a text without special tokens around it; those written in the text itself are recognised, as in
    /// chats.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode_alone(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| self.wrong(e))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, without the special ones.
    ///
    /// # Errors
    /// When the tokenizer refuses them.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        let text = self.inner.decode(ids, true).map_err(|e| self.wrong(e))?;
        Ok(if self.clean_up { cleaned(&text) } else { text })
    }

    /// How many special tokens are added to every text.
    pub fn special_tokens(&self) -> usize {
        self.inner.get_post_processor().map_or(0, |p| p.added_tokens(false))
    }

    /// Decodes tokens one by one, behind the last tokens of a text that is known: the first token of a text may lose
    /// its space.
    pub fn stream(&self, behind: &[u32]) -> TextStream<'_> {
        let behind = &behind[behind.len().saturating_sub(BEHIND)..];
        TextStream { tokenizer: self, tokens: behind.to_vec(), before: 0, told: behind.len() }
    }

    fn wrong(&self, error: tokenizers::Error) -> ModelError {
        ModelError::Tokenizer { path: self.path.clone(), problem: error.to_string() }
    }
}

/// Decodes tokens as they come. A token may be part of a character, or read otherwise alone than behind another: it is
/// decoded with those before it, and its text is returned once it is complete.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Where the tokens begin that new tokens are decoded together with.
    before: usize,
    /// Where the tokens begin whose text was not returned yet.
    told: usize,
}

impl TextStream<'_> {
    /// Adds a token, and returns the text that it completes; empty where more tokens are needed.
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
        // What was returned may have read otherwise; nothing is returned twice.
        Ok(all.get(known.len()..).unwrap_or_default().to_owned())
    }

    /// Returns the rest of the text, once no more tokens come.
    ///
    /// # Errors
    /// When the tokenizer refuses them.
    pub fn finish(self) -> Result<String, ModelError> {
        let (known, all) = self.read()?;
        Ok(all.get(known.len()..).unwrap_or_default().to_owned())
    }

    /// The text that was returned last, and the same text continued by what was not returned yet.
    fn read(&self) -> Result<(String, String), ModelError> {
        let known = self.tokenizer.decode(&self.tokens[self.before..self.told])?;
        Ok((known, self.tokenizer.decode(&self.tokens[self.before..])?))
    }
}

/// A text without the spaces that decoding leaves before punctuation.
fn cleaned(text: &str) -> String {
    const SPACED: [(&str, &str); 10] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    SPACED.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
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

    /// A tokenizer of words with `[CLS] text [SEP]`, and with padding and truncation as sentence-transformers leave
    /// them.
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
    fn encoding_never_pads_and_truncates_only_to_a_given_limit() {
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

    /// A tokenizer whose tokens are bytes.
    const BYTES: &str = r#"{
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "WordLevel", "unk_token": "<0x20>", "vocab": {
            "<0x20>": 0, "a": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}}
    }"#;

    #[test]
    fn streamed_text_comes_in_whole_characters() {
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

    /// A tokenizer like Llama 2's: each word has a space before it, which the first word of a text loses.
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
    fn a_continued_sequence_keeps_its_first_space() {
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
    fn a_missing_tokenizer_is_an_error_that_suggests_token_ids() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let error = Tokenizer::open(directory.path()).expect_err("none").to_string();
        assert!(error.contains("token ids instead"), "{error}");
        assert!(matches!(open("{"), Err(ModelError::Tokenizer { .. })));
    }
}
