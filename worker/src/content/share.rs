//! Pieces for other devices: of the model that this one has a place with, or is about to.

use super::data::Data;
use crate::core::Core;
use crate::tasks::{blocking, lock};
use galaxy_model::{ModelDir, ModelError, pieces::Pieces};
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

/// The most devices that are served at one time; others go to the coordinator.
pub(crate) const CALLERS: usize = 16;
/// Pieces that may wait for the network, for each of them.
const AHEAD: usize = 2;
/// The most bytes of a message: 256 numbers of pieces.
const MESSAGE_BYTES: usize = 16 << 10;
/// How long a device that calls may take to say what it wants.
const FIRST: Duration = Duration::from_secs(5);
/// The time between two checks for more pieces.
const TELL: Duration = Duration::from_millis(250);

/// The pieces that this device can give to others.
#[derive(Clone)]
pub(crate) enum Shared {
    /// The data that has come into the cache.
    Cached(Arc<Data>),
    /// A model directory of this device. Each piece is compared with the manifest before it is given, and again by
    /// the device that takes it.
    Own(Arc<ModelDir>, Arc<Pieces>),
}

impl Shared {
    /// The pieces of a model directory of this device.
    pub(crate) fn own(model: Arc<ModelDir>) -> Result<Self, ModelError> {
        let pieces = Arc::new(model.pieces()?);
        Ok(Self::Own(model, pieces))
    }

    fn is(&self, wants: &v1::Wants) -> bool {
        match self {
            Self::Cached(data) => data.content.0[..] == wants.content[..],
            Self::Own(model, _) => model.files_fingerprint() == wants.fingerprint,
        }
    }

    /// A bit for each piece that is there, and a number that grows when there are more.
    fn holding(&self) -> (u64, Vec<u8>) {
        match self {
            Self::Cached(data) => data.holding(),
            Self::Own(_, pieces) => (0, vec![0xff; pieces.count().div_ceil(8) as usize]),
        }
    }
    fn arrived(&self) -> u64 {
        match self {
            Self::Cached(data) => data.arrived(),
            Self::Own(..) => 0,
        }
    }

    /// The bytes of a piece; empty if it is not there, cannot be read or has a wrong digest.
    fn read(&self, piece: u32) -> Vec<u8> {
        match self {
            Self::Cached(data) => data.read(piece).ok().flatten().unwrap_or_default(),
            Self::Own(model, pieces) => {
                let mut bytes = Vec::new();
                match model.read_piece(pieces, piece, &mut bytes) {
                    Ok(()) => bytes,
                    Err(error) => {
                        tracing::debug!(%error, "no piece is given");
                        Vec::new()
                    }
                }
            }
        }
    }
}

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
    let mut told = None;
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
                if told != Some(shared.arrived()) {
                    let (arrived, bits) = shared.holding();
                    told = Some(arrived);
                    send(Event::Holding(bits)).await.map_err(gone)?;
                }
            }
            () = supplied.closed() => return Ok(()),
        }
    }
}
