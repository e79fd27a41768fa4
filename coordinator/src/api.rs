//! The API: the Galaxy service over a [`Session`]. Wire types end here.

mod fields;
mod intake;

use crate::{
    audit::Audit,
    client_memory::Caller,
    error::RequestError,
    fleet::{DeviceView, Readiness},
    members::MemberService,
    placement,
    reception::{Reception, Update},
    registry::Registry,
    session::{
        Embed, GenerateEvent, Input, Items, Prefix, Report, RunOutput, Sequences, Session, Tensors,
    },
    trace::DeviceSum,
};
use galaxy_common::Wanted;
use galaxy_proto::{
    ALPN_JOIN, COMMIT, MAX_MESSAGE_BYTES, PROTOCOL, VERSION, convert,
    door::{Door, Peer, require},
    identity::{Identity, Role},
    v1::{
        self,
        galaxy_server::{Galaxy, GalaxyServer},
        generate_event,
        members_server::MembersServer,
        run_event::Event,
    },
};
use intake::Intake;
use std::{
    future::Future,
    num::NonZeroU32,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tonic::{
    Request, Response, Status,
    metadata::MetadataMap,
    service::{Interceptor, interceptor::InterceptedService},
};

/// Bytes of one piece of a tensor.
const PIECE: usize = 1 << 20;
/// How many events of a generation may wait for a client that reads slowly: those of some decode bursts.
const EVENTS: usize = 64;
/// How many pieces may wait for a client that reads slowly.
const PIECES: usize = 4;
/// How long a client may leave a piece untaken before the rest is dropped.
const PATIENCE: Duration = Duration::from_secs(30);
/// Calls at one time on one connection; more wait in the client.
const STREAMS: u32 = 128;
/// The most bytes that may be on their way to us over one connection, before any of them is counted.
const WINDOW: u32 = 1 << 20;
/// How long a connection may be silent before the client is asked for a sign of life, and how long
/// that may take.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// The Galaxy service of a [`Session`], over gRPC.
#[derive(Clone)]
pub struct Api {
    session: Session,
    cluster: String,
    audit: Audit,
    registry: Option<(Arc<Registry>, Update)>,
    /// Tasks that send results to clients.
    replies: Arc<Mutex<JoinSet<()>>>,
}

impl Api {
    /// The service of `session`, under the cluster's name.
    pub fn new(session: Session, cluster: impl Into<String>) -> Self {
        Self {
            session,
            cluster: cluster.into(),
            audit: Audit::none(),
            registry: None,
            replies: Arc::default(),
        }
    }

    /// Writes what concerns the operator to `audit`.
    pub fn audited(mut self, audit: Audit) -> Self {
        self.audit = audit;
        self
    }

    /// Lets machines join, and lets admins manage who belongs to the cluster. `update` gets the devices whenever they
    /// have changed.
    pub fn joined_by(mut self, registry: Arc<Registry>, update: Update) -> Self {
        self.registry = Some((registry, update));
        self
    }

    /// The session that is served.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Serves clients on `listener` until `stop` ends and every call is answered.
    ///
    /// Without an identity it is plaintext, and only this machine is let in.
    ///
    /// # Errors
    /// When the transport fails.
    pub async fn serve(
        self,
        listener: TcpListener,
        identity: Option<&Identity>,
        stop: impl Future<Output = ()>,
    ) -> Result<(), tonic::transport::Error> {
        let listen = listener.local_addr();
        let members = self.registry.clone().zip(listen.ok()).map(|((registry, update), listen)| {
            let (session, audit) = (self.session.clone(), self.audit.clone());
            let desk = MemberService { registry, session, audit, update, listen };
            self.behind(Role::Admin, MembersServer::new(desk))
        });
        let reception =
            self.registry.clone().zip(identity).map(|((registry, update), identity)| {
                let (identity, audit) = (identity.clone(), self.audit.clone());
                Arc::new(Reception::new(registry, identity, audit, update))
            });
        let hook = reception.as_ref().map(|reception| (ALPN_JOIN, reception.hook()));
        let door = Door::open(listener, identity, hook);
        let replies = self.replies.clone();
        let service = GalaxyServer::new(self.clone())
            .max_decoding_message_size(intake::MAX_REQUEST_BYTES as usize)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let service = self.behind(Role::Client, service);
        let served = tonic::transport::Server::builder()
            .max_concurrent_streams(STREAMS)
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE))
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .add_service(service)
            .add_optional_service(members)
            .serve_with_incoming_shutdown(door, stop)
            .await;
        let mut left = std::mem::take(&mut *replies.lock().unwrap_or_else(PoisonError::into_inner));
        left.shutdown().await;
        served
    }

    /// A service for callers of a role: the caller is checked before a byte of the request is read, and every byte that
    /// comes is counted.
    fn behind<S>(
        &self,
        role: Role,
        service: S,
    ) -> Intake<InterceptedService<S, impl Interceptor + Clone + use<S>>> {
        let audit = self.audit.clone();
        let service = InterceptedService::new(service, move |request: Request<()>| {
            require(role, &request).inspect_err(|status| refused(&audit, &request, status))?;
            Ok(request)
        });
        Intake::new(service, self.session.client_memory().clone())
    }

    /// Sends results in a task of its own, until they are taken, or the client is gone or has no use for them.
    fn reply(&self, done: Tensors) -> Events {
        let (sender, receiver) = mpsc::channel(PIECES);
        let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        while replies.try_join_next().is_some() {}
        replies.spawn(send(sender, done, PATIENCE));
        Box::pin(ReceiverStream::new(receiver))
    }

    fn state(&self) -> &'static str {
        let readiness = self.session.readiness();
        if self.session.admission().draining() {
            return "draining";
        }
        let planned = self.session.fleet_status().plan.is_some();
        let needed = |d: &DeviceView| !planned || d.part.is_some();
        match readiness {
            Readiness::Ready(_) => "ready",
            Readiness::Moving { .. } => "moving",
            Readiness::Waiting { .. }
                if self.session.devices().iter().any(|d| d.state == "lost" && needed(d)) =>
            {
                "degraded"
            }
            Readiness::Waiting { .. } => "starting",
        }
    }
}

/// Writes to the audit log that a call was refused.
fn refused<T>(audit: &Audit, request: &Request<T>, status: &Status) {
    if let Some(peer) = request.extensions().get::<Peer>() {
        audit.refused(peer, status.message());
    }
}

/// The caller of a request, with the memory that the request holds so far.
fn caller<T>(request: &Request<T>) -> Option<Caller> {
    request.extensions().get().cloned()
}

/// The most of a call's time that is kept for sending a typed error back to the caller.
const WAY_BACK: Duration = Duration::from_millis(20);
/// The longest time that a call may ask for: longer than any request runs. A caller that asks for a day holds its place
/// for as long as this.
const LONGEST: Duration = Duration::from_secs(3600);

/// The time that a call may take, by its `grpc-timeout`, but no more than [`LONGEST`].
fn allowed(metadata: &MetadataMap) -> Result<Option<Duration>, Status> {
    let asked = timeout(metadata)?.map(|time| time.min(LONGEST));
    Ok(asked.map(|time| time.saturating_sub(WAY_BACK.min(time / 10))))
}

pub(crate) fn timeout(metadata: &MetadataMap) -> Result<Option<Duration>, Status> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let wrong = || {
        let why =
            "grpc-timeout is not a number of up to 8 digits and one of H M S m u n".to_owned();
        Status::from(RequestError::Invalid { why })
    };
    let text = value.to_str().map_err(|_| wrong())?;
    let (digits, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(wrong)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    let n: u64 = digits.parse().map_err(|_| wrong())?;
    Ok(Some(match unit {
        "H" => Duration::from_secs(n * 3600),
        "M" => Duration::from_secs(n * 60),
        "S" => Duration::from_secs(n),
        "m" => Duration::from_millis(n),
        "u" => Duration::from_micros(n),
        "n" => Duration::from_nanos(n),
        _ => return Err(wrong()),
    }))
}

type Events = Pin<Box<dyn Stream<Item = Result<v1::RunEvent, Status>> + Send>>;
type GenerateEvents = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

#[tonic::async_trait]
impl Galaxy for Api {
    type RunStream = Events;
    type GenerateStream = GenerateEvents;

    async fn embed(
        &self,
        request: Request<v1::EmbedRequest>,
    ) -> Result<Response<v1::EmbedReply>, Status> {
        let limit = allowed(request.metadata())?;
        let session = self.session.of(caller(&request));
        let asked = embed(request.into_inner())?;
        let done = session.embed(asked, limit).await?;
        session.caller().settle(3 * 4 * done.vectors.len() as u64)?;
        Ok(Response::new(v1::EmbedReply {
            width: done.width,
            vectors: convert::bytes(&done.vectors),
            report: Some(report(done.report)),
        }))
    }

    async fn classify(
        &self,
        request: Request<v1::ClassifyRequest>,
    ) -> Result<Response<v1::ClassifyReply>, Status> {
        let limit = allowed(request.metadata())?;
        let session = self.session.of(caller(&request));
        let v1::ClassifyRequest { texts, truncate, images } = request.into_inner();
        let items = match (texts.is_empty(), images.is_empty()) {
            (_, true) => Items::Texts(texts, truncate),
            (true, false) => Items::Images(images),
            (false, false) => {
                let why = "the request has texts and images: send one kind".to_owned();
                return Err(RequestError::Invalid { why }.into());
            }
        };
        let done = session.classify(items, limit).await?;
        Ok(Response::new(v1::ClassifyReply {
            labels: done.labels,
            logits: convert::bytes(&done.logits),
            probabilities: convert::bytes(&done.probabilities),
            report: Some(report(done.report)),
        }))
    }

    async fn rerank(
        &self,
        request: Request<v1::RerankRequest>,
    ) -> Result<Response<v1::RerankReply>, Status> {
        let limit = allowed(request.metadata())?;
        let session = self.session.of(caller(&request));
        let v1::RerankRequest { query, texts, truncate } = request.into_inner();
        let done = session.rerank(query, texts, truncate, limit).await?;
        Ok(Response::new(v1::RerankReply {
            scores: convert::bytes(&done.scores),
            report: Some(report(done.report)),
        }))
    }

    async fn run(&self, request: Request<v1::RunRequest>) -> Result<Response<Events>, Status> {
        let limit = allowed(request.metadata())?;
        let session = self.session.of(caller(&request));
        let request = request.into_inner();
        let output = output(&request)?;
        let sequences = request.sequences.into_iter().map(input).collect();
        let done = session.run(sequences, output, limit).await?;
        Ok(Response::new(self.reply(done)))
    }

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<GenerateEvents>, Status> {
        let limit = allowed(request.metadata())?;
        let session = self.session.of(caller(&request));
        let (prompt, options) = convert::generate_options(request.into_inner())
            .map_err(|e| RequestError::Invalid { why: e.to_string() })?;
        let (listener, said) = mpsc::channel(EVENTS);
        let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        while replies.try_join_next().is_some() {}
        replies.spawn(async move { session.generate(prompt, options, limit, listener).await });
        let events = ReceiverStream::new(said).map(|said| Ok(generated(said?)));
        Ok(Response::new(Box::pin(events)))
    }

    async fn status(
        &self,
        _request: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusReply>, Status> {
        let status = self.session.fleet_status();
        let plan = status.plan.as_deref();
        let (served, failed) = self.session.counts();
        let epoch = match self.session.readiness() {
            Readiness::Ready(epoch) => epoch.0,
            Readiness::Waiting { .. } | Readiness::Moving { .. } => 0,
        };
        Ok(Response::new(v1::StatusReply {
            version: VERSION.to_owned(),
            commit: COMMIT.to_owned(),
            protocol: PROTOCOL,
            cluster: self.cluster.clone(),
            model: self.session.model().name().to_owned(),
            strategy: status.strategy.to_string(),
            wire: plan.map(|p| p.wire.to_string()).unwrap_or_default(),
            tiles: plan.map_or(0, |p| u32::from(p.tiles)),
            layout: plan.map(|p| p.layout.to_string()).unwrap_or_default(),
            modes: plan.map(placement::modes).unwrap_or_default(),
            link: plan.map(|p| p.link.to_string()).unwrap_or_default(),
            exchange: plan.map(|p| p.exchange.to_string()).unwrap_or_default(),
            plan: status.what,
            predicted_ns: status.predicted.map_or(0, ns),
            context: self.session.context(),
            state: self.state().to_owned(),
            epoch,
            devices: self.session.devices().into_iter().map(device).collect(),
            queued: u32::try_from(self.session.admission().queued()).unwrap_or(u32::MAX),
            served,
            failed,
            sequences: Some(sequences(self.session.sequences())),
        }))
    }

    async fn trace(
        &self,
        request: Request<v1::TraceRequest>,
    ) -> Result<Response<v1::TraceReply>, Status> {
        let trace = self.session.trace(request.into_inner().request).await?;
        let devices = trace.devices.into_iter().map(traced).collect();
        Ok(Response::new(v1::TraceReply { chrome_json: trace.chrome_json, devices }))
    }

    async fn drain(
        &self,
        request: Request<v1::GalaxyDrainRequest>,
    ) -> Result<Response<v1::GalaxyDrainReply>, Status> {
        let peer = require(Role::Admin, &request)
            .inspect_err(|status| refused(&self.audit, &request, status))?;
        let limit = allowed(request.metadata())?;
        let off = request.into_inner().off;
        self.audit.record(&peer, "drain", serde_json::json!({ "off": off }));
        if off {
            self.session.admission().drain(false);
        } else {
            let drained = self.session.drain();
            match limit {
                // What is left when the caller's time is over still ends by itself.
                Some(limit) => drop(tokio::time::timeout(limit, drained).await),
                None => drained.await,
            }
        }
        Ok(Response::new(v1::GalaxyDrainReply {}))
    }
}

/// Converts a client's request for embeddings.
pub(crate) fn embed(request: v1::EmbedRequest) -> Result<Embed, Status> {
    let prefix = match (request.prompt_name, request.prompt) {
        (Some(_), Some(_)) => {
            let why = "the request has a prompt's name and a prompt: send one".to_owned();
            return Err(RequestError::Invalid { why }.into());
        }
        (Some(name), None) => Some(Prefix::Named(name)),
        (None, Some(text)) => Some(Prefix::Text(text)),
        (None, None) => None,
    };
    Ok(Embed {
        texts: request.texts,
        ids: request.ids.into_iter().map(|sequence| sequence.ids).collect(),
        truncate: request.truncate,
        prefix,
        dimensions: NonZeroU32::new(request.dimensions),
        normalise: request.normalise,
    })
}

fn input(sequence: v1::Sequence) -> Input {
    let v1::Sequence { ids, image, pixels } = sequence;
    match (image.is_empty(), pixels.is_empty()) {
        (false, _) => Input::Image(image),
        (_, false) => Input::Pixels(convert::floats(&pixels)),
        _ => Input::Tokens(ids),
    }
}

pub(crate) fn output(request: &v1::RunRequest) -> Result<RunOutput, Status> {
    let unspecified = request.output == i32::from(v1::Wanted::Unspecified);
    if request.pooled && !unspecified {
        let why =
            "the request asks for the model's pooling and for an output: ask for one".to_owned();
        return Err(RequestError::Invalid { why }.into());
    }
    if unspecified {
        return Ok(RunOutput::Sentence);
    }
    let wanted: Wanted = convert::wanted(request.output)
        .map_err(|e| RequestError::Invalid { why: e.to_string() })?;
    Ok(RunOutput::Wanted(wanted))
}

pub(crate) fn generated(said: GenerateEvent) -> v1::GenerateEvent {
    use generate_event::Event;
    let event = match said {
        GenerateEvent::Waiting { unready } => {
            let (device, unready) = unready.unwrap_or_default();
            let device = device.map(String::from).unwrap_or_default();
            Event::Waiting(v1::GenerateWaiting { unready, device })
        }
        GenerateEvent::Begun { request, prompt, seed, text, generated } => {
            Event::Begun(v1::GenerateBegun {
                request: request.0,
                prompt_tokens: prompt,
                seed,
                text,
                generated,
            })
        }
        GenerateEvent::Token(token) => Event::Token(token.into()),
        GenerateEvent::Done { finish, text, report: cost } => Event::Done(v1::GenerateDone {
            finish: finish.to_string(),
            text,
            report: Some(report(cost)),
        }),
    };
    v1::GenerateEvent { event: Some(event) }
}

/// Sends results in pieces, each of which must be taken within `patience`. What is not taken yet counts against the
/// client's memory; its place in the queue is free already.
async fn send(
    sender: mpsc::Sender<Result<v1::RunEvent, Status>>,
    Tensors { tensors, report: cost, held }: Tensors,
    patience: Duration,
) {
    let send = async |event| {
        let event = v1::RunEvent { event: Some(event) };
        sender.send_timeout(Ok(event), patience).await.is_ok()
    };
    for (sequence, tensor) in tensors.into_iter().enumerate() {
        let sequence = u32::try_from(sequence).unwrap_or(u32::MAX);
        if !send(Event::Tensor(v1::TensorHead { sequence, shape: tensor.shape })).await {
            return;
        }
        for piece in tensor.values.chunks(PIECE / 4) {
            if !send(Event::Data(convert::bytes(piece))).await {
                return;
            }
        }
    }
    // Without a report the client knows that it has not all.
    send(Event::Report(report(cost))).await;
    drop(held);
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn report(report: Report) -> v1::RequestReport {
    let devices = report.devices.into_iter().map(|(name, cost)| v1::DeviceReport {
        device: name.into(),
        compute_busy_ns: cost.compute_busy_ns,
        awaiting_receive_ns: cost.awaiting_receive_ns,
        bytes_sent: cost.bytes_sent,
        bytes_received: cost.bytes_received,
        total_ns: cost.total_ns,
    });
    v1::RequestReport {
        request: report.request.0,
        epoch: report.epoch.0,
        queue_ns: ns(report.queue),
        tokenize_ns: ns(report.tokenize),
        execute_ns: ns(report.execute),
        tokens: u32::try_from(report.tokens).unwrap_or(u32::MAX),
        programs: report.programs,
        devices: devices.collect(),
        cached: report.cached,
    }
}

fn sequences(of: Sequences) -> v1::SequencesStatus {
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    v1::SequencesStatus {
        waiting: count(of.waiting),
        running: count(of.running),
        most: count(of.most),
        evicted: of.evicted,
        prefixes: of.prefixes,
        prefix_rows: of.prefix_rows,
        blocks: of.blocks,
        free: of.free,
        tokens: of.tokens,
        drafted: of.drafted,
        accepted: of.accepted,
    }
}

fn device(view: DeviceView) -> v1::DeviceStatus {
    let mut status = v1::DeviceStatus {
        name: view.name,
        address: view.address,
        state: view.state.to_owned(),
        detail: view.detail,
        weight_bytes: view.weight_bytes.0,
        budget_bytes: view.budget.0,
        needed_bytes: view.needed.0,
        threads: u32::from(view.threads),
        processor: view.processor,
        ..v1::DeviceStatus::default()
    };
    if let Some(part) = view.part {
        let block = placement::held(&part);
        (status.heads_from, status.heads_to) = (block.heads.start(), block.heads.end());
        (status.columns_from, status.columns_to) = (block.columns.start(), block.columns.end());
        let vocabulary = part.prefill.vocabulary;
        (status.vocabulary_from, status.vocabulary_to) = (vocabulary.start(), vocabulary.end());
        status.row_weight = part.prefill.row_weight;
    }
    status
}

fn traced(sum: DeviceSum) -> v1::TraceDevice {
    let lane = |l: crate::trace::LaneSum| v1::TraceLane {
        lane: l.lane,
        busy_ns: l.busy_ns,
        idle_ns: l.idle_ns,
    };
    v1::TraceDevice {
        device: sum.device,
        lanes: sum.lanes.into_iter().map(lane).collect(),
        wall_ns: sum.wall_ns,
        awaiting_receive_ns: sum.awaiting_receive_ns,
        bytes_received: sum.bytes_received,
    }
}

#[cfg(test)]
mod tests;
