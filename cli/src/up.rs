//! `galaxy up`: a cluster on this machine, which others join: authority, coordinator and a worker.

mod children;
mod files;

use super::{failure::Failure, invite, join, print, tell};
use children::Children;
use clap::Args;
use files::Files;
use galaxy_client::Client;
use galaxy_common::{Bytes, DeviceName};
use galaxy_model::Quantisation;
use galaxy_proto::{
    identity::Role,
    join::{home, identity_in},
};
use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::signal::unix::{SignalKind, signal};

/// How long the coordinator may take to listen: it reads the model's files first.
const LISTENS: Duration = Duration::from_secs(60);
/// The pause between two looks at the programs that were started.
const LOOK: Duration = Duration::from_millis(200);
/// How long a call may take.
const CALL: Duration = Duration::from_secs(10);
/// How long the invitation that is printed is valid.
const LINE_LASTS: Duration = Duration::from_secs(15 * 60);

/// Arguments of `galaxy up`.
#[derive(Args, Debug)]
pub struct UpArgs {
    /// Model directory or GGUF file to serve.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Round the model's matrices to q8, q6 or q4 as devices read them; lossy [default: as the cluster file says].
    ///
    /// A new cluster file keeps matrices as the model's files have them.
    #[arg(long, value_name = "BITS")]
    weights_format: Option<Quantisation>,
    /// Name of this machine in the cluster [default: its host name].
    #[arg(long, value_parser = |text: &str| DeviceName::new(text))]
    name: Option<DeviceName>,
    /// Address that the coordinator listens at.
    #[arg(long, value_name = "ADDR:PORT", default_value = "0.0.0.0:7000")]
    listen: SocketAddr,
    /// Port of this machine's worker.
    #[arg(long, value_name = "PORT", default_value_t = 7100, value_parser = clap::value_parser!(u16).range(1..))]
    worker_port: u16,
    /// Memory that this machine grants, like 4GB [default: 0.6 of what is free].
    ///
    /// It counts the first time only, when galaxy up writes the device's file.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Kernel threads of this machine's worker [default: all cores].
    ///
    /// They count the first time only, when galaxy up writes the device's file.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Number of devices that may join by the printed invitation, within 15 minutes.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    uses: u32,
}

/// Runs `galaxy up`.
pub async fn up(args: UpArgs) -> Result<(), Failure> {
    let home = home().ok_or_else(|| {
        Failure::new("there is no place for a cluster: this user has no home")
            .todo("set GALAXY_HOME")
    })?;
    join::private(&home)?;
    let files = Files::prepare(&home, &args)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(unwatched)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(unwatched)?;
    let mut children = Children::default();
    let told = async {
        files.start(&args, &mut children)?;
        let listens = files.reachable(args.listen);
        let client = connect(&listens, &home, &mut children).await?;
        let invitation = client.invite(Role::Device, args.uses, LINE_LASTS, None).await?;
        print(&format!(
            "the cluster runs on this machine, as long as this command does; its files are in {}\n\
             commands here need no arguments: galaxy status\n\n{}\n",
            files.cluster.display(),
            invite::show(&invitation, Role::Device, args.uses)
        ))?;
        loop {
            tokio::time::sleep(LOOK).await;
            children.all_live()?;
        }
    };
    let ended = tokio::select! {
        ended = told => ended,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    tell("ending the coordinator and the worker");
    children.end().await;
    ended
}

fn unwatched(error: std::io::Error) -> Failure {
    Failure::new(format!("signals cannot be waited for: {error}"))
}

/// Connects with the admin's identity of this machine, as soon as the coordinator listens.
async fn connect(
    address: &str,
    home: &std::path::Path,
    children: &mut Children,
) -> Result<Client, Failure> {
    let begun = Instant::now();
    loop {
        children.all_live()?;
        let builder = Client::builder()
            .address(address)
            .coordinator(files::COORDINATOR)
            .identity(identity_in(home, Role::Admin))
            .timeout(CALL);
        match builder.connect().await {
            Ok(client) => return Ok(client),
            Err(error) if !error.retryable() || begun.elapsed() > LISTENS => {
                return Err(error.into());
            }
            Err(_) => tokio::time::sleep(LOOK).await,
        }
    }
}
