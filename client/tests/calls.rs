//! The SDK against a coordinator that says what the test wants, over real gRPC on loopback.
#![allow(clippy::unwrap_used)]

use galaxy_client::{
    Client, ClientError, GenerateOptions, Generated, Output, RetryPolicy, SamplingParams, TooLong,
};
use galaxy_common::RequestId;
use galaxy_proto::{
    fault::{Fault, to_status},
    v1::{
        self,
        galaxy_server::{Galaxy, GalaxyServer},
        run_event::Event,
    },
};
use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::sync::{Notify, oneshot};
use tokio_stream::StreamExt;
use tonic::{Code, Request, Response, Status, transport::server::TcpIncoming};

/// Fails as often as it has faults, then answers; keeps what it was asked.
#[derive(Clone, Default)]
struct Scripted {
    faults: Arc<Mutex<VecDeque<Status>>>,
    sizes: Arc<Mutex<Vec<usize>>>,
    timeouts: Arc<Mutex<Vec<Option<String>>>>,
    /// After how many tokens texts break off, and with which status.
    breaks: Arc<Mutex<VecDeque<(usize, Status)>>>,
    /// Whether texts begin from their beginning, whatever is asked.
    forgets: bool,
    /// Makes embed wait for ever; notifies when it begins, and when its caller goes away.
    stuck: Option<Arc<(Notify, Notify)>>,
}

impl Scripted {
    fn failing(faults: impl IntoIterator<Item = Status>) -> Self {
        Self { faults: Arc::new(Mutex::new(faults.into_iter().collect())), ..Self::default() }
    }
    fn next(&self, size: usize) -> Result<(), Status> {
        self.sizes.lock().unwrap().push(size);
        self.faults.lock().unwrap().pop_front().map_or(Ok(()), Err)
    }
}

fn report() -> Option<v1::RequestReport> {
    Some(v1::RequestReport { request: 7, tokens: 3, ..Default::default() })
}

struct OnDrop(Arc<(Notify, Notify)>);
impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.1.notify_one();
    }
}

#[tonic::async_trait]
impl Galaxy for Scripted {
    async fn embed(
        &self,
        request: Request<v1::EmbedRequest>,
    ) -> Result<Response<v1::EmbedReply>, Status> {
        let timeout = request.metadata().get("grpc-timeout");
        let timeout = timeout.map(|t| t.to_str().unwrap().to_owned());
        self.timeouts.lock().unwrap().push(timeout);
        if let Some(stuck) = &self.stuck {
            let _gone = OnDrop(stuck.clone());
            stuck.0.notify_one();
            std::future::pending::<()>().await;
        }
        let texts = request.into_inner().texts;
        self.next(texts.len())?;
        // Each vector says how long its text is.
        let vectors = texts.iter().flat_map(|t| [t.len() as f32, 1.0]);
        Ok(Response::new(v1::EmbedReply {
            width: 2,
            vectors: vectors.flat_map(f32::to_le_bytes).collect(),
            report: report(),
        }))
    }
    async fn classify(
        &self,
        request: Request<v1::ClassifyRequest>,
    ) -> Result<Response<v1::ClassifyReply>, Status> {
        self.next(request.into_inner().texts.len())?;
        // Half of what two labels need.
        Ok(Response::new(v1::ClassifyReply {
            labels: vec!["bad".into(), "good".into()],
            logits: vec![0; 4],
            report: report(),
            probabilities: vec![0; 8],
        }))
    }
    async fn rerank(
        &self,
        request: Request<v1::RerankRequest>,
    ) -> Result<Response<v1::RerankReply>, Status> {
        let texts = request.into_inner().texts;
        self.next(texts.len())?;
        // The longer, the better.
        let scores = texts.iter().flat_map(|text| (text.len() as f32).to_le_bytes()).collect();
        Ok(Response::new(v1::RerankReply { scores, report: report() }))
    }
    type RunStream = tokio_stream::Iter<std::vec::IntoIter<Result<v1::RunEvent, Status>>>;
    async fn run(
        &self,
        request: Request<v1::RunRequest>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let request = request.into_inner();
        self.next(request.sequences.len())?;
        let mut events = Vec::new();
        for (sequence, ids) in (0..).zip(request.sequences) {
            let shape = vec![ids.ids.len() as u32, 1];
            events.push(Event::Tensor(v1::TensorHead { sequence, shape }));
            for id in ids.ids {
                events.push(Event::Data((id as f32).to_le_bytes().to_vec()));
            }
        }
        events.extend(report().map(Event::Report));
        let events: Vec<_> =
            events.into_iter().map(|e| Ok(v1::RunEvent { event: Some(e) })).collect();
        Ok(Response::new(tokio_stream::iter(events)))
    }
    type GenerateStream = tokio_stream::Iter<std::vec::IntoIter<Result<v1::GenerateEvent, Status>>>;
    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        use v1::generate_event::Event;
        assert!(request.metadata().get("grpc-timeout").is_none(), "a text may take its time");
        let v1::GenerateRequest { ids, max_tokens, sampling, generated, .. } = request.into_inner();
        self.next(ids.len())?;
        let seed = sampling.unwrap().seed.unwrap_or(77);
        let behind = if self.forgets { 0 } else { generated.len() };
        let begun = v1::GenerateBegun {
            request: 3,
            prompt_tokens: 2,
            seed,
            text: true,
            generated: behind as u32,
        };
        let mut events = vec![Event::Begun(begun)];
        for token in ids.into_iter().skip(behind) {
            let text = format!(" {token}");
            events.push(Event::Token(v1::GeneratedToken { token, text, ..Default::default() }));
        }
        let mut events: Vec<_> =
            events.into_iter().map(|e| Ok(v1::GenerateEvent { event: Some(e) })).collect();
        // It is gone behind so many tokens.
        if let Some((tokens, fault)) = self.breaks.lock().unwrap().pop_front() {
            events.truncate(1 + tokens);
            events.push(Err(fault));
        } else if max_tokens > 0 {
            let (finish, text) = ("length".to_owned(), ".".to_owned());
            let done = Event::Done(v1::GenerateDone { finish, text, report: report() });
            events.push(Ok(v1::GenerateEvent { event: Some(done) }));
        }
        Ok(Response::new(tokio_stream::iter(events)))
    }
    async fn status(
        &self,
        _: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusReply>, Status> {
        Ok(Response::new(v1::StatusReply { state: "ready".into(), ..Default::default() }))
    }
    async fn trace(
        &self,
        request: Request<v1::TraceRequest>,
    ) -> Result<Response<v1::TraceReply>, Status> {
        let chrome_json = request.into_inner().request.to_string();
        Ok(Response::new(v1::TraceReply { chrome_json, devices: Vec::new() }))
    }
    async fn drain(
        &self,
        request: Request<v1::GalaxyDrainRequest>,
    ) -> Result<Response<v1::GalaxyDrainReply>, Status> {
        self.next(usize::from(request.into_inner().off))?;
        Ok(Response::new(v1::GalaxyDrainReply {}))
    }
}

/// A coordinator; it ends with the sender.
async fn serve(service: Scripted) -> (SocketAddr, oneshot::Sender<()>) {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(GalaxyServer::new(service))
            .serve_with_incoming_shutdown(incoming, async { drop(stopped.await) }),
    );
    (address, stop)
}

/// A policy whose pauses are too short to wait for.
fn quick() -> RetryPolicy {
    RetryPolicy {
        attempts: 3,
        first: Duration::from_micros(1),
        longest: Duration::from_micros(4),
        device_faults: false,
    }
}

async fn client(address: SocketAddr) -> Client {
    Client::builder().address(address.to_string()).retry(quick()).connect().await.unwrap()
}

fn overloaded() -> Status {
    to_status(Code::ResourceExhausted, Fault::new("overloaded", "the queue of 64 is full", true))
}
fn lost() -> Status {
    to_status(Code::Unavailable, Fault::new("device_lost", "it went silent", true).of("pi-2"))
}
fn too_long() -> Status {
    to_status(Code::InvalidArgument, Fault::new("text_too_long", "text 0 is too long", false))
}

#[tokio::test]
async fn reranked_texts_are_ordered_across_parts() {
    let service = Scripted::default();
    let (address, _stop) = serve(service.clone()).await;
    let texts: Vec<String> = (0..1500).map(|i| "x".repeat(1 + i * 7 % 1500)).collect();
    let answer = client(address).await.rerank("q", &texts, TooLong::Refuse).await.unwrap();
    assert_eq!(*service.sizes.lock().unwrap(), [1024, 476]);
    assert!(answer.ranked.iter().all(|r| r.score == texts[r.index].len() as f32));
    assert!(answer.ranked.is_sorted_by(|a, b| a.score >= b.score));
}

#[tokio::test]
async fn retryable_faults_are_retried() {
    let service = Scripted::failing([overloaded(), overloaded()]);
    let (address, _stop) = serve(service.clone()).await;
    let answer = client(address).await.embed(&["a", "abc"]).await.unwrap();
    assert_eq!(answer.vectors, [[1.0, 1.0], [3.0, 1.0]]);
    assert_eq!(answer.report.requests, [RequestId(7)]);
    assert_eq!(*service.sizes.lock().unwrap(), [2, 2, 2]);
    // Every attempt carried the time that was left.
    assert!(service.timeouts.lock().unwrap().iter().all(Option::is_some));
}

#[tokio::test]
async fn attempts_are_bounded() {
    let service = Scripted::failing([overloaded(), overloaded(), overloaded(), overloaded()]);
    let (address, _stop) = serve(service.clone()).await;
    let error = client(address).await.embed(&["a"]).await.unwrap_err();
    assert_eq!((error.code(), error.retryable(), error.device()), ("overloaded", true, None));
    assert_eq!(service.sizes.lock().unwrap().len(), 3);
}

#[tokio::test]
async fn a_lost_device_fails_the_call_at_once_if_waiting_is_off() {
    let service = Scripted::failing([lost(), lost()]);
    let (address, _stop) = serve(service.clone()).await;
    let error = client(address).await.embed(&["a"]).await.unwrap_err();
    assert_eq!(
        (error.code(), error.retryable(), error.device()),
        ("device_lost", true, Some("pi-2"))
    );
    assert_eq!(service.sizes.lock().unwrap().len(), 1);
    let client = Client::builder().address(address.to_string()).connect().await.unwrap();
    client.embed(&["a"]).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_call_is_retried_until_its_deadline_and_returns_the_last_fault() {
    let service = Scripted::failing(std::iter::repeat_n((), 500).map(|()| lost()));
    let (address, _stop) = serve(service.clone()).await;
    let client = Client::builder().address(address.to_string()).connect().await.unwrap();
    let error = client.embed(&["a"]).await.unwrap_err();
    assert_eq!((error.code(), error.device()), ("device_lost", Some("pi-2")), "{error}");
    let asked = service.sizes.lock().unwrap().len();
    // 60 s, with pauses of 0.8 to 1.6 s.
    assert!((36..80).contains(&asked), "{asked}");
}

/// All items of a text of these tokens, whose coordinators break off at `breaks`.
async fn pieces(
    service: &Scripted,
    tokens: &[u32],
    breaks: &[(usize, Status)],
) -> Result<Vec<String>, ClientError> {
    service.breaks.lock().unwrap().extend(breaks.iter().cloned());
    let (address, _stop) = serve(service.clone()).await;
    let options = GenerateOptions { max_tokens: 9, ..GenerateOptions::default() };
    let mut text = client(address).await.generate(tokens.to_vec(), options).await?;
    let mut said = Vec::new();
    while let Some(piece) = text.next().await? {
        said.push(match piece {
            Generated::Token(token) => token.text,
            Generated::Done(done) => done.text + &done.finish,
        });
    }
    Ok(said)
}

#[tokio::test]
async fn a_broken_token_stream_resumes_after_the_received_tokens() {
    let gone = || Status::unavailable("it ended");
    let service = Scripted::default();
    let said = pieces(&service, &[5, 17, 9], &[(0, gone()), (1, gone()), (1, lost())]).await;
    let error = said.expect_err("a device, which this client does not wait for");
    assert_eq!(error.code(), "device_lost");
    let said = pieces(&service, &[5, 17, 9], &[(0, gone()), (1, gone()), (1, gone())]).await;
    assert_eq!(said.unwrap(), [" 5", " 17", " 9", ".length"]);
    // What the caller did wrong is not tried again.
    let said = pieces(&service, &[5, 17, 9], &[(2, too_long())]).await;
    assert_eq!(said.unwrap_err().code(), "text_too_long");
}

#[tokio::test]
async fn a_token_stream_without_an_end_is_retried_and_then_fails() {
    let service = Scripted::default();
    let (address, _stop) = serve(service.clone()).await;
    let options = |max_tokens| GenerateOptions { max_tokens, ..GenerateOptions::default() };
    let mut text = client(address).await.generate(vec![5, 17], options(0)).await.unwrap();
    for want in [5, 17] {
        let Some(Generated::Token(token)) = text.next().await.unwrap() else { panic!("a token") };
        assert_eq!(token.token, want);
    }
    let error = text.next().await.unwrap_err();
    assert_eq!((error.code(), error.retryable()), ("malformed_answer", true), "{error}");
    assert_eq!(*service.sizes.lock().unwrap(), [2; 3], "asked once, and twice again");
}

#[tokio::test]
async fn a_resumed_token_stream_that_starts_over_is_refused() {
    let service = Scripted { forgets: true, ..Scripted::default() };
    let gone = Status::unavailable("it ended");
    let error = pieces(&service, &[5, 17], &[(1, gone)]).await.unwrap_err();
    assert_eq!(error.code(), "malformed_answer", "{error}");
    assert!(error.to_string().contains("after the generated tokens"), "{error}");
}

#[tokio::test]
async fn permanent_faults_are_not_retried() {
    let service = Scripted::failing([too_long()]);
    let (address, _stop) = serve(service.clone()).await;
    let error = client(address).await.embed(&["a"]).await.unwrap_err();
    assert_eq!((error.code(), error.retryable()), ("text_too_long", false));
    assert_eq!(service.sizes.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn many_texts_are_sent_in_parts_and_answered_in_order() {
    let service = Scripted::default();
    let (address, _stop) = serve(service.clone()).await;
    let texts: Vec<String> = (0..2500).map(|i| "x".repeat(i % 7)).collect();
    let answer = client(address).await.embed_with(&texts, TooLong::Truncate).await.unwrap();
    assert_eq!(*service.sizes.lock().unwrap(), [1024, 1024, 452]);
    assert!(texts.iter().zip(&answer.vectors).all(|(t, v)| v[0] == t.len() as f32));
    assert_eq!(answer.report.tokens, 9);
    assert_eq!(answer.report.requests.len(), 3);
}

#[tokio::test]
async fn an_error_names_the_part_that_failed() {
    let service = Scripted::failing([]);
    let (address, _stop) = serve(service.clone()).await;
    let client = client(address).await;
    client.embed(&["warm"]).await.unwrap();
    service.faults.lock().unwrap().push_back(too_long());
    let error = client.embed(&vec!["x"; 1500]).await.unwrap_err();
    assert!(matches!(error, ClientError::Part { first: 0, count: 1024, .. }), "{error}");
}

#[tokio::test]
async fn raw_results_are_assembled_from_pieces() {
    let (address, _stop) = serve(Scripted::default()).await;
    let sequences = [vec![5, 17, 9], vec![3]];
    let answer = client(address).await.run(&sequences, Output::Hidden).await.unwrap();
    assert_eq!(answer.tensors[0].shape, [3, 1]);
    assert_eq!(answer.tensors[0].values, [5.0, 17.0, 9.0]);
    assert_eq!((answer.tensors[1].sequence, &answer.tensors[1].values[..]), (1, &[3.0][..]));
    let many = vec![[1u32]; 1030];
    let answer = client(address).await.run(&many, Output::Pooled).await.unwrap();
    assert!(answer.tensors.iter().map(|t| t.sequence).eq(0..1030));
}

#[tokio::test]
async fn generated_tokens_arrive_one_by_one() {
    let (address, _stop) = serve(Scripted::failing([overloaded()])).await;
    let client = client(address).await;
    let options = |max_tokens| GenerateOptions { max_tokens, ..GenerateOptions::default() };
    let text = client.generate(vec![5, 17], options(2)).await.unwrap();
    assert_eq!((text.request, text.prompt_tokens, text.seed), (RequestId(3), 2, 77));
    let parts: Vec<_> = text.into_stream().collect().await;
    let said: Vec<String> = parts
        .into_iter()
        .map(|part| match part.unwrap() {
            Generated::Token(token) => token.text,
            Generated::Done(done) => done.text + &done.finish,
        })
        .collect();
    assert_eq!(said, [" 5", " 17", ".length"]);
    let seeded = GenerateOptions {
        sampling: SamplingParams { seed: Some(4), ..SamplingParams::default() },
        ..options(0)
    };
    let mut text = client.generate(vec![5], seeded).await.unwrap();
    assert_eq!(text.seed, 4);
    assert!(matches!(text.next().await.unwrap(), Some(Generated::Token(_))));
    let error = text.next().await.unwrap_err();
    assert_eq!(error.code(), "malformed_answer", "{error}");
    assert!(text.next().await.unwrap().is_none());
}

#[tokio::test]
async fn a_malformed_answer_is_an_error() {
    let (address, _stop) = serve(Scripted::default()).await;
    let error = client(address).await.classify(&["fine"]).await.unwrap_err();
    assert_eq!(error.code(), "malformed_answer");
}

#[tokio::test]
async fn a_call_ends_at_its_deadline() {
    let stuck = Arc::new((Notify::new(), Notify::new()));
    let service = Scripted { stuck: Some(stuck.clone()), ..Scripted::default() };
    let (address, _stop) = serve(service).await;
    let client = client(address).await.with_timeout(Duration::from_millis(100));
    let error = client.embed(&["a"]).await.unwrap_err();
    assert_eq!(error.code(), "deadline", "{error}");
}

#[tokio::test]
async fn a_dropped_call_is_cancelled_at_the_coordinator() {
    let stuck = Arc::new((Notify::new(), Notify::new()));
    let service = Scripted { stuck: Some(stuck.clone()), ..Scripted::default() };
    let (address, _stop) = serve(service).await;
    let client = client(address).await;
    let call = tokio::spawn(async move { client.embed(&["a"]).await });
    stuck.0.notified().await;
    call.abort();
    stuck.1.notified().await;
}

#[tokio::test]
async fn status_trace_and_drain_calls_are_answered() {
    let (address, _stop) = serve(Scripted::default()).await;
    let client = client(address).await;
    assert_eq!(client.status().await.unwrap().state, "ready");
    assert_eq!(client.trace(None).await.unwrap().chrome_json, "0");
    assert_eq!(client.trace(Some(RequestId(9))).await.unwrap().chrome_json, "9");
    client.drain().await.unwrap();
    client.undrain().await.unwrap();
}

#[tokio::test]
async fn a_plain_connection_to_a_tls_coordinator_suggests_an_identity() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // Accepts as a TLS server does, and hangs up on what is no handshake.
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.readable().await;
        }
    });
    let client = Client::builder().address(address.to_string()).connect().await;
    let error = match client {
        Ok(client) => client.status().await.unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(error.code(), "connection_broken", "{error}");
    assert!(error.to_string().contains("identity"), "{error}");
}

#[tokio::test]
async fn an_unreachable_address_or_missing_identity_is_named() {
    // Bound and dropped: nobody listens on this port.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = Client::builder().address(address.to_string()).connect().await.unwrap_err();
    assert_eq!(error.code(), "connection_refused");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    let error = Client::builder().identity("no/such/keys").connect().await.unwrap_err();
    assert_eq!(error.code(), "identity");
    assert!(error.to_string().contains("no/such/keys"), "{error}");
}
