//! Weight streaming over real processes: a cluster whose memory together is too small answers as one whose
//! memory is large enough, and damage to its files does not change that.
#![allow(clippy::unwrap_used)]

use galaxy_client::{Client, ClientError, GenerateOptions, Generated};
use galaxy_testbed::{
    models,
    processes::{PATIENCE, Setup, TestCluster, until},
};
use std::{
    fs::{self, DirBuilder},
    os::unix::fs::{DirBuilderExt, FileExt},
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

/// A decoder with 50 MB of weights in its layers.
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

/// The files of shards that the devices have written.
fn shards(caches: &Path) -> Vec<PathBuf> {
    let devices = fs::read_dir(caches).unwrap().map(|entry| entry.unwrap().path().join("shards"));
    let files = devices.filter_map(|dir| fs::read_dir(dir).ok()).flatten();
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn setup(memory: &'static str, caches: &Path) -> Setup {
    Setup {
        memory,
        shares: vec![1.0, 2.0],
        max_rows: 64,
        kv_cache_tokens: Some(192),
        caches: Some(caches.to_owned()),
        ..Setup::new(decoder())
    }
}

/// The tokens by devices that hold all weights.
async fn wanted(caches: &Path) -> Vec<u32> {
    let plenty = TestCluster::start(setup("1GB", caches)).unwrap();
    tokens(&plenty.client().await.unwrap()).await
}

/// The tokens of the first generation that succeeds.
async fn at_last(cluster: &TestCluster, client: &Client) -> Vec<u32> {
    let made = until("the cluster answers", || async { made(client).await.ok() }).await;
    made.unwrap_or_else(|error| panic!("{error:#}: {}", cluster.output()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_with_too_little_memory_streams_weights_and_answers() {
    let caches = tempfile::tempdir().unwrap();
    let want = wanted(&caches.path().join("plenty")).await;
    assert_eq!(shards(&caches.path().join("plenty")), Vec::<PathBuf>::new());

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

    // Bits flip while they run, all over the file: only the log shows it.
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

    // A file is deleted while a worker is away: it is written again.
    cluster.workers[1].kill().unwrap();
    fs::remove_file(&files[1]).unwrap();
    fs::OpenOptions::new().write(true).open(&files[0]).unwrap().set_len(5000).unwrap();
    cluster.restart_worker(1, &[]).unwrap();
    assert_eq!(at_last(&cluster, &client).await, want, "{}", cluster.output());
    assert_eq!(shards(&few).len(), 2);
}

/// A directory on a file system of limited size, which is unmounted when this is dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf, size: &str) -> Self {
        // A cache is only for its user.
        DirBuilder::new().recursive(true).mode(0o700).create(&at).unwrap();
        let small = Self(at);
        small.run(&["mount", "-t", "tmpfs", "-o", &format!("size={size},mode=700"), "tmpfs"]);
        small
    }
    fn run(&self, words: &[&str]) {
        let done = Command::new(words[0]).args(&words[1..]).arg(&self.0).status().unwrap();
        assert!(done.success(), "{words:?}");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(&self.0).status());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_reported_and_serving_resumes_when_space_is_freed() {
    let id = Command::new("id").arg("-u").output().unwrap();
    if id.stdout != b"0\n" {
        eprintln!("skipped: a disk of its own needs root");
        return;
    }
    let caches = tempfile::tempdir().unwrap();
    let want = wanted(&caches.path().join("plenty")).await;
    let few = caches.path().join("few");
    let small = Small::mount(few.join("d1/shards"), "4m");
    let mut cluster = TestCluster::begin(setup("52MB", &few)).unwrap();
    cluster.coordinator.line("No space left").unwrap();
    let client = cluster.client().await.unwrap();
    let hurried = client.with_timeout(std::time::Duration::from_secs(8));
    let why = made(&hurried).await.unwrap_err().to_string();
    assert!(why.contains("d1"), "{why}");
    assert!(cluster.health(1).await.unwrap().resident_bytes > 0, "it lives");
    let valid = |path: &PathBuf| path.extension().is_some_and(|end| end == "shard");
    assert!(!shards(&few).iter().any(|file| valid(file) && file.starts_with(&small.0)));
    small.run(&["mount", "-o", "remount,size=200m"]);
    assert_eq!(at_last(&cluster, &client).await, want, "{}", cluster.output());
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_cut_off_by_a_killed_worker_is_written_again() {
    let caches = tempfile::tempdir().unwrap();
    let want = wanted(&caches.path().join("plenty")).await;
    for attempt in 0..10 {
        let few = caches.path().join(format!("few{attempt}"));
        let mut cluster = TestCluster::begin(setup("52MB", &few)).unwrap();
        let own = few.join("d1/shards");
        let begun = Instant::now();
        let written = loop {
            let files = fs::read_dir(&own).into_iter().flatten().flatten();
            let sizes: Vec<u64> = files.map(|f| f.metadata().map_or(0, |m| m.len())).collect();
            if sizes.iter().any(|size| *size > 1 << 20) {
                break sizes;
            }
            assert!(begun.elapsed() < PATIENCE, "{}", cluster.output());
            tokio::task::yield_now().await;
        };
        cluster.workers[1].kill().unwrap();
        let left: Vec<PathBuf> = shards(&few).into_iter().filter(|f| f.starts_with(&own)).collect();
        let [part] = &left[..] else { panic!("{left:?} after {written:?}") };
        if part.extension().is_none_or(|end| end != "part") {
            // The file was written whole before the worker could be killed.
            continue;
        }
        cluster.restart_worker(1, &[]).unwrap();
        let client = cluster.client().await.unwrap();
        assert_eq!(at_last(&cluster, &client).await, want, "{}", cluster.output());
        assert!(!part.exists() && part.with_extension("").exists());
        return;
    }
    panic!("no attempt was cut off");
}
