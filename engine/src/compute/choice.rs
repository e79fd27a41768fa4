//! Which engine runs a device's programs: chosen by name, out of what this build has.

use super::{Engine, cpu::CpuEngine};
use crate::weights::Shard;
use galaxy_common::{Cache, WeightFormat};
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

/// What burn computes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BurnDevice {
    /// `burn-flex`: the processor.
    Flex,
    /// `burn-wgpu`: the adapter that wgpu prefers; `burn-wgpu:N`: discrete GPU N.
    Wgpu(Option<u16>),
    /// `burn-cuda`: CUDA device 0; `burn-cuda:N`: device N.
    Cuda(u16),
}

/// An engine that cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// A name that means none.
    #[error(
        "{name:?} is not an engine: known are cpu, burn-flex, burn-wgpu[:N] and burn-cuda[:N], where N counts GPUs from 0"
    )]
    Unknown {
        /// What was given.
        name: String,
    },
    /// An engine that was not compiled in.
    #[error("this build has no engine {engine}: build galaxy-worker with --features {feature}")]
    NotBuilt {
        /// Which.
        engine: EngineChoice,
        /// The cargo feature that brings it.
        feature: &'static str,
    },
    /// Weights from disk, which it holds in a form of its own.
    #[error(
        "engine {engine} cannot compute with weights from disk: give the device more memory or a smaller share, or start its worker with --engine cpu"
    )]
    Streams {
        /// Which.
        engine: EngineChoice,
    },
    /// A device that is not there or does not work.
    #[error("engine {engine} has no device to compute on: {why}")]
    Device {
        /// Which.
        engine: EngineChoice,
        /// What it says.
        why: String,
    },
}

impl EngineChoice {
    /// Itself, if this build has it.
    ///
    /// # Errors
    /// When it was not compiled in.
    pub fn built(self) -> Result<Self, EngineError> {
        let (feature, built) = match self {
            Self::Cpu => return Ok(self),
            Self::Burn(BurnDevice::Flex) => ("burn-flex", cfg!(feature = "burn-flex")),
            Self::Burn(BurnDevice::Wgpu(_)) => ("burn-wgpu", cfg!(feature = "burn-wgpu")),
            Self::Burn(BurnDevice::Cuda(_)) => ("burn-cuda", cfg!(feature = "burn-cuda")),
        };
        if built { Ok(self) } else { Err(EngineError::NotBuilt { engine: self, feature }) }
    }

    /// In which format it holds weights that the checkpoint stores in `stored`: for budgets.
    pub fn holds(self, stored: WeightFormat) -> WeightFormat {
        match self {
            Self::Cpu => stored,
            // burn multiplies tensors of one type only.
            Self::Burn(_) => WeightFormat::F32,
        }
    }

    /// The engine, holding `shard`, with `threads` kernel threads where it computes on the
    /// processor, and such a cache.
    ///
    /// # Errors
    /// When this build does not have it, or its device cannot be used.
    pub fn start(
        self,
        shard: Shard,
        threads: u16,
        cache: Cache,
    ) -> Result<Box<dyn Engine>, EngineError> {
        if self != Self::Cpu && shard.streams().is_some() {
            return Err(EngineError::Streams { engine: self });
        }
        match self.built()? {
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
            assert_eq!(engine.holds(WeightFormat::F16), WeightFormat::F32);
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
