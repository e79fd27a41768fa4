//! Texts that go on: what engines keep of them between programs, and how the next token comes about.

use super::{
    cache::KvCache,
    call::{Call, Misfit},
    kernels::area::Area,
};
use crate::{
    choose::{Chooser, Text},
    compute::ComputeError,
    weights::Shard,
};
use galaxy_common::{Bytes, Cache, Row, Segment, Span};
use galaxy_graph::program::Region;
use std::{collections::BTreeMap, sync::Arc};

/// The texts of one device.
pub(crate) struct Texts {
    pub(crate) cache: KvCache,
    choosers: BTreeMap<u32, Chooser>,
    /// How many rows each was asked with.
    asked: BTreeMap<u32, u32>,
    /// Tokens of the vocabulary that the device has logits for.
    slice: u32,
}

/// For a device with this shard.
pub(crate) fn texts(shard: &Shard, cache: Cache) -> Texts {
    let graph = &shard.graph;
    let kv_heads = graph.attentions().map(|(_, of)| of.kv_heads(shard.heads(of)));
    let width = graph.heads().map_or(0, |heads| heads.width);
    Texts::new(KvCache::new(cache, kv_heads, width), shard.vocabulary().len())
}

impl Texts {
    fn new(cache: KvCache, slice: u32) -> Self {
        Self { cache, choosers: BTreeMap::new(), asked: BTreeMap::new(), slice }
    }

    /// Takes room for a text, more or any, in these blocks.
    pub(crate) fn begin(&mut self, text: &Text, blocks: &Arc<[u32]>) -> Result<(), ComputeError> {
        let slot = text.slot;
        self.cache.bind(slot, text.rows, blocks).map_err(|misfit| match misfit {
            Misfit::Why(why) => ComputeError::Text { slot, why },
            _ => ComputeError::Text { slot, why: "it cannot be kept" },
        })?;
        self.choosers.insert(slot, Chooser::new(text, self.slice));
        self.asked.insert(slot, text.prompt.try_into().unwrap_or(u32::MAX));
        Ok(())
    }

    /// Forgets a text.
    pub(crate) fn end(&mut self, slot: u32) {
        self.cache.release(slot);
        self.choosers.remove(&slot);
        self.asked.remove(&slot);
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.cache.clear();
        self.choosers.clear();
        self.asked.clear();
    }

    /// How many rows the text of a slot was asked with.
    pub(crate) fn asked(&self, slot: u32) -> u32 {
        self.asked.get(&slot).copied().unwrap_or(0)
    }

    pub(crate) fn held(&self) -> Bytes {
        self.cache.held()
    }

    /// Makes sure that rows before those of a batch are there.
    pub(crate) fn has_past(&self, call: &Call<'_>, layer: u32) -> Result<(), Misfit> {
        let mut segments = call.binding.shape.segments().iter().filter(|segment| segment.past > 0);
        segments.try_for_each(|s| self.cache.past(s.slot, layer, s.past).map(|_| ()))
    }

    /// Puts those rows that are to be kept behind their past. `keys` are the rows of `region`.
    pub(crate) fn keep(
        &mut self,
        call: &Call<'_>,
        layer: u32,
        region: &Region,
        keys: Area<'_>,
    ) -> Result<(), Misfit> {
        for (rows, segment) in call.binding.shape.placed().filter(|(_, segment)| segment.kept) {
            let here = rows.intersect(region.rows);
            if here.is_empty() {
                continue;
            }
            let first = segment.past.saturating_add(here.start() - rows.start());
            let row = (here.start() - region.rows.start()) as usize;
            let some = keys.part(row, here.len() as usize, 0, keys.columns());
            self.cache.keep(segment.slot, layer, first, some)?;
        }
        Ok(())
    }

    /// The text of a segment, and the position of its next token.
    fn of(&mut self, call: &Call<'_>, segment: u32) -> Result<(&mut Chooser, u32), Misfit> {
        let found: Option<(Span<Row>, &Segment)> =
            call.binding.shape.placed().nth(segment as usize);
        let (_, segment) = found.ok_or(Misfit::Why("the batch has no such text"))?;
        let position = segment.past.saturating_add(segment.rows);
        let chooser = self.choosers.get_mut(&segment.slot);
        Ok((chooser.ok_or(Misfit::Why("nobody has said how its tokens are chosen"))?, position))
    }

    /// Writes the device's candidates for the next token of a segment.
    pub(crate) fn shortlist(
        &mut self,
        call: &Call<'_>,
        (segment, breadth): (u32, galaxy_common::Breadth),
        (logits, first): (&[f32], u32),
        tile: Option<&mut [u8]>,
    ) -> Result<(), Misfit> {
        let room =
            galaxy_graph::program::candidates_bytes(breadth.of(logits.len() as u32)) as usize;
        let tile = tile.and_then(|tile| tile.get_mut(..room));
        let tile = tile.ok_or(Misfit::Why("the tile of candidates has too little room"))?;
        let (chooser, position) = self.of(call, segment)?;
        chooser.shortlist(logits, first, position, breadth, tile);
        Ok(())
    }

    /// Adds a device's candidates.
    pub(crate) fn collect(
        &mut self,
        call: &Call<'_>,
        segment: u32,
        tile: Option<&[u8]>,
    ) -> Result<(), Misfit> {
        let tile = tile.ok_or(Misfit::Why("the tile of candidates is not there"))?;
        let (chooser, _) = self.of(call, segment)?;
        match chooser.collect(tile) {
            true => Ok(()),
            false => Err(Misfit::Why("a tile of candidates is none")),
        }
    }

    /// Chooses, and forgets the candidates.
    pub(crate) fn choose(
        &mut self,
        call: &Call<'_>,
        segment: u32,
        told: Option<&mut [f32]>,
    ) -> Result<(), Misfit> {
        let told = told.ok_or(Misfit::Why("the result has no room"))?;
        let (chooser, position) = self.of(call, segment)?;
        let chosen = chooser.choose(position, told);
        chooser.begin();
        match chosen {
            Some(_) => Ok(()),
            None => Err(Misfit::Why("no logit is a number: the model's weights are broken")),
        }
    }
}
