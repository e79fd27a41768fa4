//! `galaxy trace`: what every lane of every device did.

use super::{Connection, failure::Failure, json, milliseconds, print, progress, table::table};
use clap::Args;
use galaxy_client::{LinkRate, Trace};
use galaxy_common::{Bytes, RequestId};
use serde::Serialize;
use std::{fmt::Write as _, path::PathBuf, str::FromStr};

/// Arguments of `galaxy trace`.
#[derive(Args, Debug)]
pub struct TraceArgs {
    /// Number of a request, as its report gives it, or `last`.
    #[arg(value_name = "REQUEST|last")]
    request: Which,
    /// Write the timeline to this file, in Chrome trace format.
    ///
    /// Open it at <https://ui.perfetto.dev>.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print idle time for each lane, and the share of communication that compute hid.
    ///
    /// That share is 1 - (compute lane idle while awaiting a receive) / (bytes received / link
    /// rate).
    #[arg(long)]
    summary: bool,
    /// Rate of the links, like 125Mbit/s, for the summary.
    #[arg(long, value_name = "RATE")]
    link_rate: Option<LinkRate>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// The request to show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Which {
    Last,
    Id(RequestId),
}

impl FromStr for Which {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "last" {
            return Ok(Self::Last);
        }
        match text.parse() {
            Ok(id) if id > 0 => Ok(Self::Id(RequestId(id))),
            _ => Err("write the number of a request, or `last`".to_owned()),
        }
    }
}

/// Runs `galaxy trace`.
pub async fn trace(args: TraceArgs) -> Result<(), Failure> {
    let client = args.connection.open().await?;
    let request = match args.request {
        Which::Last => None,
        Which::Id(id) => Some(id),
    };
    let trace = progress::watch("gathering timelines", client.trace(request)).await?;
    if let Some(path) = &args.output {
        write(&trace, path)?;
    }
    if args.json {
        return print(&json(&Summary::of(&trace, args.link_rate))?);
    }
    let mut out = String::new();
    if args.summary || args.output.is_none() {
        out += &show(&Summary::of(&trace, args.link_rate));
    }
    if let Some(path) = &args.output {
        let _ = writeln!(out, "wrote {}: open it at https://ui.perfetto.dev", path.display());
    }
    print(&out)
}

/// Writes the timeline to a file.
pub fn write(trace: &Trace, path: &std::path::Path) -> Result<(), Failure> {
    std::fs::write(path, &trace.chrome_json)
        .map_err(|e| Failure::new(format!("cannot write the trace: {e}")).at(path.display()))
}

/// The figures of a trace.
#[derive(Serialize, Debug)]
pub struct Summary<'a> {
    link_rate_bits_per_second: Option<f64>,
    /// The share of communication that compute hid, of all devices together; none without the rate
    /// of the links.
    hidden_communication: Option<f64>,
    devices: Vec<DeviceSummary<'a>>,
}

#[derive(Serialize, Debug)]
struct DeviceSummary<'a> {
    #[serde(flatten)]
    trace: &'a galaxy_client::DeviceTrace,
    hidden_communication: Option<f64>,
}

impl<'a> Summary<'a> {
    /// The summary of a trace; how much communication was hidden is known only with the rate of the
    /// links.
    pub fn of(trace: &'a Trace, rate: Option<LinkRate>) -> Self {
        let device = |trace: &'a galaxy_client::DeviceTrace| DeviceSummary {
            trace,
            hidden_communication: rate.and_then(|rate| trace.hidden(rate)),
        };
        Self {
            link_rate_bits_per_second: rate.map(LinkRate::bits_per_second),
            hidden_communication: rate.and_then(|rate| trace.hidden(rate)),
            devices: trace.devices.iter().map(device).collect(),
        }
    }
}

/// The summary for people.
pub fn show(summary: &Summary<'_>) -> String {
    let mut out = String::new();
    for device in &summary.devices {
        let trace = device.trace;
        let _ = writeln!(
            out,
            "{}: {}, {} received, {} of it awaiting a receive; hidden communication {}",
            trace.device,
            milliseconds(trace.wall),
            Bytes(trace.bytes_received),
            milliseconds(trace.awaiting_receive),
            share(device.hidden_communication, trace.bytes_received),
        );
        let rows: Vec<Vec<String>> = trace
            .lanes
            .iter()
            .map(|lane| {
                vec![
                    lane.lane.clone(),
                    format!("busy {}", milliseconds(lane.busy)),
                    format!("idle {}", milliseconds(lane.idle)),
                ]
            })
            .collect();
        out += &table(&rows);
    }
    let received = summary.devices.iter().map(|d| d.trace.bytes_received).sum();
    if received > 0 && summary.link_rate_bits_per_second.is_none() {
        out += "how much was hidden depends on the rate of the links, which is not known here: \
                give it with --link-rate 125Mbit/s\n";
    } else {
        let _ = writeln!(
            out,
            "all devices: hidden communication {}",
            share(summary.hidden_communication, received)
        );
    }
    out
}

/// A share of the communication of so many bytes, for people.
pub fn share(hidden: Option<f64>, bytes: u64) -> String {
    match hidden {
        _ if bytes == 0 => "- (nothing was received)".to_owned(),
        Some(share) if share < 0.0 => "0% (it waited longer than its bytes take)".to_owned(),
        Some(share) => format!("{:.1}%", share * 100.0),
        None => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use galaxy_client::{DeviceTrace, LaneTrace};
    use std::time::Duration;

    fn trace() -> Trace {
        Trace {
            chrome_json: "{}".to_owned(),
            devices: vec![DeviceTrace {
                device: "pi-1".to_owned(),
                lanes: vec![LaneTrace {
                    lane: "compute".to_owned(),
                    busy: Duration::from_millis(80),
                    idle: Duration::from_millis(20),
                }],
                wall: Duration::from_millis(100),
                awaiting_receive: Duration::from_millis(10),
                bytes_received: 1_000_000,
            }],
        }
    }

    #[test]
    fn a_request_is_chosen_by_number_or_as_last() {
        assert_eq!("last".parse(), Ok(Which::Last));
        assert_eq!("17".parse(), Ok(Which::Id(RequestId(17))));
        assert!("0".parse::<Which>().is_err() && "first".parse::<Which>().is_err());
    }

    #[test]
    fn the_summary_shows_hidden_communication() {
        let trace = trace();
        let summary = Summary::of(&trace, Some("80Mbit/s".parse().unwrap()));
        let text = show(&summary);
        assert!(text.contains("hidden communication 90.0%"), "{text}");
        assert!(text.contains("compute  busy 80.00 ms  idle 20.00 ms"), "{text}");
        let value = serde_json::to_value(&summary).unwrap();
        assert_eq!(value["devices"][0]["device"], "pi-1");
        assert_eq!(value["devices"][0]["awaiting_receive_ms"], 10.0);
    }

    #[test]
    fn without_a_link_rate_hidden_communication_is_unknown() {
        let trace = trace();
        let text = show(&Summary::of(&trace, None));
        assert!(text.contains("hidden communication unknown"), "{text}");
        assert!(text.contains("--link-rate"), "{text}");
        assert_eq!(share(Some(-0.5), 1), "0% (it waited longer than its bytes take)");
        assert_eq!(share(None, 0), "- (nothing was received)");
    }
}
