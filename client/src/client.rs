//! The connection to a coordinator and the calls over it.

use crate::{
    answer::{Classes, Embeddings, Output, Ranked, Ranking, Report, Tensor, Tensors, rows},
    error::ClientError,
    input::{EmbedOptions, Input, TooLong},
    parts::parts,
    pieces::{Pieces, report},
    retry::{Attempts, RetryPolicy},
    status::ClusterStatus,
    trace::Trace,
};
use galaxy_common::{DeviceName, RequestId};
use galaxy_proto::{
    MAX_MESSAGE_BYTES, channel,
    identity::{Identity, Role},
    v1::{self, galaxy_client::GalaxyClient, members_client::MembersClient},
};
use std::{
    future::Future,
    ops::Range,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, timeout_at};
use tonic::transport::Channel;

/// The timeout of a call, unless the builder sets another.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
type Stub = GalaxyClient<Channel>;

/// The longest timeout: longer than anybody waits, and within what clocks and messages can hold.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Configures a connection: where the coordinator is, the identity to connect with, timeout and retries.
#[derive(Clone, Debug)]
pub struct Builder {
    address: String,
    identity: Option<PathBuf>,
    coordinator: String,
    timeout: Duration,
    retry: RetryPolicy,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            address: "127.0.0.1:7000".to_owned(),
            identity: None,
            coordinator: "coordinator".to_owned(),
            timeout: DEFAULT_TIMEOUT,
            retry: RetryPolicy::default(),
        }
    }
}

impl Builder {
    /// Where the coordinator listens, as host:port. Default: 127.0.0.1:7000.
    pub fn address(mut self, address: impl Into<String>) -> Self {
        self.address = address.into();
        self
    }
    /// The directory of our identity, made by `galaxy keys issue NAME --role client`.
    ///
    /// Without one the connection is not encrypted, which is allowed on loopback only.
    pub fn identity(mut self, directory: impl Into<PathBuf>) -> Self {
        self.identity = Some(directory.into());
        self
    }
    /// The name in the coordinator's certificate. Default: `coordinator`.
    pub fn coordinator(mut self, name: impl Into<String>) -> Self {
        self.coordinator = name.into();
        self
    }
    /// The time each call has, retries among it. Default: [`DEFAULT_TIMEOUT`].
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(LONGEST);
        self
    }
    /// The policy by which calls are tried again.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Connects to the coordinator.
    ///
    /// # Errors
    /// When the identity cannot be used or no connection comes about within the timeout.
    pub async fn connect(self) -> Result<Client, ClientError> {
        let identity = match &self.identity {
            Some(path) => Some(Identity::load(path)?),
            None => None,
        };
        let name = DeviceName::new(self.coordinator)?;
        // A coordinator that takes longer to accept is gone, however much time the call has.
        let patience = self.timeout.min(Duration::from_secs(10));
        let server = (&name, Role::Coordinator);
        let channel = channel::connect(&self.address, identity.as_ref(), server, patience).await?;
        let members = MembersClient::new(channel.clone());
        let stub = GalaxyClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let answered = Arc::new(AtomicBool::new(identity.is_some()));
        Ok(Client { stub, members, timeout: self.timeout, retry: self.retry, answered })
    }
}

/// A connection to a coordinator. Cheap to clone; clones share the connection.
///
/// # Cancel safety
/// Dropping the future of a call tells the coordinator that nobody waits any more.
#[derive(Clone, Debug)]
pub struct Client {
    stub: Stub,
    members: MembersClient<Channel>,
    timeout: Duration,
    retry: RetryPolicy,
    /// Whether a coordinator is known to answer us, so that a connection that breaks was not refused.
    answered: Arc<AtomicBool>,
}

impl Client {
    /// A builder with the defaults.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The stub for calls of admins.
    pub(crate) fn members(&self) -> MembersClient<Channel> {
        self.members.clone()
    }

    /// A request with the timeout of a call.
    pub(crate) fn timed<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.set_timeout(self.timeout);
        request
    }

    pub(crate) fn stub(&self) -> Stub {
        self.stub.clone()
    }
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }
    /// Notes that a coordinator has answered.
    pub(crate) fn answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }
    /// The attempts of a call that ends at `until`.
    pub(crate) fn attempts(&self, until: Instant) -> Attempts<'_> {
        Attempts::new(self.retry, self.timeout, &self.answered, until)
    }

    /// The same connection with another timeout for each call.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self { timeout: timeout.min(LONGEST), ..self.clone() }
    }

    /// One vector for each text, pooled and normalised as the model says.
    ///
    /// More than 1024 texts are sent in parts, one after another.
    ///
    /// # Errors
    /// `empty_text`, `text_too_long`, `overloaded`, `unavailable`, `device_lost`, `deadline`, ...
    pub async fn embed<T: AsRef<str>>(&self, texts: &[T]) -> Result<Embeddings, ClientError> {
        self.embed_with(texts, EmbedOptions::default()).await
    }

    /// Like [`Client::embed`], with options; a [`TooLong`] alone is one, too.
    ///
    /// # Errors
    /// As [`Client::embed`].
    pub async fn embed_with<T: AsRef<str>>(
        &self,
        texts: &[T],
        options: impl Into<EmbedOptions>,
    ) -> Result<Embeddings, ClientError> {
        let blank = options.into().request();
        let sizes = texts.iter().map(|text| text.as_ref().len());
        let request = |part: Range<usize>| {
            let texts = owned(&texts[part]);
            v1::EmbedRequest { texts, ..blank.clone() }
        };
        self.embed_parts(sizes, request).await
    }

    /// One vector for each sequence of token ids. These are used as they are: nothing is put before them,
    /// and nothing is cut.
    ///
    /// # Errors
    /// As [`Client::embed`], and `unknown_token`.
    pub async fn embed_ids<S: AsRef<[u32]>>(
        &self,
        sequences: &[S],
        options: EmbedOptions,
    ) -> Result<Embeddings, ClientError> {
        let blank = options.request();
        let sizes = sequences.iter().map(|ids| ids.as_ref().len().saturating_mul(5));
        let request = |part: Range<usize>| {
            let ids = sequences[part].iter();
            let ids = ids.map(|ids| v1::TokenIds { ids: ids.as_ref().to_vec() }).collect();
            v1::EmbedRequest { ids, ..blank.clone() }
        };
        self.embed_parts(sizes, request).await
    }

    async fn embed_parts(
        &self,
        sizes: impl ExactSizeIterator<Item = usize>,
        request: impl Fn(Range<usize>) -> v1::EmbedRequest,
    ) -> Result<Embeddings, ClientError> {
        let (deadline, total) = (Instant::now() + self.timeout, sizes.len());
        let mut all = Embeddings { vectors: Vec::new(), report: Report::default() };
        for part in parts(sizes) {
            let reply = self
                .call(deadline, request(part.clone()), |mut stub, request| async move {
                    Ok(stub.embed(request).await?.into_inner())
                })
                .await
                .and_then(|reply| {
                    let vectors = rows(&reply.vectors, part.len(), reply.width as usize)?;
                    Ok((vectors, report(reply.report)?))
                });
            let (vectors, cost) = reply.map_err(|e| in_part(e, &part, total))?;
            all.vectors.extend(vectors);
            all.report.absorb(cost);
        }
        Ok(all)
    }

    /// How well each text answers a query, by a model that reads both together: a cross-encoder. The best
    /// text comes first.
    ///
    /// # Errors
    /// As [`Client::embed`], and `unsupported_output` when the model does not have one class.
    pub async fn rerank<T: AsRef<str>>(
        &self,
        query: &str,
        texts: &[T],
        too_long: TooLong,
    ) -> Result<Ranking, ClientError> {
        let deadline = Instant::now() + self.timeout;
        let mut all = Ranking { ranked: Vec::new(), report: Report::default() };
        for part in parts(texts.iter().map(|text| text.as_ref().len())) {
            let request = v1::RerankRequest {
                query: query.to_owned(),
                texts: owned(&texts[part.clone()]),
                truncate: too_long == TooLong::Truncate,
            };
            let reply = self
                .call(deadline, request, |mut stub, request| async move {
                    Ok(stub.rerank(request).await?.into_inner())
                })
                .await
                .and_then(|reply| Ok((rows(&reply.scores, part.len(), 1)?, report(reply.report)?)));
            let (scores, cost) = reply.map_err(|e| in_part(e, &part, texts.len()))?;
            let scores = part.zip(scores.into_iter().flatten());
            all.ranked.extend(scores.map(|(index, score)| Ranked { index, score }));
            all.report.absorb(cost);
        }
        // Equal ones stay in their order.
        all.ranked.sort_by(|a, b| b.score.total_cmp(&a.score));
        Ok(all)
    }

    /// The logits of the model's classes for each text.
    ///
    /// # Errors
    /// As [`Client::embed`], and `unsupported_output` when the model has no classes.
    pub async fn classify<T: AsRef<str>>(&self, texts: &[T]) -> Result<Classes, ClientError> {
        self.classify_with(texts, TooLong::Refuse).await
    }

    /// Like [`Client::classify`], with a choice for texts that are too long.
    ///
    /// # Errors
    /// As [`Client::classify`].
    pub async fn classify_with<T: AsRef<str>>(
        &self,
        texts: &[T],
        too_long: TooLong,
    ) -> Result<Classes, ClientError> {
        let request = |part: Range<usize>| v1::ClassifyRequest {
            texts: owned(&texts[part]),
            truncate: too_long == TooLong::Truncate,
            ..v1::ClassifyRequest::default()
        };
        self.classify_parts(texts.iter().map(|t| t.as_ref().len()), request).await
    }

    /// The logits of the model's classes for each image: PNG or JPEG files.
    ///
    /// # Errors
    /// As [`Client::classify`].
    pub async fn classify_images<T: AsRef<[u8]>>(
        &self,
        images: &[T],
    ) -> Result<Classes, ClientError> {
        let sizes = images.iter().map(|image| image.as_ref().len());
        let request = |part: Range<usize>| v1::ClassifyRequest {
            images: images[part].iter().map(|image| image.as_ref().to_vec()).collect(),
            ..v1::ClassifyRequest::default()
        };
        self.classify_parts(sizes, request).await
    }

    async fn classify_parts(
        &self,
        sizes: impl ExactSizeIterator<Item = usize>,
        request: impl Fn(Range<usize>) -> v1::ClassifyRequest,
    ) -> Result<Classes, ClientError> {
        let (deadline, total) = (Instant::now() + self.timeout, sizes.len());
        let mut all = Classes::default();
        for part in parts(sizes) {
            let reply = self
                .call(deadline, request(part.clone()), |mut stub, request| async move {
                    Ok(stub.classify(request).await?.into_inner())
                })
                .await
                .and_then(|reply| {
                    let logits = rows(&reply.logits, part.len(), reply.labels.len())?;
                    let chances = rows(&reply.probabilities, part.len(), reply.labels.len())?;
                    Ok((reply.labels, logits, chances, report(reply.report)?))
                });
            let (labels, logits, probabilities, cost) =
                reply.map_err(|e| in_part(e, &part, total))?;
            all.labels = labels;
            all.probabilities.extend(probabilities);
            all.logits.extend(logits);
            all.report.absorb(cost);
        }
        Ok(all)
    }

    /// Runs raw sequences: token ids in, tensors out. For models without a tokenizer, too.
    ///
    /// # Errors
    /// As [`Client::embed`], and `unknown_token`, `unsupported_output`.
    pub async fn run<S: AsRef<[u32]>>(
        &self,
        sequences: &[S],
        output: Output,
    ) -> Result<Tensors, ClientError> {
        let ids = |sequence: &S| Input::Ids(sequence.as_ref().to_vec());
        self.run_inputs(&sequences.iter().map(ids).collect::<Vec<_>>(), output).await
    }

    /// Like [`Client::run`], for images, too.
    ///
    /// # Errors
    /// As [`Client::run`].
    pub async fn run_inputs(
        &self,
        sequences: &[Input],
        output: Output,
    ) -> Result<Tensors, ClientError> {
        let deadline = Instant::now() + self.timeout;
        let mut tensors = Vec::new();
        let mut cost = Report::default();
        let sizes = sequences.iter().map(Input::bytes);
        for part in parts(sizes) {
            let (wanted, pooled) = match output {
                Output::Hidden => (v1::Wanted::Hidden, false),
                Output::Logits => (v1::Wanted::LastLogits, false),
                Output::AllLogits => (v1::Wanted::AllLogits, false),
                Output::Pooled => (v1::Wanted::Unspecified, true),
            };
            let request = v1::RunRequest {
                sequences: sequences[part.clone()].iter().map(Input::message).collect(),
                output: wanted.into(),
                pooled,
            };
            let count = part.len();
            let (found, part_cost) = self
                .call(deadline, request, |mut stub, request| async move {
                    collect(stub.run(request).await?.into_inner(), count).await
                })
                .await
                .map_err(|e| in_part(e, &part, sequences.len()))?;
            // Sequences have u32 indices on the wire, so a part starts far below its limit.
            let first = part.start as u32;
            tensors.extend(found.into_iter().map(|t| Tensor { sequence: t.sequence + first, ..t }));
            cost.absorb(part_cost);
        }
        Ok(Tensors { tensors, report: Some(cost) })
    }

    /// The status of the cluster and of its devices.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn status(&self) -> Result<ClusterStatus, ClientError> {
        let deadline = Instant::now() + self.timeout;
        self.call(deadline, v1::StatusRequest {}, |mut stub, request| async move {
            Ok(stub.status(request).await?.into_inner().into())
        })
        .await
    }

    /// The measured lanes of a request that ran lately; of the last one without `request`.
    ///
    /// # Errors
    /// When the request is not known any more.
    pub async fn trace(&self, request: Option<RequestId>) -> Result<Trace, ClientError> {
        let deadline = Instant::now() + self.timeout;
        let message = v1::TraceRequest { request: request.map_or(0, |id| id.0) };
        self.call(deadline, message, |mut stub, request| async move {
            Ok(stub.trace(request).await?.into_inner().into())
        })
        .await
    }

    /// Asks the coordinator to finish what is queued and to take no more.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn drain(&self) -> Result<(), ClientError> {
        self.set_draining(true).await
    }

    /// Asks a draining coordinator to take requests again.
    ///
    /// # Errors
    /// When the coordinator does not answer.
    pub async fn undrain(&self) -> Result<(), ClientError> {
        self.set_draining(false).await
    }

    async fn set_draining(&self, draining: bool) -> Result<(), ClientError> {
        let deadline = Instant::now() + self.timeout;
        let message = v1::GalaxyDrainRequest { off: !draining };
        self.call(deadline, message, |mut stub, request| async move {
            stub.drain(request).await?;
            Ok(())
        })
        .await
    }

    /// One call: every attempt carries the time that is left, and none outlives the deadline.
    async fn call<M, T, F, A>(
        &self,
        deadline: Instant,
        message: M,
        attempt: F,
    ) -> Result<T, ClientError>
    where
        M: Clone,
        F: Fn(Stub, tonic::Request<M>) -> A,
        A: Future<Output = Result<T, ClientError>>,
    {
        let mut attempts = self.attempts(deadline);
        loop {
            let left = attempts.left();
            if left.is_zero() {
                return Err(attempts.late());
            }
            let mut request = tonic::Request::new(message.clone());
            request.set_timeout(left);
            match timeout_at(deadline, attempt(self.stub(), request)).await {
                Ok(Ok(answer)) => {
                    self.answered();
                    return Ok(answer);
                }
                Ok(Err(error)) => attempts.fails(error).await?,
                Err(_) => return Err(attempts.late()),
            }
        }
    }
}

/// Gathers the pieces of a raw result of `count` sequences.
async fn collect(
    mut stream: tonic::Streaming<v1::RunEvent>,
    count: usize,
) -> Result<(Vec<Tensor>, Report), ClientError> {
    let mut pieces = Pieces::new(count);
    while let Some(event) = stream.message().await? {
        if let Some(event) = event.event {
            pieces.take(event)?;
        }
    }
    if !pieces.ended() {
        return Err(ClientError::BrokenOff);
    }
    pieces.finish()
}

fn owned<T: AsRef<str>>(texts: &[T]) -> Vec<String> {
    texts.iter().map(|t| t.as_ref().to_owned()).collect()
}

fn in_part(error: ClientError, part: &Range<usize>, total: usize) -> ClientError {
    if part.len() == total {
        return error;
    }
    ClientError::Part { first: part.start, count: part.len(), source: Box::new(error) }
}

#[cfg(test)]
mod tests;
