//! `galaxy plan`: how a model would be split, how long it would take, and why.

mod imagined;
mod network;
mod show;

use super::{failure::Failure, json, networks, networks::Shapes, print};
use clap::Args;
use galaxy_common::{Bytes, Cache, ClusterProfile, DeviceName, Plan, Strategy};
use galaxy_coord::{
    Cluster, ClusterError,
    cluster::DEFAULT_FILE,
    placement::{allowed, workload},
    profile::Store,
};
use galaxy_graph::budget;
use galaxy_model::{Formats, ModelDir, ModelSpec};
use galaxy_planner::{Allowed, Offer, Planned, PlanningError, Request, Workload, whatif::WhatIf};
use std::{
    collections::HashSet,
    path::{Path, PathBuf},
};

/// The numbers of sequences for which a decode step is predicted, beside the one of the request.
const SEQUENCES: [u32; 4] = [2, 4, 8, 16];

/// Arguments of `galaxy plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// Cluster file, whose devices galaxy profile has measured [default: cluster.toml].
    ///
    /// No worker is asked.
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,
    /// Plan for devices and links that do not exist, from their description in this file.
    #[arg(long, value_name = "FILE", conflicts_with = "cluster")]
    simulate: Option<PathBuf>,
    /// ONNX file: show in which order its operators need the least memory.
    #[arg(long, value_name = "FILE.onnx", conflicts_with_all = ["cluster", "simulate", "compare", "what_if"])]
    model: Option<PathBuf>,
    #[command(flatten)]
    shapes: Shapes,
    /// Compare the predicted latency of every strategy.
    #[arg(long)]
    compare: bool,
    /// Change the cluster before planning, like pi-2.memory=2GB; may be given several times.
    ///
    /// Other changes are "pi-2.speed=x2", "pi-1->pi-2.rate=1Gbit/s", and "-pi-2", which leaves a device out.
    #[arg(long, value_name = "CHANGE", allow_hyphen_values = true)]
    what_if: Vec<WhatIf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Everything that a plan depends on.
struct PlanQuestion {
    spec: ModelSpec,
    formats: Formats,
    model: String,
    fingerprint: String,
    /// A sentence on what is rounded as it is read; none if nothing is.
    rounded: Option<String>,
    shape: String,
    offers: Vec<Offer>,
    profile: ClusterProfile,
    workload: Workload,
    allowed: Allowed,
}

/// Runs `galaxy plan`.
pub fn plan(args: &PlanArgs) -> Result<(), Failure> {
    if let Some(path) = &args.model {
        if !networks::is_onnx(path) {
            let todo = "name other models in the cluster file, and leave --model out";
            return Err(Failure::usage("--model is for ONNX files").at(path.display()).todo(todo));
        }
        return network::plan(path, &args.shapes, args.json);
    }
    if !args.shapes.is_empty() {
        return Err(Failure::usage("--shape goes with an ONNX file: --model FILE.onnx"));
    }
    let mut case = match (&args.cluster, &args.simulate) {
        (Some(file), _) => PlanQuestion::of_cluster(file)?,
        (None, Some(file)) => imagined::read(file)?,
        (None, None) => PlanQuestion::of_cluster(nearest()?)?,
    };
    for change in &args.what_if {
        change
            .apply(&mut case.offers, &mut case.profile)
            .map_err(|why| Failure::usage(why.to_string()).at("--what-if"))?;
    }
    if args.compare {
        let all = case.compare();
        return print(&if args.json {
            json(&show::compared_json(&all))?
        } else {
            show::compared(&all)
        });
    }
    let failed = |error: PlanningError| Failure::new(error.to_string());
    let planned = case.plan(case.allowed.strategy).map_err(failed)?;
    let steps = case.decode_steps(&planned.plan).map_err(failed)?;
    print(&if args.json {
        json(&show::planned_json(&planned, &steps, &case.unlinked()))?
    } else {
        let rounded = case.rounded.iter().map(|text| format!("{}: {text}\n", case.model));
        rounded.collect::<String>()
            + &show::planned(
                &planned,
                (&case.spec, &case.formats),
                (&case.workload, &steps),
                &case.unlinked(),
            )
            + &show::shared(&planned, &case.profile.links)
    })
}

impl PlanQuestion {
    /// The devices of a cluster file, as they were measured.
    fn of_cluster(file: &Path) -> Result<Self, Failure> {
        let cluster = Cluster::open(file).map_err(|error| {
            let failure = Failure::new(error.to_string());
            match error {
                ClusterError::Read { .. } => failure,
                _ => failure.at(file.display()),
            }
        })?;
        for warning in &cluster.warnings {
            crate::tell(&format!("warning: {}: {warning}", file.display()));
        }
        if cluster.by_hand() {
            let why = "its devices have shares, which split by hand";
            let todo = "leave the shares out, and `galaxy plan` says what profiles make of it";
            return Err(Failure::new(why).at(file.display()).todo(todo));
        }
        let model = cluster.open_model().map_err(|e| Failure::new(e.to_string()))?;
        let profile = stored(&cluster, &model, file)?;
        let offer = |device: &galaxy_coord::cluster::DeviceConfig| {
            let measured = profile.device(&device.name).ok()?;
            let own = (measured.memory.0 > 0).then_some(measured.memory);
            Some(galaxy_coord::placement::offer(device, Some(measured.threads), own))
        };
        Ok(Self {
            offers: cluster.devices.iter().filter_map(offer).collect(),
            spec: model.spec().clone(),
            formats: model.formats().clone(),
            model: model.name().to_owned(),
            fingerprint: model.fingerprint().to_owned(),
            rounded: model.rounding_in_words(),
            shape: model.shape_key(),
            workload: workload(&cluster, &model),
            allowed: allowed(&cluster, model.spec()),
            profile,
        })
    }

    /// The question to the planner, with these limits.
    fn request<'a>(&'a self, allowed: &'a Allowed) -> Request<'a> {
        Request {
            spec: &self.spec,
            formats: &self.formats,
            model: &self.model,
            fingerprint: &self.fingerprint,
            shape: &self.shape,
            offers: &self.offers,
            profile: &self.profile,
            workload: &self.workload,
            allowed,
        }
    }

    fn plan(&self, strategy: Strategy) -> Result<Planned, PlanningError> {
        let allowed = Allowed { strategy, ..self.allowed.clone() };
        galaxy_planner::plan(&self.request(&allowed))
    }

    /// Nanoseconds of a decode step of several numbers of sequences: of so many as the KV cache holds to their ends.
    fn decode_steps(&self, plan: &Plan) -> Result<Vec<(u32, f64)>, PlanningError> {
        let longest = self.workload.lengths.iter().map(|(tokens, _)| *tokens).max().unwrap_or(0);
        let each = (longest + self.workload.generated).div_ceil(Cache::BLOCK);
        let most = budget::sequences(plan).min(plan.cache.blocks() / each.max(1));
        let numbers: Vec<u32> = SEQUENCES.into_iter().filter(|number| *number <= most).collect();
        galaxy_planner::decode_steps(&self.request(&self.allowed), plan, &numbers)
    }

    /// Pairs of devices between which no link was measured, one way: no plan uses them.
    fn unlinked(&self) -> Vec<(&DeviceName, &DeviceName)> {
        let links = &self.profile.links;
        let known: HashSet<_> = links
            .iter()
            .filter(|link| self.allowed.links.contains(&link.link))
            .map(|link| (&link.from, &link.to))
            .collect();
        let names = || self.offers.iter().map(|offer| &offer.name);
        let pairs = names().flat_map(|from| names().map(move |to| (from, to)));
        pairs.filter(|pair| pair.0 != pair.1 && !known.contains(pair)).collect()
    }

    /// Every strategy: its plan, or why it has none.
    fn compare(&self) -> Vec<(Strategy, Result<Planned, PlanningError>)> {
        let all = [
            Strategy::Local,
            Strategy::Megatron,
            Strategy::Sequence,
            Strategy::Pipeline,
            Strategy::Galaxy,
            Strategy::Auto,
        ];
        all.map(|strategy| (strategy, self.plan(strategy))).into()
    }
}

/// The cluster file of the current directory.
fn nearest() -> Result<&'static Path, Failure> {
    let file = Path::new(DEFAULT_FILE);
    let todo = "name a cluster file with --cluster FILE, or devices that do not exist with --simulate FILE";
    match file.exists() {
        true => Ok(file),
        false => {
            Err(Failure::usage(format!("there is no {DEFAULT_FILE} in this directory")).todo(todo))
        }
    }
}

/// The stored profiles of a cluster's devices and links. A link that is missing there is the planner's matter.
fn stored(cluster: &Cluster, model: &ModelDir, file: &Path) -> Result<ClusterProfile, Failure> {
    let store = Store::new(&cluster.profiles);
    let todo = || format!("`galaxy profile --cluster {}` measures", file.display());
    let damaged = |e: galaxy_coord::profile::StoreError| Failure::new(e.to_string()).todo(todo());
    let shape = model.shape_key();
    let (mut devices, mut missing) = (Vec::new(), Vec::new());
    for device in &cluster.devices {
        let fits = |p: &galaxy_common::DeviceProfile| {
            // A worker that grants fewer than the file says was measured with those.
            device.threads.is_none_or(|threads| p.threads <= threads)
        };
        match store.device(&device.name, &shape, fits).map_err(damaged)? {
            Some(profile) => devices.push(profile),
            None => missing.push(device.name.to_string()),
        }
    }
    if !missing.is_empty() {
        let what = format!(
            "there is no profile of {} for models of shape {shape}{}",
            missing.join(", "),
            if cluster.devices.iter().any(|d| d.threads.is_some()) {
                " and the threads of the file"
            } else {
                ""
            }
        );
        return Err(Failure::new(what).at(store.dir().display()).todo(todo()));
    }
    let links = store.links().map_err(damaged)?;
    Ok(ClusterProfile { devices, links })
}

/// Parses a size as a cluster file has it.
fn bytes(text: &str) -> Result<Bytes, String> {
    text.parse().map_err(|e: galaxy_common::UnitError| e.to_string())
}
