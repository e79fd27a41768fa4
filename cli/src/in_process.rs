//! A model run by workers of this process, over in-memory links.

use super::{failure::Failure, tell};
use clap::Args;
use galaxy_client::{Input, Output, Tensor};
use galaxy_common::{
    Activations, BatchShape, Bytes, Cache, DeviceName, Strategy, Wanted, WireType,
};
use galaxy_engine::{compute::Inputs, local::LocalCluster, merge::Merged};
use galaxy_graph::share::{Member, PlanOptions, plan};
use galaxy_model::{
    HeadSpec, ModelDir, ModelError, Quantisation,
    image::ImageProcessor,
    sentence::{SentenceConfig, VectorForm},
};
use std::{path::Path, sync::Arc};

/// How the work is split over the devices of this process.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The strategy of the split.
    pub strategy: Strategy,
    /// The number of tiles of each device's rows.
    pub tiles: u16,
    /// The number type of activations on links.
    pub wire: WireType,
    /// The relative share of each device; as many as there are devices.
    pub shares: Vec<f64>,
    /// Kernel threads of each device.
    pub threads: u16,
}

impl Settings {
    /// One device that does everything with every core of this machine.
    pub fn single() -> Self {
        Self {
            strategy: Strategy::Local,
            tiles: 1,
            wire: WireType::F32,
            shares: vec![1.0],
            threads: cores(),
        }
    }
}

/// Cores that this process may use.
pub fn cores() -> u16 {
    std::thread::available_parallelism().map_or(1, |n| u16::try_from(n.get()).unwrap_or(u16::MAX))
}

/// Workers of this process, with their shards loaded.
pub struct InProcess {
    model: Arc<ModelDir>,
    sentence: Option<SentenceConfig>,
    cluster: LocalCluster,
}

/// How far weights and activations are rounded beyond what the files say.
#[derive(Args, Clone, Copy, PartialEq, Debug, Default)]
pub struct Rounding {
    /// Round the model's matrices to q8, q6 or q4 as they are read; lossy [default: as its files have them].
    #[arg(long = "weights-format", value_name = "BITS", requires = "model")]
    weights: Option<Quantisation>,
    /// Rounding of rows that are multiplied with quantised weights: a16, a8 or f32.
    ///
    /// a8 is faster and lossy. f32 rounds nothing, and holds such weights as f32.
    #[arg(long, value_name = "A", requires = "model", default_value_t)]
    activations: Activations,
}

impl Rounding {
    /// Rounding of weights alone.
    pub fn of_weights(weights: Option<Quantisation>) -> Self {
        Self { weights, ..Self::default() }
    }
}

/// Opens a model directory or a GGUF file with this rounding, and prints the warnings of the model.
pub fn open_model(path: &Path, rounding: Rounding) -> Result<Arc<ModelDir>, Failure> {
    let model = ModelDir::open(path).and_then(|model| model.quantised_to(rounding.weights));
    let model = model.and_then(|model| model.with_activations(rounding.activations));
    let model = model.map_err(model_failure)?;
    for warning in model.warnings() {
        tell(&format!("warning: {warning}"));
    }
    Ok(Arc::new(model))
}

/// A model's defect as a failure.
pub fn model_failure(error: ModelError) -> Failure {
    Failure::new(error.to_string())
}

impl InProcess {
    /// Loads `model` for programs of at most `max_rows` rows, and for sequences that are generated within `cache`.
    pub fn start(
        model: Arc<ModelDir>,
        settings: &Settings,
        max_rows: u32,
        cache: Cache,
    ) -> Result<Self, Failure> {
        let terms = PlanOptions {
            model: model.name(),
            fingerprint: model.fingerprint(),
            formats: model.formats(),
            strategy: settings.strategy,
            wire: settings.wire,
            tiles: settings.tiles,
            max_rows,
            cache,
        };
        let members = settings
            .shares
            .iter()
            .enumerate()
            .map(|(i, &share)| {
                Ok(Member {
                    name: DeviceName::new(format!("device-{i}"))
                        .map_err(|e| Failure::new(e.to_string()))?,
                    // This process lives within whatever this machine has.
                    budget: Bytes(1 << 50),
                    threads: settings.threads,
                    share,
                })
            })
            .collect::<Result<Vec<_>, Failure>>()?;
        let plan = plan(model.spec(), &terms, &members)
            .map_err(|e| Failure::usage(e.to_string()).at("--devices, --share, --tiles"))?;
        let cluster = LocalCluster::open(model.clone(), plan)
            .map_err(|e| Failure::new(e.to_string()).at(model.opened().display()))?;
        Ok(Self { model, sentence: None, cluster })
    }

    /// Computes the result of one sequence, which is number `index` of the request.
    pub fn run(&mut self, index: u32, input: &Input, output: Output) -> Result<Tensor, Failure> {
        let wanted = self.wanted(output)?;
        let here = |what: String| Failure::new(what).at(format_args!("sequence {index}"));
        let (rows, inputs) = match (rows(&self.model, index, input)?, input) {
            ((_, Inputs::Tokens(_)), Input::Ids(ids)) => {
                let count = self.model.spec().readable(ids, wanted).map_err(here)?;
                (count as u32, ids[..count].into())
            }
            (other, _) => other,
        };
        let shape = BatchShape::single(rows, wanted).map_err(|e| here(e.to_string()))?;
        let merged = self.cluster.run(&shape, inputs).map_err(|e| here(e.to_string()))?;
        let hidden = self.model.spec().hidden;
        let nothing = || here("no result came".to_owned());
        let mut result = merged.into_iter().next().ok_or_else(nothing)?;
        if let (Output::Pooled, Some(sentence)) = (output, &self.sentence) {
            let pooled = match result {
                Merged::Hidden(rows) => sentence.pool(&rows, hidden, 0).ok_or_else(nothing)?,
                Merged::Vector(values) => values,
                _ => return Err(nothing()),
            };
            result = Merged::Vector(sentence.finish(pooled, VectorForm::default()));
        }
        let (shape, values) = match result {
            Merged::Hidden(values) => (vec![rows, hidden], values),
            Merged::Vector(values) => (vec![values.len() as u32], values),
            Merged::Classes(values) => (vec![values.len() as u32], values),
            Merged::Token(_) | Merged::Nothing => return Err(here("no result came".to_owned())),
            Merged::Logits { rows: 1, values } if output == Output::Logits => {
                (vec![values.len() as u32], values)
            }
            Merged::Logits { rows, values } => {
                (vec![rows, values.len() as u32 / rows.max(1)], values)
            }
        };
        Ok(Tensor { sequence: index, shape, values })
    }

    /// The devices of this process.
    pub fn cluster(&self) -> &LocalCluster {
        &self.cluster
    }

    fn wanted(&mut self, output: Output) -> Result<Wanted, Failure> {
        let none = |what: &str| {
            let why = self.model.spec().headless.as_ref();
            let why = why.map(|why| format!(": {why}")).unwrap_or_default();
            Failure::new(format!("the model has no {what}{why}"))
                .at(self.model.path().display())
                .todo("ask for hidden or pooled")
        };
        Ok(match (output, &self.model.spec().head) {
            (Output::Hidden, _) => Wanted::Hidden,
            (Output::Logits, HeadSpec::Classes(_)) => Wanted::Classes,
            (Output::Logits, HeadSpec::Language { .. }) => Wanted::LastLogits,
            (Output::AllLogits, HeadSpec::Language { .. }) => Wanted::AllLogits,
            (Output::Logits, HeadSpec::None) => return Err(none("head that gives logits")),
            (Output::AllLogits, _) => return Err(none("head that gives logits of every row")),
            (Output::Pooled, _) => self.sentence()?.wanted(),
        })
    }

    fn sentence(&mut self) -> Result<&SentenceConfig, Failure> {
        if self.sentence.is_none() {
            self.sentence = Some(self.model.sentence().map_err(model_failure)?);
        }
        Ok(self.sentence.get_or_insert_default())
    }
}

/// The number of rows of a sequence, and their token ids or image patches.
pub fn rows(model: &ModelDir, index: u32, input: &Input) -> Result<(u32, Inputs), Failure> {
    let here = |what: String| Failure::new(what).at(format_args!("sequence {index}"));
    let text = || here("it is an image, and the model reads text".to_owned());
    let pixels = match (input, model.spec().patches) {
        (Input::Ids(ids), None) => {
            check(model, index, ids)?;
            // Bounded by the model's positions, which are counted in u32.
            return Ok((ids.len() as u32, ids.clone().into()));
        }
        (Input::Ids(_), Some(_)) => {
            return Err(here("it has token ids, and the model reads images".to_owned()));
        }
        (Input::Pixels(values), _) => values.clone(),
        (Input::Image(file), Some(patches)) => {
            let images = ImageProcessor::open(model.path(), patches).map_err(model_failure)?;
            images.pixels(file).map_err(|e| here(e.to_string()))?
        }
        (Input::Image(_), None) => return Err(text()),
    };
    let patches = model.spec().patches.ok_or_else(text)?;
    if pixels.len() != patches.pixels() {
        let shape = [patches.channels, patches.height, patches.width];
        return Err(here(format!("it has {} values, and the model reads {shape:?}", pixels.len())));
    }
    Ok((patches.rows(), Inputs::Patches { first: 0, values: patches.cut(&pixels).into() }))
}

/// Checks that the model can run these token ids.
pub fn check(model: &ModelDir, index: u32, ids: &[u32]) -> Result<(), Failure> {
    let spec = model.spec();
    let here = |what: String| Failure::new(what).at(format_args!("sequence {index}"));
    if ids.is_empty() {
        return Err(here("it has no token ids".to_owned()));
    }
    let limit = spec.position_limit();
    if ids.len() > limit as usize {
        let limited_by = spec.limited_by();
        let what = format!("{} token ids, and {limited_by} has {limit} rows", ids.len());
        return Err(here(what).todo("shorten it"));
    }
    match ids.iter().find(|&&id| id >= spec.vocabulary) {
        Some(id) => Err(here(format!(
            "token id {id} is unknown: the model's vocabulary has {} entries",
            spec.vocabulary
        ))),
        None => Ok(()),
    }
}
