//! Compares tokenizers of small files with `AutoTokenizer` of transformers: `scripts/golden-tokenizers.py`.
#![cfg(feature = "tokenizer")]

use galaxy_model::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::{collections::BTreeMap, fs, path::Path};

#[derive(Deserialize)]
struct Golden {
    texts: Vec<String>,
    pair_of: [String; 2],
    cut_to: usize,
    bases: BTreeMap<String, Map<String, Value>>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    base: String,
    /// The file, the field and its value; without a field the file is removed.
    changed: Vec<(String, Option<String>, Value)>,
    /// The expected outcome; `None` where it is that without changes.
    result: Option<Outcome>,
}

#[derive(Deserialize)]
struct Outcome {
    ids: Vec<Vec<u32>>,
    pair: Vec<u32>,
    types: Vec<u8>,
    cut: Vec<u32>,
    cut_pair: Vec<u32>,
    text: String,
    length: Option<u32>,
}

/// Describes the differences from the reference; `None` where there are none.
fn check(golden: &Golden, case: &Case) -> Result<Option<String>, String> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut files = golden.bases[&case.base].clone();
    for (name, field, value) in &case.changed {
        let Some(field) = field else {
            files.remove(name);
            continue;
        };
        let object = files.entry(name).or_insert_with(|| Value::Object(Map::new()));
        let object = object.as_object_mut().expect("an object");
        let absent = value.is_null()
            && name != "tokenizer.json"
            && ["tokenizer_class", "model_type"].contains(&field.as_str());
        match absent {
            true => drop(object.remove(field)),
            false => drop(object.insert(field.clone(), value.clone())),
        }
    }
    for (name, content) in &files {
        fs::write(directory.path().join(name), content.to_string()).expect("a file");
    }
    let tokenizer = Tokenizer::open(directory.path()).map_err(|error| error.to_string())?;
    let unchanged = || {
        let found = golden.cases.iter().find(|c| c.base == case.base && c.changed.is_empty());
        found.and_then(|case| case.result.as_ref()).expect("the base's own case")
    };
    let want = case.result.as_ref().unwrap_or_else(unchanged);
    let mut wrong = Vec::new();
    let mut same = |what: &str, have: String, want: String| {
        if have != want {
            wrong.push(format!("{what}: {have}, wanted {want}"));
        }
    };
    let encode = |text: &str, limit| match tokenizer.encode(text, limit) {
        Ok(ids) => format!("{ids:?}"),
        Err(error) => error.to_string(),
    };
    for (text, ids) in golden.texts.iter().zip(&want.ids) {
        same(text, encode(text, None), format!("{ids:?}"));
    }
    same("cut", encode(&golden.texts[0], Some(golden.cut_to)), format!("{:?}", want.cut));
    let [first, second] = &golden.pair_of;
    let pair = |limit| tokenizer.encode_pair(first, second, limit).expect("a pair");
    let mut whole = pair(None);
    whole.types.resize(whole.ids.len(), 0);
    same("pair", format!("{:?}", whole.ids), format!("{:?}", want.pair));
    same("types", format!("{:?}", whole.types), format!("{:?}", want.types));
    let cut = pair(Some(golden.cut_to + 2)).ids;
    same("cut pair", format!("{cut:?}"), format!("{:?}", want.cut_pair));
    same("text", tokenizer.decode(&want.ids[0]).expect("a text"), want.text.clone());
    same("length", format!("{:?}", tokenizer.max_tokens()), format!("{:?}", want.length));
    Ok((!wrong.is_empty()).then(|| wrong.join("\n    ")))
}

#[test]
fn changed_tokenizer_files_give_the_tokens_of_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/tokenizers.json");
    let text = fs::read_to_string(path).expect("the file");
    let golden: Golden = serde_json::from_str(&text).expect("its form");
    let (mut wrong, mut refused) = (Vec::new(), Vec::new());
    for case in &golden.cases {
        let name = format!("{} {:?}", case.base, case.changed);
        match check(&golden, case) {
            Ok(None) => {}
            Ok(Some(what)) => wrong.push(format!("{name}\n    {what}")),
            Err(error) => refused.push(format!("{name}\n    {error}")),
        }
    }
    let count = golden.cases.len();
    assert!(wrong.is_empty(), "{} of {count} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(
        refused.len() * 20 <= count,
        "{} of {count} are refused:\n{}",
        refused.len(),
        refused.join("\n")
    );
}
