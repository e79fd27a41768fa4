//! The head that a `config.json` describes: a language head or a class head.

use crate::{
    config::{Fields, short},
    error::ModelError,
    spec::{ClassActivation, ClassHead, ClassRow, HeadSpec, Problem},
};

const MAX_LABELS: u32 = 1 << 16;

pub(super) fn language(
    config: &Fields<'_>,
    tied: bool,
    bias: bool,
) -> Result<HeadSpec, ModelError> {
    Ok(HeadSpec::Language { tied: config.flag("tie_word_embeddings", tied)?, bias })
}

/// The class head of an encoder: it reads the first row, and has a bias.
pub(super) fn first_row(
    config: &Fields<'_>,
    dense: Option<ClassActivation>,
) -> Result<HeadSpec, ModelError> {
    let (names, problem) = (names(config)?, problem(config)?);
    let labels = names.len() as u32;
    let row = ClassRow::First;
    Ok(HeadSpec::Classes(ClassHead {
        row,
        dense,
        dense_bias: true,
        norm: false,
        labels,
        bias: true,
        names,
        problem,
        padding: None,
    }))
}

/// ModernBERT's class head: it reads the first row, and has a dense layer and a norm before its output.
pub(super) fn dense_and_norm(config: &Fields<'_>) -> Result<HeadSpec, ModelError> {
    let unsupported = |field, value: &str, remedy| ModelError::Unsupported {
        path: config.path.to_owned(),
        field,
        value: value.to_owned(),
        remedy,
    };
    if let Some(other) = config.text(&["classifier_pooling"])?.filter(|name| *name != "cls") {
        let remedy = "only classes that are told by the first row are run";
        return Err(unsupported("classifier_pooling", other, remedy));
    }
    if let Some(other) = config.text(&["classifier_activation"])?.filter(|name| *name != "gelu") {
        let remedy = "only gelu is run behind the dense layer of this family's classes";
        return Err(unsupported("classifier_activation", other, remedy));
    }
    let dense_bias = config.flag("classifier_bias", false)?;
    Ok(match first_row(config, Some(ClassActivation::Gelu))? {
        HeadSpec::Classes(head) => HeadSpec::Classes(ClassHead { dense_bias, norm: true, ..head }),
        other => other,
    })
}

/// The class head of a decoder: it reads the last row that is not padding. `padding` is the token where the config has
/// no such field.
pub(super) fn last_row(config: &Fields<'_>, padding: Option<u32>) -> Result<HeadSpec, ModelError> {
    let (names, problem) = (names(config)?, problem(config)?);
    let labels = names.len() as u32;
    let padding = match config.number_or_none(&["pad_token_id"])? {
        // A number that is not a token id occurs in no text.
        Some(id) => (0.0..=f64::from(u32::MAX)).contains(&id).then_some(id as u32),
        None => padding.filter(|_| !config.names("pad_token_id")),
    };
    let row = ClassRow::Last;
    Ok(HeadSpec::Classes(ClassHead {
        row,
        dense: None,
        dense_bias: false,
        norm: false,
        labels,
        bias: false,
        names,
        problem,
        padding,
    }))
}

/// What the logits of a class head mean.
fn problem(config: &Fields<'_>) -> Result<Option<Problem>, ModelError> {
    match config.text(&["problem_type"])? {
        None => Ok(None),
        Some("regression") => Ok(Some(Problem::Regression)),
        Some("single_label_classification") => Ok(Some(Problem::SingleLabel)),
        Some("multi_label_classification") => Ok(Some(Problem::MultiLabel)),
        Some(other) => {
            let known = "regression, single_label_classification, multi_label_classification";
            Err(config.unknown("problem_type", other, known))
        }
    }
}

/// The names of the classes, in the order of their logits.
fn names(config: &Fields<'_>) -> Result<Vec<String>, ModelError> {
    Ok(match config.inner(&["id2label"])? {
        None => {
            // transformers leaves out the default, two labels.
            let labels = config.count_or_none(&["num_labels"], MAX_LABELS)?.unwrap_or(2);
            (0..labels).map(|i| format!("LABEL_{i}")).collect()
        }
        Some(labels) => {
            let mut names = std::collections::BTreeMap::new();
            for (id, name) in labels.entries() {
                let Ok(index) = id.parse::<u32>() else {
                    return Err(config.wrong("id2label", format!("has the key {id:?}")));
                };
                let name = match name.as_str() {
                    Some(text) => text.to_owned(),
                    None => short(name),
                };
                names.insert(index, name);
            }
            let last = names.last_key_value().map(|(&index, _)| u64::from(index) + 1);
            if last != Some(names.len() as u64) || names.len() > MAX_LABELS as usize {
                let problem = format!("must number its labels 0 to n-1, at most {MAX_LABELS}");
                return Err(config.wrong("id2label", problem));
            }
            names.into_values().collect::<Vec<_>>()
        }
    })
}
