//! `galaxy-testbed kernels`: kernels are measured against the bounds of a core, cut into parts and tiles, in
//! 16 bits, and on several threads; and against PyTorch, which `scripts/compare-kernels` brings.
//!
//! All that is compared is measured in turn, in the same rounds, so that what slows the machine for a while
//! slows both sides.

mod page;
mod quiet;
mod rounds;
mod serve;
mod versus;

pub use serve::{ServeOptions, serve};
pub use versus::{ShowOptions, show};

use crate::{models, record::Record};
use anyhow::{Context, Result, ensure};
use galaxy_common::{Bytes, WeightFormat};
use galaxy_engine::{
    compute::kernels::instructions::Instructions,
    measure::{self, Bench, ModelPart},
};
use galaxy_model::{ModelDir, shape::Shape};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The options of `galaxy-testbed kernels`.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The sections to measure [default: all].
    #[arg(value_enum)]
    sections: Vec<Section>,
    /// The number of rounds that count.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Small models and few rounds: every step of it, in seconds.
    #[arg(long)]
    smoke: bool,
    /// The directory of models.
    #[arg(long, default_value = models::CACHE)]
    cache: PathBuf,
    /// The directory of results.
    #[arg(long, default_value = "target/testbed-results")]
    output: PathBuf,
}

/// A part of the measurement.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Section {
    /// Products against the peak and the memory of a core, by each set of instructions.
    Bounds,
    /// The same work in column parts and in row tiles.
    Splits,
    /// Weights in 16 bits against 32.
    Formats,
    /// Two threads against one.
    Threads,
}

impl Section {
    const ALL: [Self; 4] = [Self::Bounds, Self::Splits, Self::Formats, Self::Threads];
}

/// A model whose layers are measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Known {
    /// A model in the shape of BERT-Large.
    Bert,
    /// BERT-Large with ReLU, which costs next to nothing: products alone.
    Relu,
    /// A model in the shape of Llama 3.2 1B.
    Llama,
    /// A small BERT, for smoke runs.
    Small,
}

impl Known {
    pub(crate) const ALL: [Self; 4] = [Self::Bert, Self::Relu, Self::Llama, Self::Small];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bert => "bert",
            Self::Relu => "relu",
            Self::Llama => "llama",
            Self::Small => "small",
        }
    }

    fn shape(self) -> Result<Shape> {
        Ok(match self {
            Self::Bert => Shape::bert(24, 1024, 16),
            Self::Relu => {
                Shape { config: r#"{ "hidden_act": "relu" }"#, ..Shape::bert(24, 1024, 16) }
            }
            // The embedding table is not measured.
            Self::Llama => Shape { vocabulary: 1000, ..models::find("llama-1b")?.shape },
            Self::Small => Shape::bert(2, 80, 5),
        })
    }
}

/// The layers of a model that are measured, their weight format, and the number of threads.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Wanted {
    pub(crate) known: Known,
    pub(crate) format: WeightFormat,
    pub(crate) threads: u16,
    /// The shares by which columns and heads are cut, one for each part.
    pub(crate) shares: Vec<f64>,
}

impl Wanted {
    pub(crate) fn whole(known: Known, format: WeightFormat, threads: u16) -> Self {
        Self { known, format, threads, shares: vec![1.0] }
    }

    /// Opens all parts, each in an engine of its own, with as many layers as do not fit the cache together.
    pub(crate) fn open(&self, cache: &Path) -> Result<Vec<Bench>> {
        let shape = Shape { format: self.format, ..self.known.shape()? };
        let height = |layers| Shape { layers, ..shape }.bytes().0;
        // The size of a layer in 32 bits, so that every format has as many layers.
        let (width, widest) = (self.format.bytes(1, 1), WeightFormat::F32.bytes(1, 1));
        let layer = (height(2) - height(1)) / width * widest;
        // The narrower the format, the less of the cache its layers fill.
        let wider = (widest / width) as u32;
        let layers = (measure::copies(Bytes(layer)) * wider).min(shape.layers);
        let name = format!("kernels-{}-{:?}", self.known.name(), self.format).to_lowercase();
        let path = models::make(cache, &name, &Shape { layers, ..shape })?;
        let dir = Arc::new(ModelDir::open(&path)?);
        (0..self.shares.len())
            .map(|part| {
                let (shares, threads) = (self.shares.clone(), self.threads);
                let cut = ModelPart { layers, shares, part, threads };
                Ok(Bench::open(dir.clone(), &cut)?)
            })
            .collect()
    }
}

/// The sets of vector instructions that this processor has.
pub(crate) fn sets() -> impl Iterator<Item = Instructions> {
    [Instructions::Avx512, Instructions::Avx2, Instructions::Neon]
        .into_iter()
        .filter(|set| set.available())
}

/// Measures the wanted sections, and shows their results.
///
/// # Errors
/// When there is no room for the models, or the results cannot be written.
pub fn run(options: &Options) -> Result<()> {
    ensure!(options.rounds > 0, "--rounds 0 measures nothing: give at least 1");
    let sections = match options.sections.as_slice() {
        [] => Section::ALL.to_vec(),
        some => some.to_vec(),
    };
    let settings = serde_json::json!({
        "rounds": options.rounds,
        "smoke": options.smoke,
        "sections": sections.iter().map(|s| format!("{s:?}").to_lowercase()).collect::<Vec<_>>(),
        "instructions": Instructions::current().to_string(),
    });
    let mut record = Record::new("kernels", false, settings)?;
    let folder = options.output.join("kernels");
    let path = folder.join("kernels.json");
    for section in sections {
        eprintln!("measuring {section:?}, {} rounds", options.rounds);
        rounds::measure(section, options, &mut record)
            .with_context(|| format!("measuring {section:?}"))?;
        record.save(&path)?;
    }
    page::show(&record, &folder)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_section_is_measured_and_shown() {
        let place = tempfile::tempdir().unwrap();
        let options = Options {
            sections: Vec::new(),
            rounds: 2,
            smoke: true,
            cache: place.path().join("cache"),
            output: place.path().to_owned(),
        };
        run(&options).unwrap();
        let page = std::fs::read_to_string(place.path().join("kernels/kernels.md")).unwrap();
        for part in ["Against the core", "Cut into parts", "In 16 bits", "On two threads"] {
            assert!(page.contains(part), "{part}\n{page}");
        }
        for cut in ["whole", "2 parts", "3 parts", "5 parts", "4 tiles"] {
            assert!(page.contains(cut), "{cut}\n{page}");
        }
        let record = Record::read(&place.path().join("kernels/kernels.json")).unwrap();
        assert!(record.cells.iter().all(|cell| cell.valid().count() == 2));
    }
}
