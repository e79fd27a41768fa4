//! Devices without a model: the coordinator sends it to them, and they send it to each other.
#![allow(clippy::unwrap_used)]

use galaxy_client::Output;
use galaxy_common::LinkType;
use galaxy_coord::{
    Cluster,
    profile::{Store, Wanted, collect},
};
use galaxy_model::ModelDir;
use galaxy_proto::identity::{Identity, Role};
use galaxy_testbed::{
    models,
    processes::{Keys, Process, Setup, TestCluster, bare_worker, listening},
};
use std::path::Path;

fn model() -> std::path::PathBuf {
    models::bert(Path::new(env!("CARGO_TARGET_TMPDIR")), "weights", 2, 512, 8).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_without_the_model_match_the_outputs_of_devices_with_it() {
    let tokens = [[5u32, 17, 9, 300, 2]];
    let with = TestCluster::start(Setup::new(model())).unwrap();
    let want = with.client().await.unwrap().run(&tokens, Output::Hidden).await.unwrap();
    drop(with);
    let caches = tempfile::tempdir().unwrap();
    let setup = Setup { caches: Some(caches.path().to_owned()), ..Setup::new(model()) };
    let mut cluster = TestCluster::start(setup).unwrap();
    for device in ["d0", "d1", "d2"] {
        let line = cluster.coordinator.line(&format!("device {device} placed: ")).unwrap();
        assert!(line.contains(" fetched"), "{line}");
    }
    let client = cluster.client().await.unwrap();
    let have = client.run(&tokens, Output::Hidden).await.unwrap();
    assert_eq!(have.tensors, want.tensors, "the same weights, the same plan, the same bits");

    // All processes are started anew: everything is there, and nothing comes over the network.
    for i in 0..3 {
        cluster.restart_worker(i, &[]).unwrap();
    }
    cluster.restart_coordinator().unwrap();
    let said = cluster.coordinator.output();
    assert!(said.contains(" placed: ") && !said.contains("fetched"), "{said}");
    let client = cluster.client().await.unwrap();
    let again = client.run(&tokens, Output::Hidden).await.unwrap();
    assert_eq!(again.tensors, want.tensors);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_without_the_model_is_profiled_with_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let keys = Keys::create(&dir.path().join("keys")).unwrap();
    let identity = keys.of("d0", Role::Device).unwrap();
    let mut command = bare_worker(&identity, &dir.path().join("cache")).unwrap();
    command.args(["--listen", "127.0.0.1:0"]);
    let mut worker = Process::spawn("worker d0", command).unwrap();
    let setup = Setup { shares: vec![1.0], ..Setup::new(model()) };
    let desk = keys.of("coordinator", Role::Coordinator).unwrap();
    let text = setup.cluster_file(&desk, &[listening(&mut worker).unwrap()]);
    let file = dir.path().join("cluster.toml");
    std::fs::write(&file, text).unwrap();
    let cluster = Cluster::open(&file).unwrap();
    let model = ModelDir::open(&cluster.model).unwrap();
    let (store, desk) = (Store::new(&cluster.profiles), Identity::load(&desk).unwrap());
    let wanted = Wanted { fresh: false, links: vec![LinkType::Tls] };
    let found = collect(&cluster, &model, &desk, &store, &wanted, &|_| ()).await.unwrap();
    found.devices[0].check(&model.shape_key()).unwrap();
}
