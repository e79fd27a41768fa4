//! Measures what another process asks for, so that both can take turns on one core.
//!
//! A request is a line `MODEL FORMAT WHAT ROWS RUNS`, like `bert f32 layer 284 1`; the answer is a line with
//! the share of the core that we had, and the milliseconds of each run. `MODEL FORMAT layers` is answered
//! with the number of layers that take turns. The answer to a request that cannot be served is a line that
//! begins with `error:`.

use super::{Known, Wanted, quiet::quietly};
use crate::models;
use anyhow::{Context, Result, bail};
use galaxy_common::{Kernel, WeightFormat};
use galaxy_engine::measure::{Batch, Bench, OperationKind};
use std::{
    io::{BufRead, Write},
    path::PathBuf,
};

/// The most runs that one request may ask for.
const MOST_RUNS: u32 = 10_000;

/// The options of `galaxy-testbed kernels-serve`.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeOptions {
    /// The directory of models.
    #[arg(long, default_value = models::CACHE)]
    cache: PathBuf,
    /// The number of kernel threads.
    #[arg(long, default_value_t = 1)]
    threads: u16,
}

/// Answers requests until standard input ends.
///
/// # Errors
/// When the other end of standard input or output is gone.
pub fn serve(options: &ServeOptions) -> Result<()> {
    let mut desk = KernelServer { options, models: Vec::new() };
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        match desk.answer(&line?) {
            Ok(answer) => writeln!(out, "{answer}")?,
            Err(error) => writeln!(out, "error: {error:#}")?,
        }
        out.flush()?;
    }
    Ok(())
}

/// A model in memory, with its weight format.
struct Open {
    known: Known,
    held: WeightFormat,
    bench: Bench,
    /// The batch that was prepared last, with its number of rows.
    batch: Option<(u32, Batch)>,
    next: u32,
}

struct KernelServer<'a> {
    options: &'a ServeOptions,
    models: Vec<Open>,
}

impl KernelServer<'_> {
    fn answer(&mut self, line: &str) -> Result<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [model, format, "layers"] => Ok(self.model(model, format)?.bench.layers().to_string()),
            [model, format, what, rows, runs] => {
                let what = part(what)?;
                let rows = rows.parse().with_context(|| format!("rows {rows:?}"))?;
                let runs: u32 = runs.parse().with_context(|| format!("runs {runs:?}"))?;
                anyhow::ensure!(
                    runs <= MOST_RUNS,
                    "{runs} runs are above the limit of {MOST_RUNS}"
                );
                let model = self.model(model, format)?;
                let (times, share) = quietly(|| model.times(what, rows, runs))?;
                let times = times.iter().map(|ms| format!(" {ms:.6}"));
                Ok(format!("{share:.3}{}", times.collect::<String>()))
            }
            _ => bail!("a request is MODEL FORMAT WHAT ROWS RUNS, or MODEL FORMAT layers"),
        }
    }

    fn model(&mut self, model: &str, format: &str) -> Result<&mut Open> {
        let known = Known::ALL.into_iter().find(|known| known.name() == model);
        let known = known.with_context(|| {
            let names: Vec<&str> = Known::ALL.iter().map(|known| known.name()).collect();
            format!("no model {model:?}; there are {}", names.join(", "))
        })?;
        let held = format.parse::<WeightFormat>().ok();
        let held =
            held.with_context(|| format!("no format {format:?}; there are f32, f16, bf16"))?;
        let found = self.models.iter().position(|m| (m.known, m.held) == (known, held));
        let at = match found {
            Some(at) => at,
            None => {
                let wanted = Wanted::whole(known, held, self.options.threads);
                let bench = wanted.open(&self.options.cache)?.pop();
                let bench = bench.context("a whole model has one part")?;
                self.models.push(Open { known, held, bench, batch: None, next: 0 });
                self.models.len() - 1
            }
        };
        Ok(&mut self.models[at])
    }
}

/// The part of a layer by its name; none for the whole layer.
fn part(what: &str) -> Result<Option<OperationKind>> {
    Ok(Some(match what {
        "layer" => return Ok(None),
        "qkv" => OperationKind::Product(Kernel::Qkv),
        "attention" => OperationKind::Attention,
        "output" => OperationKind::Product(Kernel::AttentionOutput),
        "up" => OperationKind::Product(Kernel::Up),
        "down" => OperationKind::Product(Kernel::Down),
        _ => bail!("no measurement {what:?}; there are layer, qkv, attention, output, up, down"),
    }))
}

impl Open {
    fn times(&mut self, what: Option<OperationKind>, rows: u32, runs: u32) -> Result<Vec<f64>> {
        let batch = match self.batch.take() {
            Some((same, batch)) if same == rows => batch,
            _ => self.bench.batch(rows, 1)?,
        };
        self.bench.enter(&batch)?;
        // Brings activations into the cache again, whatever ran on this core meanwhile.
        self.bench.layer(&batch, self.next, &mut Vec::new())?;
        let (mut times, mut timed) = (Vec::new(), Vec::new());
        for _ in 0..runs {
            self.next = self.next.wrapping_add(1);
            timed.clear();
            // Whole layers run also for one operation: its weights are not in the cache after the others'.
            let all = self.bench.layer(&batch, self.next, &mut timed)?;
            let time = match what {
                None => all,
                Some(part) => {
                    let found = timed.iter().find(|timed| timed.part == part);
                    found.with_context(|| format!("a layer has no {part}"))?.time
                }
            };
            times.push(time.as_secs_f64() * 1e3);
        }
        self.next = self.next.wrapping_add(1);
        self.batch = Some((rows, batch));
        Ok(times)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn valid_kernel_requests_are_answered_and_invalid_requests_rejected() {
        let place = tempfile::tempdir().unwrap();
        let options = ServeOptions { cache: place.path().to_owned(), threads: 1 };
        let mut desk = KernelServer { options: &options, models: Vec::new() };
        assert_eq!(desk.answer("small f32 layers").unwrap(), "2");
        for what in ["layer", "qkv", "attention", "output", "up", "down"] {
            let answer = desk.answer(&format!("small bf16 {what} 7 3")).unwrap();
            let times: Vec<f64> = answer.split(' ').map(|ms| ms.parse().unwrap()).collect();
            assert!(times.len() == 4 && times.iter().all(|ms| *ms >= 0.0), "{answer}");
        }
        assert_eq!(desk.models.len(), 2);
        for (wrong, says) in [
            ("huge f32 layer 1 1", "there are bert, relu, llama, small"),
            ("small f64 layer 1 1", "there are f32, f16, bf16"),
            ("small f32 head 1 1", "there are layer, qkv"),
            ("small f32 layer x 1", "rows \"x\""),
            ("small f32 layer 99999 1", "positions"),
            ("small f32 layer 1 99999", "limit"),
            ("", "a request is"),
        ] {
            let error = format!("{:#}", desk.answer(wrong).unwrap_err());
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }
}
