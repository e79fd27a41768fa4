//! Golden outputs: every family, strategy and split against what `transformers` computed.
//!
//! Law 1: max|a-b| / max|b| <= 1e-4. The checkpoints are small, random, and of awkward shapes;
//! `scripts/golden.py` makes them.

use crate::pairwise::pairwise;
use anyhow::{Context, Result, bail, ensure};
use galaxy_common::{
    Assignment, BatchShape, BlockAssignment, Bytes, Cache, Column, DeviceName, DevicePlan,
    Exchange, Head, Layer, LinkType, Mode, Modes, Plan, Pooling, Segment, Span, Strategy, Wanted,
    WireType, apportion,
    plan::{Extent, Phase},
};
use galaxy_engine::{compute::Inputs, local::LocalCluster, merge::Merged};
use galaxy_graph::{lower, verify};
use galaxy_model::{HeadSpec, ModelDir};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The largest deviation that law 1 allows.
pub const TOLERANCE: f32 = 1e-4;

/// The split of work over devices: equal and uneven ones, and edge cases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// All devices have the same share.
    Equal,
    /// Each device has more than the one before, of heads, columns and rows by different factors.
    Uneven,
    /// The first device has one head and one column, the others the rest.
    OneHead,
    /// The last device has no rows.
    NoRows,
    /// The last device has nothing but a slice of the vocabulary.
    TableOnly,
    /// The last device has nothing but rows.
    RowsOnly,
    /// The first device has no MLP columns, the last no heads.
    HalfBlocks,
}

/// All splits of work.
pub const SPLITS: [Split; 7] = [
    Split::Equal,
    Split::Uneven,
    Split::OneHead,
    Split::NoRows,
    Split::TableOnly,
    Split::RowsOnly,
    Split::HalfBlocks,
];
/// The checkpoints, by their folders under `testdata/golden`.
pub const CHECKPOINTS: [&str; 29] = [
    "bert",
    "bert-f16",
    "distilbert",
    "gpt2",
    "gpt2-classes",
    "llama",
    "llama-tied-bf16",
    "roberta",
    "mpnet",
    "opt",
    "gptj",
    "qwen2",
    "qwen3",
    "mistral",
    "vit",
    "gpt2-scales",
    "llama-yarn",
    "mistral-longrope",
    "opt-post",
    "qwen2-both-ways",
    "mistral-window",
    "qwen2-window",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
    "gemma3-both-ways",
    "modernbert",
    "modernbert-biases",
];
/// The strategies; of `auto`, plans that mix modes.
pub const STRATEGIES: [Strategy; 6] = [
    Strategy::Local,
    Strategy::Megatron,
    Strategy::Galaxy,
    Strategy::Sequence,
    Strategy::Pipeline,
    Strategy::Auto,
];
/// The exchanges: the ways by which tiles travel.
pub const EXCHANGES: [Exchange; 2] = [Exchange::Ring, Exchange::Direct];
/// The modes of mixed plans: (attention, MLP) of a layer, and of the one after it.
pub const MIXES: [[(Mode, Mode); 2]; 3] = {
    use Mode::{Sequence, Tensor};
    [
        [(Tensor, Sequence), (Tensor, Sequence)],
        [(Sequence, Tensor), (Sequence, Tensor)],
        [(Sequence, Sequence), (Tensor, Tensor)],
    ]
};
/// The tile counts of the cases.
pub const TILES: [u16; 3] = [1, 2, 5];
/// The text lengths that have reference outputs, in tokens.
pub const LENGTHS: [u32; 5] = [1, 2, 7, 64, 129];

/// One combination to run: a checkpoint, and a cluster for it.
#[derive(Clone, Copy, Debug)]
pub struct GoldenCase {
    /// The folder of the checkpoint.
    pub checkpoint: &'static str,
    /// The strategy by which work is split.
    pub strategy: Strategy,
    /// The number of devices.
    pub devices: usize,
    /// The proportions of the split.
    pub split: Split,
    /// The number of tiles of a transfer.
    pub tiles: u16,
    /// Kernel threads of each device.
    pub threads: u16,
    /// The way by which tiles travel.
    pub exchange: Exchange,
    /// The modes of the layers, where the strategy mixes them.
    pub mix: [(Mode, Mode); 2],
}

/// The cases: pairwise combinations of all values, or the full matrix.
pub fn cases(full: bool) -> Vec<GoldenCase> {
    let case = |row: [usize; 8]| {
        let [c, s, d, p, t, threads, e, m] = row;
        GoldenCase {
            checkpoint: CHECKPOINTS[c],
            strategy: STRATEGIES[s],
            devices: if STRATEGIES[s] == Strategy::Local { 1 } else { d + 1 },
            split: SPLITS[p],
            tiles: TILES[t],
            threads: threads as u16 + 1,
            exchange: EXCHANGES[e],
            mix: MIXES[m],
        }
    };
    let sizes: [usize; 8] = [
        CHECKPOINTS.len(),
        STRATEGIES.len(),
        4,
        SPLITS.len(),
        TILES.len(),
        2,
        EXCHANGES.len(),
        MIXES.len(),
    ];
    if !full {
        return pairwise(&sizes).iter().map(|r| case(std::array::from_fn(|i| r[i]))).collect();
    }
    let mut all = Vec::new();
    for c in 0..CHECKPOINTS.len() {
        all.push(case([c, 0, 0, 0, 0, 0, 0, 0]));
        all.push(case([c, 0, 0, 0, 0, 1, 0, 0]));
        for s in 1..STRATEGIES.len() {
            for d in 0..4 {
                for p in 0..SPLITS.len() {
                    for t in 0..TILES.len() {
                        let (threads, e) = ((d + p + t) % 2, (d + p) % 2);
                        all.push(case([c, s, d, p, t, threads, e, (p + t) % MIXES.len()]));
                    }
                }
            }
        }
    }
    all
}

/// Relative weights of (heads, columns, rows, vocabulary) for each device of a split.
fn weights(split: Split, devices: usize) -> Vec<[u32; 4]> {
    let last = devices - 1;
    (0..devices)
        .map(|i| match split {
            _ if devices == 1 => [1; 4],
            Split::Equal => [1; 4],
            Split::Uneven => [2u32.pow(i as u32), 3u32.pow(i as u32), 1 + i as u32, 2],
            // One head of six and one column of many: weights that round to one.
            Split::OneHead if i == 0 => [1, 1, 1, 1],
            Split::OneHead => [40, 400, 2, 3],
            Split::NoRows if i == last => [1, 1, 0, 1],
            Split::TableOnly if i == last => [0, 0, 0, 1],
            Split::RowsOnly if i == last => [0, 0, 1, 0],
            Split::HalfBlocks if i == 0 => [1, 0, 1, 1],
            Split::HalfBlocks if i == last => [0, 1, 1, 1],
            _ => [1; 4],
        })
        .collect()
}

/// The modes of the blocks of one layer; the blocks of a parallel residual have the same.
fn modes(case: &GoldenCase, parallel: bool, layer: u32) -> Modes {
    let (attention, mut mlp) = match case.strategy {
        Strategy::Sequence => (Mode::Sequence, Mode::Sequence),
        Strategy::Auto => case.mix[layer as usize % 2],
        _ => (Mode::Tensor, Mode::Tensor),
    };
    if parallel {
        mlp = attention;
    }
    Modes { layers: Span::new(layer, layer + 1), attention, mlp }
}

/// The layers of each device of a pipeline, by the weights of heads.
fn stages(extent: Extent, weights: &[[u32; 4]]) -> Vec<Span<Layer>> {
    apportion(extent.layers, &weights.iter().map(|w| w[0]).collect::<Vec<_>>())
}

/// The assignments of device `i`. `part` is its share where a block is split by heads or columns.
fn blocks(
    case: &GoldenCase,
    parallel: bool,
    extent: Extent,
    weights: &[[u32; 4]],
    i: usize,
    part: (Span<Head>, Span<Column>),
) -> Vec<BlockAssignment> {
    let all = (Span::first(extent.heads), Span::first(extent.intermediate));
    if case.strategy == Strategy::Pipeline {
        let layers = stages(extent, weights)[i];
        let block = BlockAssignment { layers, heads: all.0, columns: all.1 };
        return (!layers.is_empty()).then_some(block).into_iter().collect();
    }
    let owns = weights[i][2] > 0;
    let block = |layer| {
        let Modes { layers, attention, mlp } = modes(case, parallel, layer);
        let heads = match attention {
            Mode::Tensor => part.0,
            Mode::Sequence if owns => all.0,
            Mode::Sequence => Span::empty(),
        };
        let columns = match mlp {
            Mode::Tensor => part.1,
            Mode::Sequence if owns => all.1,
            Mode::Sequence => Span::empty(),
        };
        BlockAssignment { layers, heads, columns }
    };
    (0..extent.layers).map(block).collect()
}

/// The plan of a case.
///
/// # Errors
/// When a device has no valid name (never).
pub fn plan(dir: &ModelDir, case: &GoldenCase, wire: WireType) -> Result<Plan> {
    let (weights, parallel) = (weights(case.split, case.devices), dir.spec().parallel);
    let column = |k: usize| -> Vec<u32> { weights.iter().map(|w| w[k]).collect() };
    let extent = dir.spec().extent();
    let mut heads = apportion(extent.heads, &column(0));
    let mut columns = apportion(extent.intermediate, &column(1));
    if case.split == Split::OneHead && case.devices > 1 {
        let rest: Vec<u32> = vec![1; case.devices - 1];
        let shift = |spans: Vec<(u32, u32)>| spans.into_iter().map(|(a, b)| (a + 1, b + 1));
        let cut = |total: u32| -> Vec<(u32, u32)> {
            apportion::<galaxy_common::Head>(total - 1, &rest)
                .iter()
                .map(|s| (s.start(), s.end()))
                .collect()
        };
        heads = std::iter::once((0, 1))
            .chain(shift(cut(extent.heads)))
            .map(|(a, b)| Span::new(a, b))
            .collect();
        columns = std::iter::once((0, 1))
            .chain(shift(cut(extent.intermediate)))
            .map(|(a, b)| Span::new(a, b))
            .collect();
    }
    let vocabulary = apportion(extent.vocabulary, &column(3));
    let row_weights = match case.strategy {
        Strategy::Pipeline => {
            let last = stages(extent, &weights).iter().rposition(|layers| !layers.is_empty());
            (0..case.devices).map(|i| u32::from(Some(i) == last)).collect()
        }
        _ => column(2),
    };
    let ring = (0..case.devices)
        .map(|i| {
            let part = Assignment {
                blocks: blocks(case, parallel, extent, &weights, i, (heads[i], columns[i])),
                row_weight: row_weights[i],
                vocabulary: vocabulary[i],
            };
            Ok(DevicePlan {
                name: DeviceName::new(format!("d{i}"))?,
                budget: Bytes(1 << 40),
                threads: case.threads,
                prefill: part.clone(),
                decode: part,
                streaming: None,
            })
        })
        .collect::<Result<_>>()?;
    Ok(Plan {
        model: dir.name().to_owned(),
        fingerprint: dir.fingerprint().to_owned(),
        strategy: case.strategy,
        layout: case.strategy.layout(),
        modes: (0..extent.layers).map(|layer| modes(case, parallel, layer)).collect(),
        exchange: case.exchange,
        link: LinkType::Tls,
        wire,
        activations: galaxy_common::Activations::default(),
        tiles: case.tiles,
        max_rows: LENGTHS.iter().sum(),
        cache: Cache::NONE,
        ring,
    })
}

/// The reference tensors of a checkpoint, by name: floats, and token ids.
pub struct Expected(HashMap<String, Vec<f32>>, HashMap<String, Vec<u32>>);

impl Expected {
    /// Reads the checkpoint's `expected.safetensors`.
    ///
    /// # Errors
    /// When it is not there or not as `scripts/golden.py` writes it.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("expected.safetensors");
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let file = safetensors::SafeTensors::deserialize(&bytes)?;
        let (mut floats, mut ids) = (HashMap::new(), HashMap::new());
        for (name, view) in file.tensors() {
            let words = view.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
            if name.starts_with("ids.") {
                ids.insert(name, words.map(u32::from_le_bytes).collect());
            } else {
                floats.insert(name, words.map(f32::from_le_bytes).collect());
            }
        }
        Ok(Self(floats, ids))
    }
    /// The token ids of a text of this length.
    ///
    /// # Errors
    /// When there is no text of this length.
    pub fn ids(&self, length: u32) -> Result<&[u32]> {
        Ok(self.1.get(&format!("ids.{length}")).context("no ids of this length")?)
    }
    /// The image that the reference values are of.
    ///
    /// # Errors
    /// When the checkpoint has no image.
    pub fn pixels(&self) -> Result<&[f32]> {
        Ok(self.0.get("pixels").context("no pixels")?)
    }
    /// The reference values of a text of this length; `what` is `hidden` or `logits`.
    ///
    /// # Errors
    /// When there are no such values.
    pub fn values(&self, what: &str, length: u32) -> Result<&[f32]> {
        Ok(self
            .0
            .get(&format!("{what}.{length}"))
            .with_context(|| format!("no {what}.{length}"))?)
    }
}

/// The deviation by law 1: max|a-b| / max|b|, of what was computed and what was wanted.
///
/// # Errors
/// When lengths differ or something is not finite.
pub fn deviation(got: &[f32], want: &[f32]) -> Result<f32> {
    ensure!(got.len() == want.len(), "{} values for {}", got.len(), want.len());
    ensure!(got.iter().all(|v| v.is_finite()), "a value is not finite");
    let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
    let apart = got.iter().zip(want).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    Ok(apart / largest.max(f32::MIN_POSITIVE))
}

/// The folder of the checkpoints.
pub fn checkpoints_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden")
}

/// Runs one case over all lengths and outputs; returns the largest deviation.
///
/// # Errors
/// When programs do not verify, a run fails, or a result is further off than `tolerance`.
pub fn run(case: &GoldenCase, wire: WireType, tolerance: f32) -> Result<f32> {
    run_over(case, wire, tolerance, |_| Ok(()))
}

/// Like [`run`], over links by which `connect` connects the devices.
///
/// # Errors
/// As [`run`], and when the devices cannot be connected.
pub fn run_over(
    case: &GoldenCase,
    wire: WireType,
    tolerance: f32,
    connect: impl FnOnce(&LocalCluster) -> Result<()>,
) -> Result<f32> {
    let path = checkpoints_dir().join(case.checkpoint);
    let dir = Arc::new(ModelDir::open(&path)?);
    let expected = Expected::read(&path)?;
    let plan = plan(&dir, case, wire)?;
    let cluster = LocalCluster::open(dir.clone(), plan.clone())?;
    connect(&cluster)?;
    let (language, classes) = match dir.spec().head {
        HeadSpec::Language { .. } => (true, false),
        HeadSpec::Classes(_) => (false, true),
        HeadSpec::None => (false, false),
    };
    let mut kinds =
        vec![Wanted::Hidden, Wanted::Pooled(Pooling::Mean), Wanted::Pooled(Pooling::Max)];
    kinds.extend([Wanted::Pooled(Pooling::Cls), Wanted::Pooled(Pooling::LastToken)]);
    if language {
        kinds.extend([Wanted::AllLogits, Wanted::LastLogits]);
    }
    if classes {
        kinds.push(Wanted::Classes);
    }
    // All images have one length.
    let image = dir.spec().patches.map(|patches| [patches.rows(); 3]);
    let lengths = image.as_ref().map_or(&LENGTHS[..], |image| &image[..]);
    // Each length alone with two outputs, then all lengths together with all outputs in turn.
    let mut batches: Vec<Vec<(u32, Wanted)>> = Vec::new();
    for (i, &length) in lengths.iter().enumerate() {
        batches.push(vec![(length, Wanted::Hidden)]);
        batches.push(vec![(length, kinds[kinds.len() - 1 - i % 2 * usize::from(language)])]);
    }
    batches.push(lengths.iter().enumerate().map(|(i, &l)| (l, kinds[i % kinds.len()])).collect());
    batches.push(
        lengths.iter().enumerate().map(|(i, &l)| (l, kinds[(i + 3) % kinds.len()])).collect(),
    );
    let mut worst = 0f32;
    for batch in batches {
        let segments = batch.iter().enumerate().map(|(slot, &(rows, wanted))| Segment {
            slot: slot as u32,
            context_len: 0,
            cached: false,
            rows,
            wanted,
        });
        let shape = BatchShape::new(segments.collect())?;
        let programs = lower(dir.spec(), dir.formats(), &plan, Phase::Prefill, &shape)?;
        verify(dir.spec(), dir.formats(), &plan, &shape, &programs)?;
        let inputs = match dir.spec().patches {
            Some(patches) => {
                let squares = patches.cut(expected.pixels()?);
                Inputs::Patches { first: 0, values: squares.repeat(batch.len()).into() }
            }
            None => {
                let ids = batch.iter().map(|&(length, _)| expected.ids(length));
                ids.collect::<Result<Vec<_>>>()?.concat().into()
            }
        };
        let merged = cluster.run(&shape, inputs)?;
        for (&(length, wanted), got) in batch.iter().zip(&merged) {
            let want = reference(
                &expected,
                dir.spec().hidden as usize,
                dir.spec().vocabulary as usize,
                length,
                wanted,
                got,
            )?;
            let off = deviation(got.values(), &want)?;
            if off > tolerance {
                bail!(
                    "{case:?}: {wanted:?} of {length} tokens is {off:e} off, above {tolerance:e}"
                );
            }
            worst = worst.max(off);
        }
    }
    Ok(worst)
}

fn reference(
    expected: &Expected,
    hidden: usize,
    vocabulary: usize,
    length: u32,
    wanted: Wanted,
    got: &Merged,
) -> Result<Vec<f32>> {
    let rows = || -> Result<_> { Ok(expected.values("hidden", length)?.chunks_exact(hidden)) };
    Ok(match wanted {
        Wanted::Hidden => expected.values("hidden", length)?.to_vec(),
        Wanted::Classes | Wanted::AllLogits => expected.values("logits", length)?.to_vec(),
        Wanted::Token(_) | Wanted::Nothing => bail!("no reference has tokens"),
        Wanted::LastLogits => {
            let all = expected.values("logits", length)?;
            all[all.len() - vocabulary..].to_vec()
        }
        Wanted::Pooled(pooling) => {
            ensure!(matches!(got, Merged::Vector(_)), "not a vector");
            let column = |k: usize| -> Result<Vec<f32>> { Ok(rows()?.map(|r| r[k]).collect()) };
            (0..hidden)
                .map(|k| {
                    let values = column(k)?;
                    let sum: f64 = values.iter().map(|&v| f64::from(v)).sum();
                    Ok(match pooling {
                        Pooling::Cls => values[0],
                        Pooling::LastToken => values[values.len() - 1],
                        Pooling::Max => values.iter().copied().fold(f32::MIN, f32::max),
                        Pooling::Mean => (sum / values.len() as f64) as f32,
                        Pooling::MeanSqrtLen => (sum / (values.len() as f64).sqrt()) as f32,
                    })
                })
                .collect::<Result<_>>()?
        }
    })
}
