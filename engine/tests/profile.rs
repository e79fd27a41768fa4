//! Profiles of real engines: sound for every family, and, on request, compared with timed layers.

#![allow(clippy::unwrap_used)]

use galaxy_common::{DeviceName, DeviceProfile, Kernel, Spread};
use galaxy_engine::{
    compute::choice::EngineChoice,
    measure::{
        Bench, MeasureError, ModelPart, OperationKind, Timed, copies,
        profile::{Measured, Setting, TIME, measure},
    },
};
use galaxy_model::{ModelDir, shape::Shape};
use rustix::time::{ClockId, clock_gettime};
use std::{
    ops::ControlFlow,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

fn setting(time: Duration) -> Setting {
    Setting {
        device: DeviceName::new("here").unwrap(),
        engine: EngineChoice::Cpu,
        threads: 1,
        max_rows: 512,
        memory: None,
        limit: None,
        time,
    }
}

fn golden(name: &str) -> Arc<ModelDir> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(name);
    Arc::new(ModelDir::open(&path).unwrap())
}

#[test]
fn every_family_has_a_sound_profile() {
    for name in ["bert", "gpt2", "llama"] {
        let dir = golden(name);
        let mut told = Vec::new();
        let mut progress = |done, total, now: &str| {
            told.push((done, total, now.to_owned()));
            ControlFlow::Continue(())
        };
        // Enough for a board, or an emulated one, to come to the largest number of rows.
        let time = Duration::from_secs(2);
        let Measured { profile, pauses } = measure(&dir, &setting(time), &mut progress).unwrap();
        assert!(pauses >= 1.0, "{pauses}");
        profile.check(&dir.shape_key()).unwrap();
        assert!(told.iter().all(|(done, total, _)| done <= total), "{told:?}");
        assert!(profile.wake > 0.0 && profile.memory.0 == 0, "{name}");
        let head = profile.table(Kernel::Language).is_some();
        assert_eq!(head, name != "bert", "{name}");
        let most = *profile.table(Kernel::AddNorm).unwrap().axes[0].last().unwrap();
        assert_eq!(most, dir.spec().position_limit().min(512), "{name}");
    }
}

#[test]
fn measuring_stops_when_the_progress_callback_breaks() {
    let mut progress = |_, _, _: &str| ControlFlow::Break(());
    let stopped = measure(&golden("bert"), &setting(TIME), &mut progress);
    assert!(matches!(stopped, Err(MeasureError::Stopped)));
}

#[test]
fn measuring_with_too_little_memory_is_refused() {
    let setting = Setting { memory: Some(galaxy_common::Bytes(1 << 20)), ..setting(TIME) };
    let refused = measure(&golden("bert"), &setting, &mut |_, _, _| ControlFlow::Continue(()));
    assert!(matches!(refused, Err(MeasureError::Room { .. })), "{refused:?}");
}

/// What a profile says of an operation that was timed.
fn predicted(profile: &DeviceProfile, head_width: u32, timed: &Timed) -> f64 {
    let work = timed.work;
    let (rows, inputs, outputs) =
        (f64::from(work.rows), f64::from(work.inputs), f64::from(work.outputs));
    match timed.part {
        OperationKind::Product(kernel) => {
            let columns = if kernel.is_cut_by_inputs() { inputs } else { outputs };
            profile.nanos(kernel, &[rows, columns])
        }
        OperationKind::Attention => {
            profile.nanos(Kernel::Attend, &[rows, rows, inputs / f64::from(head_width)])
        }
        OperationKind::AttentionAddNorm | OperationKind::MlpAddNorm => {
            profile.nanos(Kernel::AddNorm, &[rows])
        }
    }
}

fn on_processor() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// The sum of a profile's times against layers that are run and timed on the processor's clock,
/// with the profile's own factor for pauses. Prints, and judges nothing: how near it comes depends
/// on what else the machine does.
///
/// `cargo nextest run --release -p galaxy-engine --run-ignored only --no-capture profile_against_layers`
#[test]
#[ignore = "it measures for a minute; numbers are for a person"]
fn profile_against_layers() {
    for (name, shape) in [
        ("bert-large", Shape { layers: 12, ..Shape::bert(12, 1024, 16) }),
        ("distilbert", Shape::bert(6, 768, 12)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        shape.write(dir.path(), u64::MAX, &mut |_| {}).unwrap();
        let dir = Arc::new(ModelDir::open(dir.path()).unwrap());
        let begin = Instant::now();
        let go_on = &mut |_, _, _: &str| ControlFlow::Continue(());
        let Measured { profile, pauses } = measure(&dir, &setting(TIME), go_on).unwrap();
        let (kernel, noise) = profile.noisiest().unwrap();
        println!(
            "{name}: {:.1} s, factor {pauses:.3}, wake {:.1} us, disk {:.0} MB/s, noisiest {kernel} {:.0} %",
            begin.elapsed().as_secs_f64(),
            profile.wake / 1e3,
            profile.disk / 1e6,
            noise * 100.0
        );
        let head_width = dir.spec().head_width;
        for parts in [1, 2, 3] {
            let shares = match parts {
                1 => vec![1.0],
                parts => vec![1.0, f64::from(parts) - 1.0],
            };
            let layer = 12 * u64::from(shape.hidden).pow(2) * 4 / parts as u64;
            let layers = copies(galaxy_common::Bytes(layer)).min(shape.layers);
            let cut = ModelPart { layers, shares, part: 0, threads: 1 };
            let mut bench = Bench::open(dir.clone(), &cut).unwrap();
            for rows in [1, 16, 71, 284] {
                let batch = bench.batch(rows, 1).unwrap();
                let (mut real, mut sums) = (Vec::new(), Vec::new());
                let mut by_part =
                    std::collections::BTreeMap::<OperationKind, (Vec<f64>, f64)>::new();
                for turn in 0..3 * layers {
                    if turn % layers == 0 {
                        bench.enter(&batch).unwrap();
                    }
                    let mut timed = Vec::new();
                    let before = on_processor();
                    bench.layer(&batch, turn, &mut timed).unwrap();
                    real.push((on_processor() - before) * pauses);
                    let mut sum = 0.0;
                    for one in &timed {
                        let said = predicted(&profile, head_width, one);
                        let entry = by_part.entry(one.part).or_default();
                        entry.0.push(one.time.as_nanos() as f64 * pauses);
                        entry.1 = said;
                        sum += said;
                    }
                    sums.push(sum);
                }
                let (real, sum) = (Spread::of(&real), Spread::of(&sums).median);
                let parts_text: Vec<String> = by_part
                    .iter()
                    .map(|(part, (times, said))| {
                        let real = Spread::of(times).median;
                        format!("{part} {:.0}us {:+.1}%", real / 1e3, (said / real - 1.0) * 100.0)
                    })
                    .collect();
                println!(
                    "{name} 1/{parts} rows {rows}: {:.2} ms (quartiles {:.2} {:.2}), predicted {:.2}, {:+.1} % [{}]",
                    real.median / 1e6,
                    real.lower_quartile / 1e6,
                    real.upper_quartile / 1e6,
                    sum / 1e6,
                    (sum / real.median - 1.0) * 100.0,
                    parts_text.join(", ")
                );
            }
        }
    }
}
