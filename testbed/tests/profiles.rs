//! Profiles of a cluster of real processes: measured once, kept, and used again.
#![allow(clippy::unwrap_used)]

use galaxy_common::{DeviceName, LinkType, PROFILE_VERSION};
use galaxy_coord::{
    Cluster,
    profile::{CollectError, Progress, Store, Wanted, collect},
};
use galaxy_model::ModelDir;
use galaxy_proto::identity::{Identity, Role};
use galaxy_testbed::{
    golden::checkpoints_dir,
    processes::{Keys, Process, Setup, coordinator, listening, worker_command},
};
use std::sync::Mutex;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn profiles_are_kept_and_measuring_a_serving_cluster_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let keys = Keys::create(&dir.path().join("keys")).unwrap();
    let setup = Setup { shares: vec![1.0; 3], ..Setup::new(checkpoints_dir().join("bert")) };
    let (mut workers, mut addresses) = (Vec::new(), Vec::new());
    for i in 0..3 {
        let identity = keys.of(&format!("d{i}"), Role::Device).unwrap();
        let mut command = worker_command(&identity, &setup.model).unwrap();
        command.args(["--listen", "127.0.0.1:0", "--plain"]);
        let mut worker = Process::spawn("a worker", command).unwrap();
        addresses.push(listening(&mut worker).unwrap());
        workers.push(worker);
    }
    let path = keys.of("coordinator", Role::Coordinator).unwrap();
    let file = dir.path().join("cluster.toml");
    std::fs::write(&file, setup.cluster_file(&path, &addresses)).unwrap();
    let (cluster, identity) = (Cluster::open(&file).unwrap(), Identity::load(&path).unwrap());
    let (model, store) = (ModelDir::open(&setup.model).unwrap(), Store::new(&cluster.profiles));
    let links = vec![LinkType::Tls, LinkType::Plain];
    let kept = |name: &DeviceName| store.device(name, &model.shape_key(), |_| true);

    let told = Mutex::new(Vec::new());
    let listener = |progress: Progress| told.lock().unwrap().push(progress.to_string());
    let wanted = Wanted { fresh: false, links: links.clone() };
    let measured = collect(&cluster, &model, &identity, &store, &wanted, &listener).await.unwrap();
    assert_eq!((measured.devices.len(), measured.links.len()), (3, 12), "{told:?}");
    for device in &cluster.devices {
        measured.device(&device.name).unwrap().check(&model.shape_key()).unwrap();
        for other in cluster.devices.iter().filter(|other| other.name != device.name) {
            for link in &links {
                measured.link(&device.name, &other.name, *link).unwrap().check().unwrap();
            }
        }
    }

    // A kept profile is used, and only a stale one is measured again.
    let mut stale = measured.devices[1].clone();
    stale.version = PROFILE_VERSION - 1;
    store.save_device(&stale).unwrap();
    assert!(kept(&stale.device).is_err());
    told.lock().unwrap().clear();
    let again = collect(&cluster, &model, &identity, &store, &wanted, &listener).await.unwrap();
    assert_eq!(
        (&again.devices[0], &again.devices[2]),
        (&measured.devices[0], &measured.devices[2])
    );
    let about = |name: &str| told.lock().unwrap().iter().any(|line| line.starts_with(name));
    assert!(about("d1: ") && !about("d0: ") && !about("links: "), "{told:?}");
    for device in &again.devices {
        assert_eq!(kept(&device.device).unwrap().as_ref(), Some(device));
    }
    assert_eq!(store.links().unwrap().len(), 12);

    // A cluster that serves is not disturbed.
    let (mut serving, _) = coordinator(&file).unwrap();
    serving.line("ready: ").unwrap();
    let fresh = Wanted { fresh: true, links };
    let refused = collect(&cluster, &model, &identity, &store, &fresh, &listener).await;
    let Err(CollectError::Refused { fault, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(fault.code, "holds_place");
}
