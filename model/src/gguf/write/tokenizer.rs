//! Writes a model's `tokenizer.json` as the fields of a GGUF file: the inverse of reading one.

use super::header::{Field, Fields};
use crate::{
    ModelDir,
    chat::ChatFiles,
    gguf::{
        strips::{self, Strips},
        tokenizer::{CONTINUED, MERGES, PreTokenizer, SPACE, merges_of},
    },
    small_file::read_bounded,
};
use serde_json::Value as Json;
use std::collections::{BTreeSet, HashMap, HashSet};

/// The largest `tokenizer.json` that is read; real ones have some ten megabytes.
const MAX_BYTES: u64 = 256 << 20;

/// The types of tokens, by their numbers in files.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The name that the file gives the model, the fields of its tokenizer, and its chat template. A model without a
/// tokenizer takes token ids alone.
///
/// llama.cpp tells by the name of a model beside which special tokens white space is left out. A name under which it
/// would read the tokenizer otherwise is left out of the file.
///
/// # Errors
/// A sentence about what the tokenizer does that no field can express.
pub(super) fn fields(model: &ModelDir) -> Result<(Option<String>, Fields), String> {
    let path = model.path().join("tokenizer.json");
    let mut fields = Vec::new();
    let mut put = |name: &str, field| fields.push((format!("tokenizer.ggml.{name}"), field));
    let whole: Option<Json> = match path.is_file() {
        true => {
            let text = read_bounded(&path, MAX_BYTES).map_err(|error| error.to_string())?;
            Some(serde_json::from_slice(&text).map_err(|e| format!("its tokenizer.json: {e}"))?)
        }
        false => None,
    };
    let files = ChatFiles::open(model.path()).map_err(|error| error.to_string())?;
    let Some(whole) = whole else {
        put("model", Field::Text("none".to_owned()));
        let ends = model.generation().map_err(|error| error.to_string())?.ends;
        ends_in(&ends, None, &mut put);
        return Ok((Some(model.name().to_owned()), fields));
    };
    let tokens = Tokens::of(&whole, model.spec().vocabulary)?;
    let word_piece = is_word_piece(&whole);
    if word_piece {
        write_word_piece(&whole, &mut put)?;
    } else if is_byte_level(&whole) {
        byte_level(&whole, &mut put)?;
    } else {
        sentence_piece(&whole, &tokens, &mut put)?;
    }
    put_special(model, &files, &whole, &tokens, &mut put)?;
    let texts = match word_piece {
        true => tokens.texts.iter().zip(&tokens.kinds).map(|(t, kind)| marked(t, *kind)).collect(),
        false => tokens.texts.clone(),
    };
    put("tokens", Field::Texts(texts));
    put("token_type", Field::Wholes(tokens.kinds.clone()));
    if let Some(template) = files.templates.get("default") {
        fields.push(("tokenizer.chat_template".to_owned(), Field::Text(template.text.clone())));
    }
    let ids = |of: &BTreeSet<usize>| Field::Wholes(of.iter().map(|id| *id as i32).collect());
    for (name, of) in strips::FIELDS.iter().zip([&tokens.strips.before, &tokens.strips.behind]) {
        if !of.is_empty() {
            fields.push(((*name).to_owned(), ids(of)));
        }
    }
    if !word_piece && let Some(merges) = tokens.merges_beside_scores(&whole)? {
        fields.push((MERGES.to_owned(), Field::Texts(merges)));
    }
    let special = |id: usize| [UNKNOWN, CONTROL, USER_DEFINED].contains(&tokens.kinds[id]);
    let texts = tokens.texts.iter().map(String::as_str);
    Ok((tokens.strips.named(model.name(), texts, special), fields))
}

/// Puts the tokens that begin and end texts, and others with a meaning of their own.
fn put_special(
    model: &ModelDir,
    files: &ChatFiles,
    whole: &Json,
    tokens: &Tokens,
    put: &mut impl FnMut(&str, Field),
) -> Result<(), String> {
    let word_piece = is_word_piece(whole);
    let special = |name: &str| files.tokens.get(name).and_then(|text| tokens.id(text));
    let id = |text: Option<String>| {
        let id = text.map(|text| tokens.id(&text).ok_or(text)).transpose();
        id.map_err(|text| format!("its tokens have no {text:?}, which begins or ends texts"))
    };
    let (first, last) = around(whole)?;
    let (first, last) = (id(first)?, id(last)?);
    put("add_bos_token", Field::Flag(first.is_some()));
    if word_piece && (first.is_none() || last.is_none()) {
        let why = "no token begins and ends its texts, which no field says of WordPiece";
        return Err(why.to_owned());
    }
    if last.is_some() {
        put(if word_piece { "add_sep_token" } else { "add_eos_token" }, Field::Flag(true));
    }
    // A token behind texts is the first of those that end them.
    let ends = model.generation().map_err(|error| error.to_string())?.ends;
    let others = ends.into_iter().filter(|id| Some(*id) != last);
    let ends: Vec<u32> = last.into_iter().chain(others).collect();
    let encoder = |id: Option<u32>| id.filter(|_| !model.spec().causal);
    for (name, id) in [
        ("bos_token_id", first.or_else(|| special("bos_token"))),
        ("unknown_token_id", special("unk_token")),
        ("padding_token_id", special("pad_token")),
        ("cls_token_id", encoder(special("cls_token"))),
        (
            "seperator_token_id",
            encoder(last.filter(|_| word_piece).or_else(|| special("sep_token"))),
        ),
        ("mask_token_id", encoder(special("mask_token"))),
    ] {
        if let Some(id) = id {
            put(name, Field::Whole(id));
        }
    }
    if !word_piece {
        ends_in(&ends, last.or_else(|| special("eos_token")), put);
    }
    Ok(())
}

/// Writes the tokens that end a text, as many as there are fields for.
fn ends_in(ends: &[u32], eos: Option<u32>, put: &mut impl FnMut(&str, Field)) {
    // The tokenizer's own token comes first, if it ends texts.
    let mut all: Vec<u32> =
        eos.into_iter().filter(|id| ends.is_empty() || ends.contains(id)).collect();
    all.extend(
        ends.iter().filter(|id| Some(**id) != all.first().copied()).copied().collect::<Vec<_>>(),
    );
    for (name, id) in ["eos_token_id", "eot_token_id", "eom_token_id"].iter().zip(all) {
        put(name, Field::Whole(id));
    }
}

/// The tokens of a vocabulary, by their ids.
struct Tokens {
    texts: Vec<String>,
    kinds: Vec<i32>,
    ids: HashMap<String, u32>,
    strips: Strips,
}

impl Tokens {
    fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Reads as many tokens as the model's embedding table has rows.
    fn of(whole: &Json, rows: u32) -> Result<Self, String> {
        let model = &whole["model"];
        if !["BPE", "WordPiece"].map(Some).contains(&model["type"].as_str()) {
            let kind = &model["type"];
            return Err(format!("its tokenizer is of type {kind}: BPE and WordPiece are written"));
        }
        let vocabulary = model["vocab"].as_object().ok_or("its tokenizer.json has no vocab")?;
        let unknown = model["unk_token"].as_str();
        let bytes = model["byte_fallback"].as_bool() == Some(true);
        let mut known: HashMap<u64, (String, i32)> = HashMap::new();
        for (text, id) in vocabulary {
            let id = id.as_u64().ok_or_else(|| format!("token {text:?} has no id"))?;
            let kind = match text {
                text if Some(&**text) == unknown => UNKNOWN,
                text if bytes && is_byte(text) => BYTE,
                _ => NORMAL,
            };
            // A character that is the text of a byte's token is that token: readers know it by its byte.
            if known.get(&id).is_none_or(|(_, other)| *other != BYTE) {
                known.insert(id, (text.clone(), kind));
            }
        }
        let mut strips = Strips::default();
        for added in whole["added_tokens"].as_array().into_iter().flatten() {
            let (Some(id), Some(text)) = (added["id"].as_u64(), added["content"].as_str()) else {
                return Err(format!("an added token is {added}"));
            };
            if added["single_word"].as_bool() == Some(true) {
                return Err(format!("its token {text:?} has single_word, which no field says"));
            }
            for (field, of) in [("lstrip", &mut strips.before), ("rstrip", &mut strips.behind)] {
                of.extend((added[field].as_bool() == Some(true)).then_some(id as usize));
            }
            let kind = match added["special"].as_bool() == Some(true) {
                _ if Some(text) == unknown => UNKNOWN,
                true => CONTROL,
                false => USER_DEFINED,
            };
            known.insert(id, (text.to_owned(), kind));
        }
        if let Some((id, (text, _))) = known.iter().find(|(id, _)| **id >= u64::from(rows)) {
            return Err(format!("its token {text:?} has id {id}, and the model has {rows} rows"));
        }
        let ids = known.iter().map(|(id, (text, _))| (text.clone(), *id as u32)).collect();
        let mut token = |id| known.remove(&id).unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
        let (texts, kinds) = (0..u64::from(rows)).map(&mut token).unzip();
        Ok(Self { texts, kinds, ids, strips })
    }

    /// The scores of SentencePiece that give these merges: the sooner a token is merged, the higher its score.
    fn scores(&self, merges: &[(String, String)]) -> Vec<f32> {
        let mut ranks: HashMap<String, usize> = HashMap::new();
        for (rank, (left, right)) in merges.iter().enumerate() {
            ranks.entry(format!("{left}{right}")).or_insert(rank);
        }
        let score = |text: &String| match ranks.get(text) {
            Some(rank) => -(*rank as f32),
            // No merge has this token as its result.
            None => -(merges.len() as f32),
        };
        self.texts.iter().map(score).collect()
    }

    /// The merges of SentencePiece, where scores give the same ones in another order: those of one token may stand
    /// apart, where another one lies between. `None` where scores say it all, or for another kind of tokenizer.
    fn merges_beside_scores(&self, whole: &Json) -> Result<Option<Vec<String>>, String> {
        if is_byte_level(whole) {
            return Ok(None);
        }
        let merges = merges(whole)?;
        let scores = self.scores(&merges);
        let texts: Vec<&str> = self.texts.iter().map(String::as_str).collect();
        let again = merges_of(&texts, |id| f64::from(scores[id]));
        if again == merges {
            return Ok(None);
        }
        let set = |all: &[(String, String)]| all.iter().cloned().collect::<HashSet<_>>();
        match set(&again) == set(&merges) {
            true => Ok(Some(merges.iter().map(|(a, b)| format!("{a} {b}")).collect())),
            false => {
                Err("the merges of its tokenizer do not follow from scores of its tokens"
                    .to_owned())
            }
        }
    }
}

/// Whether a token stands for a byte, like `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// The steps of a part of a tokenizer: its list, where it is a sequence, or else the part itself.
fn steps<'a>(part: &'a Json, all: &str) -> Vec<&'a Json> {
    match part["type"].as_str() {
        None => Vec::new(),
        Some("Sequence") => part[all].as_array().into_iter().flatten().collect(),
        Some(_) => vec![part],
    }
}

fn is_byte_level(whole: &Json) -> bool {
    let steps = steps(&whole["pre_tokenizer"], "pretokenizers");
    steps.iter().any(|step| step["type"] == "ByteLevel")
}

/// The merges of a tokenizer, each as its left and its right part.
fn merges(whole: &Json) -> Result<Vec<(String, String)>, String> {
    let pair = |merge: &Json| {
        let both = match merge {
            Json::String(text) => text.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
            _ => Some((
                merge[0].as_str().unwrap_or("").into(),
                merge[1].as_str().unwrap_or("").into(),
            )),
        };
        both.filter(|(a, b)| !a.is_empty() && !b.is_empty())
            .ok_or_else(|| format!("a merge is {merge}"))
    };
    whole["model"]["merges"].as_array().into_iter().flatten().map(pair).collect()
}

/// Writes the fields of byte-level BPE, with the name of its pre-tokenizer.
fn byte_level(whole: &Json, put: &mut impl FnMut(&str, Field)) -> Result<(), String> {
    let merges = merges(whole)?;
    let cut = match merges.is_empty() {
        // Without merges each byte is a token, wherever text is split.
        true => "gpt-2",
        false => PreTokenizer::name_of(&cut(whole)?).ok_or(
            "its tokenizer cuts text in a way that has no name in GGUF files that is known here",
        )?,
    };
    put("model", Field::Text("gpt2".to_owned()));
    put("pre", Field::Text(cut.to_owned()));
    put("merges", Field::Texts(merges.iter().map(|(a, b)| format!("{a} {b}")).collect()));
    Ok(())
}

/// How a byte-level tokenizer splits text before its parts become tokens.
fn cut(whole: &Json) -> Result<PreTokenizer, String> {
    let mut cut = PreTokenizer::default();
    cut.whole_words = whole["model"]["ignore_merges"] == true;
    for step in steps(&whole["normalizer"], "normalizers") {
        match step["type"].as_str() {
            Some("NFC") => cut.composed = true,
            other => {
                return Err(format!(
                    "its tokenizer changes texts by {other:?}, which no field says"
                ));
            }
        }
    }
    for step in steps(&whole["pre_tokenizer"], "pretokenizers") {
        match step["type"].as_str() {
            Some("Digits") if step["individual_digits"] == true => cut.digits = true,
            // Known patterns match all of a text: what is between matches is nothing.
            Some("Split")
                if step["behavior"] == "Isolated" && step["invert"] != true
                    || step["behavior"] == "Removed" && step["invert"] == true =>
            {
                let pattern = step["pattern"]["Regex"].as_str();
                cut.pattern =
                    Some(pattern.ok_or("its tokenizer cuts at a text")?.to_owned().into());
            }
            Some("ByteLevel") if step["add_prefix_space"] != true => {
                if step["use_regex"] != false && cut.pattern.is_some() {
                    return Err("its tokenizer cuts texts twice, which no field says".to_owned());
                }
                if step["use_regex"] == false && cut.pattern.is_none() {
                    return Err("its tokenizer does not cut texts, which no field says".to_owned());
                }
            }
            other => {
                return Err(format!("its tokenizer cuts texts by {other:?}, which no field says"));
            }
        }
    }
    Ok(cut)
}

/// Writes the fields of SentencePiece: BPE whose merges follow from the scores of tokens.
fn sentence_piece(
    whole: &Json,
    tokens: &Tokens,
    put: &mut impl FnMut(&str, Field),
) -> Result<(), String> {
    if whole["model"]["byte_fallback"] != true {
        return Err("its tokenizer is neither over bytes nor falls back on them".to_owned());
    }
    let scores = tokens.scores(&merges(whole)?);
    put("model", Field::Text("llama".to_owned()));
    put("pre", Field::Text("default".to_owned()));
    put("scores", Field::Floats(scores));
    put("add_space_prefix", Field::Flag(space_before(whole)?));
    Ok(())
}

/// Whether a space is put before each text. The tokenizer must replace spaces as SentencePiece does.
fn space_before(whole: &Json) -> Result<bool, String> {
    let (mut before, mut spaces) = (false, false);
    for step in steps(&whole["normalizer"], "normalizers") {
        match step["type"].as_str() {
            Some("Prepend") if step["prepend"] == SPACE => before = true,
            Some("Replace") if step["pattern"]["String"] == " " && step["content"] == SPACE => {
                spaces = true;
            }
            other => {
                return Err(format!(
                    "its tokenizer changes texts by {other:?}, which no field says"
                ));
            }
        }
    }
    for step in steps(&whole["pre_tokenizer"], "pretokenizers") {
        match step["type"].as_str() {
            Some("Metaspace") if step["replacement"] == SPACE && step["split"] == false => {
                spaces = true;
                before = match step["prepend_scheme"].as_str() {
                    Some("never") => false,
                    Some("first" | "always") => true,
                    _ => step["add_prefix_space"] != false,
                };
            }
            // Gemma cuts at spaces, of which the normaliser has left none.
            Some("Split") if spaces && step["pattern"]["String"] == " " => {}
            other => {
                return Err(format!("its tokenizer cuts texts by {other:?}, which no field says"));
            }
        }
    }
    spaces
        .then_some(before)
        .ok_or_else(|| "its tokenizer keeps spaces, which no field says".to_owned())
}

fn is_word_piece(whole: &Json) -> bool {
    whole["model"]["type"] == "WordPiece"
}

/// The text of a token of WordPiece in GGUF files, which mark the tokens that begin a word.
fn marked(text: &str, kind: i32) -> String {
    match text.strip_prefix(CONTINUED) {
        _ if [UNKNOWN, CONTROL].contains(&kind) => text.to_owned(),
        Some(rest) => rest.to_owned(),
        None => format!("{SPACE}{text}"),
    }
}

/// Writes the fields of WordPiece.
fn write_word_piece(whole: &Json, put: &mut impl FnMut(&str, Field)) -> Result<(), String> {
    let (model, normalizer) = (&whole["model"], &whole["normalizer"]);
    let usual = model["continuing_subword_prefix"] == CONTINUED
        && model["max_input_chars_per_word"] == 100
        && normalizer["type"] == "BertNormalizer"
        && normalizer["clean_text"] == true
        && normalizer["handle_chinese_chars"] == true
        && whole["pre_tokenizer"]["type"] == "BertPreTokenizer";
    if !usual {
        return Err(
            "its WordPiece tokenizer changes or cuts texts in a way that no field says".into()
        );
    }
    put("model", Field::Text("bert".to_owned()));
    put("pre", Field::Text("default".to_owned()));
    put("normalizer.lowercase", Field::Flag(normalizer["lowercase"] == true));
    if let Some(strip) = normalizer["strip_accents"].as_bool() {
        put("normalizer.strip_accents", Field::Flag(strip));
    }
    Ok(())
}

/// The token that begins each text, and the one behind it, if there are any.
fn around(whole: &Json) -> Result<(Option<String>, Option<String>), String> {
    let mut found = (None, None);
    for step in steps(&whole["post_processor"], "processors") {
        match step["type"].as_str() {
            Some("ByteLevel") => {}
            Some("BertProcessing") => {
                let token = |name: &str| step[name][0].as_str().map(str::to_owned);
                found = (token("cls"), token("sep"));
            }
            Some("TemplateProcessing") => {
                let single: Vec<&Json> = step["single"].as_array().into_iter().flatten().collect();
                let token = |part: &Json| part["SpecialToken"]["id"].as_str().map(str::to_owned);
                let text = |part: &Json| part.get("Sequence").is_some();
                found = match single[..] {
                    [own] if text(own) => (None, None),
                    [first, own] if text(own) => (token(first), None),
                    [own, last] if text(own) => (None, token(last)),
                    [first, own, last] if text(own) => (token(first), token(last)),
                    _ => {
                        return Err(
                            "its tokenizer adds several tokens to texts, which no field says"
                                .into(),
                        );
                    }
                };
            }
            other => return Err(format!("its tokenizer ends with {other:?}, which no field says")),
        }
    }
    Ok(found)
}
