//! Answers: vectors, classes, tensors, and what the request cost.

use crate::error::ClientError;
use galaxy_common::{Epoch, RequestId};
use galaxy_proto::{convert, v1};
use serde::{Serialize, Serializer};
use std::{fmt, str::FromStr, time::Duration};

/// What to compute for raw sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Output {
    /// The hidden state of every row, after the last norm: rows x hidden.
    Hidden,
    /// Logits: of the classes, or of the token after the last row.
    Logits,
    /// Logits of the next token after every row: rows x vocabulary.
    AllLogits,
    /// One vector for each sequence, pooled and normalised as the model says.
    Pooled,
}

impl FromStr for Output {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "hidden" => Ok(Self::Hidden),
            "logits" => Ok(Self::Logits),
            "all-logits" => Ok(Self::AllLogits),
            "pooled" => Ok(Self::Pooled),
            _ => Err(format!(
                "{text:?} is not an output: known are hidden, logits, all-logits, pooled"
            )),
        }
    }
}
impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hidden => "hidden",
            Self::Logits => "logits",
            Self::AllLogits => "all-logits",
            Self::Pooled => "pooled",
        })
    }
}

/// One vector for each text.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Embeddings {
    /// The vectors in the order of the texts; all of one length.
    pub vectors: Vec<Vec<f32>>,
    /// What the request cost.
    pub report: Report,
}

/// The logits and probabilities of a model's classes for each text.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Classes {
    /// Names of the classes.
    pub labels: Vec<String>,
    /// The logits of each text, in the order of the texts; each list is as long as `labels`.
    pub logits: Vec<Vec<f32>>,
    /// What the logits mean by the model's `problem_type`: probabilities that sum to one where one class
    /// is right, one by one where several may be, and the logits themselves where they are values.
    pub probabilities: Vec<Vec<f32>>,
    /// What the request cost.
    pub report: Report,
}

/// How well texts answer a query.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Ranking {
    /// All texts, the best first.
    pub ranked: Vec<Ranked>,
    /// What the request cost.
    pub report: Report,
}

/// How well one text answers a query.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Ranked {
    /// The index of the text, counted from 0.
    pub index: usize,
    /// The score of the text; higher is better. From 0 to 1, unless the model's files say otherwise.
    pub score: f32,
}

/// Tensors for each sequence.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Tensors {
    /// One tensor for each sequence, in the order of the sequences.
    pub tensors: Vec<Tensor>,
    /// What the request cost; none where no coordinator was asked.
    pub report: Option<Report>,
}

/// A tensor, row-major.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Tensor {
    /// The index of the sequence that it belongs to, counted from 0.
    pub sequence: u32,
    /// Its axes, outermost first.
    pub shape: Vec<u32>,
    /// The values of the tensor, row-major.
    pub values: Vec<f32>,
}

/// What a request cost. When a call was sent in parts, the sums over its parts.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Report {
    /// The coordinator's numbers of the parts, for [`crate::Client::trace`].
    pub requests: Vec<RequestId>,
    /// The epoch in which the last part ran.
    pub epoch: Epoch,
    /// The time in the admission queue.
    #[serde(rename = "queue_ms", serialize_with = "milliseconds")]
    pub queue: Duration,
    /// The time in the tokenizer.
    #[serde(rename = "tokenize_ms", serialize_with = "milliseconds")]
    pub tokenize: Duration,
    /// The time on the devices, with that of merging their results.
    #[serde(rename = "execute_ms", serialize_with = "milliseconds")]
    pub execute: Duration,
    /// Tokens that were computed.
    pub tokens: u64,
    /// Tokens of prompts whose rows were in the KV cache already, and were not computed.
    pub cached: u64,
    /// Programs that were run.
    pub programs: u64,
    /// What each device did.
    pub devices: Vec<DeviceReport>,
}

/// What a request cost one device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DeviceReport {
    /// The name of the device.
    pub device: String,
    /// The time that the compute lane spent in operations.
    #[serde(rename = "compute_busy_ms", serialize_with = "milliseconds")]
    pub compute_busy: Duration,
    /// The time that the compute lane was idle because a receive was not complete.
    #[serde(rename = "awaiting_receive_ms", serialize_with = "milliseconds")]
    pub awaiting_receive: Duration,
    /// Bytes that went to other devices.
    pub bytes_sent: u64,
    /// Bytes that came from other devices.
    pub bytes_received: u64,
    /// The time from the first operation to the last.
    #[serde(rename = "total_ms", serialize_with = "milliseconds")]
    pub total: Duration,
}

impl Report {
    /// Adds what another part cost.
    pub(crate) fn absorb(&mut self, part: Report) {
        self.requests.extend(part.requests);
        self.epoch = self.epoch.max(part.epoch);
        self.queue += part.queue;
        self.tokenize += part.tokenize;
        self.execute += part.execute;
        self.tokens = self.tokens.saturating_add(part.tokens);
        self.cached = self.cached.saturating_add(part.cached);
        self.programs = self.programs.saturating_add(part.programs);
        for device in part.devices {
            match self.devices.iter_mut().find(|d| d.device == device.device) {
                Some(known) => {
                    known.compute_busy += device.compute_busy;
                    known.awaiting_receive += device.awaiting_receive;
                    known.bytes_sent = known.bytes_sent.saturating_add(device.bytes_sent);
                    known.bytes_received =
                        known.bytes_received.saturating_add(device.bytes_received);
                    known.total += device.total;
                }
                None => self.devices.push(device),
            }
        }
    }
}

impl From<v1::RequestReport> for Report {
    fn from(wire: v1::RequestReport) -> Self {
        let device = |wire: v1::DeviceReport| DeviceReport {
            device: wire.device,
            compute_busy: Duration::from_nanos(wire.compute_busy_ns),
            awaiting_receive: Duration::from_nanos(wire.awaiting_receive_ns),
            bytes_sent: wire.bytes_sent,
            bytes_received: wire.bytes_received,
            total: Duration::from_nanos(wire.total_ns),
        };
        Self {
            requests: vec![RequestId(wire.request)],
            epoch: Epoch(wire.epoch),
            queue: Duration::from_nanos(wire.queue_ns),
            tokenize: Duration::from_nanos(wire.tokenize_ns),
            execute: Duration::from_nanos(wire.execute_ns),
            tokens: u64::from(wire.tokens),
            cached: u64::from(wire.cached),
            programs: u64::from(wire.programs),
            devices: wire.devices.into_iter().map(device).collect(),
        }
    }
}

/// Little-endian bytes as `rows` rows of `width` values.
///
/// # Errors
/// When they are not exactly that many.
pub(crate) fn rows(bytes: &[u8], rows: usize, width: usize) -> Result<Vec<Vec<f32>>, ClientError> {
    let wanted = rows.checked_mul(width).and_then(|n| n.checked_mul(4));
    if wanted != Some(bytes.len()) || (width == 0 && rows > 0) {
        return Err(ClientError::Malformed {
            what: format!("{} bytes for {rows} rows of {width} values", bytes.len()),
        });
    }
    Ok(bytes.chunks_exact(width.max(1) * 4).map(floats).collect())
}

/// Little-endian bytes as values; a ragged end is left out.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    convert::floats(bytes)
}

/// Writes a duration as a number of milliseconds.
pub(crate) fn milliseconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_nanos() as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_rows_only_if_their_sizes_match() {
        let bytes: Vec<u8> = [1f32, 2.0, 3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(rows(&bytes, 2, 2).expect("two by two"), [vec![1.0, 2.0], vec![3.0, 4.0]]);
        assert!(rows(&[], 0, 0).expect("nothing").is_empty());
        for (n, width) in [(2, 3), (1, 2), (usize::MAX, 4), (4, 0)] {
            assert!(matches!(rows(&bytes, n, width), Err(ClientError::Malformed { .. })));
        }
        assert!(rows(&bytes[..15], 2, 2).is_err());
    }

    #[test]
    fn reports_of_parts_are_summed() {
        let part = |request, device: &str| {
            Report::from(v1::RequestReport {
                request,
                epoch: request,
                queue_ns: 1_000_000,
                execute_ns: 2_000_000,
                tokens: 7,
                devices: vec![v1::DeviceReport {
                    device: device.to_owned(),
                    bytes_sent: 5,
                    ..Default::default()
                }],
                ..Default::default()
            })
        };
        let mut report = part(1, "a");
        report.absorb(part(2, "b"));
        report.absorb(part(3, "a"));
        assert_eq!(report.requests, [RequestId(1), RequestId(2), RequestId(3)]);
        assert_eq!((report.tokens, report.queue), (21, Duration::from_millis(3)));
        assert_eq!(report.devices.len(), 2);
        assert_eq!(report.devices[0].bytes_sent, 10);
        let json = serde_json::to_value(&report).expect("json");
        assert_eq!(json["execute_ms"], 6.0);
        assert_eq!(json["requests"], serde_json::json!([1, 2, 3]));
    }

    #[test]
    fn output_names_parse_back() {
        for output in [Output::Hidden, Output::Logits, Output::AllLogits, Output::Pooled] {
            assert_eq!(output.to_string().parse(), Ok(output));
        }
        assert!("tokens".parse::<Output>().expect_err("unknown").contains("known are hidden"));
    }
}
