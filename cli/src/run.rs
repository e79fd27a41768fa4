//! `galaxy run`: token ids or images in, tensors out, on a cluster or in this process.

use super::{
    Connection, Kernels,
    failure::Failure,
    ids::Ids,
    images,
    in_process::{self, InProcess, Rounding, Settings},
    networks::{self, InputFile},
    print, progress,
    tensors::{Destination, as_json},
};
use clap::Args;
use galaxy_client::{Input, Output, Tensors};
use galaxy_common::{Cache, Strategy, WireType, plan::MAX_DEVICES};
use std::path::{Path, PathBuf};

const SHAPES: &str = "\
Results are one JSON object, on stdout or in FILE.json:

  {
    \"output\": \"hidden\",
    \"tensors\": [
      {\"sequence\": 0, \"shape\": [3, 384], \"values\": [...]}
    ],
    \"report\": {\"requests\": [17], \"queue_ms\": 0.1, \"execute_ms\": 12.0, ...}
  }

with one tensor for each sequence, in order. Values are row-major: hidden is
[rows, hidden], pooled is [hidden], logits is [classes] or [vocabulary], and
logits with --all-rows is [rows, vocabulary]. report is null with --model.
FILE.safetensors holds the same tensors in f32, named sequence.0, sequence.1, ...";

/// Arguments of `galaxy run`.
#[derive(Args, Debug)]
#[command(after_long_help = SHAPES)]
pub struct RunArgs {
    /// Token ids of a sequence: 5,17,9, or @FILE.json; may be given several times.
    ///
    /// The file has a list of ids, or a list of such lists.
    #[arg(long, required_unless_present_any = ["image", "pixels", "input"], value_name = "IDS|@FILE")]
    ids: Vec<Ids>,
    /// Image file, PNG or JPEG, for a model of images; may be given several times.
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// Safetensors file of images as the model reads them; may be given several times.
    ///
    /// Each of its tensors is f32 [channels, height, width], or several of these, with their number in front.
    #[arg(long, value_name = "FILE.safetensors")]
    pixels: Vec<PathBuf>,
    /// Values of an input of an ONNX file, like x=@in.npy; may be given several times.
    ///
    /// The name may be left out of a network with one input. Whole numbers are fixed as the network is loaded.
    #[arg(long, value_name = "NAME=@FILE.npy", requires = "model", conflicts_with_all = ["ids", "image", "pixels"])]
    input: Vec<InputFile>,
    /// Tensors to compute for each sequence.
    ///
    /// hidden are the states of every row, after the last norm. logits are those of the classes, or of the token after
    /// the last row. pooled is one vector, as the model's own files say.
    #[arg(long, value_enum, default_value_t = OutputName::Hidden)]
    output: OutputName,
    /// Give the logits after every row; needs --output logits.
    #[arg(long)]
    all_rows: bool,
    /// Write the result to this file: FILE.json, FILE.safetensors or FILE.npz.
    #[arg(short, value_name = "FILE")]
    o: Option<Destination>,
    /// Print one JSON object even with -o; without -o it is printed anyway.
    #[arg(long)]
    json: bool,
    /// Run this model in this process, without a cluster.
    ///
    /// DIR is a model directory, a GGUF file, or an ONNX file with --input. No coordinator is asked.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    local: Local,
    #[command(flatten)]
    connection: Connection,
}

/// The outputs that `--output` names.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum OutputName {
    Hidden,
    Logits,
    Pooled,
}

/// Arguments for work that is split over workers of this process.
#[derive(Args, Debug)]
#[command(next_help_heading = "With --model")]
pub(super) struct Local {
    /// Number of devices, each a worker of this process; at most 128.
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u16).range(1..=MAX_DEVICES as i64))]
    devices: Option<u16>,
    /// Strategy: local, megatron, sequence, pipeline or galaxy [default: galaxy; local for one device].
    #[arg(long, value_name = "S", requires = "model")]
    strategy: Option<Strategy>,
    /// Tiles that each device's rows are cut into; 1 means no overlap [default: 4].
    #[arg(long, value_name = "T", requires = "model", value_parser = clap::value_parser!(u16).range(1..=64))]
    tiles: Option<u16>,
    /// Number type of activations on links: f32, f16 or q8 [default: f32].
    ///
    /// f16 takes half the bytes of f32 and is lossy; q8 takes 28% of them and is lossier.
    #[arg(long, value_name = "W", requires = "model")]
    wire: Option<WireType>,
    #[command(flatten)]
    pub(super) rounding: Rounding,
    /// Relative share of work of each device, like 2,1,1 [default: equal].
    #[arg(long, value_name = "LIST", requires = "model", value_delimiter = ',')]
    share: Vec<f64>,
    /// Kernel threads of each device [default: the cores of this machine over the devices].
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    kernels: Kernels,
}

impl Local {
    /// Takes the kernels that are named, and refuses what networks of ONNX files are not split by yet.
    fn for_networks(&self) -> Result<(), Failure> {
        self.kernels.limit()?;
        let split = self.devices.is_some_and(|devices| devices > 1) || self.share.len() > 1;
        let lossy = self.wire.is_some() || self.rounding != Rounding::default();
        match split || lossy || self.strategy.is_some_and(|strategy| strategy != Strategy::Local) {
            true => Err(Failure::usage("an ONNX file runs on one device, in f32")
                .todo("leave out --devices, --share, --strategy, --wire, --weights-format and --activations")),
            false => Ok(()),
        }
    }

    pub(super) fn settings(&self) -> Result<Settings, Failure> {
        self.kernels.limit()?;
        // clap allows at most 128 devices, and more shares than that are wrong anyway.
        let listed = u16::try_from(self.share.len()).unwrap_or(u16::MAX);
        let devices = self.devices.unwrap_or(listed.max(1));
        if !self.share.is_empty() && listed != devices {
            return Err(Failure::usage(format!(
                "--share names {listed} devices, and --devices says {devices}"
            )));
        }
        if let Some(share) = self.share.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
            return Err(Failure::usage(format!("a share of {share} is not a number above zero")));
        }
        let strategy =
            self.strategy.unwrap_or(if devices == 1 { Strategy::Local } else { Strategy::Galaxy });
        if strategy == Strategy::Local && devices > 1 {
            return Err(Failure::usage(format!("strategy local takes one device, not {devices}"))
                .todo("choose galaxy or megatron, or leave --devices out"));
        }
        let shares = if self.share.is_empty() {
            vec![1.0; usize::from(devices)]
        } else {
            self.share.clone()
        };
        Ok(Settings {
            strategy,
            tiles: self.tiles.unwrap_or(4),
            wire: self.wire.unwrap_or(WireType::F32),
            shares,
            threads: self.threads.unwrap_or((in_process::cores() / devices).max(1)),
        })
    }
}

/// Runs `galaxy run`.
pub async fn run(args: RunArgs) -> Result<(), Failure> {
    if let Some(path) = args.model.as_ref().filter(|path| networks::is_onnx(path)) {
        args.local.for_networks()?;
        if !(args.ids.is_empty() && args.image.is_empty() && args.pixels.is_empty())
            || args.all_rows
        {
            return Err(Failure::usage("an ONNX file takes --input, and gives all of its results"));
        }
        let (path, threads, destination) = (path.clone(), args.local.threads, args.o.as_ref());
        return networks::run(path, args.input, threads, destination, args.json).await;
    }
    if !args.input.is_empty() {
        return Err(Failure::usage("--input goes with an ONNX file: --model FILE.onnx"));
    }
    let output = match (args.output, args.all_rows) {
        (OutputName::Hidden, false) => Output::Hidden,
        (OutputName::Pooled, false) => Output::Pooled,
        (OutputName::Logits, false) => Output::Logits,
        (OutputName::Logits, true) => Output::AllLogits,
        (_, true) => return Err(Failure::usage("--all-rows goes with --output logits only")),
    };
    let mut sequences = Vec::new();
    for ids in &args.ids {
        sequences.extend(ids.read()?.into_iter().map(Input::Ids));
    }
    for path in &args.image {
        sequences.push(Input::Image(images::file(path)?));
    }
    for path in &args.pixels {
        sequences.extend(images::pixels(path)?.into_iter().map(Input::Pixels));
    }
    if sequences.is_empty() {
        return Err(Failure::usage("there are no sequences to run").at("--ids, --image, --pixels"));
    }
    let tensors = match args.model {
        Some(path) => {
            let local = args.local;
            let work = tokio::task::spawn_blocking(move || here(&path, &local, &sequences, output));
            progress::watch("running in this process", work)
                .await
                .map_err(|e| Failure::new(format!("the run broke off: {e}")))??
        }
        None => {
            let client = args.connection.open().await?;
            progress::watch("running", client.run_inputs(&sequences, output)).await?
        }
    };
    if let Some(destination) = &args.o {
        destination.write(output, &tensors)?;
        if !args.json {
            let count = tensors.tensors.len();
            let plural = if count == 1 { "" } else { "s" };
            return print(&format!(
                "wrote {count} tensor{plural} to {}\n",
                destination.path().display()
            ));
        }
    }
    print(&as_json(output, &tensors)?)
}

/// Runs sequences on workers of this process.
fn here(
    path: &Path,
    local: &Local,
    sequences: &[Input],
    output: Output,
) -> Result<Tensors, Failure> {
    let settings = local.settings()?;
    let model = in_process::open_model(path, local.rounding)?;
    // All of them before anything is loaded: a wrong id should not cost a minute first.
    let mut max_rows = 1;
    for (index, input) in (0..).zip(sequences) {
        max_rows = in_process::rows(&model, index, input)?.0.max(max_rows);
    }
    let mut cluster = InProcess::start(model, &settings, max_rows, Cache::NONE)?;
    let tensors = (0..)
        .zip(sequences)
        .map(|(index, input)| cluster.run(index, input, output))
        .collect::<Result<_, _>>()?;
    Ok(Tensors { tensors, report: None })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Only {
        #[command(flatten)]
        run: RunArgs,
    }

    fn local(line: &str) -> Local {
        let line = format!("galaxy --ids 1 --model m {line}");
        Only::try_parse_from(line.split_whitespace()).unwrap().run.local
    }
    fn settings(line: &str) -> Result<Settings, Failure> {
        local(line).settings()
    }

    #[test]
    fn shares_must_match_the_number_of_devices() {
        assert_eq!(settings("--share 2,1,1").unwrap().shares, [2.0, 1.0, 1.0]);
        assert_eq!(settings("--devices 2").unwrap().shares, [1.0, 1.0]);
        assert_eq!(settings("--devices 2").unwrap().strategy, Strategy::Galaxy);
        assert_eq!(settings("").unwrap().strategy, Strategy::Local);
        for bad in [
            "--devices 2 --share 1,1,1",
            "--devices 2 --strategy local",
            "--share 1,0",
            "--share 1,nan",
        ] {
            assert_eq!(settings(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
    }

    #[tokio::test]
    async fn all_rows_without_logits_is_refused() {
        let line = "galaxy --ids 1 --all-rows --output pooled".split_whitespace();
        let failure = run(Only::try_parse_from(line).unwrap().run).await.unwrap_err();
        assert_eq!(failure.exit_code(), 2);
    }

    /// Any cut of the work gives what one device gives.
    #[test]
    fn splits_agree_with_one_device() {
        let model =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/bert");
        let sequences = [vec![5, 17, 9], vec![1; 20]].map(Input::Ids);
        for output in [Output::Hidden, Output::Logits, Output::Pooled] {
            let one = here(&model, &local(""), &sequences, output).unwrap();
            let three = "--share 3,2,1 --threads 1 --tiles 2";
            let three = here(&model, &local(three), &sequences, output).unwrap();
            assert_eq!(one.tensors.len(), 2);
            for (a, b) in one.tensors.iter().zip(&three.tensors) {
                assert_near(a, b, &output.to_string());
            }
        }
    }

    #[test]
    fn a_ring_of_128_devices_matches_one_device_and_129_are_refused() {
        let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
        let sequences = [vec![5, 17, 9], vec![1; 20]].map(Input::Ids);
        let run = |model: &str, line: &str| {
            here(&golden.join(model), &local(line), &sequences, Output::Hidden).unwrap()
        };
        for model in ["bert", "llama"] {
            let one = run(model, "");
            for strategy in ["galaxy", "megatron"] {
                let many = run(model, &format!("--devices 128 --strategy {strategy} --threads 1"));
                let case = format!("{model}, {strategy}");
                for (a, b) in one.tensors.iter().zip(&many.tensors) {
                    assert_near(a, b, &case);
                }
            }
        }
        let too_many = "galaxy --ids 1 --model m --devices 129".split_whitespace();
        let refused = Only::try_parse_from(too_many).unwrap_err().to_string();
        assert!(refused.contains("1..=128"), "{refused}");
    }

    fn assert_near(a: &galaxy_client::Tensor, b: &galaxy_client::Tensor, case: &str) {
        assert_eq!(a.shape, b.shape, "{case}");
        let largest = a.values.iter().fold(0f32, |m, v| m.max(v.abs()));
        let apart = a.values.iter().zip(&b.values).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(apart <= 1e-4 * largest, "{case}: {apart} of {largest}");
    }

    #[test]
    fn an_unknown_token_id_is_named_in_the_error() {
        let model =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/bert");
        let failure = here(&model, &local(""), &[Input::Ids(vec![1 << 30])], Output::Hidden);
        assert!(failure.unwrap_err().to_string().contains("token id 1073741824 is unknown"));
    }
}
