//! Models with random weights in the shapes of well-known ones, for measuring.
//!
//! `galaxy_model::shape` and `galaxy_model::networks` define what is in them; here they are kept.

mod kept;
mod networks;

use anyhow::{Context, Result};
use galaxy_common::Bytes;
use galaxy_model::shape::{Model, SHARD_BYTES, Shape, catalogue};
use kept::Recipe;
use std::path::{Path, PathBuf};

pub use networks::{NetworkRecipe, names as network_names, network};

/// The options of `galaxy-testbed models`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The names of the models to write; all of them where none is named.
    pub names: Vec<String>,
    /// The directory in which they are kept.
    #[arg(long, default_value = CACHE)]
    pub cache: PathBuf,
    /// Only lists the models that there are.
    #[arg(long)]
    pub list: bool,
}

/// The directory of models by default.
pub const CACHE: &str = "target/testbed-models";

/// The model of this name.
///
/// # Errors
/// When there is none; the error names all that there are.
pub fn find(name: &str) -> Result<&'static Model> {
    catalogue().iter().find(|model| model.name == name).with_context(|| {
        let names = catalogue().iter().map(|model| model.name);
        let names: Vec<&str> = names.chain(networks::names()).collect();
        format!("no model is named {name:?}; there are {}", names.join(", "))
    })
}

/// The directory of a model of the catalogue, written to `cache` first where it is not there yet.
///
/// # Errors
/// When there is no such model, or the disk refuses or is too full.
pub fn ensure(cache: &Path, name: &str) -> Result<PathBuf> {
    make(cache, name, &find(name)?.shape)
}

/// The directory of a BERT of this shape with a small vocabulary, written to `cache` first where
/// it is not there yet.
///
/// # Errors
/// When the disk refuses or is too full.
pub fn bert(cache: &Path, name: &str, layers: u32, hidden: u32, heads: u32) -> Result<PathBuf> {
    make(cache, &format!("{name}-1000-words"), &Shape::bert(layers, hidden, heads))
}

/// The directory of a GPT-2 of this shape, with room for long texts, written to `cache` first where it is not
/// there yet.
///
/// # Errors
/// As [`bert`].
pub fn gpt2(cache: &Path, name: &str, layers: u32, hidden: u32, heads: u32) -> Result<PathBuf> {
    let shape = Shape { family: "gpt2", positions: 2048, ..Shape::bert(layers, hidden, heads) };
    make(cache, &format!("{name}-1000-words"), &shape)
}

/// Writes a model of this shape to `cache/name`, unless it is there.
pub(crate) fn make(cache: &Path, name: &str, shape: &Shape) -> Result<PathBuf> {
    with_recipe(shape, |recipe| kept::ensure(cache, name, recipe))
}

/// Hands on how a model of this shape is written.
fn with_recipe<T>(shape: &Shape, then: impl FnOnce(&Recipe<'_>) -> T) -> T {
    let all = format!("{:?} {} {:?}", shape.format, shape.config(), shape.tensors());
    then(&Recipe::new(&all, shape.bytes(), &|dir, progress| {
        Ok(shape.write(dir, SHARD_BYTES, progress)?)
    }))
}

fn is_complete(dir: &Path, shape: &Shape) -> bool {
    with_recipe(shape, |recipe| recipe.is_complete(dir))
}

/// Writes models and networks, or lists those that there are.
///
/// # Errors
/// When there is no such model, or the disk refuses or is too full.
pub fn run(options: &Options) -> Result<()> {
    let mut models: Vec<&Model> = Vec::new();
    let mut nets: Vec<NetworkRecipe> = Vec::new();
    for name in &options.names {
        match network(name) {
            Some(network) => nets.push(network),
            None => models.push(find(name)?),
        }
    }
    if options.names.is_empty() {
        models = catalogue().iter().collect();
        nets = networks::all().collect();
    }
    if options.list {
        if !models.is_empty() {
            list(&models, &options.cache);
        }
        if !nets.is_empty() {
            networks::list(&nets, &options.cache);
        }
        return Ok(());
    }
    let missing = models.iter().filter(|m| !is_complete(&options.cache.join(m.name), &m.shape));
    let missing: Bytes = missing.map(|m| m.shape.bytes()).sum();
    let lacking = nets.iter().filter(|net| !net.is_complete(&options.cache));
    let lacking: Bytes = lacking.map(NetworkRecipe::bytes).sum();
    kept::room(&options.cache, "these models", [missing, lacking].into_iter().sum())?;
    for model in models {
        let path = ensure(&options.cache, model.name)?;
        println!("{}: {}, {}", model.name, model.shape.bytes(), path.display());
    }
    for net in nets {
        let path = net.ensure(&options.cache)?;
        println!("{}: {}, {}", net.name(), net.bytes(), path.display());
    }
    Ok(())
}

fn list(models: &[&Model], cache: &Path) {
    println!(
        "| name | shape of | layers | hidden | heads | inner | vocabulary | millions of parameters \
         | type | size | the engine runs it | in {} |",
        cache.display()
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- | --- |");
    let word = |yes| if yes { "yes" } else { "no" };
    for model in models {
        let Shape { layers, hidden, heads, intermediate, vocabulary, format, .. } = model.shape;
        println!(
            "| {} | {} | {layers} | {hidden} | {heads} | {intermediate} | {vocabulary} | {:.1} | {format:?} \
             | {} | {} | {} |",
            model.name,
            model.like,
            model.shape.parameters() as f64 * 1e-6,
            model.shape.bytes(),
            word(model.shape.spec().is_ok()),
            word(is_complete(&cache.join(model.name), &model.shape)),
        );
    }
}

#[cfg(test)]
mod tests;
