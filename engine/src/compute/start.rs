//! Starts the engine of a choice, and says which operators it has.

use super::{
    Engine,
    choice::{BurnDevice, EngineChoice, EngineError},
    cpu::{self, CpuEngine},
};
use crate::weights::Shard;
use galaxy_common::Cache;
use galaxy_graph::operators::{Operator, OperatorGraph};

impl EngineChoice {
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

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_common::WeightFormat;
    use galaxy_graph::operators::{Axes, Input, Pool, Pooling, Value, ValueId, Window};
    use galaxy_model::Formats;

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
    fn engine_names_are_parsed_and_missing_features_are_named() {
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
