//! The requests of clients, and whether they were answered rightly.
//!
//! Within a plan an answer is the same to the bit. Another plan sums in another order: tensors are then
//! within law 1, and where two tokens are as near to each other as law 1 allows, either may be chosen. So an
//! answer that differs from the one before is gone through token by token: one device in this process is
//! given the tokens of the answer, and must choose each of them next, if its logit is raised by as much as
//! law 1 allows.

use super::client::{ChaosClient, TextRequest};
use crate::golden::{TOLERANCE, deviation};
use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use galaxy_client::Output;
use galaxy_common::{BatchShape, Plan, Sampling, SamplingParams, Sequence, Wanted};
use galaxy_engine::{generate::TokenEvent, local::LocalCluster};
use galaxy_model::ModelDir;
use serde::{Deserialize, Serialize};
use std::{fmt, ops::ControlFlow, sync::Arc};

/// The number of different requests.
const CASES: usize = 48;
/// The longest prompt, and the most tokens that are generated behind one.
const PROMPT: u32 = 120;
const TOKENS: u32 = 96;

/// The outcome of a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The answer is the same as before any fault.
    Right,
    /// The answer differs, by no more than law 1 allows.
    NearTie,
    /// The answer differs by more than law 1 allows.
    Wrong,
    /// The request ended with an error.
    Lost,
    /// The request did not end within the time limit.
    Hang,
}

impl Outcome {
    /// All outcomes, in order.
    pub const ALL: [Self; 5] = [Self::Right, Self::NearTie, Self::Wrong, Self::Lost, Self::Hang];

    /// Whether the request was answered, rightly or not.
    pub fn is_answered(self) -> bool {
        matches!(self, Self::Right | Self::NearTie | Self::Wrong)
    }

    /// Whether the answer is as it should be.
    pub fn is_fine(self) -> bool {
        matches!(self, Self::Right | Self::NearTie)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Right => "right",
            Self::NearTie => "right by law 1",
            Self::Wrong => "wrong",
            Self::Lost => "lost",
            Self::Hang => "hang",
        })
    }
}

/// One request of a client.
#[derive(Clone, PartialEq, Debug)]
enum ChaosCase {
    Text(TextRequest),
    /// Hidden states of some sequences, which only the SDK asks for.
    Tensors(Vec<Vec<u32>>),
}

/// The answer to a request.
#[derive(Clone, PartialEq, Debug)]
pub enum ChaosAnswer {
    /// The generated tokens and their text, which is empty where the model has no tokenizer.
    Text(Vec<u32>, String),
    /// The values of each sequence, in the order of the request.
    Tensors(Vec<Vec<f32>>),
}

/// The requests, and the answers to them before any fault.
pub struct Cases {
    cases: Vec<ChaosCase>,
    answers: Vec<ChaosAnswer>,
    /// One device in this process that has the whole model.
    alone: LocalCluster,
}

impl Cases {
    /// Makes the requests, which are not answered yet. `plan` is the plan of one device.
    pub fn new(seed: u64, model: Arc<ModelDir>, plan: Plan) -> Result<Self> {
        let mut dice = Rng::with_seed(seed);
        // Letters, where tokens are bytes.
        let vocabulary = model.spec().vocabulary;
        let first = if vocabulary > 122 { 97 } else { 0 };
        let mut ids = |most: u32| -> Vec<u32> {
            let count = dice.u32(2..=most);
            (0..count).map(|_| first + dice.u32(..26.min(vocabulary))).collect()
        };
        let mut sizes = Rng::with_seed(seed ^ 1);
        let case = |at: usize| match at % 6 {
            0 => ChaosCase::Tensors((0..1 + at / 6 % 4).map(|_| ids(PROMPT)).collect()),
            kind => {
                // As many greedy requests as sampled ones, and some of these with a penalty.
                let greedy = kind < 3;
                let sampling = SamplingParams {
                    temperature: Some(if greedy { 0.0 } else { 0.8 }),
                    seed: (!greedy).then_some(at as u64),
                    frequency: (kind == 5).then_some(0.3),
                    ..SamplingParams::default()
                };
                let tokens = [8, 24, 48, TOKENS][sizes.usize(..4)];
                ChaosCase::Text(TextRequest { prompt: ids(PROMPT), tokens, sampling })
            }
        };
        let cases = (0..CASES).map(case).collect();
        Ok(Self { cases, answers: Vec::new(), alone: LocalCluster::open(model, plan)? })
    }

    /// The number of requests.
    pub fn len(&self) -> usize {
        self.cases.len()
    }

    /// Asks every request once, of a cluster without faults, and keeps the answers.
    pub async fn asked(mut self, clients: &[ChaosClient]) -> Result<Self> {
        for case in 0..self.len() {
            let mut may = clients.iter().filter(|client| self.may_ask(client, case));
            let many = may.clone().count().max(1);
            let client = may
                .nth(case % many)
                .with_context(|| format!("no client can ask for case {case}"))?;
            let answer = self.ask(client, case, &mut || ()).await.map_err(anyhow::Error::msg)?;
            let outcome = self.judged(case, &answer)?;
            ensure!(outcome.0.is_fine(), "case {case} before anything happened: {outcome:?}");
            self.answers.push(answer);
        }
        Ok(self)
    }

    /// Whether that client can ask for it.
    pub fn may_ask(&self, client: &ChaosClient, case: usize) -> bool {
        matches!(client, ChaosClient::Sdk(_)) || matches!(self.cases[case], ChaosCase::Text(_))
    }

    /// Asks one request, and calls `heard` whenever something of the answer arrives. The error is that which the client
    /// was told.
    pub async fn ask(
        &self,
        client: &ChaosClient,
        case: usize,
        heard: &mut (impl FnMut() + Send),
    ) -> Result<ChaosAnswer, String> {
        match (&self.cases[case], client) {
            (ChaosCase::Text(request), client) => {
                let (tokens, text) = client.generate(request, heard).await?;
                Ok(ChaosAnswer::Text(tokens, text))
            }
            (ChaosCase::Tensors(sequences), ChaosClient::Sdk(client)) => {
                let done = client.run(sequences, Output::Hidden).await;
                let done = done.map_err(|error| format!("{}: {error}", error.code()))?;
                heard();
                Ok(ChaosAnswer::Tensors(done.tensors.into_iter().map(|t| t.values).collect()))
            }
            (ChaosCase::Tensors(_), ChaosClient::Served(_)) => {
                Err("galaxy serve gives no tensors of this model".to_owned())
            }
        }
    }

    /// Judges an answer: its outcome, and what is wrong with it.
    pub fn judge(&self, case: usize, answer: &ChaosAnswer) -> Result<(Outcome, String)> {
        if self.answers[case] == *answer {
            return Ok((Outcome::Right, String::new()));
        }
        if let (ChaosAnswer::Text(before, text), ChaosAnswer::Text(made, other)) =
            (&self.answers[case], answer)
            && before == made
        {
            let why = format!("the same tokens are {text:?} and {other:?}");
            return Ok((Outcome::Wrong, why));
        }
        self.judged(case, answer)
    }

    /// Judges an answer by what the one device of this process computes.
    fn judged(&self, case: usize, answer: &ChaosAnswer) -> Result<(Outcome, String)> {
        let why = match (&self.cases[case], answer) {
            (ChaosCase::Tensors(sequences), ChaosAnswer::Tensors(tensors)) => {
                self.tensors(sequences, tensors)?
            }
            (
                ChaosCase::Text(TextRequest { prompt, tokens, sampling }),
                ChaosAnswer::Text(made, _),
            ) => {
                let sampling = sampling.clone().complete(0);
                match made.len() as u32 == *tokens {
                    true => self.tokens(prompt, made, &sampling)?,
                    false => {
                        Some(format!("{} tokens came, and {tokens} were asked for", made.len()))
                    }
                }
            }
            _ => Some("the answer is of another kind".to_owned()),
        };
        Ok(match why {
            None => (Outcome::NearTie, String::new()),
            Some(why) => (Outcome::Wrong, why),
        })
    }

    fn tensors(&self, sequences: &[Vec<u32>], tensors: &[Vec<f32>]) -> Result<Option<String>> {
        if sequences.len() != tensors.len() {
            return Ok(Some(format!("{} tensors of {} sequences", tensors.len(), sequences.len())));
        }
        for (at, (ids, values)) in sequences.iter().zip(tensors).enumerate() {
            let shape = BatchShape::single(ids.len() as u32, Wanted::Hidden)?;
            let want = self.alone.run(&shape, ids.as_slice())?;
            let want = want.first().context("one sequence")?.values();
            match deviation(values, want) {
                Ok(off) if off <= TOLERANCE => {}
                Ok(off) => return Ok(Some(format!("sequence {at} is off by {off:e}"))),
                Err(error) => return Ok(Some(format!("sequence {at}: {error}"))),
            }
        }
        Ok(None)
    }

    /// Checks tokens behind a prompt: what is wrong with them, if anything.
    fn tokens(&self, prompt: &[u32], made: &[u32], by: &Sampling) -> Result<Option<String>> {
        let mut at = 0;
        while at < made.len() {
            let here = self.choose(prompt, &made[..at], by, made.len() - at)?;
            let Some(other) = here.iter().zip(&made[at..]).position(|(a, b)| a != b) else {
                return Ok(None);
            };
            at += other;
            let (came, chosen) = (made[at], here[other]);
            let tokens = [prompt, &made[..at]].concat();
            let shape = BatchShape::single(tokens.len() as u32, Wanted::LastLogits)?;
            let logits = self.alone.run(&shape, tokens.as_slice())?;
            let logits = logits.first().context("one sequence")?.values();
            let largest = logits.iter().fold(0f32, |most, logit| most.max(logit.abs()));
            let mut raised = by.clone();
            raised.bias.push((came, TOLERANCE * largest));
            if self.choose(prompt, &made[..at], &raised, 1)? != [came] {
                let apart = logits.get(chosen as usize).zip(logits.get(came as usize));
                let apart = apart.map_or(f32::NAN, |(a, b)| (a - b) / largest);
                return Ok(Some(format!(
                    "token {at} is {came} instead of {chosen}, whose logit is larger by {apart:e} of the largest"
                )));
            }
            at += 1;
        }
        Ok(None)
    }

    /// The next `count` tokens that one device chooses behind these.
    fn choose(
        &self,
        prompt: &[u32],
        made: &[u32],
        by: &Sampling,
        count: usize,
    ) -> Result<Vec<u32>> {
        let tokens = [prompt, made].concat();
        let rows = (tokens.len() + count) as u32;
        let (sampling, prompt) = (by.clone(), prompt.len());
        let text = Sequence { slot: 0, rows, sampling, tokens, prompt };
        let mut chosen = Vec::new();
        let mut tell = |told: &TokenEvent| {
            chosen.push(told[0] as u32);
            ControlFlow::Continue(())
        };
        self.alone.generate(&text, count as u32, super::MAX_ROWS, &[], &mut tell)?;
        Ok(chosen)
    }
}
