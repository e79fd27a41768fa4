//! `galaxy demo`: embeds a few sentences, and shows how the cluster did it.

use super::{
    Connection, Kernels,
    failure::Failure,
    in_process::{self, InProcess, Rounding, Settings},
    json, loopback, milliseconds, print, progress, status,
    table::table,
    trace::{self, Summary},
};
use clap::Args;
use galaxy_client::{Client, ClusterStatus, Embeddings, Input, LinkRate, Output, Trace};
use galaxy_common::Cache;
use galaxy_model::tokenizer::Tokenizer;
use galaxy_proto::channel::is_loopback;
use serde::Serialize;
use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The sentences to embed; the others are compared with the first.
const SENTENCES: [&str; 8] = [
    "How can several small computers share the work of one neural network?",
    "Each device multiplies its own slice of the weights, and the slices together are the model.",
    "A cluster of single-board computers runs a transformer in parallel.",
    "While one tile is being multiplied, the next one is already on the wire.",
    "The orchestra plays without a conductor, every musician listening to the others.",
    "Soak the beans overnight and cook them slowly with garlic.",
    "The ferry to the island leaves at seven in the morning.",
    "Rain is expected in the mountains on Sunday.",
];
/// How long a cluster may take to load its model.
const PATIENCE: Duration = Duration::from_secs(300);
/// The pause between two looks at a cluster that is not ready.
const GLANCE: Duration = Duration::from_millis(200);

/// Arguments of `galaxy demo`.
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// The cluster's model on this machine, to compare the vectors with those of one device.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Write the timeline to this file, in Chrome trace format.
    ///
    /// Open it at <https://ui.perfetto.dev>.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Rate of the links, like 125Mbit/s [default: that of the loopback, if all devices are on this
    /// machine].
    #[arg(long, value_name = "RATE")]
    link_rate: Option<LinkRate>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    kernels: Kernels,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Serialize)]
struct Findings<'a> {
    status: &'a ClusterStatus,
    ranking: Vec<(f64, &'a str)>,
    first_ms: f64,
    round_trip_ms: f64,
    report: &'a galaxy_client::Report,
    trace: Summary<'a>,
    deviation: Option<Deviation>,
}

/// How far the cluster's vectors are from those of one device.
#[derive(Serialize, Clone, Copy, PartialEq, Debug)]
struct Deviation {
    /// The largest max|a-b| / max|b| of all vectors.
    relative: f64,
    /// The least cosine of all vectors.
    cosine: f64,
}

/// Runs `galaxy demo`.
pub async fn demo(args: DemoArgs) -> Result<(), Failure> {
    args.kernels.limit()?;
    let client = args.connection.open().await?;
    let status = progress::watch("waiting for the cluster", ready(&client)).await?;
    let began = Instant::now();
    progress::watch("embedding", client.embed(&SENTENCES)).await?;
    let first = began.elapsed();
    let began = Instant::now();
    let answer = progress::watch("embedding", client.embed(&SENTENCES)).await?;
    let round_trip = began.elapsed();
    let request = answer.report.requests.first().copied();
    let trace = progress::watch("gathering timelines", client.trace(request)).await?;
    if let Some(path) = &args.output {
        trace::write(&trace, path)?;
    }
    let rate = match args.link_rate {
        Some(rate) => Some(rate),
        None if on_this_machine(&status) => {
            blocking("measuring the loopback", || {
                loopback::measure()
                    .map_err(|e| Failure::new(format!("cannot measure the loopback: {e}")))
            })
            .await?
        }
        None => None,
    };
    let deviation = match args.model.clone() {
        Some(path) => {
            let alone = blocking("computing on one device", move || reference(&path)).await?;
            Some(deviation(&answer.vectors, &alone))
        }
        None => None,
    };
    let findings = Findings {
        status: &status,
        ranking: ranking(&answer.vectors),
        first_ms: first.as_secs_f64() * 1e3,
        round_trip_ms: round_trip.as_secs_f64() * 1e3,
        report: &answer.report,
        trace: Summary::of(&trace, rate),
        deviation,
    };
    if args.json {
        return print(&json(&findings)?);
    }
    let mut out = show(&findings, &answer, &trace, rate, args.link_rate.is_none());
    if let Some(path) = &args.output {
        let _ = writeln!(
            out,
            "\nThe timeline is in {}: open it at https://ui.perfetto.dev",
            path.display()
        );
    }
    print(&out)
}

async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    progress::watch(what, tokio::task::spawn_blocking(work))
        .await
        .map_err(|e| Failure::new(format!("{what} broke off: {e}")))?
}

/// Waits until the cluster is ready.
async fn ready(client: &Client) -> Result<ClusterStatus, Failure> {
    let began = Instant::now();
    loop {
        let status = client.status().await?;
        if status.state == "ready" {
            return Ok(status);
        }
        if status.state == "draining" || began.elapsed() > PATIENCE {
            let held = status.devices.iter().find(|d| d.state != "ready");
            let failure = Failure::new(format!("the cluster is {}", status.state));
            return Err(match held {
                Some(device) => failure.at(format_args!(
                    "device {} is {}: {}",
                    device.name, device.state, device.detail
                )),
                None => failure,
            }
            .todo("look at `galaxy status`"));
        }
        tokio::time::sleep(GLANCE).await;
    }
}

fn on_this_machine(status: &ClusterStatus) -> bool {
    // Those of the coordinator's own process have none.
    status.devices.iter().all(|d| d.address.is_empty() || is_loopback(&d.address))
}

/// Embeds the sentences on one device of this process.
fn reference(path: &Path) -> Result<Vec<Vec<f32>>, Failure> {
    let model = in_process::open_model(path, Rounding::default())?;
    let sentence = model.sentence().map_err(in_process::model_failure)?;
    let mut tokenizer = Tokenizer::open(model.path()).map_err(in_process::model_failure)?;
    if sentence.lower_case {
        tokenizer.lower_case();
    }
    let prompt = sentence.prompt(None).unwrap_or_default();
    let ids = SENTENCES
        .iter()
        .map(|text| {
            let text = format!("{prompt}{text}");
            tokenizer.encode(&text, None).map_err(in_process::model_failure)
        })
        .collect::<Result<Vec<_>, _>>()?;
    // No sentence above comes near a number of tokens that u32 could not hold.
    let rows = ids.iter().map(Vec::len).max().unwrap_or(1) as u32;
    let mut alone = InProcess::start(model, &Settings::single(), rows, Cache::NONE)?;
    let each = (0..).zip(ids.into_iter().map(Input::Ids));
    each.map(|(i, ids)| Ok(alone.run(i, &ids, Output::Pooled)?.values)).collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The other sentences with their cosines to the first, the closest first.
fn ranking(vectors: &[Vec<f32>]) -> Vec<(f64, &'static str)> {
    let Some((first, others)) = vectors.split_first() else { return Vec::new() };
    let mut ranked: Vec<_> =
        others.iter().zip(&SENTENCES[1..]).map(|(v, &text)| (cosine(first, v), text)).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    ranked
}

fn deviation(ours: &[Vec<f32>], alone: &[Vec<f32>]) -> Deviation {
    let none = Deviation { relative: 0.0, cosine: 1.0 };
    ours.iter().zip(alone).fold(none, |worst, (a, b)| {
        let apart = a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
        let largest = b.iter().map(|b| f64::from(b.abs())).fold(0.0, f64::max);
        Deviation {
            relative: worst.relative.max(apart / largest),
            cosine: worst.cosine.min(cosine(a, b)),
        }
    })
}

fn show(
    findings: &Findings<'_>,
    answer: &Embeddings,
    trace: &Trace,
    rate: Option<LinkRate>,
    measured: bool,
) -> String {
    let status = findings.status;
    let mut out = String::new();
    let taking_part = status.devices.iter().filter(|d| d.needed_bytes.0 > 0).count();
    let _ = writeln!(
        out,
        "{} on {taking_part} device{}: {}, wire {}, tiles {}\n",
        status.model,
        if taking_part == 1 { "" } else { "s" },
        status.plan,
        status.wire,
        status.tiles
    );
    let _ = writeln!(out, "Who holds what");
    out += &status::devices(&status.devices);
    let _ = writeln!(out, "\nClosest to {:?}", SENTENCES[0]);
    for (likeness, text) in &findings.ranking {
        let _ = writeln!(out, "  {likeness:>6.3}  {text}");
    }
    let report = &answer.report;
    let _ = writeln!(
        out,
        "\nLatency of {} sentences, {} tokens in {} program{}",
        SENTENCES.len(),
        report.tokens,
        report.programs,
        if report.programs == 1 { "" } else { "s" }
    );
    let line = |name: &str, value: String| vec![name.to_owned(), value];
    out += &table(&[
        line("queue", milliseconds(report.queue)),
        line("tokenize", milliseconds(report.tokenize)),
        line("execute", milliseconds(report.execute)),
        line("round trip", format!("{:.2} ms", findings.round_trip_ms)),
        line("first request", format!("{:.2} ms", findings.first_ms)),
    ]);
    let _ = writeln!(out, "\nCommunication");
    let rows: Vec<_> = trace
        .devices
        .iter()
        .map(|device| {
            vec![
                device.device.clone(),
                format!("received {}", galaxy_common::Bytes(device.bytes_received)),
                format!(
                    "waited {} of {}",
                    milliseconds(device.awaiting_receive),
                    milliseconds(device.wall)
                ),
                format!(
                    "hidden {}",
                    trace::share(rate.and_then(|r| device.hidden(r)), device.bytes_received)
                ),
            ]
        })
        .collect();
    out += &table(&rows);
    let received: u64 = trace.devices.iter().map(|d| d.bytes_received).sum();
    let _ = match rate {
        _ if received == 0 => Ok(()),
        Some(rate) if measured => writeln!(
            out,
            "  hidden = 1 - waited / (received / rate); the rate is this machine's loopback, \
             {rate} in plain TCP.\n  Devices that share one machine wait for each other's compute \
             rather than for such a link."
        ),
        Some(rate) => writeln!(out, "  hidden = 1 - waited / (received / rate), at {rate}"),
        None => writeln!(
            out,
            "  how much was hidden depends on the rate of the links: give it with --link-rate"
        ),
    };
    let _ = writeln!(out, "\nDeviation from one device");
    let _ = match findings.deviation {
        Some(Deviation { relative, cosine }) => {
            writeln!(out, "  max|a-b| / max|b| = {relative:.1e}, least cosine {cosine:.9}")
        }
        None => writeln!(out, "  not computed: name the model's directory with --model"),
    };
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_sentence_is_ranked_first() {
        let vectors: Vec<Vec<f32>> =
            (0..SENTENCES.len()).map(|i| vec![1.0, (i as f32 - 3.0).powi(2) - 9.0]).collect();
        let ranked = ranking(&vectors);
        assert_eq!(ranked.len(), SENTENCES.len() - 1);
        assert_eq!(ranked[0].1, SENTENCES[6]);
        assert!(ranked.windows(2).all(|pair| pair[0].0 >= pair[1].0));
        assert!(self::ranking(&[]).is_empty());
    }

    #[test]
    fn deviation_is_taken_from_the_worst_vector() {
        let alone = [vec![1.0, 0.0], vec![0.0, 2.0]];
        assert_eq!(deviation(&alone, &alone), Deviation { relative: 0.0, cosine: 1.0 });
        let found = deviation(&[vec![1.0, 0.0], vec![0.0, 1.5]], &alone);
        assert_eq!(found, Deviation { relative: 0.25, cosine: 1.0 });
    }

    #[test]
    fn loopback_addresses_count_as_this_machine() {
        let mut status: ClusterStatus = galaxy_proto::v1::StatusReply::default().into();
        assert!(on_this_machine(&status));
        for (address, here) in [
            ("127.0.0.1:7100", true),
            ("[::1]:7100", true),
            ("localhost:1", true),
            ("192.168.1.20:7100", false),
            ("pi-1.local:7100", false),
        ] {
            let device =
                galaxy_proto::v1::DeviceStatus { address: address.into(), ..Default::default() };
            status.devices = vec![device.into()];
            assert_eq!(on_this_machine(&status), here, "{address}");
        }
    }
}
