//! Finds the tensors of a model that nothing here reads.

use crate::{
    ModelDir,
    error::ModelError,
    family, fields, gguf,
    tensor::{Matrix, Table, Vector},
    warning::Warning,
};
use std::collections::HashSet;

impl ModelDir {
    /// A warning that names the tensors that are neither read nor known to change nothing.
    pub(crate) fn unused(&self) -> Result<Option<Warning>, ModelError> {
        let tables = [Table::Word, Table::Position].map(|table| self.table(table));
        let mut used: HashSet<String> = tables.into_iter().flatten().map(|found| found.0).collect();
        for which in Matrix::all(self.spec()) {
            used.insert(self.matrix(which)?.name);
        }
        for which in Vector::all(self.spec()) {
            used.insert(self.vector_name(which)?);
        }
        let known = |name: &&str| {
            let read = gguf::is_of_positions(name) || gguf::is_dense(name);
            read || used.contains(*name) || family::fields::needless(name)
        };
        let unused = self.store().names().into_iter().filter(|name| !known(name));
        let unused: Vec<_> = unused.map(ToOwned::to_owned).collect();
        let (what, are) = match unused.len() {
            0 => return Ok(None),
            1 => ("tensor", "is"),
            _ => ("tensors", "are"),
        };
        let count = unused.len();
        let text = format!("{count} {what} {are} not used here: {}", fields::listed(&unused));
        Ok(Some(Warning { path: self.path().to_owned(), text }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{edit, golden, golden_copy};

    #[test]
    fn unread_fields_and_tensors_are_named_in_warnings() {
        for name in ["bert", "gpt2", "llama-tied-bf16", "vit"] {
            assert_eq!(ModelDir::open(&golden(name)).expect("a model").warnings(), []);
        }
        let copy = golden_copy("bert");
        edit(&copy, "config.json", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
        edit(
            &copy,
            "config.json",
            "{",
            "{ \"rope_theta\": 1, \"auto_map\": {}, \"is_decoder\": false,",
        );
        let model = ModelDir::open(copy.path()).expect("a model");
        let told: Vec<_> = model.warnings().iter().map(ToString::to_string).collect();
        let all = told.join("\n");
        for want in [
            "auto_map names code of the model's own",
            "\"rope_theta\" is not known",
            "\"is_decoder\" stand twice",
            "16 tensors are not used here: \"bert.encoder.layer.2.attention.output.LayerNorm.bias\"",
        ] {
            assert!(all.contains(want), "{all}\nlacks {want}");
        }
    }
}
