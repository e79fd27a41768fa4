//! Requests to a Hub: redirects, who gets the token, and what the headers of all answers say together.

use super::{
    address::{Address, AddressError, Origin},
    answer::{self, ContentRange},
    error::HubError,
};
use std::{
    io::{self, Read},
    sync::Arc,
    time::{Duration, SystemTime},
};
use ureq::{
    Agent, Body, BodyReader,
    http::{HeaderMap, HeaderValue, Response, StatusCode, header},
    tls::{Certificate, RootCerts, TlsConfig},
};

/// The most redirects of a request, about as many as browsers follow; the Hub has two at most.
const MAX_REDIRECTS: usize = 10;
/// The most bytes that are read of an unwanted answer, so that its connection can be used again.
const MAX_DRAINED: u64 = 64 << 10;

/// How long a Hub is waited for, and how often it is asked again.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// The longest wait for a connection.
    pub connect: Duration,
    /// The longest wait for the next byte of an answer.
    pub silence: Duration,
    /// The most retries in a row that bring nothing.
    pub retries: u32,
    /// The pause before the first retry; it doubles with each.
    pub pause: Duration,
    /// The longest that pauses may take together, those that the Hub asks for among them; beyond it the download fails.
    pub longest: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(30),
            silence: Duration::from_secs(60),
            retries: 5,
            pause: Duration::from_millis(500),
            longest: Duration::from_secs(60),
        }
    }
}

/// An HTTP client for one Hub, and for the servers that it redirects to.
pub struct Web {
    agent: Agent,
    endpoint: Address,
    /// The header with the token, which goes to the endpoint and to no other server.
    authorization: Option<HeaderValue>,
    patience: Patience,
}

/// The answer to a request, wherever redirects led.
pub(super) struct WebResponse {
    /// The server that gave it.
    pub(super) from: Origin,
    pub(super) status: u16,
    pub(super) about: FileHeaders,
    /// The `Content-Range` of the answer, if it has one.
    pub(super) range: Option<ContentRange>,
    pub(super) length: Option<u64>,
    body: BodyReader<'static>,
    silence: Duration,
}

/// The version and the size of a file, as far as the answers to one request tell them. Some Hubs do so with the
/// redirect to the file, some after it.
#[derive(Default)]
pub(super) struct FileHeaders {
    pub(super) version: Option<String>,
    pub(super) size: Option<u64>,
}

impl Web {
    /// A client for the Hub at `endpoint`, with the proxies that the environment names and the certificate authorities
    /// that this machine trusts.
    ///
    /// # Errors
    /// When the endpoint is no address, the token is not valid, or certificates cannot be read.
    pub fn new(endpoint: &str, token: Option<&str>, patience: Patience) -> Result<Self, HubError> {
        let endpoint =
            Address::endpoint(endpoint).map_err(|problem| HubError::Endpoint { problem })?;
        let secret = |token: &str| {
            let mut value = HeaderValue::try_from(format!("Bearer {token}")).ok()?;
            value.set_sensitive(true);
            Some(value)
        };
        let authorization = match token {
            Some(token) => Some(secret(token).ok_or(HubError::Token)?),
            None => None,
        };
        let config = Agent::config_builder()
            // Redirects are followed here, where the token can be kept back.
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("galaxy/", env!("CARGO_PKG_VERSION")))
            // Of compressed contents neither ranges nor lengths are those of the file.
            .accept_encoding("identity")
            .timeout_resolve(Some(patience.connect))
            .timeout_connect(Some(patience.connect))
            .timeout_recv_response(Some(patience.silence))
            .timeout_per_read(Some(patience.silence))
            .timeout_per_write(Some(patience.silence))
            .tls_config(TlsConfig::builder().root_certs(authorities()?).build())
            .build();
        Ok(Self { agent: config.into(), endpoint, authorization, patience })
    }

    /// Scheme, host and port of the Hub.
    pub fn origin(&self) -> Origin {
        self.endpoint.origin()
    }

    /// How long the Hub is waited for.
    pub(super) fn patience(&self) -> Patience {
        self.patience
    }

    /// Asks the endpoint for what lies at `path`, from byte `range.0` to `range.1`, both included.
    /// Answers of another status than success are errors.
    pub(super) fn get(
        &self,
        path: &str,
        range: Option<(u64, Option<u64>)>,
    ) -> Result<WebResponse, HubError> {
        let mut address =
            self.endpoint.below(path).map_err(|problem| HubError::Endpoint { problem })?;
        let mut authorization = self.authorization.as_ref();
        let mut said = FileHeaders::default();
        for _ in 0..=MAX_REDIRECTS {
            let from = address.origin();
            // Whoever is somewhere else on the way chooses the rest of it.
            authorization = authorization.filter(|_| from == self.endpoint.origin());
            let answer = self
                .ask(&address, authorization, range)
                .map_err(|error| self.failed(&address, error))?;
            said.hear(answer.headers());
            let Some(location) = redirect(&answer) else {
                return self.finish(from, answer, said);
            };
            let next = follow(&address, location)
                .map_err(|problem| HubError::Redirect { from, problem })?;
            let body = answer.into_body();
            drain(body.content_length(), body.into_reader());
            address = next;
        }
        let problem = format!("there are more than {MAX_REDIRECTS} redirects");
        Err(HubError::Redirect { from: address.origin(), problem })
    }

    fn ask(
        &self,
        address: &Address,
        authorization: Option<&HeaderValue>,
        range: Option<(u64, Option<u64>)>,
    ) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(address.uri());
        if let Some(value) = authorization {
            request = request.header(header::AUTHORIZATION, value);
        }
        if let Some((from, to)) = range {
            let to = to.map_or_else(String::new, |to| to.to_string());
            request = request.header(header::RANGE, format!("bytes={from}-{to}"));
        }
        request.call()
    }

    /// Makes a [`WebResponse`] of a response that is no redirect, or an error of its status.
    fn finish(
        &self,
        from: Origin,
        answer: Response<Body>,
        mut about: FileHeaders,
    ) -> Result<WebResponse, HubError> {
        let status = answer.status().as_u16();
        let headers = answer.headers();
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let range = text("content-range").and_then(ContentRange::parse);
        let length = text("content-length").and_then(answer::number);
        // There is no first byte of an empty file to give.
        let empty = status == 416 && range.is_some_and(|range| range.total == Some(0));
        if matches!(status, 200 | 206) || empty {
            let etag = headers.get(header::ETAG).map(HeaderValue::as_bytes);
            about.version = about.version.or_else(|| answer::version(etag?));
            about.size = about.size.or_else(|| match status {
                200 => length,
                _ => range?.total,
            });
            let (body, silence) = (answer.into_body().into_reader(), self.patience.silence);
            return Ok(WebResponse { from, status, about, range, length, body, silence });
        }
        let words = |name: &str| headers.get(name).map(|value| answer::words(value.as_bytes()));
        let said = words("x-error-message").filter(|words| !words.is_empty());
        Err(HubError::Status {
            status,
            code: words("x-error-code").unwrap_or_default(),
            words: said.map_or_else(String::new, |said| format!(": {said}")),
            wait: answer::wait(text("retry-after"), text("ratelimit"), SystemTime::now()),
            from,
        })
    }

    /// The error of a failed exchange; it names the proxy between, if there is one.
    fn failed(&self, address: &Address, error: ureq::Error) -> HubError {
        let mut failed = HubError::of(address.origin(), error, self.patience.silence);
        let proxy = self.agent.config().proxy();
        if let (HubError::Network { why, .. }, Some(proxy)) = (&mut failed, proxy)
            && !proxy.is_no_proxy(address.uri())
        {
            *why = format!("{why}, by the proxy {}:{}", proxy.host(), proxy.port());
        }
        failed
    }
}

impl WebResponse {
    /// Reads more of the body; returns 0 at its end.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, HubError> {
        loop {
            match self.body.read(into) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(HubError::of(self.from.clone(), error.into(), self.silence));
                }
                Ok(count) => return Ok(count),
            }
        }
    }

    /// Reads the whole body, of at most `limit` bytes.
    pub(super) fn whole(&mut self, limit: usize) -> Result<Vec<u8>, HubError> {
        let (mut all, mut piece) = (Vec::new(), vec![0; 16 << 10]);
        loop {
            match self.read(&mut piece)? {
                0 => return Ok(all),
                count if all.len() + count > limit => {
                    let problem = format!("it is longer than {limit} bytes");
                    return Err(HubError::Answer { from: self.from.clone(), problem });
                }
                count => all.extend_from_slice(&piece[..count]),
            }
        }
    }

    /// Gives up the rest of the body; a short one is read, so that its connection can be used again.
    pub(super) fn leave(self) {
        drain(self.length, self.body);
    }
}

impl FileHeaders {
    /// Takes the version and the size that headers give of a linked file, unless an earlier answer gave them: the Hub
    /// knows digests, and the server that stores the bytes for it does not.
    fn hear(&mut self, headers: &HeaderMap) {
        let version = |name: &str| answer::version(headers.get(name)?.as_bytes());
        let size = |name: &str| answer::number(headers.get(name)?.to_str().ok()?);
        self.version = self.version.take().or_else(|| version("x-linked-etag"));
        self.size = self.size.or_else(|| size("x-linked-size"));
    }
}

/// The location that an answer redirects to, if it does.
fn redirect(answer: &Response<Body>) -> Option<&HeaderValue> {
    use StatusCode as S;
    let sends = [
        S::MOVED_PERMANENTLY,
        S::FOUND,
        S::SEE_OTHER,
        S::TEMPORARY_REDIRECT,
        S::PERMANENT_REDIRECT,
    ];
    answer.headers().get(header::LOCATION).filter(|_| sends.contains(&answer.status()))
}

fn follow(from: &Address, location: &HeaderValue) -> Result<Address, String> {
    let next = from.redirect(location.as_bytes()).map_err(|error| match error {
        AddressError::Form => "its address cannot be parsed".to_owned(),
        other => other.to_string(),
    })?;
    match from.is_secure() && !next.is_secure() {
        true => Err(format!("from https to {}", next.origin())),
        false => Ok(next),
    }
}

/// Reads what is left of an answer, if it is short, so that its connection can be used again.
fn drain(length: Option<u64>, mut body: BodyReader<'_>) {
    if length.is_some_and(|length| length <= MAX_DRAINED) {
        // A connection that breaks off is not used again.
        let _ = io::copy(&mut body, &mut io::sink());
    }
}

/// The certificate authorities of this machine, or of SSL_CERT_FILE and SSL_CERT_DIR: a mirror inside a network may
/// have one of its own. A machine that has none gets the built-in ones.
fn authorities() -> Result<RootCerts, HubError> {
    let found = rustls_native_certs::load_native_certs();
    let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"];
    if found.certs.is_empty() {
        let Some(name) = named.iter().find(|name| std::env::var_os(name).is_some()) else {
            return Ok(RootCerts::WebPki);
        };
        let why = found.errors.first().map_or_else(String::new, |error| format!(" ({error})"));
        return Err(HubError::Authorities { problem: format!("{name} names none{why}") });
    }
    let certs = found.certs.iter().map(|cert| Certificate::from_der(cert).to_owned());
    Ok(RootCerts::Specific(Arc::new(certs.collect())))
}
