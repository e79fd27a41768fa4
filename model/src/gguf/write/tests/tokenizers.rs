//! Tokenizers of several kinds as GGUF files: texts become the same tokens.

use super::*;
use crate::{
    gguf::{Gguf, strips},
    tokenizer::Tokenizer,
};
use serde_json::{Value, json};

const TEXTS: [&str; 12] = [
    "",
    "a",
    "ab  abc",
    "a\t\tb\t",
    "\n\n a   bab\n",
    "abab<turn>  ab",
    "\u{e4}b \u{1f600}",
    "<turn>\n\na<turn>",
    "  <pad> a",
    "cab aab bba aaaaab",
    "1234567 Ab's AB'S/\n/",
    "HelloWorld don't  x",
];

/// A token of a `tokenizer.json` that is found before anything else is.
fn added(id: usize, text: &str, special: bool, rstrip: bool) -> Value {
    json!({ "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": rstrip,
        "normalized": false, "special": special })
}

/// A SentencePiece tokenizer as Gemma has it: `(text, id)` of its vocabulary, and merges.
fn like_gemma() -> Value {
    let mut texts: Vec<String> =
        ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>", "\n", "\n\n"].map(str::to_owned).into();
    texts.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    for text in [
        "\u{2581}",
        "a",
        "b",
        "c",
        "\u{e4}",
        "ab",
        "\u{2581}\u{2581}",
        "\u{2581}\u{2581}\u{2581}",
        "\u{2581}ab",
        "aa",
        "\t\t",
        "aaa",
        "abab",
        "ba",
    ] {
        texts.push(text.to_owned());
    }
    let id = |text: &str| texts.iter().position(|other| other == text).expect("a token");
    let mut vocabulary: serde_json::Map<String, Value> =
        texts.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
    vocabulary.insert("\t".to_owned(), id("<0x09>").into());
    let merges = [
        ["\n", "\n"],
        ["a", "b"],
        ["\u{2581}", "\u{2581}"],
        ["\u{2581}", "\u{2581}\u{2581}"],
        ["\u{2581}\u{2581}", "\u{2581}"],
        ["\u{2581}", "ab"],
        ["a", "a"],
        ["\t", "\t"],
        ["a", "aa"],
        ["aa", "a"],
        ["ab", "ab"],
        ["b", "a"],
    ];
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(0, "<pad>", true, false), added(1, "<eos>", true, false), added(2, "<bos>", true, false),
            added(3, "<unk>", true, false), added(4, "<turn>", true, false), added(5, "\n", false, false),
            added(6, "\n\n", false, false), added(id("\u{2581}\u{2581}"), "\u{2581}\u{2581}", false, false),
        ],
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
        "pre_tokenizer": { "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious",
            "invert": false },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<bos>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<bos>": { "id": "<bos>", "ids": [2], "tokens": ["<bos>"] } },
        },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
        ] },
        "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary, "merges": merges },
    })
}

/// A byte-level tokenizer that cuts texts by a pattern, as converters from tiktoken write it.
fn like_gpt4o() -> Value {
    let pattern = crate::gguf::tokenizer::PreTokenizer::pattern_of("gpt-4o").expect("a pattern");
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-galaxy/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&fs::read(tiny).expect("a file")).expect("JSON");
    json["normalizer"] = Value::Null;
    json["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [
        { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Removed", "invert": true },
        { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
    ] });
    json["model"]["merges"] = json!([["A", "b"], ["\u{120}", "x"], ["H", "e"], ["1", "2"]]);
    let vocabulary = json["model"]["vocab"].as_object_mut().expect("a vocabulary");
    for text in ["A", "b", "Ab", "\u{120}", "x", "\u{120}x", "H", "e", "He", "1", "2", "12"] {
        let next = vocabulary.values().filter_map(Value::as_u64).max().unwrap_or(0) + 1;
        vocabulary.entry(text).or_insert(next.into());
    }
    json
}

/// Writes a model with a tokenizer and a chat template, reads it again, and compares both on texts. Returns the header.
fn survives(name: &str, json: &Value, rows: u32) -> Gguf {
    let from = tempfile::tempdir().expect("a directory");
    let place = from.path().join(name);
    fs::create_dir(&place).expect("a directory");
    let shape = Shape { vocabulary: rows, ..shaped("llama", "{}") };
    shape.write(&place, u64::MAX, &mut |_| {}).expect("a model");
    let put =
        |name: &str, json: &Value| fs::write(place.join(name), json.to_string()).expect("a file");
    put("tokenizer.json", json);
    put(
        "tokenizer_config.json",
        &json!({ "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0].content }}",
            "eos_token": json["added_tokens"][1]["content"], "bos_token": json["added_tokens"][2]["content"] }),
    );
    let model = ModelDir::open(&place).expect("a model");
    let path = from.path().join("m.gguf");
    model.write_gguf(&path, &mut |_, _| {}).expect("it can be written");
    let written = ModelDir::open(&path).expect("it can be read");
    let tokenizer = |model: &ModelDir| Tokenizer::open(model.path()).expect("a tokenizer");
    let (here, there) = (tokenizer(&written), tokenizer(&model));
    for text in TEXTS {
        let want = there.encode(text, None).expect("tokens");
        assert_eq!(here.encode(text, None).expect("tokens"), want, "{name}: {text:?}");
    }
    let template = |model: &ModelDir| {
        let files = crate::chat::ChatFiles::open(model.path()).expect("files");
        files.templates.get("default").map(|template| template.text.clone())
    };
    assert!(template(&model).is_some());
    assert_eq!(template(&written), template(&model), "{name}");
    Gguf::read(&path, &fs::File::open(&path).expect("a file")).expect("a head")
}

#[test]
fn a_tokenizer_like_that_of_gemma_survives_writing_as_gguf() {
    let json = like_gemma();
    let gguf = survives("gemma", &json, 300);
    assert_eq!(gguf.text("tokenizer.ggml.model"), Some("llama"));
    assert_eq!(gguf.flag("tokenizer.ggml.add_space_prefix"), Some(false));
    assert_eq!(gguf.flag("tokenizer.ggml.add_bos_token"), Some(true));
    assert_eq!(gguf.list("tokenizer.huggingface.merges"), None);
    let token = |id: usize| gguf.list("tokenizer.ggml.tokens").map(|all| all[id].clone());
    assert_eq!(token(7 + 9), Some(MetadataValue::Text("<0x09>".to_owned())));
    // It is a byte, and a line's end is a token that texts are searched for.
    let kind = |id: usize| gguf.list("tokenizer.ggml.token_type").map(|all| all[id].clone());
    assert_eq!(kind(7 + 9), Some(MetadataValue::Whole(6)));
    assert_eq!(kind(5), Some(MetadataValue::Whole(4)));

    // Merges into one token that stand apart: their order is in a field of our own.
    let mut apart = json.clone();
    let merges = apart["model"]["merges"].as_array_mut().expect("merges");
    merges.swap(4, 6);
    let gguf = survives("gemma", &apart, 300);
    assert_eq!(gguf.list("tokenizer.huggingface.merges").map(<[_]>::len), Some(12));
}

#[test]
fn white_space_beside_tokens_survives_writing_as_gguf() {
    let mut json = like_gemma();
    let texts = ["</s>", "<unk>", "<s>", "<|endoftext|>", "<turn>"];
    let rename = |json: &mut Value, id: usize, text: &str| {
        let old = json["added_tokens"][id]["content"].as_str().expect("a text").to_owned();
        json["added_tokens"][id]["content"] = text.into();
        let vocabulary = json["model"]["vocab"].as_object_mut().expect("a vocabulary");
        vocabulary.remove(&old);
        vocabulary.insert(text.to_owned(), id.into());
    };
    // Of those of Gemma, the ids of pad, eos, bos and unk are used for the names of Phi-3.
    for (id, text) in [(0, texts[0]), (1, texts[3]), (2, texts[2]), (3, texts[1])] {
        rename(&mut json, id, text);
    }
    json["post_processor"] = Value::Null;
    json["model"]["unk_token"] = texts[1].into();
    for id in [0, 4, 5, 6, 7] {
        json["added_tokens"][id]["rstrip"] = true.into();
    }
    let gguf = survives("made-up", &json, 300);
    assert_eq!(gguf.text("general.name"), Some("made-up (phi3)"));
    assert_eq!(gguf.list(strips::FIELDS[1]).map(<[_]>::len), Some(5));
    assert_eq!(gguf.list(strips::FIELDS[0]), None);
    assert_eq!(survives("Phi-3", &json, 300).text("general.name"), Some("Phi-3"));
    // Under its own name, llama.cpp would strip behind these, too.
    json["added_tokens"][6]["rstrip"] = false.into();
    assert_eq!(survives("Phi-3", &json, 300).text("general.name"), None);
    assert_eq!(survives("other", &json, 300).text("general.name"), Some("other"));
    // And it would not read a vocabulary without some tokens.
    assert_eq!(survives("Phi-3", &like_gemma(), 300).text("general.name"), None);
}

#[test]
fn a_tokenizer_that_cuts_like_gpt_4o_survives_writing_as_gguf() {
    let gguf = survives("phi-4-mini", &like_gpt4o(), 600);
    assert_eq!(gguf.text("tokenizer.ggml.pre"), Some("gpt-4o"));
}
