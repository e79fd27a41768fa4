//! The collectives of a ring, and the names of their transfers.

use crate::program::Block;

/// The collectives of a block: a layer has four, in this order; the head's follows the last layer's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Collective {
    Gather,
    Scatter,
}

/// Names the transfer of a tile so that both ends of every link agree.
pub(crate) fn transfer(
    layer: u32,
    block: Block,
    collective: Collective,
    ring: usize,
    owner: usize,
    tiles: u16,
    tile: usize,
) -> u32 {
    let of_layer = match (block, collective) {
        (Block::Mlp, Collective::Gather) => 2,
        (Block::Mlp, Collective::Scatter) => 3,
        (_, Collective::Gather) => 0,
        (_, Collective::Scatter) => 1,
    };
    let collective = layer * 4 + of_layer;
    (collective * ring as u32 + owner as u32) * u32::from(tiles) + tile as u32
}
