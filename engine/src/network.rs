//! Runs networks of operators from ONNX files on one device.
//!
//! [`NetworkEngine::load`] reads the weights, packs them for the kernels, joins operators that kernels compute together
//! (a convolution with the normalisation, bias and activation function behind it), and chooses the order of operators
//! that needs the least memory ([`galaxy_graph::least_memory`]). All values that operators compute lie in one arena at
//! fixed places, so that a run allocates nothing large.
//!
//! Channels of images lie side by side while a network runs: the innermost axis is the channel.

mod compile;
mod fuse;
mod products;
mod single;
mod steps;
mod values;

use crate::compute::kernels::{dense, lines::Lines, network::Context, threads::Threads};
use compile::Compiler;
use galaxy_common::Bytes;
use galaxy_graph::{
    least_memory::{LeastMemory, MemoryError, MemoryGraph, MemoryOperator},
    offsets::{Arrangement, arrange},
};
use galaxy_model::{
    ModelError,
    onnx::{Network, OnnxFile, ValueId},
};
use std::{collections::HashSet, ops::Range};
use steps::{Operand, Step};

/// Why a network cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The model's file does not give what the network needs.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An operator cannot be computed.
    #[error("{node}: {why}")]
    Operator {
        /// The node and its operator in the file.
        node: String,
        /// A sentence about why not.
        why: String,
    },
    /// An input does not fit the network.
    #[error("input {name:?}: {why}")]
    Input {
        /// The name of the input.
        name: String,
        /// A sentence about what does not fit.
        why: String,
    },
    /// The operators have no order.
    #[error(transparent)]
    Order(#[from] MemoryError),
    /// The memory for values is not there.
    #[error("the device has no room for {wanted} of values")]
    Memory {
        /// The memory that was asked for.
        wanted: Bytes,
    },
}

/// A tensor that a network reads or computes: its values, row after row, the slowest axis first.
#[derive(Clone, PartialEq, Debug)]
pub struct NetworkTensor {
    /// The shape, the slowest axis first.
    pub dims: Vec<u64>,
    /// The values, row after row.
    pub values: Vec<f32>,
}

/// What a network takes of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NetworkMemory {
    /// Weights as held.
    pub weights: Bytes,
    /// The arena of all values that operators compute.
    pub arena: Bytes,
    /// The peak of the order of operators, which the arena is never below.
    pub peak: Bytes,
    /// The least peak of any order, as far as it is proved.
    pub bound: Bytes,
    /// The peak of the order of the file.
    pub file_order: Bytes,
}

/// An input or result of a network.
struct Port {
    name: String,
    dims: Vec<u64>,
    operand: Operand,
}

/// A network that is ready to run.
pub struct NetworkEngine {
    steps: Vec<Step>,
    constants: Vec<Vec<f32>>,
    /// The place of each buffer in the arena; none of one that no step is left for.
    places: Vec<Range<usize>>,
    arena: Lines<f32>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    context: Context,
    memory: NetworkMemory,
}

impl NetworkEngine {
    /// Loads a network of a file, for so many kernel threads.
    ///
    /// # Errors
    /// When weights cannot be read, an operator cannot be computed, or memory is not there.
    pub fn load(file: &OnnxFile, network: &Network, threads: u16) -> Result<Self, NetworkError> {
        let threads = Threads::new(threads);
        let context = Context { scratch: dense::Scratch::new(&threads), threads };
        let mut compiler = Compiler::new(file, network, &context);
        compiler.compile()?;
        let port = |compiler: &mut Compiler<'_>, id: ValueId| -> Result<Port, NetworkError> {
            let value = network.value(id);
            let operand = compiler.rows(id)?;
            Ok(Port { name: value.name.clone(), dims: value.dims.clone(), operand })
        };
        let inputs = network.inputs.iter().map(|id| port(&mut compiler, *id));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let outputs = network.outputs.iter().map(|id| port(&mut compiler, *id));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        let (steps, constants, buffers, packed) = compiler.finish();
        Self::place(steps, constants, &buffers, packed, (inputs, outputs), context)
    }

    /// Orders the steps, and gives each buffer its place.
    fn place(
        steps: Vec<Step>,
        mut constants: Vec<Vec<f32>>,
        buffers: &[usize],
        packed: u64,
        (inputs, outputs): (Vec<Port>, Vec<Port>),
        context: Context,
    ) -> Result<Self, NetworkError> {
        let graph = memory_graph(&steps, buffers, (&inputs, &outputs));
        let Arrangement { least, file_order, offsets, size } = arrange(&graph)?;
        let LeastMemory { order, peak, bound, .. } = least;
        let place = |(offset, len): (&Option<u64>, &usize)| {
            offset.map_or(0..0, |offset| offset as usize / 4..offset as usize / 4 + len)
        };
        let places = offsets.iter().zip(buffers).map(place).collect();
        let mut ordered: Vec<Option<Step>> = steps.into_iter().map(Some).collect();
        let steps: Vec<Step> = order.iter().filter_map(|at| ordered[*at].take()).collect();
        let arena = Lines::zeroed(size as usize / 4)
            .map_err(|_| NetworkError::Memory { wanted: Bytes(size) })?;
        // What was packed, or worked out further, is not read again.
        let ports = inputs.iter().chain(&outputs).map(|port| &port.operand);
        let read: HashSet<&Operand> =
            steps.iter().flat_map(|step| &step.reads).chain(ports).collect();
        for (at, values) in constants.iter_mut().enumerate() {
            if !read.contains(&Operand::Constant(at)) {
                *values = Vec::new();
            }
        }
        let weights = packed + constants.iter().map(|values| 4 * values.len() as u64).sum::<u64>();
        let memory = NetworkMemory {
            weights: Bytes(weights),
            arena: Bytes(size),
            peak: Bytes(peak),
            bound: Bytes(bound),
            file_order: Bytes(file_order),
        };
        Ok(Self { steps, constants, places, arena, inputs, outputs, context, memory })
    }

    /// What it takes of memory.
    pub fn memory(&self) -> NetworkMemory {
        self.memory
    }

    /// The names and shapes of its inputs, in the order in which [`Self::run`] takes them.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &[u64])> {
        self.inputs.iter().map(|port| (port.name.as_str(), port.dims.as_slice()))
    }

    /// The names and shapes of its results, in the order in which [`Self::run`] gives them.
    pub fn outputs(&self) -> impl Iterator<Item = (&str, &[u64])> {
        self.outputs.iter().map(|port| (port.name.as_str(), port.dims.as_slice()))
    }

    /// The nodes in the order in which they are computed. A convolution stands for what is computed with it.
    pub fn order(&self) -> impl Iterator<Item = &str> {
        self.steps.iter().map(|step| step.shown.as_str())
    }

    /// Computes the results of these inputs.
    ///
    /// # Errors
    /// When an input does not fit, or an operator cannot be computed with these values.
    pub fn run(&mut self, inputs: &[NetworkTensor]) -> Result<Vec<NetworkTensor>, NetworkError> {
        self.run_with(inputs, &mut || {})
    }

    /// [`Self::run`] with a listener that is told when each step of [`Self::order`] is over.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_with(
        &mut self,
        inputs: &[NetworkTensor],
        over: &mut dyn FnMut(),
    ) -> Result<Vec<NetworkTensor>, NetworkError> {
        self.put(inputs)?;
        for step in &self.steps {
            let arena = self.arena.values_mut();
            step.call(&self.context, arena, &self.places, &self.constants)?;
            over();
        }
        let result = |port: &Port| NetworkTensor {
            dims: port.dims.clone(),
            values: match port.operand {
                Operand::Constant(at) => self.constants[at].clone(),
                Operand::Buffer(at) => self.arena.values()[self.places[at].clone()].to_vec(),
            },
        };
        Ok(self.outputs.iter().map(result).collect())
    }

    /// Puts inputs where steps read them.
    fn put(&mut self, inputs: &[NetworkTensor]) -> Result<(), NetworkError> {
        if inputs.len() != self.inputs.len() {
            let names: Vec<&str> = self.inputs().map(|(name, _)| name).collect();
            let why = format!("{} are given, and the inputs are {names:?}", inputs.len());
            return Err(NetworkError::Input { name: String::new(), why });
        }
        for (port, tensor) in self.inputs.iter().zip(inputs) {
            let wrong = |why| NetworkError::Input { name: port.name.clone(), why };
            if tensor.dims != port.dims {
                return Err(wrong(format!(
                    "{:?} values are given, and {:?} are read",
                    tensor.dims, port.dims
                )));
            }
            let count = tensor.dims.iter().product::<u64>();
            if tensor.values.len() as u64 != count {
                return Err(wrong(format!(
                    "{} values are no {:?}",
                    tensor.values.len(),
                    tensor.dims
                )));
            }
            if let Operand::Buffer(at) = port.operand {
                self.arena.values_mut()[self.places[at].clone()].copy_from_slice(&tensor.values);
            }
        }
        Ok(())
    }
}

/// What steps take of memory.
fn memory_graph(
    steps: &[Step],
    buffers: &[usize],
    (inputs, outputs): (&[Port], &[Port]),
) -> MemoryGraph {
    let of = |operand: &Operand| match operand {
        Operand::Buffer(at) => Some(*at),
        Operand::Constant(_) => None,
    };
    let once = |mut all: Vec<usize>| {
        all.sort_unstable();
        all.dedup();
        all
    };
    let operator = |step: &Step| {
        let in_place = step.in_place.then(|| step.reads.first().and_then(of)).flatten();
        let others = step.reads.iter().skip(1).filter_map(of);
        // What is read twice cannot be overwritten while it is read.
        let once_read = in_place.filter(|at| !others.clone().any(|other| other == *at));
        MemoryOperator {
            reads: once(step.reads.iter().filter_map(of).collect()),
            makes: step.makes.clone(),
            workspace: 0,
            in_place: once_read.zip(step.makes.first().copied()),
        }
    };
    MemoryGraph {
        bytes: buffers.iter().map(|len| 4 * *len as u64).collect(),
        inputs: once(inputs.iter().filter_map(|port| of(&port.operand)).collect()),
        kept: once(outputs.iter().filter_map(|port| of(&port.operand)).collect()),
        operators: steps.iter().map(operator).collect(),
    }
}
