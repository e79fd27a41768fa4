//! Which engine runs a device's programs: chosen by name, out of what this build has.

use super::{
    Engine,
    cpu::{self, CpuEngine},
};
use crate::weights::Shard;
use galaxy_common::{Cache, WeightFormat};
use galaxy_graph::operators::{Operator, OperatorGraph};
use galaxy_model::Formats;
use std::{fmt, str::FromStr};

/// An engine by its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EngineChoice {
    /// `cpu`: our own kernels.
    #[default]
    Cpu,
    /// `burn-...`: burn, on one of its devices.
    Burn(BurnDevice),
}

/// The device that burn computes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BurnDevice {
    /// `burn-flex`: the processor.
    Flex,
    /// `burn-wgpu`: the adapter that wgpu prefers; `burn-wgpu:N`: discrete GPU N.
    Wgpu(Option<u16>),
    /// `burn-cuda`: CUDA device 0; `burn-cuda:N`: device N.
    Cuda(u16),
}

/// Why an engine cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The name is not that of an engine.
    #[error(
        "{name:?} is not an engine: known are cpu, burn-flex, burn-wgpu[:N] and burn-cuda[:N], where N counts GPUs from 0"
    )]
    Unknown {
        /// The name that was given.
        name: String,
    },
    /// The engine was not compiled in.
    #[error("this build has no engine {engine}: build galaxy-worker with --features {feature}")]
    NotBuilt {
        /// The engine that was asked for.
        engine: EngineChoice,
        /// The cargo feature that compiles it in.
        feature: &'static str,
    },
    /// The engine cannot compute with weights from disk: it holds them in a form of its own.
    #[error(
        "engine {engine} cannot compute with weights from disk: give the device more memory or a smaller share, or start its worker with --engine cpu"
    )]
    Streams {
        /// The engine that was asked for.
        engine: EngineChoice,
    },
    /// The engine lacks an operator of the model.
    #[error(
        "engine {engine} has no {operator}, by which the model makes {makes:?} of layer {layer}: {}",
        match instead {
            Some(other) => format!("start the worker with --engine {other}"),
            None => "no engine of this build has it, so take another model".to_owned(),
        }
    )]
    Lacks {
        /// The engine that was asked for.
        engine: EngineChoice,
        /// The operator, with its attributes.
        operator: String,
        /// The name of the value that the operator computes.
        makes: &'static str,
        /// The layer of that value.
        layer: u32,
        /// An engine of this build that has all of the model's operators.
        instead: Option<EngineChoice>,
    },
    /// The device is missing, or does not work.
    #[error("engine {engine} has no device to compute on: {why}")]
    Device {
        /// The engine that was asked for.
        engine: EngineChoice,
        /// The reason, for people.
        why: String,
    },
}

impl EngineChoice {
    /// The same engine, if this build has it.
    pub fn built(self) -> Result<Self, EngineError> {
        let (feature, built) = match self {
            Self::Cpu => return Ok(self),
            Self::Burn(BurnDevice::Flex) => ("burn-flex", cfg!(feature = "burn-flex")),
            Self::Burn(BurnDevice::Wgpu(_)) => ("burn-wgpu", cfg!(feature = "burn-wgpu")),
            Self::Burn(BurnDevice::Cuda(_)) => ("burn-cuda", cfg!(feature = "burn-cuda")),
        };
        if built { Ok(self) } else { Err(EngineError::NotBuilt { engine: self, feature }) }
    }

    /// Whether it has an operator; an engine refuses to run one that it does not have.
    fn has(self, operator: &Operator) -> bool {
        match self {
            Self::Cpu => cpu::has(operator),
            #[cfg(feature = "burn")]
            Self::Burn(_) => super::burn::has(operator),
            #[cfg(not(feature = "burn"))]
            Self::Burn(_) => false,
        }
    }

    /// Checks that it has all operators of a model, before anything is loaded.
    ///
    /// # Errors
    /// The first operator that it does not have, and the engine that has all.
    pub fn check(self, graph: &OperatorGraph) -> Result<(), EngineError> {
        let lacks = |engine: Self| graph.operators.iter().find(move |of| !engine.has(of));
        let Some(operator) = lacks(self) else { return Ok(()) };
        let others = [Self::Cpu, Self::Burn(BurnDevice::Flex)].into_iter();
        let mut others = others.filter(|other| *other != self && other.built().is_ok());
        let operate = operator.operate();
        let made = graph.values.get(operate.makes().0 as usize);
        Err(EngineError::Lacks {
            engine: self,
            operator: operate.name(),
            makes: made.map_or("a value", |value| value.name),
            layer: made.map_or(0, |value| value.layer),
            instead: others.find(|other| lacks(*other).is_none()),
        })
    }

    /// The formats in which it holds the matrices that the model's files have in `stored`: for budgets.
    pub fn holds(self, stored: &Formats) -> Formats {
        match self {
            Self::Cpu => stored.clone(),
            // burn multiplies tensors of one type only.
            Self::Burn(_) => stored.map(|_| WeightFormat::F32),
        }
    }

    /// Starts the engine with `shard`, a KV cache of this size and type, and `threads` kernel threads where
    /// it computes on the processor.
    ///
    /// # Errors
    /// When this build does not have it, it lacks an operator of the model, or its device cannot be used.
    pub fn start(
        self,
        shard: Shard,
        threads: u16,
        cache: Cache,
    ) -> Result<Box<dyn Engine>, EngineError> {
        if self != Self::Cpu && shard.streams().is_some() {
            return Err(EngineError::Streams { engine: self });
        }
        self.built()?.check(&shard.graph)?;
        match self {
            Self::Cpu => Ok(Box::new(CpuEngine::new(shard, threads).with_cache(cache))),
            #[cfg(feature = "burn")]
            Self::Burn(device) => {
                Ok(Box::new(super::burn::BurnEngine::new(shard, device, threads, cache)?))
            }
            #[cfg(not(feature = "burn"))]
            Self::Burn(_) => Err(EngineError::NotBuilt { engine: self, feature: "burn-flex" }),
        }
    }
}

impl FromStr for EngineChoice {
    type Err = EngineError;
    fn from_str(name: &str) -> Result<Self, EngineError> {
        let unknown = || EngineError::Unknown { name: name.to_owned() };
        let (engine, index) = match name.split_once(':') {
            Some((engine, index)) => (engine, Some(index.parse().map_err(|_| unknown())?)),
            None => (name, None),
        };
        let choice = match (engine, index) {
            ("cpu", None) => Self::Cpu,
            ("burn-flex", None) => Self::Burn(BurnDevice::Flex),
            ("burn-wgpu", index) => Self::Burn(BurnDevice::Wgpu(index)),
            ("burn-cuda", index) => Self::Burn(BurnDevice::Cuda(index.unwrap_or(0))),
            _ => return Err(unknown()),
        };
        choice.built()
    }
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Burn(BurnDevice::Flex) => f.write_str("burn-flex"),
            Self::Burn(BurnDevice::Wgpu(None)) => f.write_str("burn-wgpu"),
            Self::Burn(BurnDevice::Wgpu(Some(index))) => write!(f, "burn-wgpu:{index}"),
            Self::Burn(BurnDevice::Cuda(0)) => f.write_str("burn-cuda"),
            Self::Burn(BurnDevice::Cuda(index)) => write!(f, "burn-cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_graph::operators::{Axes, Input, Pool, Pooling, Value, ValueId, Window};

    /// A model of one operator.
    fn only(operator: Operator) -> OperatorGraph {
        let axes = Axes::Image { height: 4, width: 4, channels: 1 };
        let value = |name| Value { name, layer: 3, axes };
        let mut graph = OperatorGraph::default();
        graph.values.extend([value("pixels"), value("pooled pixels")]);
        graph.operators.push(operator);
        graph
    }

    #[test]
    fn an_operator_that_an_engine_does_not_have_is_refused_by_name() {
        let (input, output) = (ValueId(0), ValueId(1));
        let window = Window { kernel: 3, dilation: 1, stride: 2, before: 1, after: 1 };
        let pooling = Pooling::Max;
        let pool = Operator::Pool(Pool { input, output, pooling, rows: window, pixels: window });
        let axes = Axes::Image { height: 4, width: 4, channels: 1 };
        let image = Operator::Input(Input { output: input, axes });
        let mut engines = vec![EngineChoice::Cpu];
        if cfg!(feature = "burn") {
            engines.push(EngineChoice::Burn(BurnDevice::Flex));
        }
        for engine in engines {
            assert_eq!(engine.check(&OperatorGraph::default()), Ok(()));
            let error = engine.check(&only(pool.clone())).expect_err("no engine pools").to_string();
            let wanted = format!(
                "engine {engine} has no pooling (maximum of windows of 3 x 3), by which the model \
                 makes \"pooled pixels\" of layer 3: no engine of this build has it"
            );
            assert!(error.starts_with(&wanted), "{error}");
            assert!(engine.check(&only(image.clone())).is_err());
        }
        let instead = Some(EngineChoice::Cpu);
        let engine = EngineChoice::Burn(BurnDevice::Cuda(0));
        let operator = "attention".to_owned();
        let lacks = EngineError::Lacks { engine, operator, makes: "context", layer: 0, instead };
        assert!(lacks.to_string().ends_with("start the worker with --engine cpu"), "{lacks}");
    }

    #[test]
    fn names_are_read_and_what_is_not_built_names_its_feature() {
        assert_eq!("cpu".parse(), Ok(EngineChoice::Cpu));
        for name in ["", "gpu", "cpu:1", "burn", "burn-flex:0", "burn-cuda:", "burn-cuda:-1"] {
            let error = name.parse::<EngineChoice>().expect_err(name);
            assert_eq!(error, EngineError::Unknown { name: name.to_owned() });
            assert!(error.to_string().contains("known are cpu, burn-flex"), "{error}");
        }
        for (device, name, feature, built) in [
            (BurnDevice::Flex, "burn-flex", "burn-flex", cfg!(feature = "burn-flex")),
            (BurnDevice::Wgpu(Some(1)), "burn-wgpu:1", "burn-wgpu", cfg!(feature = "burn-wgpu")),
            (BurnDevice::Cuda(0), "burn-cuda", "burn-cuda", cfg!(feature = "burn-cuda")),
        ] {
            let engine = EngineChoice::Burn(device);
            assert_eq!(engine.to_string(), name);
            assert_eq!(engine.holds(&Formats::all(WeightFormat::F16)), Formats::default());
            match name.parse::<EngineChoice>() {
                Ok(read) => assert!(built && read == engine),
                Err(error) => {
                    assert_eq!(error, EngineError::NotBuilt { engine, feature });
                    assert!(!built && error.to_string().contains(feature), "{error}");
                }
            }
        }
    }
}
