//! `galaxy quantise`: a model with its matrices rounded to few bits, as a GGUF file; or what that would do to them.

use super::{
    failure::Failure,
    in_process::{Rounding, model_failure, open_model},
    json, print,
    table::{row, table},
    tell,
};
use clap::Args;
use galaxy_common::{Bytes, WeightFormat};
use galaxy_model::{Matrix, Quantisation, quantise::Rounded};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::{collections::BTreeMap, fs, path::PathBuf};

const MEANING: &str = "\
The error of a matrix is the root mean square of what rounding changes over that of its values. Values are
those of the nearest block that the format has: what a model loses by it, `galaxy bench quality` measures.

Without -o nothing is written, for models of every family: set weights_format in the cluster file, or
--weights-format of generate, chat, run and up, and a model is rounded as it is read.";

/// Arguments of `galaxy quantise`.
#[derive(Args, Debug)]
#[command(after_long_help = MEANING)]
pub struct QuantiseArgs {
    /// Model directory or GGUF file, with matrices of 16 or 32 bits.
    #[arg(value_name = "DIR")]
    model: PathBuf,
    /// Write the rounded model to this GGUF file.
    ///
    /// llama.cpp reads it, too. For models of bert, gemma2, gemma3_text, llama, mistral, modernbert, phi3, qwen2, qwen3
    /// and smollm3.
    #[arg(short, value_name = "FILE.gguf")]
    o: Option<PathBuf>,
    /// Format to round matrices to: q8, q6 or q4.
    #[arg(long, value_name = "BITS", default_value_t = Quantisation::Q8)]
    format: Quantisation,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The object that `--json` prints.
#[derive(Serialize)]
struct Findings {
    model: String,
    format: &'static str,
    file: Option<String>,
    bytes: Option<u64>,
    matrices: Vec<MatrixReport>,
}

#[derive(Serialize)]
struct MatrixReport {
    tensor: String,
    stored: &'static str,
    format: &'static str,
    error: f64,
}

/// Runs `galaxy quantise`.
pub async fn quantise(args: QuantiseArgs) -> Result<(), Failure> {
    let work = tokio::task::spawn_blocking(move || done(&args));
    let said = work.await.map_err(|e| Failure::new(format!("the rounding broke off: {e}")))??;
    print(&said)
}

fn done(args: &QuantiseArgs) -> Result<String, Failure> {
    let model = open_model(&args.model, Rounding::of_weights(Some(args.format)))?;
    let bar = bar();
    let rounded = match &args.o {
        Some(path) => {
            bar.set_message(format!("writing {}", path.display()));
            model.write_gguf(path, &mut |done, of| {
                bar.set_length(of);
                bar.set_position(done);
            })
        }
        None => {
            bar.set_message("rounding");
            model.rounding(&mut |done, of| {
                bar.set_length(of as u64);
                bar.set_position(done as u64);
            })
        }
    };
    bar.finish_and_clear();
    let rounded = rounded.map_err(model_failure)?;
    let bytes = match &args.o {
        Some(path) => fs::metadata(path).ok().map(|about| about.len()),
        None => None,
    };
    if args.json {
        let line = |one: &Rounded| MatrixReport {
            tensor: one.tensor.clone(),
            stored: one.stored.name(),
            format: one.format.name(),
            error: one.error,
        };
        return json(&Findings {
            model: model.name().to_owned(),
            format: args.format.name(),
            file: args.o.as_ref().map(|path| path.display().to_string()),
            bytes,
            matrices: rounded.iter().map(line).collect(),
        });
    }
    let mut out = format!("{} in {}\n\n", model.name(), args.format) + &errors(&rounded);
    match (&args.o, bytes) {
        (Some(path), Some(bytes)) => {
            out += &format!("\nwrote {} to {}\n", Bytes(bytes), path.display());
        }
        _ => tell("nothing was written: give -o FILE.gguf for a file"),
    }
    Ok(out)
}

/// A progress bar, which shows where stderr is a terminal.
fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg} {percent}% {bar:30} {elapsed}") {
        bar.set_style(style);
    }
    bar
}

/// The kind of a matrix, for people.
fn kind(matrix: Matrix) -> &'static str {
    match matrix {
        Matrix::Query(_) => "queries",
        Matrix::Key(_) => "keys",
        Matrix::Value(_) => "values",
        Matrix::AttentionOutput(_) => "attention output",
        Matrix::Gate(_) => "gate",
        Matrix::Up(_) => "up",
        Matrix::Down(_) => "down",
        Matrix::Patch => "patches",
        Matrix::ClassDense | Matrix::ClassOutput => "class head",
        Matrix::LanguageHead => "language head",
    }
}

/// A table of the errors of matrices by their kinds, with the worst of each.
fn errors(rounded: &[Rounded]) -> String {
    let mut kinds: BTreeMap<(usize, WeightFormat), Vec<&Rounded>> = BTreeMap::new();
    let mut order = Vec::new();
    for one in rounded {
        let name = kind(one.matrix);
        let at = order.iter().position(|known| *known == name).unwrap_or_else(|| {
            order.push(name);
            order.len() - 1
        });
        kinds.entry((at, one.format)).or_default().push(one);
    }
    let percent = |error: f64| format!("{:.3}%", error * 100.0);
    let mut rows = vec![row(["matrices", "format", "count", "error", "worst", "of"])];
    for ((at, format), all) in kinds {
        let mean = all.iter().map(|one| one.error).sum::<f64>() / all.len() as f64;
        let Some(worst) = all.iter().max_by(|a, b| a.error.total_cmp(&b.error)) else { continue };
        let count = all.len().to_string();
        let mut cells = row([order[at], format.name(), &count]);
        match worst.stored == worst.format {
            true => cells.push("as it is".to_owned()),
            false => cells.extend([percent(mean), percent(worst.error), worst.tensor.clone()]),
        }
        rows.push(cells);
    }
    table(&rows)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::in_process::{InProcess, Settings};
    use galaxy_client::{Input, Output};
    use galaxy_common::Cache;
    use galaxy_model::tokenizer::Tokenizer;
    use std::path::Path;

    fn tiny() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-galaxy")
    }

    fn args(model: PathBuf, o: Option<PathBuf>, format: Quantisation) -> QuantiseArgs {
        QuantiseArgs { model, o, format, json: false }
    }

    #[test]
    fn a_quantised_file_gives_the_logits_of_quantisation_on_load() {
        let dir = tempfile::tempdir().unwrap();
        for format in Quantisation::ALL {
            let path = dir.path().join(format!("tiny-{format}.gguf"));
            let said = done(&args(tiny(), Some(path.clone()), format)).unwrap();
            assert!(said.contains("attention output") && said.contains("wrote"), "{said}");
            let tokens = |path: &Path| {
                let model = open_model(path, Rounding::default()).unwrap();
                let tokenizer = Tokenizer::open(model.path()).unwrap();
                tokenizer.encode("Each device, at 12:30 — says ünï", None).unwrap()
            };
            let ids = tokens(&path);
            assert_eq!(ids, tokens(&tiny()));
            let logits = |path: &Path, format| {
                let model = open_model(path, Rounding::of_weights(format)).unwrap();
                let rows = ids.len() as u32;
                let one = InProcess::start(model, &Settings::single(), rows, Cache::NONE);
                one.unwrap().run(0, &Input::Ids(ids.clone()), Output::AllLogits).unwrap().values
            };
            assert_eq!(logits(&path, None), logits(&tiny(), Some(format)), "{format}");
        }
    }

    #[test]
    fn quantisation_is_shown_for_families_of_which_no_gguf_file_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let bert = galaxy_model::shape::Shape::bert(1, 64, 4);
        let gpt2 = galaxy_model::shape::Shape { family: "gpt2", ..bert };
        for (shape, written) in [(bert, true), (gpt2, false)] {
            let folder = dir.path().join(shape.family);
            std::fs::create_dir(&folder).unwrap();
            shape.write(&folder, u64::MAX, &mut |_| {}).unwrap();
            let said = done(&args(folder.clone(), None, Quantisation::Q6)).unwrap();
            assert!(said.contains("queries") && said.contains("q8_0"), "{said}");
            let file = dir.path().join(format!("{}.gguf", shape.family));
            let done = done(&args(folder, Some(file.clone()), Quantisation::Q8));
            assert_eq!((done.is_ok(), file.exists()), (written, written));
            let refused = done.err().map(|error| error.to_string());
            assert!(refused.is_none_or(|said| said.contains("weights_format")));
        }
    }
}
