//! Texts that go on: what engines keep of them between programs, and how the next token comes about.

use super::{
    cache::KvCache,
    call::{Call, Misfit},
    kernels::area::Area,
};
use crate::{
    choose::{self, Chooser, Gathered, Text},
    compute::ComputeError,
    weights::Shard,
};
use galaxy_common::{Bytes, Cache, Segment};
use galaxy_graph::program::{Region, TOKEN_VALUES, candidates_bytes};
use std::{collections::BTreeMap, sync::Arc};

const NO_NUMBER: Misfit = Misfit::Why("no logit is a number: the model's weights are broken");
const NO_TILE: Misfit = Misfit::Why("the tile of candidates is not there");

/// The texts of one device.
pub(crate) struct Texts {
    pub(crate) cache: KvCache,
    choosers: BTreeMap<u32, Chooser>,
    /// Candidates for each choice of a batch: several may be of one sequence, whose tokens are drafted.
    gathered: Vec<Gathered>,
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
        let (choosers, asked) = (BTreeMap::new(), BTreeMap::new());
        Self { cache, choosers, gathered: Vec::new(), asked, slice }
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

    /// Forgets candidates of a run that ended before it chose.
    pub(crate) fn forget_candidates(&mut self) {
        self.gathered.iter_mut().for_each(Gathered::begin);
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

    /// Writes the device's candidates for the next token of each choice of the batch. `logits` gives its
    /// row of each, of the tokens from `first` on.
    pub(crate) fn shortlist<L: AsRef<[f32]>>(
        &mut self,
        call: &Call<'_>,
        first: u32,
        logits: impl Fn(usize) -> Result<L, Misfit>,
        tile: Option<&mut [u8]>,
    ) -> Result<(), Misfit> {
        let mut left = tile.ok_or(NO_TILE)?;
        let ends = call.binding.ending.is_asked();
        for (at, (_, segment, breadth)) in call.binding.shape.choices().enumerate() {
            let logits = logits(at)?;
            let logits = logits.as_ref();
            let room = candidates_bytes(breadth.of(logits.len() as u32)) as usize;
            if left.len() < room {
                return Err(Misfit::Why("the tile of candidates has too little room"));
            }
            let (chooser, position) = chooser_of(&mut self.choosers, segment)?;
            let mask = call.binding.mask(at);
            let used = chooser.shortlist((logits, first), position, breadth, mask, left);
            if ends {
                choose::end_burst(left);
            }
            left = &mut left[used..];
        }
        Ok(())
    }

    /// Adds a device's candidates.
    pub(crate) fn collect(&mut self, call: &Call<'_>, tile: Option<&[u8]>) -> Result<(), Misfit> {
        let mut left = tile.ok_or(NO_TILE)?;
        for (at, _) in call.binding.shape.choices().enumerate() {
            if at == self.gathered.len() {
                self.gathered.push(Gathered::default());
            }
            let rest = self.gathered[at].collect(left);
            left = rest.ok_or(Misfit::Why("a tile of candidates is none"))?;
        }
        Ok(())
    }

    /// Chooses for all, tells of each one behind another, and forgets the candidates.
    pub(crate) fn choose(
        &mut self,
        call: &Call<'_>,
        told: Option<&mut [f32]>,
    ) -> Result<(), Misfit> {
        let mut told = told.unwrap_or_default().chunks_exact_mut(TOKEN_VALUES as usize);
        let mut result = Ok(());
        for (at, (_, segment, _)) in call.binding.shape.choices().enumerate() {
            let told = told.next().ok_or(Misfit::Why("the result has no room"))?;
            let gathered = self.gathered.get_mut(at).ok_or(NO_TILE)?;
            let (chooser, position) = chooser_of(&mut self.choosers, segment)?;
            let masked = call.binding.mask(at).is_some();
            let chosen = match gathered.best() {
                Some(f32::NEG_INFINITY) if masked => Err(Misfit::NoToken(segment.slot)),
                _ => chooser.choose(gathered, position, told).ok_or(NO_NUMBER).map(|_| ()),
            };
            gathered.begin();
            result = result.and(chosen);
        }
        result
    }
}

/// What is known of the next token of a segment, and the position of that.
fn chooser_of<'c>(
    choosers: &'c mut BTreeMap<u32, Chooser>,
    segment: &Segment,
) -> Result<(&'c mut Chooser, u32), Misfit> {
    let position = segment.past.saturating_add(segment.rows);
    let chooser = choosers.get_mut(&segment.slot);
    Ok((chooser.ok_or(Misfit::Why("nobody has said how its tokens are chosen"))?, position))
}
