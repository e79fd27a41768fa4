//! `galaxy serve`: an HTTP server beside the programs that speak OpenAI's API. Requests go to the coordinator by the
//! SDK, under our identity.

mod api;
mod key;
mod limits;

use super::{
    Connection, chat::other_model, failure::Failure, generation_config::GenerationConfig,
    in_process::model_failure, print, progress, tell,
};
use api::Api;
use clap::Args;
use galaxy_cli::openai::chat::Chat;
use galaxy_proto::door::SharedLobby;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use key::KeyArgs;
use limits::{Limited, Limits};
use std::{net::SocketAddr, path::PathBuf, pin::pin, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::timeout,
};

/// The most idle connections at a time; each that comes then displaces another.
const WAITING: usize = 512;
/// How long the head of a request may take.
const HEAD: Duration = Duration::from_secs(10);
/// How long answers may take to end after a signal to stop.
const GOODBYE: Duration = Duration::from_secs(10);
/// The pause after the system refused a connection, for want of descriptors most often.
const PAUSE: Duration = Duration::from_millis(100);

const ROUTES: &str = "\
What is answered, as OpenAI's API does, for one choice of each prompt:

  POST /v1/chat/completions   chats, whole or streamed; with --model
  POST /v1/completions        completions of prompts, whole or streamed
  POST /v1/embeddings         vectors, as numbers or base64
  POST /v1/rerank             how well documents answer a query, by a cross-encoder
  GET  /v1/models             the cluster's model
  GET  /health                200 while the cluster is ready, else 503

A program names http://127.0.0.1:8080/v1 as its base URL. Besides OpenAI's parameters: top_k, min_p,
repetition_penalty, ignore_eos, return_token_ids (the ids of what is generated, beside its text),
chat_template_kwargs and priority (which requests come first where not all can: those with a lower number),
and truncate for embeddings. null is the same as leaving a parameter out;
what would change the answer and is not done is refused by name. What a request leaves open is as the
model's generation_config.json says, where that says it: else temperature 1, as OpenAI has it.";

/// Arguments of `galaxy serve`.
#[derive(Args, Debug)]
#[command(after_long_help = ROUTES)]
pub struct ServeArgs {
    /// Address to listen at; any but this machine's loopback needs an API key.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    #[command(flatten)]
    key: KeyArgs,
    /// Model directory or GGUF file with the chat template and tokenizer, for chats.
    ///
    /// Of a directory, the template (chat_template.jinja, tokenizer_config.json or chat_template.json) and
    /// tokenizer.json are read. A GGUF file has both.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Where settings come from that requests leave open.
    #[arg(long, value_enum, default_value_t)]
    generation_config: GenerationConfig,
    #[command(flatten)]
    connection: Connection,
}

/// Runs `galaxy serve`, until a signal ends it.
pub async fn serve(args: ServeArgs) -> Result<(), Failure> {
    let key = args.key.read()?;
    if key.is_none() && !args.listen.ip().is_loopback() {
        return Err(Failure::usage("whoever reaches this address could use the cluster")
            .at(args.listen)
            .todo("set --api-key-file, or listen on 127.0.0.1"));
    }
    let chat = match &args.model {
        Some(directory) => Some(Chat::open(directory).map_err(model_failure)?),
        None => None,
    };
    let client = args.connection.open().await?;
    let asking = args.connection.open().await?;
    let status = progress::watch("asking the coordinator", asking.status()).await?;
    let other = args.model.as_ref().and_then(|model| other_model(model, &status.model, "--model"));
    if let Some(warning) = other {
        tell(&format!("warning: {warning}"));
    }
    let listener = TcpListener::bind(args.listen).await.map_err(|error| {
        Failure::new(format!("cannot listen: {error}"))
            .at(args.listen)
            .todo("choose another --listen")
    })?;
    let failed = |error: std::io::Error| Failure::new(error.to_string());
    let address = listener.local_addr().map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    match print(&format!("listening on http://{address}/v1 for {}\n", status.model)) {
        Err(failure) if !failure.is_enough() => return Err(failure),
        // Whoever reads no lines may ask all the same.
        _ => {}
    }

    let (stop, stopping) = watch::channel(());
    let accepting =
        accept(listener, Api::new(client, asking, key, chat, args.generation_config), stopping);
    let mut accepting = pin!(accepting);
    tokio::select! {
        () = &mut accepting => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    drop(stop);
    // What is being answered ends first, unless we are told again.
    tokio::select! {
        _ = timeout(GOODBYE, accepting) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Accepts connections until the sender of `stopping` is dropped, and waits for their ends.
async fn accept(listener: TcpListener, api: Api, mut stopping: watch::Receiver<()>) {
    let (router, limits) = (api.router(), Limits::default());
    let lobby = SharedLobby::new(WAITING);
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let (stream, address) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(_) => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            },
            _ = stopping.changed() => break,
        };
        let (stay, notice) = lobby.arrive(address.ip());
        let service = Limited::new(router.clone(), limits.clone(), Arc::new(stay));
        let stopping = stopping.clone();
        connections.spawn(async move {
            tokio::select! {
                () = converse(stream, service, stopping) => {}
                () = notice.given() => {}
            }
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Serves one connection to its end.
async fn converse(
    stream: TcpStream,
    service: Limited<axum::Router>,
    mut stopping: watch::Receiver<()>,
) {
    // Tokens are small, and each is to be seen at once.
    drop(stream.set_nodelay(true));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    // How a connection ends is the business of whoever made it.
    tokio::select! {
        ended = connection.as_mut() => return drop(ended),
        _ = stopping.changed() => connection.as_mut().graceful_shutdown(),
    }
    drop(connection.await);
}
