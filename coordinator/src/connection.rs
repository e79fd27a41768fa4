//! Connections to workers: forming one, and asking the worker to describe itself.

use crate::cluster::DeviceConfig;
use futures_util::stream::{FuturesUnordered, StreamExt};
use galaxy_common::printable::line;
use galaxy_proto::{
    MAX_MESSAGE_BYTES, PROTOCOL, VERSION, channel,
    fault::from_status,
    identity::{Identity, Role},
    v1::{DescribeReply, DescribeRequest, worker_client::WorkerClient},
};
use std::time::Duration;
use tonic::transport::Channel;

/// A connection to a worker.
pub(crate) type Connection = WorkerClient<Channel>;

/// How long dialling an address may take, with TCP and TLS.
const DIAL: Duration = Duration::from_secs(3);
/// How much earlier than the next one an address is dialled. All of them have their time before whoever asks gives up.
const HEAD_START: Duration = Duration::from_millis(100);
/// How long a worker may take to describe itself.
const DESCRIBE: Duration = Duration::from_secs(2);
/// The most bytes of a worker's description, which may name some thousand models.
const DESCRIPTION_BYTES: usize = 256 << 10;
/// The most bytes of any other message of a device: a piece of a result has one MiB, the times of a long program some.
const MESSAGE_BYTES: usize = 16 << 20;

/// The most characters of each text by which a device describes itself.
const MAX_WORDS: usize = 200;
/// The most directories of models that a device may name.
const MAX_MODELS: usize = 1000;

/// Forms a fresh connection.
///
/// # Errors
/// The reason, for people: nobody answers, or it is not who it should be.
pub(crate) async fn connect(
    device: &DeviceConfig,
    identity: &Identity,
) -> Result<Connection, String> {
    let server = (&device.name, Role::Device);
    let addresses = [&device.address].into_iter().chain(&device.addresses);
    let mut dials: FuturesUnordered<_> = (0..)
        .zip(addresses)
        .map(|(at, address)| async move {
            tokio::time::sleep(HEAD_START * at).await;
            // Once: a worker that was started anew describes itself anew, and holds nothing.
            let dialled = channel::connect_once(address, Some(identity), None, server, DIAL).await;
            dialled.map_err(|error| (at, error))
        })
        .collect();
    let mut failed = Vec::new();
    let channel = loop {
        match dials.next().await {
            Some(Ok(channel)) => break channel,
            Some(Err(error)) => failed.push(error),
            // What is wrong at the first one is what a person looks for.
            None => {
                let first = failed.into_iter().min_by_key(|(at, _)| *at);
                return Err(first.map(|(_, error)| error.to_string()).unwrap_or_default());
            }
        }
    };
    Ok(WorkerClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES))
}

/// Forms a fresh connection and asks the worker to describe itself.
///
/// # Errors
/// As [`connect`], and when the worker does not describe itself, or as another device, or with another protocol.
pub(crate) async fn introduce(
    device: &DeviceConfig,
    identity: &Identity,
) -> Result<(Connection, DescribeReply), String> {
    let connection = connect(device, identity).await?;
    let mut brief = connection.clone().max_decoding_message_size(DESCRIPTION_BYTES);
    let asked = brief.describe(DescribeRequest { protocol: PROTOCOL });
    let mut description = tokio::time::timeout(DESCRIBE, asked)
        .await
        .map_err(|_| format!("it does not describe itself within {DESCRIBE:?}"))?
        .map_err(|status| from_status(&status).to_string())?
        .into_inner();
    make_printable(&mut description);
    let DescribeReply { protocol, version, name, .. } = &description;
    if *protocol != PROTOCOL {
        return Err(format!(
            "it speaks protocol {protocol} (version {version}), and this is protocol {PROTOCOL} \
             (version {VERSION}): install the same version on both"
        ));
    }
    if name != device.name.as_str() {
        return Err(format!("it calls itself {name:?}: is the address right?"));
    }
    Ok((connection, description))
}

/// Makes the description that a device gives of itself printable: it may have any text.
fn make_printable(description: &mut DescribeReply) {
    let DescribeReply { version, commit, name, processor, engine, models, .. } = description;
    models.truncate(MAX_MODELS);
    for text in [version, commit, name, processor, engine].into_iter().chain(models) {
        *text = line(text, MAX_WORDS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_descriptions_are_escaped_and_cut_to_a_bound() {
        let evil = "\x1b]0;mine\x07".repeat(1000);
        let mut said = DescribeReply {
            version: evil.clone(),
            commit: evil.clone(),
            name: evil.clone(),
            processor: evil.clone(),
            engine: evil.clone(),
            models: vec![evil; 2 * MAX_MODELS],
            ..DescribeReply::default()
        };
        make_printable(&mut said);
        let DescribeReply { version, commit, name, processor, engine, models, .. } = said;
        assert_eq!(models.len(), MAX_MODELS);
        for text in [version, commit, name, processor, engine].iter().chain(&models) {
            assert!(!text.contains(char::is_control) && text.len() < 10 * MAX_WORDS, "{text:?}");
        }
    }
}
