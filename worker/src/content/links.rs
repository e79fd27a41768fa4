//! Where pieces come from: the coordinator, which calls this device, and other devices, which it
//! calls.

use super::ContentError;
use crate::tasks::lock;
use bytes::Bytes as Payload;
use galaxy_common::DeviceName;
use galaxy_model::manifest::{Digest, MAX_MANIFEST_BYTES, Manifest};
use galaxy_proto::{
    channel,
    fault::from_status,
    identity::{Identity, Role},
    v1::{self, content_client::ContentClient, supplied::Event},
};
use std::{net::IpAddr, sync::Mutex, time::Duration};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Messages of wants that may wait for the network.
pub(super) const WANTS: usize = 64;
/// How long a coordinator may take to call, once it knows that the model is needed.
const CALL: Duration = Duration::from_secs(15);
/// The longest time between two messages of a coordinator that prepares a manifest, or sends it.
const SILENCE: Duration = Duration::from_secs(30);
/// How often a device is called that has no pieces yet, or cannot be reached.
const CALLS: u32 = 60;
/// The time between two such calls.
const AGAIN: Duration = Duration::from_millis(500);
/// How long a connection to a device may take.
const DIAL: Duration = Duration::from_secs(3);

/// A coordinator that has called [`supply`](v1::worker_server::Worker::supply).
pub(crate) struct ModelServer {
    pub(crate) incoming: Streaming<v1::Supplied>,
    pub(crate) wants: mpsc::Sender<v1::Wants>,
}

/// The place where a task waits for a coordinator to call.
#[derive(Default)]
pub(crate) struct ModelServerSlot(Mutex<Option<oneshot::Sender<ModelServer>>>);

impl ModelServerSlot {
    /// Waits from now on; an earlier task that waited waits no more.
    pub(crate) fn wait(&self) -> oneshot::Receiver<ModelServer> {
        let (sender, receiver) = oneshot::channel();
        *lock(&self.0) = Some(sender);
        receiver
    }

    /// Hands a coordinator that has called to the task that waits. Returns the stream that says
    /// what is wanted; none where no task waits.
    pub(crate) fn arrive(
        &self,
        incoming: Streaming<v1::Supplied>,
    ) -> Option<ReceiverStream<v1::Wants>> {
        let waiting = lock(&self.0).take()?;
        let (wants, asked) = mpsc::channel(WANTS);
        waiting.send(ModelServer { incoming, wants }).ok()?;
        Some(ReceiverStream::new(asked))
    }
}

/// The next event that a coordinator sends.
async fn next(supply: &mut ModelServer) -> Result<Event, ContentError> {
    let silent = |_| ContentError::Silent { after: SILENCE };
    let lost = |status| ContentError::Lost { why: from_status(&status).to_string() };
    loop {
        let message = timeout(SILENCE, supply.incoming.message()).await.map_err(silent)?;
        let ended = || ContentError::Lost { why: "it hung up".to_owned() };
        if let Some(event) = message.map_err(lost)?.ok_or_else(ended)?.event {
            return Ok(event);
        }
    }
}

/// Waits for the coordinator's call and its offer, which must be the model of this fingerprint.
pub(super) async fn offered(
    waiting: oneshot::Receiver<ModelServer>,
    fingerprint: &str,
) -> Result<(ModelServer, Digest, u64), ContentError> {
    let nobody = ContentError::NoCall { after: CALL };
    let Ok(Ok(mut supply)) = timeout(CALL, waiting).await else { return Err(nobody) };
    loop {
        match next(&mut supply).await? {
            Event::Preparing(v1::Preparing { bytes_done, bytes_total }) => {
                tracing::debug!(bytes_done, bytes_total, "the coordinator prepares the manifest");
            }
            Event::Offer(v1::Offer { content, manifest_bytes, fingerprint: other }) => {
                let content = Digest::read(&content).filter(|_| other == fingerprint);
                let wrong = || ContentError::Other { want: fingerprint.to_owned(), have: other };
                return Ok((supply, content.ok_or_else(wrong)?, manifest_bytes));
            }
            // Nothing of this was asked for.
            Event::Manifest(_) | Event::Piece(_) | Event::Holding(_) => {}
        }
    }
}

/// Asks for the manifest of `content`, which has `length` bytes.
pub(super) async fn manifest(
    supply: &mut ModelServer,
    content: Digest,
    length: u64,
) -> Result<(Manifest, Vec<u8>), ContentError> {
    if length > MAX_MANIFEST_BYTES {
        return Err(ContentError::Manifest { why: format!("it has {length} bytes") });
    }
    let wants = v1::Wants { manifest: true, ..v1::Wants::default() };
    let gone = |_| ContentError::Lost { why: "it hung up".to_owned() };
    supply.wants.send(wants).await.map_err(gone)?;
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < length {
        if let Event::Manifest(part) = next(supply).await? {
            if part.is_empty() || part.len() as u64 > length - bytes.len() as u64 {
                return Err(ContentError::Manifest { why: "its parts do not add up".to_owned() });
            }
            bytes.extend_from_slice(&part);
        }
    }
    if Digest::of(&bytes) != content {
        return Err(ContentError::Manifest { why: "its digest is another".to_owned() });
    }
    Ok((Manifest::from_bytes(&bytes)?, bytes))
}

/// A message of a source.
pub(super) enum News {
    /// The source is connected, and takes wants.
    Joined(mpsc::Sender<v1::Wants>),
    /// A piece; no bytes if the source does not have it.
    Piece(u32, Payload),
    /// A bit for each piece that the source has.
    Holding(Vec<u8>),
    /// The source cannot be reached, or not any more; the reason, for people.
    Gone(String),
}

/// A device that may have pieces.
#[derive(Clone, Debug)]
pub(crate) struct Neighbour {
    pub(crate) name: DeviceName,
    pub(crate) address: String,
}

/// Passes on the messages of a source, until it ends or nobody listens.
pub(super) async fn listen(
    source: usize,
    mut incoming: Streaming<v1::Supplied>,
    news: mpsc::Sender<(usize, News)>,
) {
    loop {
        let said = match incoming.message().await {
            Ok(Some(v1::Supplied { event })) => match event {
                Some(Event::Piece(v1::Piece { piece, data })) => News::Piece(piece, data),
                Some(Event::Holding(bits)) => News::Holding(bits),
                _ => continue,
            },
            Ok(None) => News::Gone("it hung up".to_owned()),
            Err(status) => News::Gone(from_status(&status).to_string()),
        };
        let over = matches!(said, News::Gone(_));
        if news.send((source, said)).await.is_err() || over {
            return;
        }
    }
}

/// Connects to a device as soon as it has the model, and passes on its messages.
pub(super) async fn join(
    source: usize,
    peer: Neighbour,
    (identity, from): (Identity, Option<IpAddr>),
    about: (Digest, String),
    news: mpsc::Sender<(usize, News)>,
) {
    for _ in 0..CALLS {
        match call(&peer, (&identity, from), about.clone()).await {
            Ok((wants, incoming)) => {
                if news.send((source, News::Joined(wants))).await.is_ok() {
                    listen(source, incoming, news).await;
                }
                return;
            }
            // All devices are placed at the same time, and not all have the manifest at once.
            Err(why) => tracing::debug!(peer = %peer.name, why, "has no pieces yet"),
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn call(
    peer: &Neighbour,
    (identity, from): (&Identity, Option<IpAddr>),
    (content, fingerprint): (Digest, String),
) -> Result<(mpsc::Sender<v1::Wants>, Streaming<v1::Supplied>), String> {
    let server = (&peer.name, Role::Device);
    let channel = channel::connect_once(&peer.address, Some(identity), from, server, DIAL)
        .await
        .map_err(|error| error.to_string())?;
    let (wants, asked) = mpsc::channel(WANTS);
    let first = v1::Wants { content: content.0.to_vec(), fingerprint, ..v1::Wants::default() };
    wants.try_send(first).map_err(|error| error.to_string())?;
    let mut client = ContentClient::new(channel);
    let answer = timeout(DIAL, client.fetch(ReceiverStream::new(asked))).await;
    let incoming = answer.map_err(|_| "it does not answer".to_owned())?;
    let incoming = incoming.map_err(|status| from_status(&status).to_string())?;
    Ok((wants, incoming.into_inner()))
}
