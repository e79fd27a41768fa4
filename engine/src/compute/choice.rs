//! Which engine runs a device's programs: chosen by name, out of what this build has.

use galaxy_common::WeightFormat;
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

    /// The formats in which it holds the matrices that the model's files have in `stored`: for budgets.
    pub fn holds(self, stored: &Formats) -> Formats {
        match self {
            Self::Cpu => stored.clone(),
            // burn multiplies tensors of one type only.
            Self::Burn(_) => stored.map(|_| WeightFormat::F32),
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
