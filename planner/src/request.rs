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
    /// Its name.
    pub name: DeviceName,
    /// Bytes that it grants, by its own word and by the cluster file's.
    pub budget: Bytes,
    /// Kernel threads.
    pub threads: u16,
}

/// What the cluster is used for.
#[derive(Clone, PartialEq, Debug)]
pub struct Workload {
    /// Lengths of texts in tokens, with relative weights.
    pub lengths: Vec<(u32, f64)>,
    /// Texts that are there at once, all of one of these lengths. Where tokens are made, each text comes by
    /// itself.
    pub texts: u32,
    /// What is wanted of them.
    pub wanted: Wanted,
    /// Tokens that are made for each, one row at a time; 0: texts are read only.
    pub made: u32,
}

/// What the planner may choose from.
#[derive(Clone, PartialEq, Debug)]
pub struct Allowed {
    /// Which planner: [`Strategy::Auto`] takes what is predicted fastest.
    pub strategy: Strategy,
    /// Number types on the wire, the preferred one first; all but f32 are lossy.
    pub wires: Vec<WireType>,
    /// Link types. Profiles of each must be there.
    pub links: Vec<LinkType>,
    /// Tiles, if they are given.
    pub tiles: Option<u16>,
    /// How tiles travel, if that is given.
    pub exchange: Option<Exchange>,
    /// Most rows of one program: budgets hold for them.
    pub max_rows: u32,
    /// What is kept of texts that go on: budgets hold for it, too.
    pub cache: Cache,
    /// How weights come from disk where memory does not add up, if they may.
    pub reading: Reading,
}

/// A question.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// The formats of its matrices, as devices hold them.
    pub formats: &'a Formats,
    /// Its name,
    pub model: &'a str,
    /// its fingerprint,
    pub fingerprint: &'a str,
    /// and its shape, as profiles name it.
    pub shape: &'a str,
    /// Devices, in the order of the cluster file.
    pub offers: &'a [Offer],
    /// What they were measured to do.
    pub profile: &'a ClusterProfile,
    /// What is run.
    pub workload: &'a Workload,
    /// What may be chosen.
    pub allowed: &'a Allowed,
}

impl Request<'_> {
    /// Texts of so many tokens that go through the devices together: no more than a program has rows for.
    pub(crate) fn together(&self, tokens: u32) -> u32 {
        self.texts().min(self.allowed.max_rows / tokens.max(1)).max(1)
    }

    /// Texts that are there at once.
    pub(crate) fn texts(&self) -> u32 {
        let makes = self.workload.made > 0 && self.allowed.cache.rows > 0;
        if makes { 1 } else { self.workload.texts }
    }

    /// Tokens that a plan makes for each text.
    pub(crate) fn made(&self, plan: &Plan) -> u32 {
        if plan.cache.rows > 0 { self.workload.made } else { 0 }
    }
}

/// What one device is predicted to do for a request of the workload: for its texts, all together.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceShare {
    /// Which.
    pub name: DeviceName,
    /// Its kernels at work, nanoseconds.
    pub compute: f64,
    /// Of that, time that its links take from the kernels.
    pub links: f64,
    /// Its kernels idle until a tile arrives, nanoseconds.
    pub waiting: f64,
    /// Its kernels idle until weights have come from disk, nanoseconds.
    pub stalled: f64,
    /// Bytes of tiles that it sends,
    pub sent: u64,
    /// and receives.
    pub received: u64,
}

/// What a plan is predicted to do for a request, all of its texts together, by the simulator: means over the
/// workload's lengths.
#[derive(Clone, PartialEq, Debug)]
pub struct Prediction {
    /// From start to the last operation, nanoseconds.
    pub latency: f64,
    /// Of that, for each token that is made; 0 where none are.
    pub token: f64,
    /// What is read, by the closed form.
    pub closed_form: f64,
    /// By devices of the ring.
    pub devices: Vec<DeviceShare>,
}

/// A plan that was not taken.
#[derive(Clone, PartialEq, Debug)]
pub struct RunnerUp {
    /// It.
    pub plan: Plan,
    /// In words: "galaxy on 3 devices, 4 tiles".
    pub what: String,
    /// Its predicted latency, nanoseconds.
    pub latency: f64,
    /// Why it lost, in words.
    pub why: String,
}

/// What would make the plan faster.
#[derive(Clone, PartialEq, Debug)]
pub struct Advice {
    /// In words: "1.2 GB more memory on pi-2".
    pub what: String,
    /// Predicted latency then, nanoseconds.
    pub latency: f64,
}

/// How far the search went.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Search {
    /// Sets of devices that were looked at,
    pub subsets: u64,
    /// of all that there are.
    pub all_subsets: u64,
    /// Splits whose closed form was computed.
    pub splits: u64,
    /// Plans that were simulated.
    pub simulated: u64,
    /// At most so much better, as a share of its closed form, any plan could be that was not looked at;
    /// 0 when all were.
    pub gap: f64,
}

/// A plan with its reasons.
#[derive(Clone, PartialEq, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// In words: "galaxy on 3 devices, 4 tiles".
    pub what: String,
    /// What it is predicted to do.
    pub prediction: Prediction,
    /// What each device of its ring needs.
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
    /// A profile that is missing or cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// Programs that cannot be made.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// All devices together do not grant enough, or the strategy cannot use what they grant.
    #[error(
        "{strategy} has no plan that fits: {missing} are missing{}; {what}",
        device.as_ref().map(|d| format!(" on {d}")).unwrap_or_default()
    )]
    Memory {
        /// Of which strategy.
        strategy: Strategy,
        /// On which device, if it is one's.
        device: Option<DeviceName>,
        /// How much.
        missing: Bytes,
        /// What needs it, and what to do.
        what: String,
    },
    /// A question that makes no sense.
    #[error("{why}")]
    Nothing {
        /// What is wrong.
        why: String,
    },
}
