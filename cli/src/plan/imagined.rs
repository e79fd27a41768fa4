//! Devices and links that do not exist: the file of `galaxy plan --simulate`.

use super::{PlanQuestion, bytes};
use crate::{duration, failure::Failure};
use galaxy_common::{
    CacheType, DeviceName, LinkRate, RateError, Reading, Strategy, WireType,
    plan::{LinkType, MAX_DEVICES, MAX_TILES},
    shape::MAX_ROWS,
};
use galaxy_coord::{
    cluster::{DEFAULT_LENGTH, DEFAULT_MAX_ROWS, MAX_TEXTS},
    placement::wanted,
};
use galaxy_model::{Formats, ModelDir, ModelSpec, shape};
use galaxy_planner::{
    Allowed, Offer, Workload,
    synthetic::{self, SyntheticDevice},
};
use serde::Deserialize;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The model's directory, relative to the file; given instead of `shape`.
    model: Option<PathBuf>,
    /// The name of a well-known shape, given instead of `model`.
    shape: Option<String>,
    strategy: Option<String>,
    lengths: Option<Vec<u32>>,
    texts: Option<u32>,
    generate: Option<u32>,
    max_rows: Option<u32>,
    tiles: Option<u16>,
    #[serde(alias = "weights")]
    weight_streaming: Option<String>,
    #[serde(default)]
    lossy: bool,
    #[serde(default)]
    plain: bool,
    device: Vec<ImaginedDevice>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ImaginedDevice {
    name: String,
    /// The number of such devices, whose names are numbered from 1; one without a number if absent.
    count: Option<u32>,
    /// The rate of matrix products, in 10^9 operations per second.
    gflops: f64,
    /// The rate at which it reads memory, in 10^9 bytes per second.
    memory_bandwidth: f64,
    memory: String,
    /// The rate of its network interface, each way, like `1Gbit/s`.
    rate: String,
    /// The latency from it to the switch, like `0.1ms`.
    latency: String,
}

/// Reads the file of `--simulate`.
pub(super) fn read(file: &Path) -> Result<PlanQuestion, Failure> {
    let wrong = |what: String| Failure::new(what).at(file.display());
    let text = std::fs::read_to_string(file).map_err(|e| wrong(format!("cannot be read: {e}")))?;
    let parsed: File = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    let base = file.parent().unwrap_or(Path::new(""));
    case(parsed, base).map_err(wrong)
}

fn case(file: File, base: &Path) -> Result<PlanQuestion, String> {
    let (spec, formats, model) = model(&file, base)?;
    let max_rows = file.max_rows.unwrap_or(DEFAULT_MAX_ROWS);
    if !(1..=MAX_ROWS).contains(&max_rows) {
        return Err(format!("max_rows = {max_rows} is out of range: 1 to {MAX_ROWS}"));
    }
    if let Some(tiles) = file.tiles.filter(|tiles| !(1..=MAX_TILES).contains(tiles)) {
        return Err(format!("tiles = {tiles} is out of range: 1 to {MAX_TILES}"));
    }
    let most = spec.position_limit().min(max_rows);
    let lengths = file.lengths.unwrap_or_else(|| vec![DEFAULT_LENGTH.min(most)]);
    if let Some(length) = lengths.iter().find(|length| !(1..=most).contains(*length)) {
        return Err(format!("lengths: {length} is out of range: 1 to {most}"));
    }
    let texts = file.texts.unwrap_or(1);
    if !(1..=MAX_TEXTS).contains(&texts) {
        return Err(format!("texts = {texts} is out of range: 1 to {MAX_TEXTS}"));
    }
    let strategy = file.strategy.as_deref().unwrap_or("auto").parse::<Strategy>();
    let reading = file.weight_streaming.as_deref().map_or(Ok(Reading::Auto), str::parse);
    let mut devices: Vec<SyntheticDevice> = Vec::new();
    for device in &file.device {
        for one in device.each()? {
            if devices.iter().any(|other| other.name == one.name) {
                return Err(format!("the name {} is used twice", one.name));
            }
            devices.push(one);
        }
        if devices.len() > MAX_DEVICES {
            return Err(format!("a ring has at most {MAX_DEVICES} devices: lower the counts"));
        }
    }
    let offer = |device: &SyntheticDevice| Offer {
        name: device.name.clone(),
        budget: device.memory,
        threads: device.threads,
    };
    let shape = "imagined".to_owned();
    Ok(PlanQuestion {
        rounded: None,
        offers: devices.iter().map(offer).collect(),
        profile: synthetic::profile(&spec, &shape, formats.most(), &devices),
        workload: Workload {
            generated: file.generate.unwrap_or(0),
            texts,
            lengths: lengths.into_iter().map(|length| (length, 1.0)).collect(),
            wanted: wanted(&spec, None),
        },
        allowed: Allowed {
            strategy: strategy?,
            wires: if file.lossy {
                vec![WireType::F32, WireType::F16]
            } else {
                vec![WireType::F32]
            },
            links: vec![if file.plain { LinkType::Plain } else { LinkType::Tls }],
            tiles: file.tiles,
            exchange: None,
            max_rows,
            cache: galaxy_coord::placement::cache_for(&spec, None, CacheType::F32),
            reading: reading?,
        },
        fingerprint: model.clone(),
        spec,
        formats,
        model,
        shape,
    })
}

fn model(file: &File, base: &Path) -> Result<(ModelSpec, Formats, String), String> {
    match (&file.model, &file.shape) {
        (Some(dir), None) => {
            let model = ModelDir::open(&base.join(dir)).map_err(|e| e.to_string())?;
            let formats = model.formats();
            Ok((model.spec().clone(), formats.clone(), model.name().to_owned()))
        }
        (None, Some(name)) => {
            let found = shape::catalogue().iter().find(|model| model.name == name);
            let found = found.ok_or_else(|| {
                let known: Vec<_> = shape::catalogue().iter().map(|model| model.name).collect();
                format!("no shape {name:?}: known are {}", known.join(" "))
            })?;
            let spec = found.shape.spec().map_err(|e| e.to_string())?;
            Ok((spec, Formats::all(found.shape.format), name.clone()))
        }
        _ => Err("give model, a directory, or shape, a well-known one".to_owned()),
    }
}

impl ImaginedDevice {
    /// The devices that the entry describes: one, or as many as its count says.
    fn each(&self) -> Result<Vec<SyntheticDevice>, String> {
        let of = |key: &str, why: String| format!("device {:?}: {key}: {why}", self.name);
        for (key, value) in [("gflops", self.gflops), ("memory_bandwidth", self.memory_bandwidth)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(of(key, format!("{value} is no number above zero")));
            }
        }
        let memory = bytes(&self.memory).map_err(|e| of("memory", e))?;
        let rate: LinkRate = self.rate.parse().map_err(|e: RateError| of("rate", e.to_string()))?;
        let latency = duration(&self.latency).map_err(|e| of("latency", e))?;
        let names: Vec<String> = match self.count {
            None => vec![self.name.clone()],
            Some(0) => return Err(of("count", "0 is no number of devices".to_owned())),
            Some(count) => (1..=count.min(MAX_DEVICES as u32 + 1))
                .map(|n| format!("{}-{n}", self.name))
                .collect(),
        };
        let one = |name: String| {
            Ok(SyntheticDevice {
                name: DeviceName::new(name).map_err(|e| of("name", e.to_string()))?,
                gflops: self.gflops,
                memory_rate: self.memory_bandwidth,
                memory,
                threads: 1,
                link_rate: rate.bits_per_second() / 8.0,
                latency: latency.as_nanos() as f64,
            })
        };
        names.into_iter().map(one).collect()
    }
}
