//! What the planner is asked, and what it answers.

use galaxy_common::ClusterProfile;
use galaxy_common::{
    Bytes, Cache, DeviceName, Exchange, LinkType, Plan, ProfileError, Reading, Strategy, Wanted,
    WireType,
};
use galaxy_graph::{LowerError, budget::Needs};
use galaxy_model::{Formats, ModelSpec};

/// A device that may take part.
#[derive(Clone, PartialEq, Debug)]
pub struct Offer {
    /// The device's name.
    pub name: DeviceName,
    /// Bytes that it grants, by its own word and by the cluster file's.
    pub budget: Bytes,
    /// How many kernel threads it runs.
    pub threads: u16,
}

/// What the cluster is used for.
#[derive(Clone, PartialEq, Debug)]
pub struct Workload {
    /// Lengths of texts in tokens, with relative weights.
    pub lengths: Vec<(u32, f64)>,
    /// How many texts are there at once, all of one of these lengths. Where tokens are generated, each
    /// sequence comes by itself.
    pub texts: u32,
    /// What is wanted of these texts.
    pub wanted: Wanted,
    /// How many tokens are generated for each sequence, one row at a time; 0 where texts are only read.
    pub generated: u32,
}

/// What the planner may choose from.
#[derive(Clone, PartialEq, Debug)]
pub struct Allowed {
    /// The strategy: [`Strategy::Auto`] takes what is predicted fastest.
    pub strategy: Strategy,
    /// Number types on the wire, the preferred one first; all but f32 are lossy.
    pub wires: Vec<WireType>,
    /// Link types. Profiles of each must be there.
    pub links: Vec<LinkType>,
    /// The number of tiles; `None` leaves it to the planner.
    pub tiles: Option<u16>,
    /// How tiles travel; `None` leaves it to the planner.
    pub exchange: Option<Exchange>,
    /// Most rows of one program: budgets hold for them.
    pub max_rows: u32,
    /// The size and number type of the KV cache: budgets hold for it, too.
    pub cache: Cache,
    /// How weights come from disk where memory does not add up, if they may.
    pub reading: Reading,
}

/// What the planner is asked.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The model that is planned for.
    pub spec: &'a ModelSpec,
    /// The formats of its matrices, as devices hold them.
    pub formats: &'a Formats,
    /// The model's name.
    pub model: &'a str,
    /// The model's fingerprint.
    pub fingerprint: &'a str,
    /// The model's shape, as profiles name it.
    pub shape: &'a str,
    /// The devices that may take part, in the order of the cluster file.
    pub offers: &'a [Offer],
    /// What these devices and their links were measured to do.
    pub profile: &'a ClusterProfile,
    /// What the cluster is used for.
    pub workload: &'a Workload,
    /// What the planner may choose from.
    pub allowed: &'a Allowed,
}

impl Request<'_> {
    /// How many texts of so many tokens go through the devices together: no more than a program has rows
    /// for.
    pub(crate) fn batch_size(&self, tokens: u32) -> u32 {
        self.texts().min(self.allowed.max_rows / tokens.max(1)).max(1)
    }

    /// How many texts are there at once; 1 where tokens are generated.
    pub(crate) fn texts(&self) -> u32 {
        let makes = self.workload.generated > 0 && self.allowed.cache.rows > 0;
        if makes { 1 } else { self.workload.texts }
    }

    /// Tokens that are generated for each sequence under a plan; 0 without a KV cache.
    pub(crate) fn generated_tokens(&self, plan: &Plan) -> u32 {
        if plan.cache.rows > 0 { self.workload.generated } else { 0 }
    }
}

/// What one device is predicted to do for a request of the workload: for its texts, all together.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceShare {
    /// The device's name.
    pub name: DeviceName,
    /// Nanoseconds for which its kernels work.
    pub compute: f64,
    /// Nanoseconds, of those, that its links take from the kernels.
    pub links: f64,
    /// Nanoseconds for which its kernels are idle until a tile arrives.
    pub waiting: f64,
    /// Nanoseconds for which its kernels are idle until weights have come from disk.
    pub stalled: f64,
    /// Bytes of tiles that it sends.
    pub sent: u64,
    /// Bytes of tiles that it receives.
    pub received: u64,
}

/// What a plan is predicted to do for a request, all of its texts together, by the simulator: means over the
/// workload's lengths.
#[derive(Clone, PartialEq, Debug)]
pub struct Prediction {
    /// Nanoseconds from the start to the end of the last operation.
    pub latency: f64,
    /// Nanoseconds of that for each token that is generated; 0 where none are.
    pub token: f64,
    /// Nanoseconds by the closed form, of what is read.
    pub closed_form: f64,
    /// What each device does, in the order of the ring.
    pub devices: Vec<DeviceShare>,
}

/// A plan that was not taken.
#[derive(Clone, PartialEq, Debug)]
pub struct RunnerUp {
    /// The plan that was not taken.
    pub plan: Plan,
    /// The plan as a phrase for people: "galaxy on 3 devices, 4 tiles".
    pub what: String,
    /// Its predicted latency, nanoseconds.
    pub latency: f64,
    /// Why it is slower, for people.
    pub why: String,
}

/// What would make the plan faster.
#[derive(Clone, PartialEq, Debug)]
pub struct Advice {
    /// What to change, as a phrase for people: "1.2 GB more memory on pi-2".
    pub what: String,
    /// Predicted latency then, nanoseconds.
    pub latency: f64,
}

/// How far the search went.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Search {
    /// How many sets of devices were looked at.
    pub subsets: u64,
    /// How many sets of devices there are.
    pub all_subsets: u64,
    /// Splits whose closed form was computed.
    pub splits: u64,
    /// Plans that were simulated.
    pub simulated: u64,
    /// How much better, as a share of its closed form, a plan could be at most that was not looked at; 0
    /// when all were.
    pub gap: f64,
}

/// A plan with its reasons.
#[derive(Clone, PartialEq, Debug)]
pub struct Planned {
    /// The plan that was found.
    pub plan: Plan,
    /// The plan as a phrase for people: "galaxy on 3 devices, 4 tiles".
    pub what: String,
    /// What it is predicted to do.
    pub prediction: Prediction,
    /// What each device of its ring needs, in the ring's order.
    pub needs: Vec<Needs>,
    /// Devices that were left out, and why.
    pub left_out: Vec<(DeviceName, String)>,
    /// The best plan of another kind.
    pub runner_up: Option<RunnerUp>,
    /// What would help most, the best first.
    pub advice: Vec<Advice>,
    /// How it was found.
    pub search: Search,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanningError {
    /// A profile is missing or cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The plan cannot be lowered into programs.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// All devices together do not grant enough, or the strategy cannot use what they grant.
    #[error(
        "{strategy} has no plan that fits: {missing} are missing{}; {what}",
        device.as_ref().map(|d| format!(" on {d}")).unwrap_or_default()
    )]
    Memory {
        /// The strategy that has no plan.
        strategy: Strategy,
        /// The device that lacks the memory, if it is one.
        device: Option<DeviceName>,
        /// Bytes that are missing.
        missing: Bytes,
        /// What needs it, and what to do.
        what: String,
    },
    /// The question makes no sense, or has no answer.
    #[error("{why}")]
    Nothing {
        /// The reason, for people.
        why: String,
    },
}
