//! The measurements that are no cell of a policy: many requests in a row, the loaders beside `fio`, and a
//! model over devices whose memory together does not hold it.

use super::{
    Bench, Disk, MADE, MemoryCase, Policy,
    device::{DeviceProcess, forget},
};
use crate::{
    driver::Driver,
    environment::Environment,
    experiment::{Options, placing::place},
    instance::{Split, Testbed},
    reader::ReaderCommand,
    record::{Outcome, RecordFile, Verdict},
};
use anyhow::{Context, Result, bail, ensure};
use galaxy_common::Strategy;
use galaxy_model::ModelDir;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Instant,
};

/// The number of requests in a row.
const REQUESTS: u32 = 1000;
/// The numbers of loaders beside as many jobs of `fio`.
const LOADERS: [u16; 3] = [1, 2, 4];
/// How often loaders and `fio` take turns.
const TURNS: usize = 5;
/// The bytes that `fio` reads at a time, as our loaders do.
const BLOCK: u64 = 2 << 20;
/// The environment whose devices together cannot hold the model.
const ENVIRONMENT: &str = "three";

/// The first part of the keys of cells with requests in a row.
pub(super) const MANY: &str = "requests";
/// The first part of the keys of cells with loaders beside `fio`.
pub(super) const BESIDE: &str = "loaders";
/// The first part of the keys of cells with devices together.
pub(super) const TOGETHER: &str = "together";

impl Bench<'_> {
    /// Takes many requests in a row, by every policy whose memory is bounded.
    pub(super) fn requests(&self, record: &mut RecordFile) -> Result<()> {
        let (count, samples) = if self.options.smoke { (20, 2) } else { (REQUESTS, 1) };
        let rows = match self.case.ask {
            ReaderCommand::Run(rows) => rows,
            _ => return Ok(()),
        };
        for policy in super::POLICIES.into_iter().filter(|policy| policy.bounded()) {
            let (key, name) =
                (format!("{MANY}/{}/{}", self.case.name, policy.name()), policy.name());
            let labels = [("disk", MANY), ("model", &self.case.name), ("policy", &name)];
            if record.cell(&key, &labels).done(samples) {
                continue;
            }
            let plan = self.case.planned(policy, (4, 1))?;
            let facts = self.facts(&plan)?;
            for _ in 0..samples {
                let (values, ..) =
                    self.run(&plan, true, (None, None), ReaderCommand::Many(count, rows))?;
                eprintln!("{key}: {:.1} MB resident at most", values["rss_mb"]);
                let cell = record.cell(&key, &labels);
                cell.facts.extend(facts.map(|(name, value)| (name.to_owned(), value)));
                cell.facts.insert("requests".to_owned(), f64::from(count));
                // Only memory is of interest: it does not matter what else ran.
                cell.add(values, Verdict::Valid);
                record.save()?;
            }
        }
        Ok(())
    }

    /// Measures the loaders alone, in turns with `fio` on the same file.
    pub(super) fn loaders(&self, record: &mut RecordFile) -> Result<()> {
        if Command::new("fio").arg("--version").output().is_err() {
            eprintln!("without fio: its package is called so");
            return Ok(());
        }
        let plan = self.case.planned(Policy::PipeLoad(6), (0, 0))?;
        let work = tempfile::tempdir()?;
        let file = work.path().join("plan.json");
        std::fs::write(&file, serde_json::to_vec(&plan)?)?;
        let mut device = DeviceProcess::start(self.case, &file, &self.shards(), None)?;
        device.ask(ReaderCommand::Open)?;
        forget(&self.case.path)?;
        let shard = newest(&self.shards())?;
        for loaders in LOADERS {
            let key = format!("{BESIDE}/{}/{loaders}", self.case.name);
            let count = loaders.to_string();
            let labels = [("disk", BESIDE), ("model", &self.case.name), ("policy", &count)];
            while !record.cell(&key, &labels).done(TURNS) {
                let watch = crate::health::Watch::start()?;
                let took = device.ask(ReaderCommand::Read(loaders))?;
                let ours = took.loaded as f64 * 1e-3 / took.ms;
                let theirs = fio(&shard, loaders)?;
                let health = watch.finish(0)?;
                eprintln!("{key}: {ours:.0} MB/s, fio {theirs:.0} MB/s");
                let mut values = BTreeMap::from([
                    ("ours_mb_s".to_owned(), ours),
                    ("fio_mb_s".to_owned(), theirs),
                    ("of_fio".to_owned(), ours / theirs),
                ]);
                values.extend(health.values());
                record.cell(&key, &labels).add(values, Verdict::Valid);
                record.save()?;
            }
        }
        Ok(())
    }
}

/// The file of the shard that was written or opened last, by its time of modification.
fn newest(directory: &Path) -> Result<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        files.push((entry.metadata()?.modified()?, entry.path()));
    }
    files.retain(|(_, path)| path.extension().is_some_and(|end| end == "shard"));
    files.into_iter().max().map(|(_, path)| path).context("there is no shard")
}

/// The rate at which `fio` reads a file, in MB/s: each job its own part, directly, a block at a time.
fn fio(file: &Path, jobs: u16) -> Result<f64> {
    let part = std::fs::metadata(file)?.len() / u64::from(jobs) / BLOCK * BLOCK;
    let out = Command::new("fio")
        .args(["--name=read", "--rw=read", "--direct=1", "--ioengine=psync", "--readonly"])
        .args(["--group_reporting", "--thread", "--output-format=json", "--loops=1"])
        .arg(format!("--filename={}", file.display()))
        .args([format!("--bs={BLOCK}"), format!("--numjobs={jobs}")])
        .args([format!("--size={part}"), format!("--offset_increment={part}")])
        .output()?;
    ensure!(out.status.success(), "fio: {}", String::from_utf8_lossy(&out.stderr));
    let found: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    let read = found["jobs"][0]["read"]["bw_bytes"].as_f64().context("fio says no rate")?;
    Ok(read * 1e-6)
}

/// Runs the model over devices whose memory together does not hold it: whether they generate the same tokens
/// as one device that holds all, and how long that takes.
pub(super) fn together(
    options: &Options,
    case: &MemoryCase,
    record: &mut RecordFile,
) -> Result<()> {
    let key = format!("{TOGETHER}/{}/{ENVIRONMENT}", case.name);
    let labels = [("disk", TOGETHER), ("model", case.name.as_str()), ("policy", ENVIRONMENT)];
    if record.cell(&key, &labels).done(1) {
        return Ok(());
    }
    let wanted = super::key(Disk::Free, &case.name, Policy::Preload);
    let wanted = record.cell(&wanted, &[]).labels.get("tokens").cloned();
    let wanted = wanted.context("one device has made no text yet")?;
    let environment = Environment::open(ENVIRONMENT)?;
    let grants: u64 = environment.devices.iter().map(|d| environment.memory(d).0).sum();
    ensure!(grants < case.stored(), "{ENVIRONMENT} holds {}", case.name);
    let name = options.testbed.as_deref().unwrap_or(super::NAME);
    let up = Testbed::anew(environment, name, options.loopback, &options.cache)?;
    let up = up.calibrated()?;
    record.calibrations.insert(ENVIRONMENT.to_owned(), up.calibration.clone());
    let caches = options.cache.canonicalize()?.join("caches");
    up.start_workers(&options.cache.canonicalize()?, options.plain, Some(&caches))?;
    let stage = Driver::new(&up)?;
    let model = Arc::new(ModelDir::open(&case.path)?);
    let mut cluster = up.cluster(model.path(), Strategy::Auto, Split::Profiles { tokens: MADE.0 });
    cluster.max_rows = 64;
    (cluster.kv_cache_tokens, cluster.generate) = (Some(64), Some(MADE.1));
    eprintln!("{key}: shards are written");
    let begun = Instant::now();
    let placed = match place(&up, options.smoke, &stage, cluster, &model)? {
        Ok(placed) => placed,
        Err(refusal) => bail!("{key}: {refusal:?}"),
    };
    let placing = begun.elapsed().as_secs_f64();
    let plan = placed.plan();
    let mut values = BTreeMap::from([("placing_s".to_owned(), placing)]);
    for device in &plan.ring {
        let (read, kept) = galaxy_planner::stream::read_and_kept(&case.spec, &case.formats, device);
        for (what, bytes) in [("read", read), ("kept", kept)] {
            values.insert(format!("{}_{what}_mb", device.name), bytes.0 as f64 * 1e-6);
        }
    }
    let prompt: Vec<u32> = (0..MADE.0).map(|at| 3 + at * 7 % 90).collect();
    let text = placed.generate(&prompt, MADE.1)?;
    let made: Vec<String> = text.tokens.iter().map(ToString::to_string).collect();
    let made = made.join(" ");
    let (first, last) = (text.at[0], text.at[text.at.len() - 1]);
    values.insert("first_ms".to_owned(), first.as_secs_f64() * 1e3);
    let each = (last - first).as_secs_f64() * 1e3 / f64::from(MADE.1 - 1);
    values.insert("token_ms".to_owned(), each);
    let what = placed.what();
    for (index, device) in up.environment.devices.iter().enumerate() {
        let used = up.usage(index)?;
        if let Some(peak) = used.memory_peak {
            values.insert(format!("{}_peak_mb", device.name), peak.0 as f64 * 1e-6);
        }
        ensure!(used.oom_kills == 0, "{} was out of memory", device.name);
    }
    eprintln!(
        "{key}: {:.1} s to the first token, {:.1} s for each more",
        first.as_secs_f64(),
        each * 1e-3
    );
    drop(placed);
    drop(stage);
    up.down()?;
    let cell = record.cell(&key, &labels);
    cell.labels.extend([("plan".to_owned(), what), ("tokens".to_owned(), made.clone())]);
    match made == wanted {
        true => cell.add(values, Verdict::Valid),
        false => {
            let error = format!("it makes {made} where one device makes {wanted}");
            cell.outcome = Outcome::Failed { error };
        }
    }
    record.save()?;
    // The shards are two copies of the largest model: the next run writes its own.
    std::fs::remove_dir_all(&caches)?;
    Ok(())
}
