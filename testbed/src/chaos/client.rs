//! Clients of the cluster: of the SDK, and programs that ask `galaxy serve`.

use super::HANG;
use anyhow::{Context, Result, ensure};
use galaxy_client::{Client, GenerateOptions, Generated};
use galaxy_common::SamplingParams;
use serde::Deserialize;
use serde_json::json;
use std::io::{BufRead, BufReader};
use tokio::sync::mpsc;

/// A program that asks the cluster, and what it asks by.
#[derive(Clone, Debug)]
pub enum ChaosClient {
    /// A program with the SDK.
    Sdk(Box<Client>),
    /// A program that asks `galaxy serve` at this address, with no more than HTTP.
    Served(String),
}

/// A text that a client asks for.
#[derive(Clone, PartialEq, Debug)]
pub struct TextRequest {
    /// The tokens before it.
    pub prompt: Vec<u32>,
    /// How many tokens are generated.
    pub tokens: u32,
    /// How they are sampled.
    pub sampling: SamplingParams,
}

/// A chunk of a stream of `/v1/completions`, or an error in its place.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: String,
    #[serde(default)]
    token_ids: Vec<u32>,
}

impl ChaosClient {
    /// Generates a text, and calls `heard` whenever something of it arrives. Gives its tokens, and their text.
    ///
    /// # Errors
    /// The error that the client was told.
    pub async fn generate(
        &self,
        request: &TextRequest,
        heard: &mut (impl FnMut() + Send),
    ) -> Result<(Vec<u32>, String), String> {
        match self {
            Self::Sdk(client) => by_sdk(client, request, heard)
                .await
                .map_err(|error| format!("{}: {error}", error.code())),
            Self::Served(address) => {
                by_http(address, request, heard).await.map_err(|error| format!("{error:#}"))
            }
        }
    }
}

async fn by_sdk(
    client: &Client,
    TextRequest { prompt, tokens, sampling }: &TextRequest,
    heard: &mut (impl FnMut() + Send),
) -> Result<(Vec<u32>, String), galaxy_client::ClientError> {
    let options = GenerateOptions {
        max_tokens: *tokens,
        sampling: sampling.clone(),
        ignore_end: true,
        fallback: None,
        ..GenerateOptions::default()
    };
    let mut generating = client.generate(prompt.clone(), options).await?;
    let (mut generated, mut text) = (Vec::new(), String::new());
    heard();
    loop {
        let next = generating.next().await?;
        heard();
        match next {
            Some(Generated::Token(token)) => {
                generated.push(token.token);
                text.push_str(&token.text);
            }
            Some(Generated::Done(done)) => {
                text.push_str(&done.text);
                return Ok((generated, text));
            }
            None => return Ok((generated, text)),
        }
    }
}

async fn by_http(
    address: &str,
    request: &TextRequest,
    heard: &mut (impl FnMut() + Send),
) -> Result<(Vec<u32>, String)> {
    let (sender, mut events) = mpsc::unbounded_channel();
    let url = format!("http://{address}/v1/completions");
    let TextRequest { prompt, tokens, sampling } = request;
    let SamplingParams { temperature, seed, frequency, .. } = sampling;
    let sent = SamplingParams {
        temperature: *temperature,
        seed: *seed,
        frequency: *frequency,
        ..SamplingParams::default()
    };
    ensure!(sent == *sampling, "only temperature, seed and frequency penalty are sent by HTTP");
    let body = json!({
        "prompt": prompt, "max_tokens": tokens, "ignore_eos": true, "stream": true,
        "return_token_ids": true, "temperature": temperature, "seed": seed,
        "frequency_penalty": frequency,
    });
    let reading = tokio::task::spawn_blocking(move || {
        // Whoever has stopped waiting hears of nothing more.
        read_events(&url, &body.to_string(), |event| drop(sender.send(event)))
    });
    let (mut generated, mut text) = (Vec::new(), String::new());
    while let Some(chunk) = events.recv().await {
        heard();
        generated.extend(chunk.token_ids);
        text.push_str(&chunk.text);
    }
    reading.await.context("the reader broke off")??;
    Ok((generated, text))
}

/// Sends a request, and reads the choices of its stream to the end.
fn read_events(url: &str, body: &str, mut event: impl FnMut(Choice)) -> Result<()> {
    // Nobody waits for a request any more that hangs.
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .proxy(None)
        .timeout_global(Some(HANG))
        .build()
        .into();
    let mut response = agent.post(url).content_type("application/json").send(body)?;
    let status = response.status();
    if !status.is_success() {
        anyhow::bail!("{status}: {}", response.body_mut().read_to_string()?);
    }
    let mut ended = false;
    for line in BufReader::new(response.body_mut().as_reader()).lines() {
        let line = line.context("the stream broke off")?;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            ended = true;
            continue;
        }
        let chunk: Chunk = serde_json::from_str(data).with_context(|| data.to_owned())?;
        if let Some(error) = chunk.error {
            anyhow::bail!("{error}");
        }
        chunk.choices.into_iter().for_each(&mut event);
    }
    ensure!(ended, "the stream ended without [DONE]");
    Ok(())
}
