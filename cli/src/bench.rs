//! `galaxy bench`: measures kernels, decoding, rounded weights, and coordinators under load.

mod decode;
mod network;
mod pairs;
mod quality;
mod serve;

use super::{
    Kernels,
    failure::Failure,
    in_process::{self, Rounding, open_model},
    json, print, progress,
    table::{row, table},
};
use clap::{Args, Subcommand, builder::PossibleValuesParser};
use galaxy_common::{Bytes, Kernel, Spread, WeightFormat};
use galaxy_engine::{
    compute::kernels::instructions::Instructions,
    measure::{self, Bench, ModelPart, OperationKind, Timed, Work},
};
use galaxy_model::{
    ModelDir, ModelSpec,
    shape::{self, SHARD_BYTES, Shape},
};
use serde::Serialize;
use std::{
    fmt::Write as _,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// The fewest runs of a layer that are timed.
const LEAST_RUNS: usize = 7;
/// The most runs of a layer that are timed.
const MOST_RUNS: usize = 200;
/// The time after which runs of a layer end, once there are `LEAST_RUNS` of them.
const PATIENCE: Duration = Duration::from_millis(600);
/// The most tokens of a made-up vocabulary: enough that its language head comes from memory, without a table of a
/// gigabyte.
const MOST_TOKENS: u32 = 32_768;

const MEANING: &str = "\
What the figures mean:

  peak      multiplications and additions in registers alone; nothing can be faster
  memory    reading a buffer far larger than the last-level cache; one row cannot be
            much faster than its weights are read
  ms        the median of several runs, and the lowest and the highest. Layers take
            turns, together larger than the last-level cache, so that weights come
            from memory, as they do when a model runs
  GFLOP/s   multiplications and additions of the operation's definition over its time
  GB/s      bytes of weights over its time
  bound ms  the operation at the peak, or its weights at the memory's rate, whichever
            takes longer; of a layer, the sum. Row operations have none
  of bound  how much of the bound was reached; one row may be a few percent above 100%,
            where its kernel reads faster than the loop that measures memory

Operations run as they do in a worker: bias, activation and gate are part of their
products, rotary positions of qkv. A language head runs on the last row alone.
Whatever else runs on this device shows as spread; let nothing else run.";

/// Arguments of `galaxy bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(flatten)]
    kernels: Kernels,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Time every operation of a layer, against what this device can do at most.
    #[command(after_long_help = MEANING)]
    Kernels(KernelsArgs),
    /// Time decoding on one device, against how fast it reads memory.
    #[command(after_long_help = decode::MEANING)]
    Decode(decode::DecodeArgs),
    /// Time a network of an ONNX file, and its operators.
    Network(network::NetworkArgs),
    /// Measure what a model loses when its matrices are rounded to few bits.
    #[command(after_long_help = quality::MEANING)]
    Quality(quality::QualityArgs),
    /// Measure a coordinator under many clients: tokens per second, and latency over load.
    #[command(after_long_help = serve::MEANING)]
    Serve(serve::ServeArgs),
    /// Compare two coordinators that answer the same prompts in turns.
    #[command(after_long_help = pairs::MEANING)]
    Pairs(pairs::PairsArgs),
}

/// Arguments of `galaxy bench kernels`.
#[derive(Args, Debug)]
struct KernelsArgs {
    /// Measure with the shapes and weights of this model: a directory or a GGUF file.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["shape", "format"])]
    model: Option<PathBuf>,
    /// Measure with made-up weights in a well-known shape, written to the directory of temporary files.
    #[arg(long, value_name = "NAME", default_value = "bert-large",
        value_parser = PossibleValuesParser::new(known()))]
    shape: String,
    /// Rows of each batch to measure, like 1,284.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,16,71,284,384",
        value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    rows: Vec<u32>,
    /// Kernel threads [default: the cores of this machine].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Format of made-up weights: f32, f16 or bf16 [default: that of the well-known model].
    #[arg(long, value_name = "FORMAT")]
    format: Option<WeightFormat>,
    #[command(flatten)]
    rounding: Rounding,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The names of the catalogue's models whose families are measured.
fn known() -> Vec<&'static str> {
    let runs = |family| ["bert", "distilbert", "gpt2", "llama"].contains(&family);
    shape::catalogue().iter().filter(|m| runs(m.shape.family)).map(|m| m.name).collect()
}

#[derive(Serialize)]
struct Findings {
    model: String,
    format: &'static str,
    layers: u32,
    weights: Bytes,
    cache: Bytes,
    instructions: String,
    threads: u16,
    /// Multiplications and additions in registers alone, in GFLOP/s.
    peak: Spread,
    /// Reading a buffer far larger than the last-level cache, in GB/s.
    stream: Spread,
    lines: Vec<OperationFigures>,
}

/// The figures of an operation, or of a whole layer, at one number of rows.
#[derive(Serialize)]
struct OperationFigures {
    rows: u32,
    operation: String,
    inputs: u32,
    outputs: u32,
    ms: Spread,
    /// Operations over the median time, in GFLOP/s; 0 where no operations are counted.
    gflops: f64,
    /// Bytes of weights over the median time, in GB/s; 0 without weights.
    gigabytes: f64,
    /// The least time by the device's peak and memory, in ms; none where no operations are counted.
    bound_ms: Option<f64>,
}

/// Runs `galaxy bench`.
pub async fn bench(args: BenchArgs) -> Result<(), Failure> {
    args.kernels.limit()?;
    let (now, work): (_, Box<dyn FnOnce() -> Result<String, Failure> + Send>) = match args.what {
        What::Kernels(args) => (
            "measuring kernels",
            Box::new(move || {
                let findings = kernels(&args)?;
                if args.json { json(&findings) } else { Ok(text(&findings)) }
            }),
        ),
        What::Decode(args) => (
            "generating tokens",
            Box::new(move || {
                let findings = decode::measured(&args)?;
                if args.json { json(&findings) } else { Ok(decode::text(&findings)) }
            }),
        ),
        What::Network(args) => (
            "timing the network",
            Box::new(move || {
                let findings = network::measured(&args)?;
                if args.json { json(&findings) } else { Ok(network::text(&findings)) }
            }),
        ),
        What::Quality(args) => (
            "comparing formats",
            Box::new(move || {
                let findings = quality::measured(&args)?;
                if args.json { json(&findings) } else { Ok(quality::text(&findings)) }
            }),
        ),
        What::Serve(args) => return serve::measure(&args).await,
        What::Pairs(args) => return pairs::measure(&args).await,
    };
    let said = progress::watch(now, tokio::task::spawn_blocking(work))
        .await
        .map_err(|e| Failure::new(format!("the measurement broke off: {e}")))??;
    print(&said)
}

fn kernels(args: &KernelsArgs) -> Result<Findings, Failure> {
    let threads = args.threads.unwrap_or(in_process::cores());
    // The made-up model stays until nothing reads it any more.
    let (dir, layers, _made) = match &args.model {
        Some(path) => {
            let dir = open_model(path, args.rounding)?;
            let layers = measure::copies(layer_bytes(dir.spec(), dir.formats().widest()));
            (dir, layers, None)
        }
        None => {
            let (dir, layers, made) = made_up(args)?;
            (dir, layers, Some(made))
        }
    };
    let model = args.model.as_ref().map_or(args.shape.as_str(), |_| dir.name()).to_owned();
    let place = dir.path().display().to_string();
    let failed = |e: measure::MeasureError| Failure::new(e.to_string()).at(&place);
    let mut bench = Bench::open(dir.clone(), &ModelPart::whole(layers, threads)).map_err(failed)?;
    let instructions = Instructions::current();
    let (peak, stream) =
        (measure::peak(instructions, threads), measure::stream(instructions, threads));
    let mut lines = Vec::new();
    for (at, &rows) in args.rows.iter().enumerate() {
        let with_head = at == 0;
        let runs = runs(&mut bench, rows, with_head).map_err(failed)?;
        lines.extend(runs.lines(rows, peak.median, stream.median));
    }
    Ok(Findings {
        model,
        format: dir.format().name(),
        layers: bench.layers(),
        weights: bench.weights(),
        cache: measure::last_level_cache(),
        instructions: instructions.to_string(),
        threads,
        peak,
        stream,
        lines,
    })
}

/// Writes a model of the shape that is asked for, with as many layers as it takes for weights to come from memory.
/// Returns it with the number of its layers, and its directory, which is removed on drop.
fn made_up(args: &KernelsArgs) -> Result<(Arc<ModelDir>, u32, tempfile::TempDir), Failure> {
    let model = shape::catalogue().iter().find(|model| model.name == args.shape);
    let model = model.ok_or_else(|| Failure::usage(format!("no shape {:?}", args.shape)))?;
    let format = match args.format {
        None => model.shape.format,
        Some(format) if format.block().is_none() => format,
        Some(_) => return Err(Failure::usage("made-up weights are f32, f16 or bf16")),
    };
    let vocabulary = model.shape.vocabulary.min(MOST_TOKENS);
    let one = Shape { layers: 1, vocabulary, format, ..model.shape };
    let two = Shape { layers: 2, ..one };
    let layers = measure::copies(Bytes(two.bytes().0 - one.bytes().0)).min(model.shape.layers);
    let temporary = |e: std::io::Error| {
        Failure::new(format!("no directory for made-up weights: {e}")).at("TMPDIR")
    };
    let place = tempfile::tempdir().map_err(temporary)?;
    let shape = Shape { layers, ..one };
    shape.write(place.path(), SHARD_BYTES, &mut |_| {}).map_err(|e| {
        let needs = shape.bytes();
        Failure::new(e.to_string()).todo(format!("made-up weights take {needs}; set TMPDIR"))
    })?;
    Ok((open_model(place.path(), Rounding::default())?, layers, place))
}

/// Bytes of the matrices of a layer.
fn layer_bytes(spec: &ModelSpec, format: WeightFormat) -> Bytes {
    let (hidden, inner) = (u64::from(spec.hidden), u64::from(spec.intermediate));
    let heads = u64::from(2 * spec.heads + 2 * spec.kv_heads) * u64::from(spec.head_width);
    let mlp = inner * if spec.gated { 3 } else { 2 };
    Bytes(format.bytes(hidden, heads + mlp))
}

/// The times of runs of layers.
#[derive(Default)]
struct Runs {
    /// The times of whole layers, in milliseconds.
    layers: Vec<f64>,
    /// The times of each operation in milliseconds, in the order in which operations run.
    operations: Vec<(OperationKind, Work, Vec<f64>)>,
}

fn runs(bench: &mut Bench, rows: u32, head: bool) -> Result<Runs, measure::MeasureError> {
    let batch = bench.batch(rows, 1)?;
    bench.enter(&batch)?;
    let mut timed = Vec::new();
    // Pages and caches of activations are there after this one.
    bench.layer(&batch, 0, &mut timed)?;
    let mut runs = Runs::default();
    let begin = Instant::now();
    for layer in 1.. {
        let enough = runs.layers.len() >= LEAST_RUNS && begin.elapsed() >= PATIENCE;
        if enough || runs.layers.len() == MOST_RUNS {
            break;
        }
        if layer % bench.layers() == 0 {
            bench.enter(&batch)?;
        }
        timed.clear();
        let all = bench.layer(&batch, layer, &mut timed)?;
        runs.layers.push(all.as_secs_f64() * 1e3);
        runs.add(&timed);
    }
    if head {
        for _ in 0..LEAST_RUNS {
            timed.clear();
            bench.head(&batch, &mut timed)?;
            runs.add(&timed);
        }
    }
    Ok(runs)
}

impl Runs {
    fn add(&mut self, timed: &[Timed]) {
        for Timed { part, work, time } in timed {
            let ms = time.as_secs_f64() * 1e3;
            match self.operations.iter_mut().find(|(known, ..)| known == part) {
                Some((_, _, all)) => all.push(ms),
                None => self.operations.push((*part, *work, vec![ms])),
            }
        }
    }

    fn lines(self, rows: u32, peak: f64, stream: f64) -> Vec<OperationFigures> {
        let bound = |work: &Work| (work.operations > 0.0).then(|| work.bound(peak, stream));
        let (mut lines, mut head) = (Vec::new(), Vec::new());
        let (mut operations, mut weights, mut sum) = (0.0, 0.0, 0.0);
        for (part, work, times) in &self.operations {
            let ms = Spread::of(times);
            let line = OperationFigures {
                rows: work.rows,
                operation: part.to_string(),
                inputs: work.inputs,
                outputs: work.outputs,
                ms,
                gflops: work.operations / ms.median * 1e-6,
                gigabytes: work.weights / ms.median * 1e-6,
                bound_ms: bound(work),
            };
            if *part == OperationKind::Product(Kernel::Language) {
                head.push(line);
                continue;
            }
            operations += work.operations;
            weights += work.weights;
            sum += bound(work).unwrap_or(0.0);
            lines.push(line);
        }
        let ms = Spread::of(&self.layers);
        lines.push(OperationFigures {
            rows,
            operation: "layer".to_owned(),
            inputs: 0,
            outputs: 0,
            ms,
            gflops: operations / ms.median * 1e-6,
            gigabytes: weights / ms.median * 1e-6,
            bound_ms: Some(sum),
        });
        lines.extend(head);
        lines
    }
}

fn text(findings: &Findings) -> String {
    let Findings { model, format, layers, weights, cache, instructions, threads, .. } = findings;
    let plural = |n: u32| if n == 1 { "" } else { "s" };
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "{model} in {format}: {layers} layer{}, {weights} of weights, beside a cache of {cache}\n\
         {instructions}, {threads} thread{}: peak {:.0} GFLOP/s, memory {:.1} GB/s\n",
        plural(*layers),
        plural(u32::from(*threads)),
        findings.peak,
        findings.stream,
    );
    let mut rows = vec![row([
        "rows",
        "operation",
        "shape",
        "ms",
        "lowest to highest",
        "GFLOP/s",
        "GB/s",
        "bound ms",
        "of bound",
    ])];
    let mut last = None;
    for line in &findings.lines {
        let OperationFigures { ms, gflops, gigabytes, .. } = line;
        let shape = match line.inputs {
            0 => String::new(),
            _ if line.operation.starts_with("add and norm") => line.inputs.to_string(),
            _ => format!("{} x {}", line.inputs, line.outputs),
        };
        let some = |value: f64, text: String| if value > 0.0 { text } else { "-".to_owned() };
        // A blank line between the rows.
        if last.replace(line.rows).is_some_and(|before| before != line.rows) {
            rows.push(Vec::new());
        }
        rows.push(vec![
            line.rows.to_string(),
            line.operation.clone(),
            shape,
            format!("{:.3}", ms.median),
            format!("{:.3} to {:.3}", ms.low, ms.high),
            some(*gflops, format!("{gflops:.1}")),
            some(*gigabytes, format!("{gigabytes:.2}")),
            line.bound_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.3}")),
            line.bound_ms
                .map_or_else(|| "-".to_owned(), |b| format!("{:.0}%", 100.0 * b / ms.median)),
        ]);
    }
    out.push_str(&table(&rows));
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Only {
        #[command(flatten)]
        kernels: KernelsArgs,
    }

    fn findings(line: &str) -> Findings {
        let line = format!("galaxy --threads 1 {line}");
        kernels(&Only::try_parse_from(line.split_whitespace()).unwrap().kernels).unwrap()
    }

    #[test]
    fn every_operation_has_a_line() {
        let model =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/llama");
        let findings = findings(&format!("--model {} --rows 1,5", model.display()));
        let names: Vec<&str> = findings.lines.iter().map(|l| l.operation.as_str()).collect();
        let layer = [
            "qkv",
            "attention",
            "attention output",
            "add and norm after attention",
            "up",
            "down",
            "add and norm after mlp",
        ];
        let want: Vec<&str> = layer
            .into_iter()
            .chain(["layer", "language head"])
            .chain(layer)
            .chain(["layer"])
            .collect();
        assert_eq!(names, want);
        assert!(findings.lines.iter().all(|l| l.ms.n >= LEAST_RUNS && l.ms.median >= 0.0));
        let text = text(&findings);
        assert!(text.contains("peak") && text.lines().count() > names.len(), "{text}");
        serde_json::to_string(&findings).unwrap();
    }

    #[test]
    fn a_shape_is_benchmarked_without_model_files() {
        let findings = findings("--shape tiny-bert --rows 3 --format bf16");
        assert_eq!((findings.format, findings.layers), ("bf16", 2));
        assert_eq!(findings.lines.len(), 8);
    }
}
