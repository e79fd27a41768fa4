//! Networks of convolutions with random weights, as ONNX files.

use super::kept::{self, Recipe};
use anyhow::Result;
use galaxy_common::Bytes;
use galaxy_model::networks::{Description, Entry, MODEL, catalogue};
use std::path::{Path, PathBuf};

/// A network of the catalogue with all that is written of it.
pub struct NetworkRecipe {
    entry: &'static Entry,
    description: Description,
}

/// The network of this name, if there is one.
pub fn network(name: &str) -> Option<NetworkRecipe> {
    catalogue().iter().find(|entry| entry.name == name).map(NetworkRecipe::of)
}

/// All networks of the catalogue.
pub(super) fn all() -> impl Iterator<Item = NetworkRecipe> {
    catalogue().iter().map(NetworkRecipe::of)
}

/// The names of all networks.
pub fn names() -> impl Iterator<Item = &'static str> {
    catalogue().iter().map(|entry| entry.name)
}

impl NetworkRecipe {
    fn of(entry: &'static Entry) -> Self {
        Self { entry, description: entry.describe() }
    }

    /// The name of the network.
    pub fn name(&self) -> &'static str {
        self.entry.name
    }

    /// The network with the shapes of all its tensors.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The bytes that its weights take.
    pub fn bytes(&self) -> Bytes {
        self.description.bytes()
    }

    fn with_recipe<T>(&self, then: impl FnOnce(&Recipe<'_>) -> T) -> T {
        then(&Recipe::new(&format!("{:?}", self.description), self.bytes(), &|dir, progress| {
            Ok(self.description.write(dir, progress)?)
        }))
    }

    /// Whether the cache has it.
    pub fn is_complete(&self, cache: &Path) -> bool {
        self.with_recipe(|recipe| recipe.is_complete(&cache.join(self.entry.name)))
    }

    /// Its ONNX file, written to `cache` first where it is not there yet.
    ///
    /// # Errors
    /// When the disk refuses or is too full.
    pub fn ensure(&self, cache: &Path) -> Result<PathBuf> {
        let dir = self.with_recipe(|recipe| kept::ensure(cache, self.entry.name, recipe))?;
        Ok(dir.join(MODEL))
    }
}

/// Prints a table of networks.
pub(super) fn list(networks: &[NetworkRecipe], cache: &Path) {
    println!(
        "| network | shape of | input | nodes | convolutions | results | millions of parameters | size | in {} |",
        cache.display()
    );
    println!("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |");
    for network in networks {
        let Description { model, .. } = &network.description;
        println!(
            "| {} | {} | 1x3x{side}x{side} | {} | {} | {} | {:.3} | {} | {} |",
            network.name(),
            network.entry.like,
            model.nodes.len(),
            network.description.count("Conv"),
            model.outputs.len(),
            network.description.parameters() as f64 * 1e-6,
            network.bytes(),
            if network.is_complete(cache) { "yes" } else { "no" },
            side = network.entry.side,
        );
    }
}
