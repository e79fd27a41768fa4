//! The widths at which matrices are measured, and how many of them a device has room for. Pure.

use galaxy_common::{BlockAssignment, Bytes, Column, Head, Span, Token, WeightFormat};
use galaxy_graph::{budget, holdings::READ_BUFFERS, lower::kv_span};
use galaxy_model::{HeadSpec, ModelSpec};

/// Parts of a layer whose matrices are measured; between them times are nearly linear.
const SHARES: [f64; 4] = [1.0, 0.5, 0.25, 0.125];
/// The most rows that are measured: beyond, times grow in proportion to the pairs of an axis.
pub(super) const MOST_ROWS: u32 = 512;
/// The most rows of the language head's grid: a sequence has one last row.
pub(super) const LANGUAGE_ROWS: u32 = 64;
/// The fewest rows that are measured, where memory is short.
const LEAST_ROWS: u32 = 64;
/// The most bytes of the slice of a language head: more only takes longer to load.
const LANGUAGE: u64 = 48 << 20;

/// The weights that are held to be measured.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Sample {
    /// The layer of the model that each layer of the shard is of, and how much of it.
    pub(super) blocks: Vec<(u32, BlockAssignment)>,
    /// The number of neighbouring layers that have all widths once.
    pub(super) set: usize,
    /// The slice of the vocabulary.
    pub(super) vocabulary: Span<Token>,
    /// The most rows that are measured.
    pub(super) rows: u32,
}

/// The room that the device has which measures.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasuringDevice {
    /// Bytes that may be taken besides what the process holds already.
    pub(super) memory: Bytes,
    /// The largest cache of the processor.
    pub(super) cache: Bytes,
    /// The bytes of weights that there is time to load.
    pub(super) load: Bytes,
    /// The format in which its weights take most of the engine's memory.
    pub(super) format: WeightFormat,
    /// The number of kernel threads.
    pub(super) threads: u16,
}

impl Sample {
    /// Chooses what of a model is measured on a device with so much room, for programs of at most
    /// `max_rows` rows.
    ///
    /// # Errors
    /// The bytes that the least of it takes, if that is more than there is.
    pub(super) fn choose(
        spec: &ModelSpec,
        max_rows: u32,
        room: MeasuringDevice,
    ) -> Result<Self, Bytes> {
        let mut rows = max_rows.min(spec.position_limit()).clamp(1, MOST_ROWS);
        let fixed = fixed(room.threads);
        let needs = |rows: u32, set: &[BlockAssignment]| {
            fixed + activations(spec, rows) + weights(spec, room.format, set)
        };
        let sets = (0..SHARES.len()).map(|skip| set(spec, &SHARES[skip..]));
        let mut chosen = None;
        for set in sets {
            while needs(rows, &set) > room.memory.0 && rows > LEAST_ROWS {
                rows /= 2;
            }
            if needs(rows, &set) <= room.memory.0 {
                chosen = Some(set);
                break;
            }
        }
        let least = || Bytes(needs(rows, &set(spec, &SHARES[SHARES.len() - 1..])));
        let set = chosen.ok_or_else(least)?;
        let left = room.memory.0 - needs(rows, &set);
        // With its logits.
        let column = room.format.bytes(spec.hidden.into(), 1) + u64::from(LANGUAGE_ROWS * 4);
        let vocabulary = match spec.head {
            HeadSpec::Language { .. } => {
                let most = LANGUAGE.min(left / 2) / column;
                let columns = spec.vocabulary.min(u32::try_from(most).unwrap_or(u32::MAX));
                Span::first(if columns > 16 { columns / 16 * 16 } else { columns })
            }
            _ => Span::empty(),
        };
        // Several, so that each matrix comes from memory when its turn comes again, as in a model
        // that is larger than the cache. One that is not stays in the cache when it runs, too.
        let bytes = weights(spec, room.format, &set).max(1);
        let held = u64::from(vocabulary.len()) * column;
        let whole = weights(spec, room.format, &[block(spec, 1.0)]) * u64::from(spec.layers);
        let copies = [
            (3 * room.cache.0).div_ceil(bytes),
            whole.div_ceil(bytes),
            (room.load.0 / bytes).max(1),
            1 + (left - held.min(left)) / bytes,
        ];
        let copies = copies.into_iter().min().unwrap_or(1).max(1) as usize;
        // The first may lack a norm that the others have.
        let first = u32::from(!spec.first_norm && spec.layers > 1);
        let layers = (first..spec.layers.max(1)).cycle();
        let blocks = set.iter().copied().cycle().take(copies * set.len());
        let blocks = layers.zip(blocks).collect();
        Ok(Self { blocks, set: set.len(), vocabulary, rows })
    }

    /// The number of sets that are held.
    pub(super) fn copies(&self) -> usize {
        self.blocks.len() / self.set.max(1)
    }
}

/// The bytes that are taken whatever is measured.
fn fixed(threads: u16) -> u64 {
    let scratch = u64::from(threads) * budget::THREAD_SCRATCH + budget::SHARED_SCRATCH;
    scratch + READ_BUFFERS
}

/// The share of a layer: whole heads, and columns in groups that kernels multiply at a time.
fn block(spec: &ModelSpec, share: f64) -> BlockAssignment {
    let of = |count: u32| ((f64::from(count) * share).round() as u32).clamp(1, count);
    let columns = of(spec.intermediate.div_ceil(16)) * 16;
    BlockAssignment {
        layers: Span::empty(),
        heads: Span::<Head>::first(of(spec.heads)),
        columns: Span::<Column>::first(columns.min(spec.intermediate)),
    }
}

/// One block of each share; shares that give the same block are there once.
fn set(spec: &ModelSpec, shares: &[f64]) -> Vec<BlockAssignment> {
    let mut blocks: Vec<_> = shares.iter().map(|&share| block(spec, share)).collect();
    blocks.dedup();
    blocks
}

fn weights(spec: &ModelSpec, format: WeightFormat, set: &[BlockAssignment]) -> u64 {
    let of = |block: &BlockAssignment| {
        let queries = u64::from(block.heads.len() * spec.head_width);
        let keys = u64::from(kv_span(spec, block.heads).len() * spec.head_width);
        let inner = u64::from(block.columns.len()) * if spec.gated { 3 } else { 2 };
        format.bytes(spec.hidden.into(), 2 * queries + 2 * keys + inner + 64)
    };
    set.iter().map(of).sum()
}

/// The bytes of the slots of the program that measures, and of its tiles.
fn activations(spec: &ModelSpec, rows: u32) -> u64 {
    let (all, keys) = (spec.heads * spec.head_width, spec.kv_heads * spec.head_width);
    let widths = 7 * spec.hidden + 2 * all + 2 * keys + spec.intermediate;
    u64::from(rows) * u64::from(widths) * 4
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_model::{ModelDir, shape::Shape};

    fn spec(shape: Shape) -> ModelSpec {
        let dir = tempfile::tempdir().unwrap();
        shape.write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        ModelDir::open(dir.path()).unwrap().spec().clone()
    }

    const ROOM: MeasuringDevice = MeasuringDevice {
        memory: Bytes(u64::MAX >> 8),
        cache: Bytes(1 << 20),
        load: Bytes(1 << 30),
        format: WeightFormat::F32,
        threads: 1,
    };

    #[test]
    fn measured_widths_are_halved_and_copies_exceed_the_cache() {
        let spec = spec(Shape::bert(8, 128, 8));
        let sample = Sample::choose(&spec, 10_000, ROOM).unwrap();
        let heads: Vec<_> = sample.blocks[..sample.set].iter().map(|b| b.1.heads.len()).collect();
        let columns: Vec<_> =
            sample.blocks[..sample.set].iter().map(|b| b.1.columns.len()).collect();
        assert_eq!((heads, columns), (vec![8, 4, 2, 1], vec![512, 256, 128, 64]));
        assert_eq!(sample.rows, 512);
        // Whole, half, quarter and eighth of a layer of 768 KiB, more than twice the cache together.
        assert_eq!(sample.copies(), 2);
        assert!(sample.copies() * 786_432 * 15 / 8 > 2 << 20);
        assert!(sample.vocabulary.is_empty());
        let small = MeasuringDevice { cache: Bytes(1), ..ROOM };
        assert_eq!(Sample::choose(&spec, 70, small).unwrap().copies(), 1);
        assert_eq!(Sample::choose(&spec, 70, small).unwrap().rows, 70);
    }

    #[test]
    fn little_memory_shrinks_the_measurement_and_too_little_is_refused() {
        let spec = spec(Shape::bert(2, 128, 8));
        let with =
            |memory| Sample::choose(&spec, 512, MeasuringDevice { memory: Bytes(memory), ..ROOM });
        let fixed = fixed(1);
        let all = weights(&spec, WeightFormat::F32, &set(&spec, &SHARES));
        let tight = with(fixed + all + activations(&spec, 128)).unwrap();
        assert_eq!((tight.rows, tight.set, tight.copies()), (128, 4, 1));
        let half = weights(&spec, WeightFormat::F32, &set(&spec, &SHARES[1..]));
        let tighter = with(fixed + half + activations(&spec, 64)).unwrap();
        assert_eq!((tighter.rows, tighter.set), (64, 3));
        assert_eq!(tighter.blocks[0].1.heads.len(), 4, "the whole is not there");
        let needed = with(fixed).unwrap_err();
        assert!(with(needed.0).is_ok() && with(needed.0 - 1).is_err());
    }

    #[test]
    fn a_model_of_two_heads_and_few_columns_has_two_measured_widths() {
        let shape = Shape { intermediate: 24, ..Shape::bert(1, 32, 2) };
        let sample = Sample::choose(&spec(shape), 512, ROOM).unwrap();
        let widths = |b: &(u32, BlockAssignment)| (b.0, b.1.heads.len(), b.1.columns.len());
        let found: Vec<_> = sample.blocks[..sample.set].iter().map(widths).collect();
        assert_eq!(found, [(0, 2, 24), (0, 1, 16)]);
    }
}
