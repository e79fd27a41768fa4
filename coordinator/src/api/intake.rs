//! What stands before the service: it counts the bytes of requests against what their clients may
//! hold, before any of them is decoded, and ends requests that do not come to an end.

use super::fields::{Fields, shape};
use crate::{
    client_memory::{Caller, ClientMemory},
    error::RequestError,
    session::MAX_TEXTS,
};
use galaxy_proto::{
    door::{Peer, Sampled},
    fault::{Fault, to_status},
};
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Sleep, sleep};
use tonic::{
    Code, Status,
    body::Body,
    codegen::{Bytes, Service, http},
    server::NamedService,
};

/// How long a request may pause while it arrives.
const PAUSE: Duration = Duration::from_secs(10);
/// How long a whole request may take to arrive: 16 MiB over a link of 3 Mbit/s.
const WHOLE: Duration = Duration::from_secs(60);
/// Bytes of the header of a gRPC message: whether it is compressed, and its length.
const HEADER: usize = 5;
/// The most texts, lists and messages of a request: as many texts as are taken, with a list inside each, and some.
const MAX_FIELDS: usize = 2 * MAX_TEXTS + 256;
/// The most bytes of a request that asks for little.
const SMALL: u64 = 64 << 10;
/// The most bytes of a request to generate, which has a prompt.
const TEXT: u64 = 9 << 20;
/// The most bytes of any other request: 1024 texts of 16 kB.
pub(super) const MAX_REQUEST_BYTES: u64 = 16 << 20;

fn most(path: &str) -> u64 {
    match path {
        "/galaxy.v1.Galaxy/Status" | "/galaxy.v1.Galaxy/Trace" | "/galaxy.v1.Galaxy/Drain" => SMALL,
        "/galaxy.v1.Galaxy/Generate" => TEXT,
        path if path.starts_with("/galaxy.v1.Members/") => SMALL,
        _ => MAX_REQUEST_BYTES,
    }
}

/// A service whose requests are counted as they arrive.
#[derive(Clone)]
pub(super) struct Intake<S> {
    inner: S,
    memory: ClientMemory,
    refusals: Arc<Sampled>,
}

impl<S> Intake<S> {
    pub fn new(inner: S, memory: ClientMemory) -> Self {
        Self { inner, memory, refusals: Arc::default() }
    }
}

impl<S: NamedService> NamedService for Intake<S> {
    const NAME: &'static str = S::NAME;
}

type Answering<E> = Pin<Box<dyn Future<Output = Result<http::Response<Body>, E>> + Send>>;

impl<S, B> Service<http::Request<Body>> for Intake<S>
where
    S: Service<http::Request<Body>, Response = http::Response<B>, Error = Infallible>,
    S::Future: Send + 'static,
    B: HttpBody<Data = Bytes, Error = Status> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answering<Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let who = request.extensions().get::<Peer>().and_then(|peer| peer.identity.clone());
        let caller = self.memory.caller(who);
        let path = request.uri().path().to_owned();
        let (mut parts, body) = request.into_parts();
        parts.extensions.insert(caller.clone());
        let body = IncomingBody {
            body,
            caller: caller.clone(),
            fields: Fields::new(shape(&path)),
            most: most(&path),
            header: Vec::with_capacity(HEADER),
            charged: 0,
            too_many: false,
            pause: Box::pin(sleep(PAUSE)),
            whole: Box::pin(sleep(WHOLE)),
            refusals: self.refusals.clone(),
        };
        let answering = self.inner.call(http::Request::from_parts(parts, Body::new(body)));
        Box::pin(async move {
            let (parts, body) = answering.await?.into_parts();
            // What is not taken yet is held.
            let going = OutgoingBody { body: Body::new(body), _caller: caller };
            Ok(http::Response::from_parts(parts, Body::new(going)))
        })
    }
}

/// A request that is arriving.
struct IncomingBody {
    body: Body,
    caller: Caller,
    fields: Fields,
    most: u64,
    header: Vec<u8>,
    /// Bytes of its fields beyond those on the wire that are counted already.
    charged: u64,
    /// Whether it has more texts than are taken: then it is read to its end only to say how many, and not kept.
    too_many: bool,
    pause: Pin<Box<Sleep>>,
    whole: Pin<Box<Sleep>>,
    refusals: Arc<Sampled>,
}

impl IncomingBody {
    /// Counts bytes that came, and takes memory of the caller for them.
    fn count(&mut self, mut bytes: &[u8]) -> Result<(), RequestError> {
        let missing = HEADER - self.header.len();
        if missing > 0 {
            let (header, rest) = bytes.split_at(missing.min(bytes.len()));
            self.header.extend_from_slice(header);
            bytes = rest;
            if self.header.len() < HEADER {
                return Ok(());
            }
            let length = u32::from_be_bytes([
                self.header[1],
                self.header[2],
                self.header[3],
                self.header[4],
            ]);
            let length = u64::from(length);
            if length > self.most {
                return Err(RequestError::RequestTooLarge { bytes: length, limit: self.most });
            }
            // As it comes, and as it is decoded.
            self.caller.grow(2 * length)?;
        }
        self.fields.read(bytes);
        self.too_many |= self.fields.count() > MAX_FIELDS;
        if self.too_many {
            return Ok(());
        }
        self.caller.grow(self.fields.extra() - self.charged)?;
        self.charged = self.fields.extra();
        Ok(())
    }

    fn refuse(&self, status: Status) -> Status {
        if let Some(left_out) = self.refusals.take() {
            let who = self.caller.who();
            tracing::warn!(?who, why = status.message(), left_out, "refused a request");
        }
        status
    }
}

impl HttpBody for IncomingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
                let late = this.pause.as_mut().poll(cx).is_ready()
                    || this.whole.as_mut().poll(cx).is_ready();
                if !late {
                    return Poll::Pending;
                }
                let why = format!(
                    "the request did not come to its end: it may pause for {PAUSE:?} and take {WHOLE:?}"
                );
                let fault = Fault::new("deadline", why, true);
                return Poll::Ready(Some(Err(
                    this.refuse(to_status(Code::DeadlineExceeded, fault))
                )));
            };
            this.pause.as_mut().reset(tokio::time::Instant::now() + PAUSE);
            if let Some(Ok(frame)) = &frame
                && let Some(data) = frame.data_ref()
                && let Err(error) = this.count(data)
            {
                return Poll::Ready(Some(Err(this.refuse(error.into()))));
            }
            if !this.too_many {
                return Poll::Ready(frame);
            }
            if !matches!(frame, Some(Ok(_))) || this.body.is_end_stream() {
                let texts = this.fields.count();
                let error = RequestError::TooManyTexts { texts, limit: MAX_TEXTS };
                return Poll::Ready(Some(Err(this.refuse(error.into()))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer on its way to the client; the request's memory is given back when this is dropped.
struct OutgoingBody {
    body: Body,
    _caller: Caller,
}

impl HttpBody for OutgoingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
