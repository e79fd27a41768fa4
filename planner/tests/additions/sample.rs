//! Random clusters, and each with one more device.

#![allow(clippy::unwrap_used)]

use crate::testing::{Dice, Question, bert, llama};
use galaxy_common::{Bytes, Cache, DeviceName, Wanted, WeightFormat, WireType};
use galaxy_model::{Formats, ModelSpec};
use galaxy_planner::{Offer, Request, synthetic, synthetic::SyntheticDevice};

/// A kind of device, by the figures of one in the middle of its kind.
struct DeviceKind {
    name: &'static str,
    gflops: f64,
    memory_rate: f64,
    memory: f64,
    /// Bits per second.
    rate: f64,
    latency: f64,
}

const KINDS: [DeviceKind; 7] = [
    kind("board", 8.0, 4.0, 2e9, 1e8, 200e3),
    kind("board5", 30.0, 10.0, 6e9, 1e9, 100e3),
    kind("phone", 25.0, 12.0, 3e9, 2e8, 1_500e3),
    kind("laptop", 90.0, 30.0, 12e9, 5e8, 1_000e3),
    kind("mini-pc", 150.0, 40.0, 24e9, 1e9, 100e3),
    kind("desktop", 500.0, 60.0, 48e9, 2.5e9, 60e3),
    kind("server", 1_500.0, 150.0, 160e9, 1e10, 30e3),
];

const fn kind(
    name: &'static str,
    gflops: f64,
    memory_rate: f64,
    memory: f64,
    rate: f64,
    latency: f64,
) -> DeviceKind {
    DeviceKind { name, gflops, memory_rate, memory, rate, latency }
}

/// A cluster and what is asked of it; the last device is the one that is added.
pub struct Addition {
    /// With the added device.
    pub after: Question,
    /// The model, the devices and the workload as a phrase.
    pub what: String,
}

impl Addition {
    /// The devices without the added one.
    pub fn before(&self) -> &[Offer] {
        &self.after.offers[..self.after.offers.len() - 1]
    }

    /// The question with so many of the devices.
    pub fn request<'a>(&'a self, offers: &'a [Offer]) -> Request<'a> {
        Request { offers, ..self.after.request() }
    }
}

/// A model of 23 million to 70 billion parameters whose matrices take at most so many bytes, if there
/// is one.
fn model(dice: &mut Dice, most: f64) -> (&'static str, ModelSpec) {
    let mini = ModelSpec { heads: 12, kv_heads: 12, head_width: 32, ..bert(6, 384) };
    let encoders = [
        ("minilm", mini),
        ("bert-base", bert(12, 768)),
        ("bert-large", bert(24, 1024)),
        ("encoder-1b", bert(36, 1536)),
    ];
    let decoders = [
        ("llama-1b", ModelSpec { intermediate: 8192, ..llama(16, 2048, 32, 8) }),
        ("llama-3b", ModelSpec { intermediate: 8192, ..llama(28, 3072, 24, 8) }),
        ("llama-8b", llama(32, 4096, 32, 8)),
        ("llama-13b", ModelSpec { intermediate: 13_824, ..llama(40, 5120, 40, 40) }),
        ("llama-34b", ModelSpec { intermediate: 22_016, ..llama(48, 8192, 64, 8) }),
        ("llama-70b", llama(80, 8192, 64, 8)),
    ];
    let which = dice.whole(0, 9) as usize;
    let mut up_to = match which {
        0..=3 => encoders[..=which].to_vec(),
        _ => decoders[..=which - 4].to_vec(),
    };
    while up_to.len() > 1 && up_to.last().is_some_and(|(_, spec)| 2.0 * values(spec) > most) {
        up_to.pop();
    }
    up_to.pop().unwrap()
}

/// Values of a model's matrices.
fn values(spec: &ModelSpec) -> f64 {
    let (hidden, heads) = (f64::from(spec.hidden), f64::from(spec.heads + spec.kv_heads));
    let matrices = if spec.gated { 3.0 } else { 2.0 };
    let layer = 2.0 * heads * f64::from(spec.head_width) + matrices * f64::from(spec.intermediate);
    hidden * (f64::from(spec.layers) * layer + f64::from(spec.vocabulary))
}

/// The addition of a device that a seed draws, to a cluster of `low` to `high` devices.
pub fn addition(seed: u64, low: u64, high: u64) -> Addition {
    let mut dice = Dice::new(seed);
    let count = dice.whole(low, high) as usize + 1;
    let mut kinds: Vec<usize> = (0..dice.whole(1, 4)).map(|_| dice.whole(0, 6) as usize).collect();
    kinds.sort_unstable();
    kinds.dedup();
    // How much devices of a kind differ, and which share of its memory each grants.
    let differ = [0.0, 0.05, 0.3][dice.whole(0, 2) as usize];
    let granted = [0.1, 0.3, 0.8][dice.whole(0, 2) as usize];
    // The added one may be of another kind.
    let last = if dice.whole(0, 3) == 0 { dice.whole(0, 6) as usize } else { kinds[0] };
    let mut devices: Vec<SyntheticDevice> = Vec::new();
    let mut mix = String::new();
    for at in 0..count {
        let own = kinds[dice.whole(0, kinds.len() as u64 - 1) as usize];
        let kind = &KINDS[if at + 1 == count { last } else { own }];
        let mut around = || 1.0 + differ * dice.real(-1.0, 1.0);
        mix.push(kind.name.as_bytes()[0] as char);
        devices.push(SyntheticDevice {
            name: DeviceName::new(format!("{}-{at}", kind.name)).unwrap(),
            gflops: kind.gflops * around(),
            memory_rate: kind.memory_rate * around(),
            memory: Bytes((kind.memory * granted * around()) as u64),
            threads: 1,
            link_rate: kind.rate / 8.0 * around(),
            latency: kind.latency * around(),
        });
    }
    let others: f64 = devices[..count - 1].iter().map(|d| d.memory.0 as f64).sum();
    let (name, spec) = model(&mut dice, 0.8 * others);
    let mut after = Question::new(&spec, devices.clone());
    after.profile = synthetic::profile(&spec, "shape", WeightFormat::F16, &devices);
    after.formats = Formats::all(WeightFormat::F16);
    after.profile.links.retain(|link| link.link == after.allowed.links[0]);
    // On some networks each pair has its own rate.
    if dice.whole(0, 2) == 0 {
        let least = dice.real(0.3, 0.9);
        for link in &mut after.profile.links {
            let share = dice.real(least, 1.0);
            (link.rate, link.busy_rate) = (link.rate * share, link.busy_rate * share);
        }
    }
    let length = [16, 64, 128, 284, 512][dice.whole(0, 4) as usize];
    after.workload.lengths = vec![(length, 1.0)];
    after.allowed.max_rows = 1024;
    let task = match (spec.causal, dice.whole(0, 3)) {
        (true, 0..=1) => {
            after.workload.wanted = Wanted::LastLogits;
            after.workload.generated = [16, 64, 256][dice.whole(0, 2) as usize];
            after.allowed.cache = Cache {
                rows: Cache::taken(length + after.workload.generated),
                values: galaxy_common::CacheType::F32,
            };
            format!("{length} tokens and {} more", after.workload.generated)
        }
        (causal, which) => {
            after.workload.wanted = if causal {
                Wanted::LastLogits
            } else {
                Wanted::Pooled(galaxy_common::Pooling::Mean)
            };
            after.workload.texts = if which == 3 { dice.whole(2, 40) as u32 } else { 1 };
            format!("{} times {length} tokens", after.workload.texts)
        }
    };
    if dice.whole(0, 3) == 0 {
        after.allowed.wires = vec![WireType::F32, WireType::F16];
    }
    let what = format!("{name}, {count} devices {mix}, {granted} of memory, {task}");
    Addition { after, what }
}
