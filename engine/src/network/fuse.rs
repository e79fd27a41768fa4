//! Which nodes are computed together: what scales channels and the activation function behind a convolution, a
//! normalisation or a sum, and shuffles of channels.

use crate::compute::kernels::activation::ActivationFn;
use galaxy_model::onnx::{Binary, Network, NetworkNode, Operator, Unary, ValueId};

/// Which nodes read each value.
pub(super) struct Readers(Vec<Vec<usize>>);

/// What a node is computed with.
pub(super) struct Followers {
    /// The value that comes out in the end.
    pub(super) made: ValueId,
    /// What each channel is multiplied by and what is added to it, one after another.
    pub(super) scales: Vec<Scale>,
    /// The activation function behind that.
    pub(super) activation: Option<ActivationFn>,
    /// The nodes that are computed so.
    pub(super) nodes: Vec<usize>,
}

/// An operator that does the same to all values of a channel, by stored numbers.
pub(super) enum Scale {
    /// A normalisation: scale, shift, mean, variance, and what is added to that.
    Norm([ValueId; 4], f32),
    /// What each channel is multiplied by.
    Times(ValueId),
    /// What is added to each channel.
    Plus(ValueId),
}

impl Scale {
    /// What a node does to the channels of this value, if it is nothing else.
    pub(super) fn of(network: &Network, node: &NetworkNode, read: ValueId) -> Option<Self> {
        let is_stored = |id: &ValueId| network.value(*id).is_constant();
        match (&node.operator, node.reads.as_slice()) {
            (Operator::BatchNorm { epsilon }, &[input, a, b, c, d])
                if input == read && [a, b, c, d].iter().all(is_stored) =>
            {
                Some(Self::Norm([a, b, c, d], *epsilon))
            }
            (Operator::Binary(function), &[a, b]) => {
                let other = if a == read { b } else { a };
                let (dims, own) = (&network.value(read).dims, &network.value(other).dims);
                // The axis of channels is the second from the front, and axes are counted from behind.
                let channel = own.len().checked_sub(dims.len().checked_sub(1)?);
                let is_one = |(axis, side): (usize, &u64)| {
                    *side == 1 || channel == Some(axis) && Some(side) == dims.get(1)
                };
                let fits = is_stored(&other)
                    && network.value(node.makes[0]).dims == *dims
                    && own.iter().enumerate().all(is_one);
                match function {
                    _ if !fits => None,
                    Binary::Mul => Some(Self::Times(other)),
                    Binary::Add => Some(Self::Plus(other)),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}

/// Groups of channels that change places with what is in them.
pub(super) struct Shuffle {
    /// The groups, and how many channels each has.
    pub(super) groups: (usize, usize),
    /// The nodes behind the first.
    pub(super) nodes: [usize; 2],
    pub(super) made: ValueId,
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

    /// What a node that computes `made` is computed with. `scales`: whether its channels can be scaled.
    pub(super) fn followers(&self, network: &Network, made: ValueId, scales: bool) -> Followers {
        let mut all = Followers { made, scales: Vec::new(), activation: None, nodes: Vec::new() };
        while let (true, &[at]) = (scales, self.of(all.made))
            && let Some(node) = network.nodes.get(at)
            && let Some(scale) = Scale::of(network, node, all.made)
        {
            all.scales.push(scale);
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

    /// Whether a view of images is the first of a shuffle of their channels: they are divided into groups, which change
    /// places with what is in them, and put together again. Gives the groups, what is in each, the two nodes that
    /// follow, and the result.
    pub(super) fn shuffle(&self, network: &Network, view: &NetworkNode) -> Option<Shuffle> {
        let dims = |id: ValueId| network.value(id).dims.as_slice();
        let only = |id: ValueId| match self.of(id) {
            &[at] => network.nodes.get(at).map(|node| (at, node)),
            _ => None,
        };
        let (whole, divided) = (dims(view.reads[0]), dims(view.makes[0]));
        let (&[n, _, ref pixels @ ..], &[m, groups, each, ref same @ ..]) = (whole, divided) else {
            return None;
        };
        let (first, turned) = only(view.makes[0])?;
        let Operator::Transpose { order } = &turned.operator else { return None };
        let swapped = order.iter().copied().eq([0, 2, 1].into_iter().chain(3..divided.len()));
        let (second, joined) = only(turned.makes[0])?;
        let is_view = matches!(joined.operator, Operator::View) && dims(joined.makes[0]) == whole;
        if n != m || pixels.is_empty() || pixels != same || !swapped || !is_view {
            return None;
        }
        let made = joined.makes[0];
        Some(Shuffle { groups: (groups as usize, each as usize), nodes: [first, second], made })
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
