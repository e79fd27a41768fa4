//! What the operators of a network take of memory, in the order of its file and in others.

use super::{MemoryGraph, MemoryOperator};
use galaxy_model::onnx::{Network, NetworkNode, Operator, ValueId};

impl MemoryGraph {
    /// The values of a network as buffers: what does not change is none of them, and a view is the value that it
    /// shows. Functions of one value, and of two of the same shape, may overwrite what they read.
    pub fn of_network(network: &Network) -> Self {
        let mut buffers: Vec<Option<usize>> = vec![None; network.values.len()];
        let mut graph = Self::default();
        let add = |graph: &mut Self, id: ValueId| {
            graph.bytes.push(network.value(id).bytes());
            graph.bytes.len() - 1
        };
        for &id in &network.inputs {
            let buffer = add(&mut graph, id);
            graph.inputs.push(buffer);
            buffers[id.0 as usize] = Some(buffer);
        }
        for node in &network.nodes {
            let mut reads: Vec<usize> =
                node.reads.iter().filter_map(|id| buffers[id.0 as usize]).collect();
            let over = overwritten(network, node).and_then(|id| buffers[id.0 as usize]);
            // What is read twice is read while it would be overwritten.
            let over = over.filter(|at| reads.iter().filter(|read| *read == at).count() == 1);
            reads.sort_unstable();
            reads.dedup();
            if let (Operator::View, [read]) = (&node.operator, reads.as_slice()) {
                buffers[node.makes[0].0 as usize] = Some(*read);
                continue;
            }
            let mut makes = Vec::new();
            for &id in &node.makes {
                let buffer = add(&mut graph, id);
                buffers[id.0 as usize] = Some(buffer);
                makes.push(buffer);
            }
            let in_place = over.zip(makes.first().copied());
            graph.operators.push(MemoryOperator { reads, makes, workspace: 0, in_place });
        }
        graph.kept = network.outputs.iter().filter_map(|id| buffers[id.0 as usize]).collect();
        graph.kept.sort_unstable();
        graph.kept.dedup();
        graph
    }
}

/// The value that a node may overwrite with its result.
fn overwritten(network: &Network, node: &NetworkNode) -> Option<ValueId> {
    let made = &network.value(*node.makes.first()?).dims;
    let first = *node.reads.first()?;
    let is_alike = network.value(first).dims == *made;
    match node.operator {
        Operator::Unary(_) | Operator::BatchNorm { .. } => Some(first),
        Operator::Binary(_) => is_alike.then_some(first),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use galaxy_model::onnx::{Binary, ElementType, Source, Unary, Value};

    #[test]
    fn views_are_the_values_that_they_show_and_constants_are_no_buffers() {
        let value = |name: &str, count: u64, source: Source| Value {
            name: name.into(),
            dims: vec![count],
            element: ElementType::F32,
            source,
        };
        let node = |operator, reads: &[u32], makes: u32| NetworkNode {
            shown: String::new(),
            operator,
            reads: reads.iter().map(|id| ValueId(*id)).collect(),
            makes: vec![ValueId(makes)],
        };
        let network = Network {
            values: vec![
                value("x", 4, Source::Input),
                value("w", 4, Source::Filled(1.0)),
                value("a", 4, Source::Node),
                value("view", 4, Source::Node),
                value("b", 4, Source::Node),
            ],
            nodes: vec![
                node(Operator::Binary(Binary::Add), &[0, 1], 2),
                node(Operator::View, &[2], 3),
                node(Operator::Unary(Unary::Relu), &[3], 4),
            ],
            inputs: vec![ValueId(0)],
            outputs: vec![ValueId(4)],
        };
        let graph = MemoryGraph::of_network(&network);
        assert_eq!(graph.bytes, [16, 16, 16]);
        assert_eq!(graph.operators[1].in_place, Some((1, 2)));
        // All in the place of the input.
        assert_eq!(graph.peak(&[0, 1]).unwrap(), 16);
    }
}
