//! Weights from disk over real processes: a cluster whose memory does not add up answers as one whose does,
//! and what becomes of its files.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, ClientError, GenerateOptions, Generated};
use galaxy_testbed::{
    models,
    processes::{Setup, TestCluster, until},
};
use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// A decoder of 50 MB of layers.
fn decoder() -> PathBuf {
    models::gpt2(Path::new(env!("CARGO_TARGET_TMPDIR")), "gpt2-512x4", 4, 512, 8).unwrap()
}

async fn tokens(client: &Client) -> Vec<u32> {
    made(client).await.unwrap_or_else(|error| panic!("{error}"))
}

async fn made(client: &Client) -> Result<Vec<u32>, ClientError> {
    let options =
        GenerateOptions { max_tokens: 12, ignore_end: true, ..GenerateOptions::default() };
    let mut text = client.generate(vec![5, 17, 9, 40], options).await?;
    let mut tokens = Vec::new();
    while let Some(Generated::Token(token)) = text.next().await? {
        tokens.push(token.token);
    }
    assert_eq!(tokens.len(), 12);
    Ok(tokens)
}

/// Files of shards that the devices have.
fn shards(caches: &Path) -> Vec<PathBuf> {
    let devices = fs::read_dir(caches).unwrap().map(|entry| entry.unwrap().path().join("shards"));
    let files = devices.filter_map(|dir| fs::read_dir(dir).ok()).flatten();
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_whose_memory_does_not_add_up_answers() {
    let caches = tempfile::tempdir().unwrap();
    let setup = |memory, caches: &Path| Setup {
        memory,
        shares: vec![1.0, 2.0],
        max_rows: 64,
        cache_rows: Some(192),
        caches: Some(caches.to_owned()),
        ..Setup::new(decoder())
    };
    let plenty = TestCluster::start(setup("1GB", &caches.path().join("plenty"))).unwrap();
    let want = tokens(&plenty.client().await.unwrap()).await;
    assert_eq!(shards(&caches.path().join("plenty")), Vec::<PathBuf>::new());
    drop(plenty);

    let few = caches.path().join("few");
    let mut cluster = TestCluster::start(setup("52MB", &few)).unwrap();
    let client = cluster.client().await.unwrap();
    assert_eq!(tokens(&client).await, want, "{}", cluster.output());
    let files = shards(&few);
    assert_eq!(files.len(), 2, "{files:?}: {}", cluster.output());
    let trace = client.trace(None).await.unwrap();
    assert!(
        trace.devices.iter().all(|device| device.lanes.iter().any(|l| l.lane.starts_with("load")))
    );

    // Bits flip while they run, all over the file: nobody sees it but the log.
    for file in &files {
        let open = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
        for at in (9000..open.metadata().unwrap().len()).step_by(500_000) {
            let mut byte = [0];
            open.read_exact_at(&mut byte, at).unwrap();
            open.write_all_at(&[!byte[0]], at).unwrap();
        }
    }
    assert_eq!(tokens(&client).await, want, "{}", cluster.output());
    assert!(
        cluster.output().contains("read from the model's files instead"),
        "{}",
        cluster.output()
    );

    // Gone, while a worker is away: it is written again.
    cluster.workers[1].kill().unwrap();
    fs::remove_file(&files[1]).unwrap();
    fs::OpenOptions::new().write(true).open(&files[0]).unwrap().set_len(5000).unwrap();
    cluster.restart_worker(1, &[]).unwrap();
    let again = until("the cluster answers again", || async { made(&client).await.ok() }).await;
    let again = again.unwrap_or_else(|e| panic!("{e:#}: {}", cluster.output()));
    assert_eq!(again, want, "{}", cluster.output());
    assert_eq!(shards(&few).len(), 2);
}
