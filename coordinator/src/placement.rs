//! Placement: from a cluster, a model, what devices grant and what they were measured to do to a plan
//! that fits.
//!
//! Everything here is a pure function. A cluster file with shares is split by them; any other by the
//! planner, from profiles.

use crate::cluster::{Cluster, DEFAULT_CACHE_ROWS, DEFAULT_GENERATE, DEFAULT_TILES};
use crate::drift;
use galaxy_common::{
    BatchShape, Bytes, Cache, ClusterProfile, DeviceName, ProfileError, Reading, Wanted,
    plan::{BlockAssignment, CacheType, DevicePlan, Layout, LinkType, Mode, Modes, Plan, Strategy},
};
use galaxy_graph::{
    Costs, LowerError, Program,
    budget::{self, Needs},
    program::Lane,
    share::{self, Member, PlanOptions, ShareError},
};
use galaxy_model::{HeadSpec, ModelDir, ModelSpec};
use galaxy_planner::{
    Allowed, Offer, Planned, PlanningError, Prediction, Request, Workload, stream,
};
use std::{sync::Arc, time::Duration};

/// What makes a plan from profiles: [`galaxy_planner::plan`], or another in tests.
pub type Planner = fn(&Request<'_>) -> Result<Planned, PlanningError>;

/// What predicts a plan: [`galaxy_planner::predict`], or another in tests.
pub type Predictor = fn(&Request<'_>, &Plan) -> Result<Prediction, PlanningError>;

/// What predicts by profiles how long operations of one batch shape take.
pub type Pricer = for<'a> fn(
    &'a ModelSpec,
    &'a Plan,
    &'a BatchShape,
    &'a ClusterProfile,
) -> Result<Box<dyn Costs + 'a>, ProfileError>;

/// Why a model has no place in a cluster.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// The shares give no plan.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The profiles give no plan.
    #[error(transparent)]
    Planning(#[from] PlanningError),
    /// The plan gives no programs.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// A plan has a part for a device that nobody offered.
    #[error("the plan has a part for {device}, which is no device of the cluster file")]
    Stranger {
        /// The device that the cluster file does not have.
        device: DeviceName,
    },
    /// A device's part does not fit into what it grants.
    #[error(
        "device {device} needs {} for its part ({} weights, {} on their way from disk, {} activations, {} transfers, {} results, {} scratch, {} KV cache, {} process) and grants {grants}: {} are missing. Raise its memory to {}, give it a smaller share, add a device, or lower max_rows or kv_cache_tokens",
        needs.total(), needs.weights, needs.stream, needs.activations, needs.staging, needs.results, needs.scratch, needs.cache, needs.process,
        Bytes(needs.total().0.saturating_sub(grants.0)), megabytes(needs.total())
    )]
    Budget {
        /// The device whose part does not fit.
        device: DeviceName,
        /// The memory that its part needs.
        needs: Needs,
        /// The memory that it grants.
        grants: Bytes,
    },
}

impl PlacementError {
    /// The device that is to blame, if it is one.
    pub fn device(&self) -> Option<&DeviceName> {
        match self {
            Self::Budget { device, .. } | Self::Stranger { device } => Some(device),
            Self::Planning(PlanningError::Memory { device, .. }) => device.as_ref(),
            Self::Planning(PlanningError::Profile(ProfileError::NoDevice { device })) => {
                Some(device)
            }
            _ => None,
        }
    }
}

/// A number of bytes as it is written in a cluster file, rounded up to megabytes.
fn megabytes(bytes: Bytes) -> String {
    format!("{}MB", bytes.0.div_ceil(1_000_000))
}

/// A plan, placed on the devices of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// The plan that is placed.
    pub plan: Arc<Plan>,
    /// The device of each rank, by its place in the cluster file.
    pub ring: Vec<usize>,
    /// The memory that each device of the ring needs, by rank.
    pub needed: Vec<Bytes>,
    /// Devices without a part, by their place in the cluster file, and why.
    pub left_out: Vec<(usize, String)>,
    /// The plan as a phrase: "galaxy on 3 devices, 4 tiles".
    pub what: String,
    /// How long a typical text is predicted to take; none for plans by hand.
    pub predicted: Option<Duration>,
}

impl Placement {
    fn new(cluster: &Cluster, plan: Plan, needs: &[Needs]) -> Result<Self, PlacementError> {
        let place = |name: &DeviceName| cluster.devices.iter().position(|d| d.name == *name);
        let ring = plan.ring.iter().map(|part| {
            let stranger = || PlacementError::Stranger { device: part.name.clone() };
            place(&part.name).ok_or_else(stranger)
        });
        let devices = match plan.ring.len() {
            1 => "1 device".to_owned(),
            devices => format!("{devices} devices"),
        };
        Ok(Self {
            ring: ring.collect::<Result<_, _>>()?,
            needed: needs.iter().map(Needs::total).collect(),
            left_out: Vec::new(),
            what: format!("{} on {devices}, {} tiles", plan.strategy, plan.tiles),
            predicted: None,
            plan: Arc::new(plan),
        })
    }

    /// Why a device has no part.
    pub fn reason(&self, device: usize) -> &str {
        let found = self.left_out.iter().find(|(left, _)| *left == device);
        match found {
            Some((_, why)) => why,
            // It was not there when the plan was made, and was looked at since.
            None if self.predicted.is_some() => {
                "a plan with it is not predicted to be faster by enough"
            }
            None => "the strategy gives it no part",
        }
    }
}

/// How the blocks of a plan are split, for people; empty where the layout leaves no choice.
pub fn modes(plan: &Plan) -> String {
    if plan.layout != Layout::Ring || plan.ring.len() < 2 {
        return String::new();
    }
    let cut = |modes: &Modes| match (modes.attention, modes.mlp) {
        (Mode::Tensor, Mode::Tensor) => "tensor".to_owned(),
        (Mode::Sequence, Mode::Sequence) => "sequence".to_owned(),
        (attention, mlp) => format!("attention {attention}, mlp {mlp}"),
    };
    match &plan.modes[..] {
        [all] => cut(all),
        runs => {
            let run = |m: &Modes| format!("{} {}", m.layers, cut(m));
            runs.iter().map(run).collect::<Vec<_>>().join("; ")
        }
    }
}

/// The first run of layers in which a device has heads or columns; else its empty part of layer 0.
pub(crate) fn held(part: &DevicePlan) -> BlockAssignment {
    let mut blocks = part.prefill.blocks.iter();
    let found = blocks.find(|b| !b.heads.is_empty() || !b.columns.is_empty());
    found.copied().unwrap_or_else(|| part.prefill.block(0))
}

/// What a device of the cluster file offers, its memory budget and its threads, with what its worker says of itself.
///
/// `threads` is the most that the worker grants, where that is known; `own` is the worker's own
/// limit of memory, if it has one.
pub fn offer(
    device: &crate::cluster::DeviceConfig,
    threads: Option<u16>,
    own: Option<Bytes>,
) -> Offer {
    Offer {
        name: device.name.clone(),
        budget: own.map_or(device.memory, |own| own.min(device.memory)),
        threads: device.threads.into_iter().chain(threads).min().unwrap_or(1).max(1),
    }
}

/// The plan that follows from the shares of the cluster file, checked against the offers.
///
/// # Errors
/// When the shares give no plan, and [`PlacementError::Budget`] for the first device whose part does
/// not fit.
pub fn by_shares(
    cluster: &Cluster,
    model: &ModelDir,
    offers: &[Offer],
) -> Result<Placement, PlacementError> {
    let members = offers.iter().map(|offer| {
        let device = cluster.devices.iter().find(|d| d.name == offer.name);
        Member {
            name: offer.name.clone(),
            budget: offer.budget,
            threads: offer.threads,
            share: device.and_then(|d| d.share).unwrap_or(1.0),
        }
    });
    let formats = model.formats();
    let terms = PlanOptions {
        model: model.name(),
        fingerprint: model.fingerprint(),
        formats,
        strategy: cluster.strategy,
        wire: cluster.wires()[0],
        tiles: cluster.tiles.unwrap_or(DEFAULT_TILES),
        max_rows: cluster.max_rows,
        cache: cache(cluster, model.spec()),
    };
    let mut plan = share::plan(model.spec(), &terms, &members.collect::<Vec<_>>())?;
    // By hand nothing is measured: what was allowed is meant.
    plan.link = if cluster.plain { LinkType::Plain } else { cluster.links()[0] };
    let spec = model.spec();
    let mut needs = budget::needs_all(spec, formats, &plan)?;
    // What no memory holds comes from disk.
    let way = stream::StreamingChoice::named(cluster.weight_streaming);
    let may = cluster.weight_streaming != Reading::Preload;
    if let Some(Ok(fitted)) = may.then(|| stream::fitted(spec, formats, &plan, &needs, way)) {
        plan = fitted;
        needs = budget::needs_all(spec, formats, &plan)?;
    }
    for (device, needs) in plan.ring.iter().zip(&needs) {
        if needs.total() > device.budget {
            let (device, grants) = (device.name.clone(), device.budget);
            return Err(PlacementError::Budget { device, needs: *needs, grants });
        }
    }
    let mut placement = Placement::new(cluster, plan, &needs)?;
    if cluster.strategy == Strategy::Local {
        let idle = (0..cluster.devices.len()).filter(|i| !placement.ring.contains(i));
        let why = "strategy local takes the device of the largest share".to_owned();
        placement.left_out = idle.map(|i| (i, why.clone())).collect();
    }
    Ok(placement)
}

/// The output that a model is used for: that of its head; without a head `of_vectors`, or else the hidden states.
pub fn wanted(spec: &ModelSpec, of_vectors: Option<Wanted>) -> Wanted {
    match spec.head {
        HeadSpec::Classes(_) => Wanted::Classes,
        HeadSpec::Language { .. } => Wanted::LastLogits,
        HeadSpec::None => of_vectors.unwrap_or(Wanted::Hidden),
    }
}

/// The workload of the cluster: texts of the lengths in its file, so many at once, as far as the model takes them.
pub fn workload(cluster: &Cluster, model: &ModelDir) -> Workload {
    let wanted = wanted(model.spec(), model.sentence().ok().map(|sentence| sentence.wanted()));
    let most = model.spec().position_limit().min(cluster.max_rows);
    let lengths = match model.spec().patches {
        Some(patches) => vec![(patches.rows(), 1.0)],
        None => cluster.lengths.iter().map(|tokens| ((*tokens).min(most), 1.0)).collect(),
    };
    let generated = match cache(cluster, model.spec()).rows {
        0 => 0,
        _ => cluster.generate.unwrap_or(DEFAULT_GENERATE),
    };
    Workload { lengths, texts: cluster.texts, wanted, generated }
}

/// The KV cache that the cluster file asks for; none where the model generates no tokens.
pub fn cache(cluster: &Cluster, spec: &ModelSpec) -> Cache {
    cache_for(spec, cluster.kv_cache_tokens, cluster.kv_cache_format)
}

/// The KV cache of a model: `rows` rows, or by default as its positions allow, stored as `values`;
/// none where the model generates no tokens.
pub fn cache_for(spec: &ModelSpec, rows: Option<u32>, values: CacheType) -> Cache {
    if !(spec.causal && matches!(spec.head, HeadSpec::Language { .. })) {
        return Cache::NONE;
    }
    let most = spec.position_limit().min(DEFAULT_CACHE_ROWS);
    Cache { rows: Cache::taken(rows.unwrap_or(most)), values }
}

/// What the cluster file lets the planner choose from.
pub fn allowed(cluster: &Cluster, spec: &ModelSpec) -> Allowed {
    Allowed {
        strategy: cluster.strategy,
        wires: cluster.wires(),
        links: cluster.links(),
        tiles: cluster.tiles,
        exchange: None,
        max_rows: cluster.max_rows,
        cache: cache(cluster, spec),
        reading: cluster.weight_streaming,
    }
}

/// Asks a planner about the model in the cluster, with devices that run as `profile` says.
pub fn ask<T>(
    cluster: &Cluster,
    model: &ModelDir,
    offers: &[Offer],
    profile: &ClusterProfile,
    question: impl FnOnce(&Request<'_>) -> T,
) -> T {
    question(&Request {
        spec: model.spec(),
        formats: model.formats(),
        model: model.name(),
        fingerprint: model.fingerprint(),
        shape: &model.shape_key(),
        offers,
        profile,
        workload: &workload(cluster, model),
        allowed: &allowed(cluster, model.spec()),
    })
}

/// Places the plan of a planner's answer.
///
/// # Errors
/// When the plan has a device that the cluster does not have.
pub fn settle(cluster: &Cluster, planned: Planned) -> Result<Placement, PlacementError> {
    let mut placement = Placement::new(cluster, planned.plan, &planned.needs)?;
    let why = |device: &crate::cluster::DeviceConfig| {
        let found = planned.left_out.iter().find(|(name, _)| *name == device.name);
        found.map_or_else(
            || "it was not connected when the plan was made".to_owned(),
            |l| l.1.clone(),
        )
    };
    let devices = cluster.devices.iter().enumerate();
    let idle = devices.filter(|(i, _)| !placement.ring.contains(i));
    placement.left_out = idle.map(|(i, device)| (i, why(device))).collect();
    placement.what = planned.what;
    let latency = planned.prediction.latency;
    placement.predicted = Some(Duration::from_nanos(latency.max(0.0) as u64));
    Ok(placement)
}

/// The profile by which the tracks of [`drift`] take `factors` times as long.
pub fn scaled(cluster: &Cluster, profile: &ClusterProfile, factors: &[f64]) -> ClusterProfile {
    let factor = |at: Option<usize>| at.and_then(|at| factors.get(at)).copied().unwrap_or(1.0);
    let devices = profile.devices.iter().map(|device| {
        let at = cluster.devices.iter().position(|d| d.name == device.device);
        let (kernels, disk) = (at.map(drift::kernels_of), at.map(drift::disk_of));
        device.scaled(factor(kernels)).with_disk_scaled(factor(disk))
    });
    ClusterProfile { devices: devices.collect(), links: profile.links.clone() }
}

/// How long a device is expected to be busy with a program.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Busy {
    /// How long its kernels work, in ns.
    pub kernels: f64,
    /// How long the busiest of its loaders reads while all of them do, in ns.
    pub disk: f64,
}

/// How long each device's kernels and loaders work on programs of `shape`, by rank.
///
/// # Errors
/// When the profile lacks a device or a link of the plan.
pub fn busy(
    spec: &ModelSpec,
    plan: &Plan,
    profile: &ClusterProfile,
    shape: &BatchShape,
    programs: &[Program],
    pricer: Pricer,
) -> Result<Vec<Busy>, ProfileError> {
    let costs = pricer(spec, plan, shape, profile)?;
    let of = |program: &Program| {
        let compute = program.lanes.iter().filter(|(lane, _)| *lane == Lane::Compute);
        let operations = compute.flat_map(|(_, ids)| ids);
        let kernels = operations.map(|id| costs.compute(program, program.operation(*id)) as f64);
        let loaded = |id: &_| -> u64 {
            let regions = program.operation(*id).writes.iter();
            regions.map(|region| program.region_bytes(region)).sum()
        };
        let loaders = program.lanes.iter().filter(|(lane, _)| matches!(lane, Lane::Load(_)));
        let loaders: Vec<u64> = loaders.map(|(_, ids)| ids.iter().map(loaded).sum()).collect();
        let (most, all) = (loaders.iter().max().copied().unwrap_or(0), loaders.iter().sum::<u64>());
        let disk = costs
            .disk(program.rank)
            .map_or(0.0, |disk| (most as f64 / disk.each).max(all as f64 / disk.all) * 1e9);
        Busy { kernels: kernels.sum(), disk }
    };
    Ok(programs.iter().map(of).collect())
}
