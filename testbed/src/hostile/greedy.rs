//! A client with a certificate that sends requests which cost much more than they look like.

use super::{ASKED, BEHIND, BUDGET, HostileCluster, HostileTarget, Row, row, say};
use anyhow::{Result, bail};
use galaxy_common::DeviceName;
use galaxy_proto::{
    channel,
    identity::Role,
    v1::{self, galaxy_client::GalaxyClient},
};
use http_body::{Body as HttpBody, Frame};
use std::{
    convert::Infallible,
    io::Write,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tonic::{
    Request,
    body::Body,
    codegen::{Bytes, Service, http},
    transport::Channel,
};

/// The requests that the client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestAttack {
    /// Texts of 15 MB.
    Texts,
    /// Lists of empty messages, two bytes each.
    Lists,
    /// Requests whose bodies never end.
    Endless,
    /// Requests whose answers it does not read.
    Unread,
    /// Requests with a deadline of a day, more than the queue has places.
    Patient,
    /// Large images that are small when compressed.
    Images,
}

impl RequestAttack {
    /// The requests to a model of texts; those with images are to a model of images.
    pub const OF_TEXTS: [Self; 5] =
        [Self::Texts, Self::Lists, Self::Endless, Self::Unread, Self::Patient];

    fn words(self) -> &'static str {
        match self {
            Self::Texts => "a client: 20 texts of 15 MB",
            Self::Lists => "a client: 20 requests of 8 million empty lists",
            Self::Endless => "a client: 100 requests of 15 MiB without an end",
            Self::Unread => "a client: 70 answers of 3 MB that are not read",
            Self::Patient => "a client: 300 requests of 64 texts with a deadline of a day",
            Self::Images => "a client: 20 images of 16,384 x 16,384 pixels in 0.3 MB each",
        }
    }
}

/// The number of the client's connections.
const CHANNELS: usize = 4;
/// The time that its requests have to arrive before the honest client asks.
const GATHERING: Duration = Duration::from_secs(2);
/// The longest that the honest client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// The width and height of an image, in pixels.
const SIDE: u32 = 16_384;
const DAY: Duration = Duration::from_secs(24 * 3600);
const EMBED: &str = "/galaxy.v1.Galaxy/Embed";

async fn dial(stage: &HostileCluster, who: &str) -> Result<Channel> {
    let identity = stage.identity(who, Role::Client)?;
    let name = DeviceName::new("coordinator")?;
    let to = (&name, Role::Coordinator);
    Ok(channel::connect(&stage.cluster.address, Some(&identity), to, PATIENCE).await?)
}

/// How an honest client fares while another sends such requests, and how much the coordinator's memory grows.
pub async fn under(stage: &HostileCluster, greed: RequestAttack) -> Result<Row> {
    let target = HostileTarget::Coordinator;
    say(format_args!("{target:?}"), greed.words());
    let before = median(stage, greed).await?;
    let memory = stage.memory(target)?;
    let mut channels = Vec::new();
    for _ in 0..CHANNELS {
        channels.push(dial(stage, "greedy").await?);
    }
    let mut calls = JoinSet::new();
    let many = match greed {
        RequestAttack::Texts | RequestAttack::Lists | RequestAttack::Images => 20,
        RequestAttack::Endless => 100,
        RequestAttack::Unread => 70,
        RequestAttack::Patient => 300,
    };
    let body = if greed == RequestAttack::Images { large()?.into() } else { body(greed) };
    for i in 0..many {
        let (channel, body) = (channels[i % CHANNELS].clone(), body.clone());
        calls.spawn(async move {
            match greed {
                RequestAttack::Unread => unread(channel).await,
                RequestAttack::Patient => patient(channel).await,
                RequestAttack::Images => image(channel, body).await,
                _ => send(channel, body, greed == RequestAttack::Endless).await,
            }
        });
    }
    let mut peak = memory;
    let watched = Instant::now();
    while watched.elapsed() < GATHERING {
        sleep(Duration::from_millis(20)).await;
        peak = peak.max(stage.memory(target)?);
    }
    let (mut waits, mut unanswered) = (Vec::new(), 0);
    for _ in 0..ASKED {
        match ask(stage, greed).await {
            Ok(wait) => waits.push(wait),
            Err(_) => unanswered += 1,
        }
        peak = peak.max(stage.memory(target)?);
    }
    let open = calls.len();
    drop(calls);
    let longest = waits.iter().max().copied().unwrap_or_default();
    let growth = peak - memory;
    let attack = greed.words().to_owned();
    let row = row(target, attack, (open, many as u64), before, (waits, unanswered), growth);
    let held = row.unanswered == 0 && longest <= before + BEHIND && growth <= BUDGET;
    Ok(Row { held, ..row })
}

async fn median(stage: &HostileCluster, greed: RequestAttack) -> Result<Duration> {
    let mut waits = Vec::new();
    for _ in 0..ASKED {
        waits.push(ask(stage, greed).await?);
    }
    waits.sort();
    Ok(waits[waits.len() / 2])
}

async fn ask(stage: &HostileCluster, greed: RequestAttack) -> Result<Duration> {
    let begun = Instant::now();
    let asked = async {
        let mut client = GalaxyClient::new(dial(stage, "honest").await?);
        if greed == RequestAttack::Images {
            let images = vec![std::fs::read(stage.model.join("image.png"))?];
            client.classify(v1::ClassifyRequest { images, ..Default::default() }).await?;
        } else {
            let texts = vec!["sea".to_owned()];
            client.embed(v1::EmbedRequest { texts, ..Default::default() }).await?;
        }
        Ok::<_, anyhow::Error>(())
    };
    match timeout(PATIENCE, asked).await {
        Ok(answered) => answered?,
        Err(_) => bail!("no answer within {PATIENCE:?}"),
    }
    Ok(begun.elapsed())
}

/// The bytes of a request's message, with gRPC's prefix.
fn body(greed: RequestAttack) -> Bytes {
    let mut message = match greed {
        RequestAttack::Lists => [0x1a, 0].repeat(8 << 20),
        RequestAttack::Texts => {
            let mut message = vec![0x0a];
            let mut length = 15_000_000;
            while length >= 0x80 {
                message.push((length & 0x7f) as u8 | 0x80);
                length >>= 7;
            }
            message.push(length as u8);
            message.extend(b"sea ".repeat(3_750_000));
            message
        }
        // A list of lists, whose end never comes.
        RequestAttack::Endless => vec![0; 15 << 20],
        _ => Vec::new(),
    };
    message.truncate(16 << 20);
    let says = if greed == RequestAttack::Endless { 16 << 20 } else { message.len() };
    let mut all = vec![0];
    all.extend((says as u32).to_be_bytes());
    all.extend(message);
    all.into()
}

struct Sending {
    left: Bytes,
    endless: bool,
}

impl HttpBody for Sending {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let part = self.left.len().min(256 << 10);
        match (part, self.endless) {
            (0, true) => Poll::Pending,
            (0, false) => Poll::Ready(None),
            _ => Poll::Ready(Some(Ok(Frame::data(self.left.split_to(part))))),
        }
    }
}

/// Sends a request, and keeps its answer without reading it.
async fn send(mut channel: Channel, left: Bytes, endless: bool) {
    let request = http::Request::builder()
        .method("POST")
        .uri(EMBED)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::new(Sending { left, endless }));
    let Ok(request) = request else { return };
    if std::future::poll_fn(|cx| channel.poll_ready(cx)).await.is_ok() {
        let answer = channel.call(request).await;
        // The answer is never read.
        std::future::pending::<()>().await;
        drop(answer);
    }
}

async fn unread(channel: Channel) {
    let sequences = vec![v1::Sequence { ids: vec![101; 500], ..Default::default() }; 4];
    let output = v1::Wanted::Hidden.into();
    let request = v1::RunRequest { sequences, output, ..Default::default() };
    let answer = GalaxyClient::new(channel).run(request).await;
    // The answer is never read.
    std::future::pending::<()>().await;
    drop(answer);
}

async fn patient(channel: Channel) {
    let texts = vec!["sea ".repeat(200); 64];
    let mut request = Request::new(v1::EmbedRequest { texts, ..Default::default() });
    request.set_timeout(DAY);
    // Refused or not, that was all.
    drop(GalaxyClient::new(channel).embed(request).await);
}

async fn image(channel: Channel, image: Bytes) {
    let request = v1::ClassifyRequest { images: vec![image.into()], ..Default::default() };
    drop(GalaxyClient::new(channel).classify(request).await);
}

/// A PNG image that is all black.
fn large() -> Result<Vec<u8>> {
    let mut file = Vec::new();
    let mut image = png::Encoder::new(&mut file, SIDE, SIDE);
    image.set_color(png::ColorType::Grayscale);
    let mut header = image.write_header()?;
    let mut rows = header.stream_writer()?;
    let row = vec![0; SIDE as usize];
    for _ in 0..SIDE {
        rows.write_all(&row)?;
    }
    rows.finish()?;
    header.finish()?;
    Ok(file)
}
