//! The sequences of an engine: what it keeps of them between programs, and how their next tokens are chosen.

use super::{cache::KvCache, call::Call, kernels::area::Area, op_error::OpError};
use crate::{
    compute::ComputeError,
    sampler::{self, Candidates, Sampler, Sequence},
    weights::Shard,
};
use galaxy_common::{Bytes, Cache, Segment};
use galaxy_graph::program::{Region, TOKEN_VALUES, candidates_bytes};
use std::{collections::BTreeMap, sync::Arc};

const NO_NUMBER: OpError = OpError::Why("no logit is a number: the model's weights are broken");
const NO_TILE: OpError = OpError::Why("the tile of candidates is not there");

/// The sequences of one device: their keys and values, and their samplers.
pub(crate) struct Sequences {
    pub(crate) cache: KvCache,
    samplers: BTreeMap<u32, Sampler>,
    /// The candidates for each choice of a batch; several choices may be of one sequence, whose tokens are
    /// drafted.
    gathered: Vec<Candidates>,
    /// The number of prompt tokens of each sequence, by its slot.
    prompt_tokens: BTreeMap<u32, u32>,
    /// The number of tokens of the vocabulary that the device has logits for.
    slice: u32,
}

/// The sequences of a device with this shard: none yet.
pub(crate) fn sequences(shard: &Shard, cache: Cache) -> Sequences {
    let graph = &shard.graph;
    let kv_heads = graph.attentions().map(|(_, of)| of.kv_heads(shard.heads(of)));
    let width = graph.heads().map_or(0, |heads| heads.width);
    Sequences::new(KvCache::new(cache, kv_heads, width), shard.vocabulary().len())
}

impl Sequences {
    fn new(cache: KvCache, slice: u32) -> Self {
        let (samplers, prompt_tokens) = (BTreeMap::new(), BTreeMap::new());
        Self { cache, samplers, gathered: Vec::new(), prompt_tokens, slice }
    }

    /// Takes room for a sequence in these blocks, in place of those that its slot had.
    pub(crate) fn begin(
        &mut self,
        text: &Sequence,
        blocks: &Arc<[u32]>,
    ) -> Result<(), ComputeError> {
        let slot = text.slot;
        self.cache.bind(slot, text.rows, blocks).map_err(|error| match error {
            OpError::Why(why) => ComputeError::Sequence { slot, why },
            _ => ComputeError::Sequence { slot, why: "it cannot be cached" },
        })?;
        self.samplers.insert(slot, Sampler::new(text, self.slice));
        self.prompt_tokens.insert(slot, text.prompt.try_into().unwrap_or(u32::MAX));
        Ok(())
    }

    /// Forgets a sequence, and gives its blocks back.
    pub(crate) fn end(&mut self, slot: u32) {
        self.cache.release(slot);
        self.samplers.remove(&slot);
        self.prompt_tokens.remove(&slot);
    }

    /// Forgets all sequences.
    pub(crate) fn clear(&mut self) {
        self.cache.clear();
        self.samplers.clear();
        self.prompt_tokens.clear();
    }

    /// Forgets the candidates of a run that ended before it chose.
    pub(crate) fn forget_candidates(&mut self) {
        self.gathered.iter_mut().for_each(Candidates::begin);
    }

    /// The number of prompt tokens of the sequence in a slot; 0 where there is none.
    pub(crate) fn prompt_tokens(&self, slot: u32) -> u32 {
        self.prompt_tokens.get(&slot).copied().unwrap_or(0)
    }

    pub(crate) fn held(&self) -> Bytes {
        self.cache.held()
    }

    /// Makes sure that the cached rows that a batch sees are there.
    pub(crate) fn has_context(&self, call: &Call<'_>, layer: u32) -> Result<(), OpError> {
        let mut segments =
            call.binding.shape.segments().iter().filter(|segment| segment.context_len > 0);
        segments.try_for_each(|s| self.cache.cached_rows(s.slot, layer, s.context_len).map(|_| ()))
    }

    /// Puts the rows that are to be cached behind those of their sequences. `keys` are the rows of
    /// `region`.
    pub(crate) fn append_kv(
        &mut self,
        call: &Call<'_>,
        layer: u32,
        region: &Region,
        keys: Area<'_>,
    ) -> Result<(), OpError> {
        for (rows, segment) in call.binding.shape.placed().filter(|(_, segment)| segment.cached) {
            let here = rows.intersect(region.rows);
            if here.is_empty() {
                continue;
            }
            let first = segment.context_len.saturating_add(here.start() - rows.start());
            let row = (here.start() - region.rows.start()) as usize;
            let some = keys.part(row, here.len() as usize, 0, keys.columns());
            self.cache.append(segment.slot, layer, first, some)?;
        }
        Ok(())
    }

    /// Writes the device's candidates for the next token of each choice of the batch. `logits` gives its row
    /// for each choice, of the tokens from `first` on.
    pub(crate) fn top_k<L: AsRef<[f32]>>(
        &mut self,
        call: &Call<'_>,
        first: u32,
        logits: impl Fn(usize) -> Result<L, OpError>,
        tile: Option<&mut [u8]>,
    ) -> Result<(), OpError> {
        let mut left = tile.ok_or(NO_TILE)?;
        let ends = call.binding.ending.is_asked();
        for (at, (_, segment, candidates)) in call.binding.shape.sampled().enumerate() {
            let logits = logits(at)?;
            let logits = logits.as_ref();
            let room = candidates_bytes(candidates.of(logits.len() as u32)) as usize;
            if left.len() < room {
                return Err(OpError::Why("the tile of candidates has too little room"));
            }
            let (sampler, position) = sampler_of(&mut self.samplers, segment)?;
            let mask = call.binding.mask(at);
            let used = sampler.top_k((logits, first), position, candidates, mask, left);
            if ends {
                sampler::end_burst(left);
            }
            left = &mut left[used..];
        }
        Ok(())
    }

    /// Adds the candidates of one device for all choices of the batch.
    pub(crate) fn gather(&mut self, call: &Call<'_>, tile: Option<&[u8]>) -> Result<(), OpError> {
        let mut left = tile.ok_or(NO_TILE)?;
        for (at, _) in call.binding.shape.sampled().enumerate() {
            if at == self.gathered.len() {
                self.gathered.push(Candidates::default());
            }
            let rest = self.gathered[at].gather(left);
            left = rest.ok_or(OpError::Why("a tile of candidates is none"))?;
        }
        Ok(())
    }

    /// Makes all choices of the batch, writes what is to be reported of each into `told`, one behind
    /// another, and forgets the candidates.
    pub(crate) fn sample(
        &mut self,
        call: &Call<'_>,
        told: Option<&mut [f32]>,
    ) -> Result<(), OpError> {
        let mut told = told.unwrap_or_default().chunks_exact_mut(TOKEN_VALUES as usize);
        let mut result = Ok(());
        for (at, (_, segment, _)) in call.binding.shape.sampled().enumerate() {
            let told = told.next().ok_or(OpError::Why("the result has no room"))?;
            let gathered = self.gathered.get_mut(at).ok_or(NO_TILE)?;
            let (sampler, position) = sampler_of(&mut self.samplers, segment)?;
            let masked = call.binding.mask(at).is_some();
            let chosen = match gathered.best() {
                Some(f32::NEG_INFINITY) if masked => Err(OpError::NoToken(segment.slot)),
                _ => sampler.sample(gathered, position, told).ok_or(NO_NUMBER).map(|_| ()),
            };
            gathered.begin();
            result = result.and(chosen);
        }
        result
    }
}

/// The sampler of a segment's sequence, and the position of its next token.
fn sampler_of<'c>(
    samplers: &'c mut BTreeMap<u32, Sampler>,
    segment: &Segment,
) -> Result<(&'c mut Sampler, u32), OpError> {
    let position = segment.context_len.saturating_add(segment.rows);
    let sampler = samplers.get_mut(&segment.slot);
    Ok((sampler.ok_or(OpError::Why("it has no sampler"))?, position))
}
