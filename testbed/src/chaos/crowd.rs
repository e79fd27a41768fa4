//! Clients that ask again and again.

use super::{
    HANG,
    cases::{Cases, Outcome},
    client::ChaosClient,
    millis,
    record::{Record, RecordLine},
};
use anyhow::{Context, Result};
use fastrand::Rng;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{runtime::Runtime, task::JoinSet};

/// The pause of a client after an error.
const AFTER_ERROR: Duration = Duration::from_millis(200);

/// Clients that ask one request after another until `Crowd::end`.
pub struct Crowd {
    over: Arc<AtomicBool>,
    clients: JoinSet<Result<()>>,
}

impl Crowd {
    /// Starts all clients, each as a task of the runtime.
    pub fn begin(
        runtime: &Runtime,
        clients: Vec<ChaosClient>,
        cases: &Arc<Cases>,
        record: &Arc<Record>,
        seed: u64,
    ) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let mut all = JoinSet::new();
        for (number, client) in clients.into_iter().enumerate() {
            // A run that goes on with a record asks other requests than before, and the same each time.
            let dice = Rng::with_seed(seed ^ (number as u64 + 1) << 32 ^ record.answered() as u64);
            let (over, cases, record) = (over.clone(), cases.clone(), record.clone());
            let asking = ask(number, client, cases, record, over, dice);
            all.spawn_on(asking, runtime.handle());
        }
        Self { over, clients: all }
    }

    /// Lets each client end the request that it is waiting for, and joins all of them.
    pub async fn end(mut self) -> Result<()> {
        self.over.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.context("a client broke off")??;
        }
        Ok(())
    }
}

async fn ask(
    number: usize,
    client: ChaosClient,
    cases: Arc<Cases>,
    record: Arc<Record>,
    over: Arc<AtomicBool>,
    mut dice: Rng,
) -> Result<()> {
    while !over.load(Ordering::Relaxed) {
        let case = dice.usize(..cases.len());
        if !cases.may_ask(&client, case) {
            continue;
        }
        let begun = Instant::now();
        let (mut last, mut waited) = (begun, Duration::ZERO);
        let mut heard = || {
            waited = waited.max(last.elapsed());
            last = Instant::now();
        };
        let answer = tokio::time::timeout(HANG, cases.ask(&client, case, &mut heard)).await;
        let took_ms = millis(begun.elapsed());
        let waited_ms = millis(waited.max(last.elapsed()));
        let (outcome, why) = match answer {
            Err(_) => (Outcome::Hang, format!("no end within {HANG:?}")),
            Ok(Err(error)) => {
                // Where nobody listens, errors come at once.
                tokio::time::sleep(AFTER_ERROR).await;
                (Outcome::Lost, error)
            }
            Ok(Ok(answer)) => {
                let cases = cases.clone();
                tokio::task::spawn_blocking(move || cases.judge(case, &answer)).await??
            }
        };
        if !outcome.is_fine() {
            eprintln!("client {number}, case {case}: {outcome}: {why}");
        }
        let client = number;
        record.add(&RecordLine::Request { client, case, outcome, took_ms, waited_ms, why })?;
    }
    Ok(())
}
