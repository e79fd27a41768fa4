//! Compares the head that a config names with the tensors of the checkpoint: the head may be tied or not, missing, or
//! stored in the place of the embedding table.

use crate::{
    error::ModelError,
    family::{Family, full},
    spec::{HeadSpec, ModelSpec},
    store::Store,
};

/// What the tensors of a checkpoint say about its head.
pub(crate) struct Top {
    /// The name of the embedding table.
    pub(crate) token_embedding: &'static str,
    /// A contradiction between config and tensors, or a missing head, for the model's author.
    pub(crate) warning: Option<String>,
}

/// Changes the head of `spec` to fit the tensors: as `transformers` 5 decides where config and tensors contradict each
/// other, and no head where its tensors are missing.
pub(crate) fn match_head(
    store: &Store,
    family: &Family,
    prefix: &str,
    spec: &mut ModelSpec,
) -> Result<Top, ModelError> {
    let names = &family.names;
    let tensor = |pattern| full(prefix, pattern, 0, ".weight");
    let mut top = Top { token_embedding: names.word, warning: None };
    let missing = match &mut spec.head {
        HeadSpec::None => None,
        HeadSpec::Classes(head) => {
            let dense = head.dense.map(|_| names.class_dense);
            let all = dense.into_iter().chain([names.class_output]);
            all.map(tensor).find(|name| !store.has(name))
        }
        HeadSpec::Language { tied, .. } => {
            let (words, own) = (tensor(names.word), tensor(names.language_head));
            match (*tied, store.has(&own), store.has(&words)) {
                (true, true, true) => {
                    // A tied head that equals the table is right as a tensor of its own, too.
                    *tied = false;
                    let differ = !store.alike(&own, &words)?;
                    top.warning = differ.then(|| {
                        format!(
                            "tie_word_embeddings is true, and {own} differs from {words}: the head uses its \
                             own; set it to false, or remove {own}"
                        )
                    });
                    None
                }
                (true, true, false) => {
                    top.token_embedding = names.language_head;
                    None
                }
                (false, false, _) => Some(own),
                (true, false, _) | (false, true, _) => None,
            }
        }
    };
    if let Some(name) = missing {
        top.warning = Some(format!(
            "the head of this architecture is left out, because there is no tensor {name}: only hidden \
             states and vectors can be had"
        ));
        spec.head = HeadSpec::None;
        spec.headless = Some(format!("its files have no tensor {name}"));
    }
    Ok(top)
}

#[cfg(test)]
mod tests {
    use crate::{HeadSpec, Matrix, ModelDir, Table, testing::golden};
    use serde_json::{Value, json};
    use std::{fs, path::Path};

    /// A copy of a golden checkpoint in one file, with other fields in its config, and with the tensors that `change`
    /// returns for each name and its bytes.
    fn changed(
        name: &str,
        fields: Value,
        change: impl Fn(&str, &[u8]) -> Vec<(String, Vec<u8>)>,
    ) -> tempfile::TempDir {
        let copy = tempfile::tempdir().expect("a temporary directory");
        let config = fs::read(golden(name).join("config.json")).expect("a config");
        let mut config: Value = serde_json::from_slice(&config).expect("a config");
        for (field, value) in fields.as_object().expect("fields") {
            config[field] = value.clone();
        }
        fs::write(copy.path().join("config.json"), config.to_string()).expect("a config");
        let bytes = fs::read(golden(name).join("model.safetensors")).expect("one file");
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
        let (mut tensors, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, entry) in header.as_object().expect("tensors") {
            let Some(offsets) = entry["data_offsets"].as_array() else { continue };
            let at = |i: usize| 8 + length + offsets[i].as_u64().expect("a number") as usize;
            for (name, bytes) in change(name, &bytes[at(0)..at(1)]) {
                let mut entry = entry.clone();
                entry["data_offsets"] = json!([data.len(), data.len() + bytes.len()]);
                tensors.insert(name, entry);
                data.extend(bytes);
            }
        }
        let header = Value::Object(tensors).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.into_bytes());
        file.extend(data);
        fs::write(copy.path().join("model.safetensors"), file).expect("a file");
        copy
    }

    fn open(path: &Path) -> (ModelDir, Vec<String>) {
        let model = ModelDir::open(path).expect("a model");
        let warnings = model.warnings().iter().map(|w| w.text.clone()).collect();
        (model, warnings)
    }

    fn head(model: &ModelDir) -> Vec<f32> {
        let source = model.matrix(Matrix::LanguageHead).expect("a head");
        let (rows, columns) = (source.rows(), source.columns());
        let mut out = vec![0.0; (rows * columns) as usize];
        source
            .read_f32((0..rows, 0..columns), &mut out, columns as usize, 0, &mut Vec::new())
            .expect("values");
        out
    }

    #[test]
    fn a_separate_language_head_overrides_tie_word_embeddings() {
        let tied = json!({ "tie_word_embeddings": true });
        let keep = |name: &str, bytes: &[u8]| vec![(name.to_owned(), bytes.to_vec())];
        let copy = changed("llama", tied, keep);
        let (model, warnings) = open(copy.path());
        assert_eq!(model.matrix(Matrix::LanguageHead).expect("a head").name(), "lm_head.weight");
        assert!(
            warnings.iter().any(|text| text.contains("lm_head.weight differs")),
            "{warnings:?}"
        );
        let (original, _) = open(&golden("llama"));
        assert_eq!(head(&model), head(&original));
    }

    #[test]
    fn a_tied_head_stored_twice_gives_no_warning() {
        let twice = |name: &str, bytes: &[u8]| {
            let own = name.ends_with("embed_tokens.weight").then(|| "lm_head.weight".to_owned());
            own.into_iter().chain([name.to_owned()]).map(|name| (name, bytes.to_vec())).collect()
        };
        let copy = changed("qwen2", json!({}), twice);
        let (model, warnings) = open(copy.path());
        assert!(!warnings.iter().any(|text| text.contains("lm_head")), "{warnings:?}");
        assert_eq!(head(&model), head(&open(&golden("qwen2")).0));
    }

    #[test]
    fn a_tied_embedding_table_may_be_named_lm_head() {
        let rename = |name: &str, bytes: &[u8]| {
            let own = name.ends_with("embed_tokens.weight");
            let name = if own { "lm_head.weight" } else { name };
            vec![(name.to_owned(), bytes.to_vec())]
        };
        let copy = changed("qwen2", json!({}), rename);
        let ((model, _), (original, _)) = (open(copy.path()), open(&golden("qwen2")));
        assert_eq!(head(&model), head(&original));
        let row = |model: &ModelDir| {
            let mut row = vec![0.0; model.spec().hidden as usize];
            model.embedding_rows(Table::Word, &[7], &mut row).expect("a row");
            row
        };
        assert_eq!(row(&model), row(&original));
    }

    #[test]
    fn a_model_with_a_missing_head_loads_without_head() {
        for (name, lacks) in [
            ("llama", "lm_head.weight"),
            ("gpt2-classes", "score.weight"),
            ("bert", "classifier.weight"),
            ("distilbert", "pre_classifier.weight"),
        ] {
            let less = |name: &str, bytes: &[u8]| match name == lacks {
                true => vec![],
                false => vec![(name.to_owned(), bytes.to_vec())],
            };
            let copy = changed(name, json!({}), less);
            let (model, warnings) = open(copy.path());
            assert_eq!(model.spec().head, HeadSpec::None, "{name}");
            let why = model.spec().headless.as_deref().expect("a reason");
            assert!(why.contains(lacks), "{why}");
            assert!(warnings.iter().any(|text| text.contains(lacks)), "{warnings:?}");
        }
    }
}
