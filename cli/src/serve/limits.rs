//! Limits on HTTP requests: places, bytes and time.
//!
//! An idle connection stands in a lobby, where the oldest of the busiest address goes for each that comes. One whose
//! request is being answered does not stand there; the number of these is bounded.

use axum::{body::Body, http, response::IntoResponse};
use galaxy_cli::openai::error::ApiError;
use galaxy_proto::door::Stay;
use http::{Request, Response, StatusCode, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};
use tower::Service;

/// The most requests that are answered at one time.
const REQUESTS: usize = 256;
/// The most bytes of all requests that are answered at one time: as much as a coordinator grants one client.
const BYTES: usize = 256_000_000;
/// The most bytes of one request; a request that does not give its length takes as much room.
pub const MAX_BYTES: usize = 16 << 20;
/// How long a request may pause while it comes.
const PAUSE: Duration = Duration::from_secs(10);
/// How long all of a request may take to come.
const WHOLE: Duration = Duration::from_secs(60);

/// The room that all connections share.
#[derive(Clone)]
pub struct Limits {
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests: Arc::new(Semaphore::new(REQUESTS)),
            bytes: Arc::new(Semaphore::new(BYTES)),
        }
    }
}

impl Limits {
    /// Takes room for a request, if there is enough.
    fn take(&self, request: &Request<Incoming>) -> Option<[OwnedSemaphorePermit; 2]> {
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        let length = match (length, request.body().is_end_stream()) {
            (_, true) => 0,
            (length, false) => length.unwrap_or(MAX_BYTES).min(MAX_BYTES),
        };
        let requests = self.requests.clone().try_acquire_owned().ok()?;
        let bytes = self.bytes.clone().try_acquire_many_owned(u32::try_from(length).ok()?).ok()?;
        Some([requests, bytes])
    }
}

/// The service of one connection, within the limits.
#[derive(Clone)]
pub struct Limited<S> {
    inner: S,
    limits: Limits,
    stay: Arc<Stay>,
}

impl<S> Limited<S> {
    /// The service of a connection that is still idle.
    pub fn new(inner: S, limits: Limits, stay: Arc<Stay>) -> Self {
        Self { inner, limits, stay }
    }
}

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<S> hyper::service::Service<Request<Incoming>> for Limited<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: Request<Incoming>) -> Answering {
        let Some(room) = self.limits.take(&request) else {
            let why = "as many requests are being answered as may be: try again later";
            let full = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", why);
            return Box::pin(async move { Ok(full.into_response()) });
        };
        self.stay.away();
        let (parts, body) = request.into_parts();
        let (pause, whole) = (Box::pin(sleep(PAUSE)), Box::pin(sleep(WHOLE)));
        let request = Request::from_parts(parts, Body::new(IncomingBody { body, pause, whole }));
        let (mut inner, back) = (self.inner.clone(), Back(self.stay.clone()));
        Box::pin(async move {
            std::future::poll_fn(|cx| inner.poll_ready(cx)).await?;
            let (mut parts, body) = inner.call(request).await?.into_parts();
            // Who may not ask does not stay.
            if matches!(parts.status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
                let close = http::HeaderValue::from_static("close");
                parts.headers.insert(header::CONNECTION, close);
            }
            let going = OutgoingBody { body, _room: room, _back: back };
            Ok(Response::from_parts(parts, Body::new(going)))
        })
    }
}

/// Puts a connection back into the lobby once its answer was sent, or given up.
struct Back(Arc<Stay>);

impl Drop for Back {
    fn drop(&mut self) {
        self.0.back();
    }
}

/// The body of a request on its way to us, with its time limits.
struct IncomingBody {
    body: Incoming,
    pause: Pin<Box<Sleep>>,
    whole: Pin<Box<Sleep>>,
}

impl HttpBody for IncomingBody {
    type Data = axum::body::Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(frame) => {
                this.pause.as_mut().reset(Instant::now() + PAUSE);
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => {
                let late = this.pause.as_mut().poll(cx).is_ready()
                    || this.whole.as_mut().poll(cx).is_ready();
                match late {
                    true => Poll::Ready(Some(Err("the request does not come to its end".into()))),
                    false => Poll::Pending,
                }
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

/// The body of an answer on its way to the program, with the room that its request takes.
struct OutgoingBody {
    body: Body,
    _room: [OwnedSemaphorePermit; 2],
    _back: Back,
}

impl HttpBody for OutgoingBody {
    type Data = axum::body::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
