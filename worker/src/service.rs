//! The control service: wire types in, wire types out, and nobody but coordinators.

use crate::{
    core::{Core, lock},
    execute::Execution,
    place,
};
use galaxy_common::{Epoch, SequenceNumber};
use galaxy_engine::compute::cpu;
use galaxy_proto::{
    COMMIT, PROTOCOL, VERSION,
    door::require,
    identity::Role,
    v1::{self, worker_server::Worker},
};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Events of a call that wait for the network: pieces of 1 MiB.
const EVENTS: usize = 4;

/// The control service of a worker.
pub(crate) struct Control(pub(crate) Arc<Core>);

type Answer<T> = Result<Response<T>, Status>;
type Events<T> = ReceiverStream<Result<T, Status>>;

#[tonic::async_trait]
impl Worker for Control {
    async fn describe(&self, request: Request<v1::DescribeRequest>) -> Answer<v1::DescribeReply> {
        require(Role::Coordinator, &request)?;
        let core = &self.0;
        let state = core.state.borrow().clone();
        Ok(Response::new(v1::DescribeReply {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            commit: COMMIT.to_owned(),
            name: core.name.to_string(),
            threads: core.threads.into(),
            memory_bytes: core.memory.map_or(0, |memory| memory.0),
            processor: cpu::processor().to_owned(),
            models: core.models.list().into_iter().map(|(name, _)| name).collect(),
            draining: state.draining(),
            epoch: state.epoch().0,
            plain_port: core.plain_port.unwrap_or(0).into(),
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

    type ExecuteStream = Events<v1::ExecuteEvent>;
    async fn execute(&self, request: Request<v1::ExecuteRequest>) -> Answer<Self::ExecuteStream> {
        require(Role::Coordinator, &request)?;
        let execution = Execution::admit(&self.0, request.into_inner())
            .map_err(|error| error.into_status(&self.0.name))?;
        let (events, stream) = mpsc::channel(EVENTS);
        self.0.tasks.spawn(execution.run(events));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn health(&self, request: Request<v1::HealthRequest>) -> Answer<v1::HealthReply> {
        require(Role::Coordinator, &request)?;
        let state = self.0.state.borrow().clone();
        let clock = self.0.active().and_then(|active| active.executor.upgrade());
        let clock = clock.map_or(0, |executor| executor.clock());
        Ok(Response::new(v1::HealthReply {
            epoch: state.epoch().0,
            running_sequence: state.running().map_or(0, |sequence| sequence.0),
            running: state.running().is_some(),
            draining: state.draining(),
            clock_ns: clock,
            resident_bytes: resident_bytes(),
        }))
    }

    async fn cancel(&self, request: Request<v1::CancelRequest>) -> Answer<v1::CancelReply> {
        require(Role::Coordinator, &request)?;
        let epoch = Epoch(request.into_inner().epoch);
        if self.0.tell(|state| state.cancel(epoch)) {
            tracing::info!(%epoch, "cancelled");
            self.0.ring.close(epoch);
            let disconnected = self.0.disconnect().await;
            disconnected.map_err(|error| error.into_status(&self.0.name))?;
        }
        Ok(Response::new(v1::CancelReply {}))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Answer<v1::DrainReply> {
        require(Role::Coordinator, &request)?;
        let on = !request.into_inner().off;
        tracing::info!(on, "draining");
        self.0.tell(|state| state.drain(on));
        Ok(Response::new(v1::DrainReply {}))
    }

    async fn timeline(&self, request: Request<v1::TimelineRequest>) -> Answer<v1::TimelineReply> {
        require(Role::Coordinator, &request)?;
        let v1::TimelineRequest { epoch, sequence } = request.into_inner();
        let timelines = lock(&self.0.timelines);
        let times = timelines
            .get(Epoch(epoch), SequenceNumber(sequence))
            .map_err(|error| error.into_status(&self.0.name))?;
        Ok(Response::new(v1::TimelineReply {
            start_ns: times.iter().map(|(start, _)| *start).collect(),
            end_ns: times.iter().map(|(_, end)| *end).collect(),
        }))
    }
}

/// What the process holds in memory, where the system says so; else 0.
fn resident_bytes() -> u64 {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return 0 };
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: Option<u64> =
        line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok());
    kib.unwrap_or(0) * 1024
}
