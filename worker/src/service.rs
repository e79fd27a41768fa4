//! The control service: wire types in, wire types out, for coordinators only.

use crate::{
    core::Core,
    execute::Execution,
    place, probe, profile,
    tasks::{blocking, lock},
};
use galaxy_common::{Epoch, SequenceNumber};
use galaxy_engine::compute::kernels::instructions::Instructions;
use galaxy_proto::{
    COMMIT, MAX_MESSAGE_BYTES, PROTOCOL, VERSION,
    door::require,
    fault::{Fault, to_status},
    identity::{NotRemoved, Removed, Role},
    v1::{
        self,
        worker_server::{Worker, WorkerServer},
    },
};
use std::{sync::Arc, time::Duration};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{
    Code, Request, Response, Status, Streaming, codegen::BoxStream,
    service::interceptor::InterceptedService,
};

/// Events of a call that may wait for the network: pieces of 1 MiB.
const EVENTS: usize = 4;

/// The most bytes of a coordinator's message: the pixels or tokens of the largest batch, and room.
const MESSAGE_BYTES: usize = 32 << 20;
/// How long the system may take to say how much memory the process holds. The answer that it lives
/// must not depend on it.
const RESIDENT_DEADLINE: Duration = Duration::from_millis(250);

/// The control service of a worker.
pub(crate) struct Control(Arc<Core>);

type Interceptor = fn(Request<()>) -> Result<Request<()>, Status>;

impl Control {
    /// The service as it is served: the caller's role is checked before anything is read from it.
    pub(crate) fn service(core: Arc<Core>) -> InterceptedService<WorkerServer<Self>, Interceptor> {
        let service = WorkerServer::new(Self(core))
            .max_decoding_message_size(MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        InterceptedService::new(service, |request| {
            require(Role::Coordinator, &request)?;
            Ok(request)
        })
    }
}

type Answer<T> = Result<Response<T>, Status>;
type Events<T> = ReceiverStream<Result<T, Status>>;

#[tonic::async_trait]
impl Worker for Control {
    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Answer<v1::DescribeReply> {
        let core = &self.0;
        let models = core.content.models.clone();
        let models =
            blocking(move || models.list()).await.map_err(|error| error.into_status(&core.name))?;
        let state = core.state.borrow().clone();
        Ok(Response::new(v1::DescribeReply {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            commit: COMMIT.to_owned(),
            name: core.name.to_string(),
            threads: core.grant.threads.into(),
            memory_bytes: core.grant.memory.map_or(0, |memory| memory.0),
            processor: Instructions::current().to_string(),
            models: models.into_iter().map(|(name, _)| name).collect(),
            draining: state.draining(),
            epoch: state.epoch().0,
            plain_port: core.grant.plain_port.unwrap_or(0).into(),
            engine: galaxy_engine::measure::profile::engine_name(core.grant.engine),
        }))
    }

    type PlaceStream = Events<v1::PlaceEvent>;
    async fn place(&self, request: Request<v1::PlaceRequest>) -> Answer<Self::PlaceStream> {
        let peer = require(Role::Coordinator, &request)?;
        let request = request.into_inner();
        tracing::info!(epoch = request.epoch, rank = request.rank, %peer, "placing");
        let (events, stream) = mpsc::channel(EVENTS);
        let core = self.0.clone();
        self.0.tasks.spawn(place::place(core, request, events));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type PrepareStream = Events<v1::PlaceEvent>;
    async fn prepare(&self, request: Request<v1::PrepareRequest>) -> Answer<Self::PrepareStream> {
        let peer = require(Role::Coordinator, &request)?;
        let request = request.into_inner();
        tracing::info!(load = request.load, %peer, "preparing for a place");
        let (events, stream) = mpsc::channel(EVENTS);
        self.0.tasks.spawn(place::prepare(self.0.clone(), request, events));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type SupplyStream = BoxStream<v1::Wants>;
    async fn supply(
        &self,
        request: Request<Streaming<v1::Supplied>>,
    ) -> Answer<Self::SupplyStream> {
        let peer = require(Role::Coordinator, &request)?;
        tracing::debug!(%peer, "brings a model");
        let wants = self.0.content.model_server.arrive(request.into_inner()).ok_or_else(|| {
            let why = "this worker waits for no model";
            to_status(Code::FailedPrecondition, Fault::new("not_wanted", why, false))
        })?;
        Ok(Response::new(Box::pin(wants.map(Ok))))
    }

    type ExecuteStream = Events<v1::ExecuteEvent>;
    async fn execute(&self, request: Request<v1::ExecuteRequest>) -> Answer<Self::ExecuteStream> {
        let execution = Execution::admit(&self.0, request.into_inner())
            .map_err(|error| error.into_status(&self.0.name))?;
        let (events, stream) = mpsc::channel(EVENTS + execution.steps());
        self.0.tasks.spawn(execution.run(events));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn forget(&self, request: Request<v1::ForgetRequest>) -> Answer<v1::ForgetReply> {
        let v1::ForgetRequest { epoch, slot } = request.into_inner();
        let active = self.0.active().filter(|active| active.epoch == Epoch(epoch));
        if let Some(executor) = active.and_then(|active| active.executor.upgrade()) {
            let forgotten = blocking(move || executor.end(Some(slot))).await;
            forgotten.map_err(|error| error.into_status(&self.0.name))?;
        }
        // Nothing is stored of another epoch.
        Ok(Response::new(v1::ForgetReply {}))
    }

    async fn end_burst(&self, request: Request<v1::EndBurstRequest>) -> Answer<v1::EndBurstReply> {
        let v1::EndBurstRequest { epoch, sequence } = request.into_inner();
        lock(&self.0.running.endings).ask(Epoch(epoch), SequenceNumber(sequence));
        Ok(Response::new(v1::EndBurstReply {}))
    }

    async fn health(&self, _: Request<v1::HealthRequest>) -> Answer<v1::HealthReply> {
        self.0.was_asked();
        let resident = tokio::time::timeout(RESIDENT_DEADLINE, blocking(resident_bytes)).await;
        let state = self.0.state.borrow().clone();
        let clock = self.0.active().and_then(|active| active.executor.upgrade());
        let clock = clock.map_or(0, |executor| executor.clock());
        Ok(Response::new(v1::HealthReply {
            epoch: state.epoch().0,
            running_sequence: state.running().map_or(0, |sequence| sequence.0),
            running: state.running().is_some(),
            draining: state.draining(),
            clock_ns: clock,
            resident_bytes: resident.map_or(0, |bytes| bytes.unwrap_or(0)),
        }))
    }

    async fn deny(&self, request: Request<v1::DenyRequest>) -> Answer<v1::DenyReply> {
        let wrong = |error: NotRemoved| Status::invalid_argument(error.to_string());
        let removed = Removed::try_from(request.into_inner()).map_err(wrong)?;
        if self.0.identity.denied().take(removed.clone()) {
            let path = self.0.removed.clone();
            // The list holds in any case; saved, it holds after a restart before the coordinator
            // comes.
            if let Ok(Err(error)) = blocking(move || removed.save(&path)).await {
                tracing::warn!(%error, "the list of removed members is not kept");
            }
        }
        Ok(Response::new(v1::DenyReply {}))
    }

    async fn cancel(&self, request: Request<v1::CancelRequest>) -> Answer<v1::CancelReply> {
        let epoch = Epoch(request.into_inner().epoch);
        let cancelled = self.0.cancel(epoch).await;
        cancelled.map_err(|error| error.into_status(&self.0.name))?;
        Ok(Response::new(v1::CancelReply {}))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Answer<v1::DrainReply> {
        let on = !request.into_inner().off;
        tracing::info!(on, "draining");
        self.0.tell(|state| state.drain(on));
        Ok(Response::new(v1::DrainReply {}))
    }

    type ProfileStream = Events<v1::ProfileEvent>;
    async fn profile(&self, request: Request<v1::ProfileRequest>) -> Answer<Self::ProfileStream> {
        let peer = require(Role::Coordinator, &request)?;
        let request = request.into_inner();
        tracing::info!(model = request.model, %peer, "measuring");
        let (events, stream) = mpsc::channel(EVENTS);
        self.0.tasks.spawn(profile::profile(self.0.clone(), request, events));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn probe(&self, request: Request<v1::ProbeRequest>) -> Answer<v1::ProbeReply> {
        let probed = probe::probe(&self.0, request.into_inner()).await;
        probed.map(Response::new).map_err(|error| error.into_status(&self.0.name))
    }

    async fn timeline(&self, request: Request<v1::TimelineRequest>) -> Answer<v1::TimelineReply> {
        let v1::TimelineRequest { epoch, sequence } = request.into_inner();
        let timelines = lock(&self.0.running.timelines);
        let times = timelines
            .get(Epoch(epoch), SequenceNumber(sequence))
            .map_err(|error| error.into_status(&self.0.name))?;
        Ok(Response::new(v1::TimelineReply {
            start_ns: times.iter().map(|(start, _)| *start).collect(),
            end_ns: times.iter().map(|(_, end)| *end).collect(),
        }))
    }
}

/// Bytes that the process holds in memory, where the system says so; else 0.
fn resident_bytes() -> u64 {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return 0 };
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: Option<u64> =
        line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok());
    kib.unwrap_or(0) * 1024
}
