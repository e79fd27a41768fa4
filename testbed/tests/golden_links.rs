//! Law 1 over every type of link: the pairwise combinations of more than one device, connected as
//! workers are, over loopback.
#![allow(clippy::unwrap_used)]

#[path = "../../worker/tests/ringing/mod.rs"]
mod ringing;

use galaxy_common::{Epoch, LinkType, Rank, WireType};
use galaxy_engine::{link::Links, local::LocalCluster};
use galaxy_graph::links;
use galaxy_proto::identity::Authority;
use galaxy_testbed::golden::{TOLERANCE, cases, run_over};
use galaxy_worker::ring::Formation;
use ringing::{RingDevice, device};
use std::sync::Arc;
use tokio::{runtime::Runtime, task::JoinSet};

struct Lab {
    runtime: Runtime,
    devices: Vec<Arc<RingDevice>>,
}

impl Lab {
    fn new() -> Self {
        let runtime = Runtime::new().unwrap();
        let keys = tempfile::tempdir().unwrap();
        let authority = Authority::create(keys.path(), "home").unwrap();
        let devices = runtime.block_on(async {
            let mut devices = Vec::new();
            for number in 0..4 {
                devices.push(Arc::new(device(&authority, &format!("d{number}")).await));
            }
            devices
        });
        Self { runtime, devices }
    }

    /// Connects the devices of a cluster by links of this type.
    fn connect(&self, cluster: &LocalCluster, link: LinkType, epoch: u64) {
        let plan = Arc::new(cluster.plan().clone());
        let here = &self.devices[..plan.ring.len()];
        let mut forming = JoinSet::new();
        let ends = self.runtime.block_on(async {
            for (rank, device) in here.iter().enumerate() {
                let wanted = Formation {
                    epoch: Epoch(epoch),
                    rank: Rank(rank as u16),
                    digest: [7; 32],
                    plan: plan.clone(),
                    peers: here.iter().map(|device| device.at.clone()).collect(),
                    link,
                    links: links(&plan),
                };
                let device = device.clone();
                forming.spawn(async move {
                    (rank, device.ring.form(&device.identity, wanted).await.unwrap())
                });
            }
            let mut ends: Vec<(usize, Links)> = forming.join_all().await;
            ends.sort_by_key(|(rank, _)| *rank);
            ends
        });
        cluster.connect_over(ends.into_iter().map(|(_, links)| links).collect());
    }
}

fn over(link: LinkType) {
    let lab = Lab::new();
    let mut failures = Vec::new();
    for (number, case) in cases(false).iter().filter(|case| case.devices > 1).enumerate() {
        let ran = run_over(case, WireType::F32, TOLERANCE, |cluster| {
            lab.connect(cluster, link, 1 + number as u64);
            Ok(())
        });
        failures.extend(ran.err().map(|error| format!("{case:?}: {error:#}")));
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn combinations_match_transformers_over_tls() {
    over(LinkType::Tls);
}

#[test]
fn combinations_match_transformers_over_quic() {
    over(LinkType::Quic);
}

#[test]
fn combinations_match_transformers_over_plain_tcp() {
    over(LinkType::Plain);
}
