//! The collectives of a ring, and the names of their transfers.

use crate::program::Block;

/// The collectives of a block: a layer has four, in this order; the head's follows the last layer's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Collective {
    Gather,
    Scatter,
}

/// The names of a ring's transfers, on which both ends of every link agree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfers {
    /// How many devices the ring has, each of which owns tiles.
    pub owners: usize,
    /// The most tiles that one of them owns.
    pub tiles: u16,
}

impl Transfers {
    /// The name of the transfer of one tile of an owner, in a collective of a block and layer.
    pub fn id(
        self,
        (block, layer): (Block, u32),
        collective: Collective,
        owner: usize,
        tile: usize,
    ) -> u32 {
        let of_layer = match (block, collective) {
            (Block::Mlp, Collective::Gather) => 2,
            (Block::Mlp, Collective::Scatter) => 3,
            (_, Collective::Gather) => 0,
            (_, Collective::Scatter) => 1,
        };
        let collective = layer * 4 + of_layer;
        (collective * self.owners as u32 + owner as u32) * u32::from(self.tiles) + tile as u32
    }
}
