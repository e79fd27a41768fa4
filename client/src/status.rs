//! The status of a cluster and of its devices.

use galaxy_common::{Bytes, printable::line};
use galaxy_proto::v1;
use serde::{Serialize, Serializer};
use std::{ops::Range, time::Duration};

/// What a coordinator says about itself and its devices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ClusterStatus {
    /// Version of the coordinator.
    pub version: String,
    /// Commit that it was built from.
    pub commit: String,
    /// Protocol version that it speaks.
    pub protocol: u32,
    /// Name of the cluster.
    pub cluster: String,
    /// Name of the model.
    pub model: String,
    /// The strategy that the cluster file asks for.
    pub strategy: String,
    /// The plan in force as a phrase, like `galaxy on 3 devices, 4 tiles`; empty before there is
    /// one.
    pub plan: String,
    /// The layout of the plan: how its devices share the layers; empty before there is a plan.
    pub layout: String,
    /// How the plan splits blocks, as a phrase.
    pub modes: String,
    /// The transport of the links: `tls`, `plain` or `quic`.
    pub link: String,
    /// How tiles are exchanged: `ring` or `direct`.
    pub exchange: String,
    /// How long a typical text is predicted to take; none for a split by hand.
    #[serde(rename = "predicted_ms", serialize_with = "maybe_milliseconds")]
    pub predicted: Option<Duration>,
    /// The context length: most tokens of a prompt with those that are generated after it; 0:
    /// nothing is generated.
    pub context: u32,
    /// The number type of activations on links.
    pub wire: String,
    /// The number of tiles that each device's rows are cut into.
    pub tiles: u32,
    /// `starting`, `ready`, `moving`, `degraded` or `draining`.
    pub state: String,
    /// Epoch of the plan.
    pub epoch: u64,
    /// Devices in the order of the cluster file.
    pub devices: Vec<DeviceStatus>,
    /// Requests that wait.
    pub queued: u32,
    /// Requests that were answered.
    pub served: u64,
    /// Requests that failed.
    pub failed: u64,
    /// The sequences that generate tokens.
    pub sequences: SequencesStatus,
}

/// The sequences that generate tokens, and the blocks of the KV cache that they share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct SequencesStatus {
    /// The number of sequences that wait for a step.
    pub waiting: u32,
    /// The number of sequences in the step that runs.
    pub running: u32,
    /// The most sequences that were in one step.
    pub most: u32,
    /// Evictions so far: sequences that lost their KV blocks to an older one, and were computed
    /// again.
    pub evicted: u64,
    /// Sequences so far that began with rows of the prefix cache.
    pub prefixes: u64,
    /// Rows that sequences took from the prefix cache so far.
    pub prefix_rows: u64,
    /// The number of KV blocks.
    pub blocks: u32,
    /// KV blocks that no unfinished sequence has.
    pub free: u32,
    /// Tokens that were generated so far.
    pub tokens: u64,
    /// Rows of drafted tokens so far.
    pub drafted: u64,
    /// Drafted tokens so far that were accepted.
    pub accepted: u64,
}

/// Writes a duration as a number of milliseconds, if there is one.
fn maybe_milliseconds<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64() * 1e3).serialize(to)
}

/// One device of a cluster.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DeviceStatus {
    /// The name of the device.
    pub name: String,
    /// The address at which its worker listens.
    pub address: String,
    /// `unreachable`, `connected`, `placing`, `ready`, `lost` or `idle`.
    pub state: String,
    /// The reason for the state, where there is one to give.
    pub detail: String,
    /// The query heads that it computes of each layer.
    pub heads: Range<u32>,
    /// The columns that it computes of each MLP's intermediate size.
    pub columns: Range<u32>,
    /// The slice of the vocabulary whose logits it computes.
    pub vocabulary: Range<u32>,
    /// The relative number of its rows in connective blocks.
    pub row_weight: u32,
    /// The bytes of the weights that it holds.
    pub weight_bytes: Bytes,
    /// The memory that it grants.
    pub budget_bytes: Bytes,
    /// The memory that its part of the plan needs.
    pub needed_bytes: Bytes,
    /// The number of its kernel threads.
    pub threads: u32,
    /// The widest vector instructions of its kernels.
    pub processor: String,
}

/// The most characters of each text; a coordinator's have some hundred at most.
const MAX_WORDS: usize = 4000;

/// A text of a status as it may be shown, whoever wrote it.
fn words(text: &str) -> String {
    line(text, MAX_WORDS)
}

impl From<v1::StatusReply> for ClusterStatus {
    fn from(wire: v1::StatusReply) -> Self {
        Self {
            version: words(&wire.version),
            commit: words(&wire.commit),
            protocol: wire.protocol,
            cluster: words(&wire.cluster),
            model: words(&wire.model),
            strategy: words(&wire.strategy),
            plan: words(&wire.plan),
            layout: words(&wire.layout),
            modes: words(&wire.modes),
            link: words(&wire.link),
            exchange: words(&wire.exchange),
            predicted: (wire.predicted_ns > 0).then(|| Duration::from_nanos(wire.predicted_ns)),
            context: wire.context,
            wire: words(&wire.wire),
            tiles: wire.tiles,
            state: words(&wire.state),
            epoch: wire.epoch,
            devices: wire.devices.into_iter().map(DeviceStatus::from).collect(),
            queued: wire.queued,
            served: wire.served,
            failed: wire.failed,
            sequences: wire.sequences.unwrap_or_default().into(),
        }
    }
}
impl From<v1::SequencesStatus> for SequencesStatus {
    fn from(wire: v1::SequencesStatus) -> Self {
        Self {
            waiting: wire.waiting,
            running: wire.running,
            most: wire.most,
            evicted: wire.evicted,
            prefixes: wire.prefixes,
            prefix_rows: wire.prefix_rows,
            blocks: wire.blocks,
            free: wire.free,
            tokens: wire.tokens,
            drafted: wire.drafted,
            accepted: wire.accepted,
        }
    }
}
impl From<v1::DeviceStatus> for DeviceStatus {
    fn from(wire: v1::DeviceStatus) -> Self {
        Self {
            name: words(&wire.name),
            address: words(&wire.address),
            state: words(&wire.state),
            detail: words(&wire.detail),
            heads: wire.heads_from..wire.heads_to,
            columns: wire.columns_from..wire.columns_to,
            vocabulary: wire.vocabulary_from..wire.vocabulary_to,
            row_weight: wire.row_weight,
            weight_bytes: Bytes(wire.weight_bytes),
            budget_bytes: Bytes(wire.budget_bytes),
            needed_bytes: Bytes(wire.needed_bytes),
            threads: wire.threads,
            processor: words(&wire.processor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_in_a_status_are_escaped() {
        let device =
            v1::DeviceStatus { detail: "\x1b[2J\u{202e}gone".to_owned(), ..Default::default() };
        let wire = v1::StatusReply {
            model: "a\nb".to_owned(),
            devices: vec![device],
            ..Default::default()
        };
        let status = ClusterStatus::from(wire);
        assert_eq!(status.model, "a\\nb");
        assert_eq!(status.devices[0].detail, "\\u{1b}[2J\\u{202e}gone");
    }
}
