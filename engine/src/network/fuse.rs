//! Which nodes a convolution is computed with: a normalisation with stored statistics, and an activation function.

use crate::compute::kernels::activation::ActivationFn;
use galaxy_model::onnx::{Binary, Network, Operator, Unary, ValueId};

/// Which nodes read each value.
pub(super) struct Readers(Vec<Vec<usize>>);

/// What a node is computed with.
pub(super) struct Followers {
    /// The value that comes out in the end.
    pub(super) made: ValueId,
    /// The normalisation that follows at once: scale, shift, mean, variance, and what is added to that.
    pub(super) norm: Option<([ValueId; 4], f32)>,
    /// The activation function behind that.
    pub(super) activation: Option<ActivationFn>,
    /// The nodes that are computed so.
    pub(super) nodes: Vec<usize>,
}

impl Readers {
    pub(super) fn new(network: &Network) -> Self {
        let mut readers = vec![Vec::new(); network.values.len()];
        for (at, node) in network.nodes.iter().enumerate() {
            node.reads.iter().for_each(|id| readers[id.0 as usize].push(at));
        }
        // Who asks for the result is a reader, too, which no node is.
        network.outputs.iter().for_each(|id| readers[id.0 as usize].push(usize::MAX));
        Self(readers)
    }

    fn of(&self, id: ValueId) -> &[usize] {
        &self.0[id.0 as usize]
    }

    /// What a node that computes `made` is computed with. `norms`: whether a normalisation can be.
    pub(super) fn followers(&self, network: &Network, made: ValueId, norms: bool) -> Followers {
        let mut all = Followers { made, norm: None, activation: None, nodes: Vec::new() };
        if let (true, &[at]) = (norms, self.of(made))
            && let Some(node) = network.nodes.get(at)
            && let (Operator::BatchNorm { epsilon }, &[input, a, b, c, d]) =
                (&node.operator, node.reads.as_slice())
            && input == made
            && [a, b, c, d].iter().all(|id| network.value(*id).is_constant())
        {
            all.norm = Some(([a, b, c, d], *epsilon));
            all.made = node.makes[0];
            all.nodes.push(at);
        }
        if let Some((activation, nodes, made)) = self.activation(network, all.made) {
            all.activation = Some(activation);
            all.nodes.extend(nodes);
            all.made = made;
        }
        all
    }

    /// The activation function that a value goes through and that nothing else reads, the nodes that it is, and its
    /// result.
    fn activation(
        &self,
        network: &Network,
        of: ValueId,
    ) -> Option<(ActivationFn, Vec<usize>, ValueId)> {
        let unary = |at: usize| match network.nodes.get(at)?.operator {
            Operator::Unary(function) => Some(function),
            _ => None,
        };
        match *self.of(of) {
            [at] => {
                let activation = match unary(at)? {
                    Unary::Relu => ActivationFn::Relu,
                    Unary::Clip { least: 0.0, most: 6.0 } => ActivationFn::Relu6,
                    Unary::LeakyRelu { alpha: 0.01 } => ActivationFn::LeakyRelu,
                    Unary::HardSwish => ActivationFn::HardSwish,
                    Unary::Mish => ActivationFn::Mish,
                    Unary::Sigmoid => ActivationFn::Sigmoid,
                    Unary::Tanh => ActivationFn::Tanh,
                    _ => return None,
                };
                Some((activation, vec![at], network.nodes[at].makes[0]))
            }
            // x times a function of x.
            [a, b] => {
                let (first, times) = if unary(a).is_some() { (a, b) } else { (b, a) };
                let inside = network.nodes.get(first)?.makes[0];
                let (activation, nodes, gate) = match unary(first)? {
                    Unary::Sigmoid => (ActivationFn::Silu, vec![first], inside),
                    Unary::HardSigmoid { alpha, beta: 0.5 } if (alpha - 1.0 / 6.0).abs() < 1e-7 => {
                        (ActivationFn::HardSwish, vec![first], inside)
                    }
                    Unary::Softplus => {
                        let &[second] = self.of(inside) else { return None };
                        let Some(Unary::Tanh) = unary(second) else { return None };
                        (ActivationFn::Mish, vec![first, second], network.nodes[second].makes[0])
                    }
                    _ => return None,
                };
                let node = network.nodes.get(times)?;
                let is_product = node.operator == Operator::Binary(Binary::Mul)
                    && node.reads.len() == 2
                    && node.reads.contains(&of)
                    && node.reads.contains(&gate);
                if !is_product || self.of(gate) != [times] {
                    return None;
                }
                Some((activation, nodes.into_iter().chain([times]).collect(), node.makes[0]))
            }
            _ => None,
        }
    }
}
