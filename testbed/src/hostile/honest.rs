//! An honest client: it dials, is slow in its handshake, asks, and is answered.

use super::HostileTarget;
use anyhow::{Context, Result, bail};
use galaxy_common::DeviceName;
use galaxy_proto::{
    channel,
    identity::{Identity, Role},
    v1::{self, galaxy_client::GalaxyClient, worker_client::WorkerClient},
};
use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

/// How much longer its handshake takes than it would on this machine.
pub const DELAY: Duration = Duration::from_millis(300);
/// The longest that it waits for an answer.
const PATIENCE: Duration = Duration::from_secs(15);

/// The honest client, and the process that it asks.
pub struct Honest {
    pub target: HostileTarget,
    pub address: SocketAddr,
    /// The identity of a client or a coordinator; none over HTTP.
    pub identity: Option<Identity>,
}

impl Honest {
    /// The median time of an answer, over so many requests.
    pub async fn median(&self, times: usize) -> Result<Duration> {
        let mut waits = Vec::new();
        for _ in 0..times {
            waits.push(self.ask().await?);
        }
        waits.sort();
        Ok(waits[waits.len() / 2])
    }

    /// The time of one answer, from the first packet on.
    pub async fn ask(&self) -> Result<Duration> {
        let begun = Instant::now();
        timeout(PATIENCE, self.answered()).await.context("no answer")??;
        Ok(begun.elapsed())
    }

    async fn answered(&self) -> Result<()> {
        let Some(identity) = &self.identity else { return self.over_http().await };
        let slow = slowly(self.address).await?;
        let name = DeviceName::new(match self.target {
            HostileTarget::Worker => "d0",
            _ => "coordinator",
        })?;
        let role =
            if self.target == HostileTarget::Worker { Role::Device } else { Role::Coordinator };
        let to = (&name, role);
        let channel = channel::connect(&slow.to_string(), Some(identity), to, PATIENCE).await?;
        match self.target {
            HostileTarget::Worker => {
                WorkerClient::new(channel).health(v1::HealthRequest {}).await?;
            }
            _ => {
                GalaxyClient::new(channel).status(v1::StatusRequest {}).await?;
            }
        }
        Ok(())
    }

    async fn over_http(&self) -> Result<()> {
        let mut stream = TcpStream::connect(self.address).await?;
        sleep(DELAY).await;
        let request = format!(
            "GET /v1/models HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
            self.address
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        match answer.starts_with("HTTP/1.1 200") {
            true => Ok(()),
            false => bail!("it answered {answer:?}"),
        }
    }
}

/// The address of a proxy to `address`: connections to it are established at once, and carry the first byte
/// later.
async fn slowly(address: SocketAddr) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let at = listener.local_addr()?;
    tokio::spawn(async move {
        let (mut near, _) = listener.accept().await?;
        let mut far = TcpStream::connect(address).await?;
        near.set_nodelay(true)?;
        far.set_nodelay(true)?;
        sleep(DELAY).await;
        tokio::io::copy_bidirectional(&mut near, &mut far).await
    });
    Ok(at)
}
