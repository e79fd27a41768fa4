//! The service that gives pieces to other devices.

use super::share::{CALLERS, Shared};
use crate::{
    core::Core,
    tasks::{blocking, lock},
};
use galaxy_proto::{
    door::require,
    fault::{Fault, to_status},
    identity::Role,
    v1::{
        self,
        content_server::{Content, ContentServer},
        supplied::Event,
    },
};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    time::MissedTickBehavior,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming, service::interceptor::InterceptedService};

/// Pieces that may wait for the network, for each device that is served.
const AHEAD: usize = 2;
/// The most bytes of a message: 256 numbers of pieces.
const MESSAGE_BYTES: usize = 16 << 10;
/// How long a device that calls may take to say what it wants.
const FIRST: Duration = Duration::from_secs(5);
/// The time between two checks for more pieces.
const TELL: Duration = Duration::from_millis(250);

/// The service that gives pieces to other devices.
pub(crate) struct Share(Arc<Core>);

type Interceptor = fn(Request<()>) -> Result<Request<()>, Status>;

impl Share {
    /// The service as it is served: only devices may call it.
    pub(crate) fn service(core: Arc<Core>) -> InterceptedService<ContentServer<Self>, Interceptor> {
        let service = ContentServer::new(Self(core)).max_decoding_message_size(MESSAGE_BYTES);
        InterceptedService::new(service, |request| {
            require(Role::Device, &request)?;
            Ok(request)
        })
    }
}

type Pieced = Result<v1::Supplied, Status>;

#[tonic::async_trait]
impl Content for Share {
    type FetchStream = ReceiverStream<Pieced>;
    async fn fetch(
        &self,
        request: Request<Streaming<v1::Wants>>,
    ) -> Result<Response<Self::FetchStream>, Status> {
        let peer = require(Role::Device, &request)?;
        let refused = |code, name: &str, why: String| to_status(code, Fault::new(name, why, true));
        let Ok(place) = self.0.content.callers.clone().try_acquire_owned() else {
            let why = format!("{CALLERS} devices are served already");
            return Err(refused(Code::ResourceExhausted, "overloaded", why));
        };
        let mut wants = request.into_inner();
        let first = tokio::time::timeout(FIRST, wants.message()).await;
        let silent = |_| Status::deadline_exceeded("it does not say what it wants");
        let first = first.map_err(silent)??.unwrap_or_default();
        let shared = lock(&self.0.content.shared).clone().filter(|shared| shared.is(&first));
        let Some(shared) = shared else {
            let why = "this device has no place with that model".to_owned();
            return Err(refused(Code::NotFound, "no_content", why));
        };
        tracing::debug!(%peer, "gives pieces of the model");
        let (supplied, stream) = mpsc::channel(AHEAD);
        self.0.tasks.spawn(async move {
            // The caller goes on without this device.
            if let Err(status) = serve(shared, wants, &supplied, place).await {
                tracing::debug!(%status, "gives no more pieces");
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Gives the wanted pieces, one by one, and reports which pieces are there.
async fn serve(
    shared: Shared,
    mut wants: Streaming<v1::Wants>,
    supplied: &mpsc::Sender<Pieced>,
    _place: OwnedSemaphorePermit,
) -> Result<(), Status> {
    let gone = |_| Status::cancelled("it hung up");
    let send = async |event| supplied.send(Ok(v1::Supplied { event: Some(event) })).await;
    let mut announced = None;
    let mut ticks = tokio::time::interval(TELL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            wanted = wants.message() => {
                let Some(wanted) = wanted? else { return Ok(()) };
                for piece in wanted.pieces {
                    let of = shared.clone();
                    let bytes = blocking(move || of.read(piece)).await;
                    let data = bytes.map_err(|error| Status::internal(error.to_string()))?.into();
                    send(Event::Piece(v1::Piece { piece, data })).await.map_err(gone)?;
                }
            }
            _ = ticks.tick() => {
                if announced != Some(shared.arrived()) {
                    let (arrived, bits) = shared.holding();
                    announced = Some(arrived);
                    send(Event::Holding(bits)).await.map_err(gone)?;
                }
            }
            () = supplied.closed() => return Ok(()),
        }
    }
}
