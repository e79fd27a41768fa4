//! The architectures as which models are written, and what llama.cpp reads from files of each.

use super::unwritten;
use crate::{
    ModelDir,
    error::ModelError,
    small_file::{MAX_JSON_BYTES, read_bounded},
    spec::{HeadSpec, NormKind},
};
use serde_json::Value as Json;

/// The divisors of rotary frequencies that readers of an architecture apply.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Divisors {
    /// None at all.
    None,
    /// Those of short texts and those of long ones, without a field that says so.
    ShortAndLong,
    /// Either those, where a field says so, or the same ones for all texts.
    Any,
}

/// The layers that have a sliding window in files of an architecture.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// No layer has one.
    None,
    /// All layers have it, or none has.
    All,
    /// All but each `every`-th layer have one, where the file does not say it: of each group of so many, the last one
    /// has none, or the `first` one.
    Some { every: u32, first: bool },
}

/// What files of an architecture are like.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// The family, as checkpoints name it.
    family: &'static str,
    /// The name of the architecture.
    pub(super) name: &'static str,
    /// Whether rows see earlier rows only.
    causal: bool,
    /// Whether files store the rows of queries and keys in pairs.
    pub(super) in_pairs: bool,
    /// Whether queries, keys and values are one tensor, and gate and up another one.
    pub(super) fused: bool,
    /// Whether matrices and layer norms may have biases.
    biases: bool,
    /// Whether the language head may be another matrix than the token embedding table.
    untied: bool,
    pub(super) divisors: Divisors,
    pub(super) windows: Windows,
    /// The base of rotary frequencies where a config gives none.
    pub(super) theta: f64,
    /// The field of the base in layers with windows, in configs that give one base a field of its own.
    pub(super) local_theta: &'static str,
}

const LLAMA: Layout = Layout {
    family: "llama",
    name: "llama",
    causal: true,
    in_pairs: true,
    fused: false,
    biases: true,
    untied: true,
    divisors: Divisors::Any,
    windows: Windows::None,
    theta: 10_000.0,
    local_theta: "",
};
const QWEN2: Layout =
    Layout { family: "qwen2", name: "qwen2", in_pairs: false, divisors: Divisors::None, ..LLAMA };
const GEMMA3: Layout = Layout {
    family: "gemma3_text",
    name: "gemma3",
    biases: false,
    windows: Windows::Some { every: 6, first: false },
    theta: 1_000_000.0,
    local_theta: "rope_local_base_freq",
    ..QWEN2
};
const LAYOUTS: [Layout; 11] = [
    Layout { family: "bert", name: "bert", causal: false, ..QWEN2 },
    Layout {
        family: "gemma2",
        name: "gemma2",
        untied: false,
        windows: Windows::Some { every: 2, first: false },
        theta: 10_000.0,
        local_theta: "",
        ..GEMMA3
    },
    GEMMA3,
    Layout { name: "gemma-embedding", causal: false, ..GEMMA3 },
    LLAMA,
    Layout { family: "mistral", ..LLAMA },
    Layout {
        family: "modernbert",
        name: "modern-bert",
        causal: false,
        fused: true,
        windows: Windows::Some { every: 3, first: true },
        theta: 160_000.0,
        local_theta: "local_rope_theta",
        ..GEMMA3
    },
    Layout {
        family: "phi3",
        name: "phi3",
        fused: true,
        biases: false,
        divisors: Divisors::ShortAndLong,
        windows: Windows::All,
        ..QWEN2
    },
    QWEN2,
    Layout { family: "qwen3", name: "qwen3", ..QWEN2 },
    Layout {
        family: "smollm3",
        name: "smollm3",
        biases: false,
        divisors: Divisors::None,
        theta: 2_000_000.0,
        ..LLAMA
    },
];

/// The architecture as which a model is written.
pub(super) struct Architecture {
    pub(super) layout: Layout,
    /// The model's `config.json`.
    pub(super) config: Json,
}

impl Architecture {
    /// The architecture of a model.
    ///
    /// # Errors
    /// When the model's family cannot be written, or the model has something that llama.cpp does not read in it.
    pub(super) fn of(model: &ModelDir) -> Result<Self, ModelError> {
        let spec = model.spec();
        let layouts = || LAYOUTS.iter();
        let of_family = |layout: &&Layout| layout.family == spec.family;
        if !layouts().any(|layout| of_family(&layout)) {
            let mut known: Vec<_> = layouts().map(|layout| layout.family).collect();
            known.sort_unstable();
            known.dedup();
            let why = format!(
                "GGUF files are written of {}, and it is {:?}: set weights_format in the cluster file, or \
                 --weights-format, and it is rounded when it is placed",
                known.join(", "),
                spec.family
            );
            return Err(unwritten(model, why));
        }
        let found = layouts().filter(of_family).find(|layout| layout.causal == spec.causal);
        let sees = if spec.causal { "earlier rows only" } else { "the rows behind them, too" };
        let layout = found.ok_or_else(|| {
            unwritten(
                model,
                format!("its rows see {sees}, which files of {} do not say", spec.family),
            )
        })?;
        layout.fits(model)?;
        let path = model.path().join("config.json");
        let text = read_bounded(&path, MAX_JSON_BYTES)?;
        let config = serde_json::from_slice(&text)
            .map_err(|error| unwritten(model, format!("its config.json: {error}")))?;
        Ok(Self { layout: *layout, config })
    }
}

impl Layout {
    /// Checks that a model has no tensors that readers of this architecture do not know.
    fn fits(&self, model: &ModelDir) -> Result<(), ModelError> {
        let (spec, name) = (model.spec(), self.name);
        let refused = |what: &str| {
            let why = format!("it has {what}, which llama.cpp does not read in files of {name}");
            Err(unwritten(model, why))
        };
        let of_matrices = spec.qkv_bias || spec.attention_output_bias || spec.mlp_bias;
        if !self.biases && (of_matrices || spec.norm == NormKind::Layer && spec.norm_bias) {
            return refused("biases");
        }
        if !self.untied && matches!(spec.head, HeadSpec::Language { tied: false, .. }) {
            return refused("a language head of its own");
        }
        if self.fused && spec.heads * spec.head_width != spec.hidden {
            return refused("heads that are not as wide as its rows together");
        }
        Ok(())
    }
}
