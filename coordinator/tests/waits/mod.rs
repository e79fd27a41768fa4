//! Requests that wait for a cluster, that are run again, and sequences that resume behind tokens of another request.

use super::{
    LIMITS,
    around::{Around, Before},
    golden, plan, plan_with,
};
use galaxy_common::{
    Cache, CacheType, DeviceName, GenerateOptions, GeneratedToken, SamplingParams, Wanted,
    plan::Strategy,
};
use galaxy_coord::{
    Input, Limits, LocalFleet, RequestError, RunOutput, Session,
    fleet::Readiness,
    session::{Finish, GenerateEvent},
};
use galaxy_model::ModelDir;
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::sync::mpsc;

/// Fails so many programs as if a device was lost.
struct Losses(AtomicUsize);

impl Before for Losses {
    async fn program(&self) -> Result<(), RequestError> {
        let less = |losses: usize| losses.checked_sub(1);
        match self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) {
            Err(_) => Ok(()),
            Ok(_) => {
                let device = DeviceName::new("dev-0").unwrap();
                Err(RequestError::DeviceLost { device, reason: "unplugged".to_owned() })
            }
        }
    }
}

fn starting(devices: LocalFleet) -> Arc<Around<Losses>> {
    Arc::new(Around::starting(devices, Losses(AtomicUsize::new(0))))
}

async fn hidden(session: &Session, timeout: Option<Duration>) -> Result<Vec<f32>, RequestError> {
    let output = RunOutput::Wanted(Wanted::Hidden);
    let done = session.run(vec![Input::Tokens(vec![5, 6, 7])], output, timeout).await?;
    Ok(done.tensors[0].values.clone())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_the_cluster_and_is_run_again_after_device_losses() {
    let model = Arc::new(ModelDir::open(&golden()).unwrap());
    let open = || {
        let plan = plan(&model, &[1.0, 1.0], Strategy::Galaxy);
        let fleet = starting(LocalFleet::open(model.clone(), plan).unwrap());
        (fleet.clone(), Session::new(model.clone(), fleet, LIMITS))
    };
    let (fleet, session) = open();
    fleet.make_ready();
    let want = hidden(&session, None).await.unwrap();
    let (fleet, session) = open();
    fleet.before.0.store(3, Ordering::SeqCst);
    let waiting = tokio::spawn(async move { hidden(&session, None).await });
    while fleet.readiness.receiver_count() == 0 {
        tokio::task::yield_now().await;
    }
    assert!(!waiting.is_finished());
    fleet.make_ready();
    assert_eq!(waiting.await.unwrap().unwrap(), want);
    assert_eq!(fleet.before.0.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn waiting_requests_fail_with_no_plan_when_no_plan_is_possible() {
    let model = Arc::new(ModelDir::open(&golden()).unwrap());
    let devices = LocalFleet::open(model.clone(), plan(&model, &[1.0], Strategy::Local)).unwrap();
    let fleet = starting(devices);
    let session = Session::new(model, fleet.clone(), LIMITS);
    let waiting = {
        let session = session.clone();
        tokio::spawn(async move { hidden(&session, None).await })
    };
    while fleet.readiness.receiver_count() == 0 {
        tokio::task::yield_now().await;
    }
    let (device, reason) = (None, "12 MB are missing".to_owned());
    fleet.readiness.send_replace(Readiness::Waiting { device, reason, planless: true });
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!((error.code(), error.retryable()), ("no_plan", false));
    assert!(error.to_string().contains("12 MB are missing"), "{error}");
}

/// What a client received of a sequence.
struct Heard {
    tokens: Vec<GeneratedToken>,
    /// The text that was held back.
    rest: String,
    finish: Finish,
    /// How many tokens the sequence resumed with.
    behind: u32,
}

async fn heard(
    session: &Session,
    prompt: &str,
    options: &GenerateOptions,
) -> Result<Heard, RequestError> {
    let (listener, mut said) = mpsc::channel(1000);
    let prompt = prompt.into();
    session.generate(prompt, options.clone(), None, listener).await;
    let (mut tokens, mut behind) = (Vec::new(), 0);
    loop {
        match said.recv().await.unwrap()? {
            GenerateEvent::Waiting { .. } => {}
            GenerateEvent::Begun { generated, .. } => behind = generated,
            GenerateEvent::Token(token) => tokens.push(token),
            GenerateEvent::Done { finish, text: rest, .. } => {
                return Ok(Heard { tokens, rest, finish, behind });
            }
        }
    }
}

/// The demo's decoder, on one device.
fn speaker(limits: Limits) -> (Arc<Around<Losses>>, Session) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-galaxy");
    let model = Arc::new(ModelDir::open(&path).unwrap());
    let cache = Cache { rows: 4 * Cache::BLOCK, values: CacheType::F32 };
    let plan = plan_with(&model, &[1.0], Strategy::Local, cache);
    let fleet = starting(LocalFleet::open(model.clone(), plan).unwrap());
    (fleet.clone(), Session::new(model, fleet, limits))
}

fn options(temperature: f32) -> GenerateOptions {
    let sampling = SamplingParams {
        temperature: Some(temperature),
        seed: Some(11),
        frequency: Some(0.1),
        ..SamplingParams::default()
    };
    let fallback = None;
    GenerateOptions { max_tokens: 60, sampling, fallback, ..GenerateOptions::default() }
}

fn ids(tokens: &[GeneratedToken]) -> Vec<u32> {
    tokens.iter().map(|token| token.token).collect()
}

fn text(tokens: &[GeneratedToken], rest: &str) -> String {
    tokens.iter().map(|token| token.text.as_str()).chain([rest]).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_resumed_behind_generated_tokens_continues_unchanged() {
    let (fleet, session) = speaker(LIMITS);
    fleet.make_ready();
    for temperature in [0.0, 0.9] {
        let all = options(temperature);
        let whole = heard(&session, "Each device ", &all).await.unwrap();
        let said = text(&whole.tokens, &whole.rest);
        // With a string in the middle that ends it, across what is there and what is to come.
        let stop = said.chars().skip(30).take(6).collect::<String>();
        for options in [all.clone(), GenerateOptions { stop: vec![stop], ..all }] {
            let whole = heard(&session, "Each device ", &options).await.unwrap();
            let (tokens, said) = (ids(&whole.tokens), text(&whole.tokens, &whole.rest));
            assert!(tokens.len() > 30 && whole.behind == 0);
            for behind in [0, 1, 29, 32, tokens.len() - 1, tokens.len()] {
                let generated = tokens[..behind].to_vec();
                let options = GenerateOptions { generated, ..options.clone() };
                let rest = heard(&session, "Each device ", &options).await.unwrap();
                assert_eq!(ids(&rest.tokens), tokens[behind..], "behind {behind}");
                assert_eq!((rest.finish, rest.behind as usize), (whole.finish, behind));
                let before = text(&whole.tokens[..behind], "");
                assert_eq!(before + &text(&rest.tokens, &rest.rest), said, "behind {behind}");
            }
        }
    }
    let end = GenerateOptions { generated: vec![65, 256], ..options(0.0) };
    let ended = heard(&session, "Each device ", &end).await.unwrap();
    assert_eq!((ended.tokens.len(), ended.finish), (0, Finish::Stop));
    for (generated, word) in [(vec![65; 61], "61 tokens"), (vec![70_000], "70000")] {
        let options = GenerateOptions { generated, ..options(0.0) };
        let error = heard(&session, "Each device ", &options).await.map(drop).unwrap_err();
        assert!(!error.retryable() && error.to_string().contains(word), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_survives_device_losses_from_its_first_program() {
    let (fleet, session) = speaker(LIMITS);
    fleet.make_ready();
    let want = heard(&session, "Each device ", &options(0.9)).await.unwrap();
    fleet.before.0.store(3, Ordering::SeqCst);
    let have = heard(&session, "Each device ", &options(0.9)).await.unwrap();
    assert_eq!(ids(&have.tokens), ids(&want.tokens));
    assert_eq!(fleet.before.0.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_sequence_without_a_deadline_waits_for_the_cluster_for_the_timeout() {
    let (fleet, session) = speaker(Limits { timeout: Duration::from_secs(20), ..LIMITS });
    let begun = tokio::time::Instant::now();
    let error = heard(&session, "Each device ", &options(0.0)).await.map(drop).unwrap_err();
    assert!((20..=22).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    assert_eq!(error.to_string(), "the cluster is not ready: it is starting");
    let (listener, mut said) = mpsc::channel(1000);
    tokio::spawn(async move {
        session.generate("Each device ".into(), options(0.0), None, listener).await;
    });
    let mut waits = 0;
    while let Some(Ok(GenerateEvent::Waiting { unready: Some((None, reason)) })) = said.recv().await
    {
        assert_eq!(reason, "it is starting");
        waits += 1;
        if waits == 5 {
            fleet.make_ready();
        }
    }
    assert!((5..=6).contains(&waits), "{waits}");
    assert!(matches!(said.recv().await, Some(Ok(GenerateEvent::Token(_)))), "behind its beginning");
}
