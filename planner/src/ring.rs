//! Plans of the layout ring for given devices in a given order: the closed form of all that may be
//! chosen, and the best split that fits.

use crate::{
    candidate,
    cost_model::{self, Load, Reach, Seat, Tables},
    cutting::{Cutting, RowLayers, Transport, Units},
    links::Links,
    memory::{Memory, ShardBytes},
    paper,
    request::{PlanningError, Request},
    split::{Missing, Problem, Split},
};
use galaxy_common::{DeviceProfile, Plan, ProfileError, Strategy, WireType};
use galaxy_graph::{
    budget::{self, Needs},
    holdings::Cuts,
    operators::OperatorGraph,
};
use std::{collections::BTreeMap, rc::Rc};

/// How many lengths of the workload the closed form tells apart.
const LENGTHS: usize = 4;

/// The number of tiles that a usual ring of many devices cuts all rows into.
const TILES_OF_ALL: f64 = 32.0;

/// How many times a split is found again after its programs were found to need more.
const ATTEMPTS: usize = 6;

/// A plan that fits.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub plan: Plan,
    /// Empty while it was not lowered, because it stays far below what is granted.
    pub needs: Vec<Needs>,
    /// Nanoseconds by the closed form.
    pub closed_form: f64,
}

/// A ring that is asked about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring<'a> {
    /// Places in the list of offers, in ring order.
    pub members: &'a [usize],
    pub means: Transport,
    pub by_rows: RowLayers,
}

/// How the split of a ring is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum By {
    /// The exact split, of the least cost.
    Exact,
    /// The split of the paper's Algorithm 1.
    Paper,
    /// The split in equal parts.
    Equal,
}

impl By {
    fn split(self, problem: &Problem) -> Result<Split, Missing> {
        match self {
            Self::Exact => problem.solve(),
            Self::Paper => paper::algorithm(problem).map_err(|split| worst(problem, &split)),
            Self::Equal => {
                let split = equal(problem);
                let fits = |d| problem.bytes(&split, d) <= problem.devices[d].room;
                let all = (0..problem.devices.len()).all(fits);
                if all { Ok(split) } else { Err(worst(problem, &split)) }
            }
        }
    }
}

/// What is known of the request, worked out once, to price and plan its rings.
pub(crate) struct Rings<'a> {
    pub request: &'a Request<'a>,
    graph: OperatorGraph,
    /// The units between which heads and columns may be cut.
    pub cuts: Cuts,
    pub memory: Memory,
    pub loads: Vec<Load>,
    /// The fewest texts of any load.
    pub texts: u32,
    pub links: Links<'a>,
    profiles: Vec<&'a DeviceProfile>,
    tables: BTreeMap<(usize, usize, u16, bool), Rc<Tables>>,
    weights: BTreeMap<Units, Rc<ShardBytes>>,
    held: BTreeMap<(Units, u64, RowLayers), Rc<ShardBytes>>,
    slowest: Vec<Slowest>,
    /// How many splits were found.
    pub splits: u64,
}

/// The slowest devices of a ring if memory had no end: the same whatever the exchange and the layers
/// by rows.
struct Slowest {
    members: Vec<usize>,
    reach: Vec<Reach>,
    tiles: u16,
    wire: WireType,
    /// A, M and V of the problem, in nanoseconds.
    nanos: [f64; 3],
}

impl<'a> Rings<'a> {
    /// # Errors
    /// When an offer has no profile, or one that cannot be used.
    pub fn new(request: &'a Request<'a>) -> Result<Self, ProfileError> {
        let profiles = request.offers.iter().map(|o| request.profile.device(&o.name));
        let loads = cost_model::loads(request, LENGTHS);
        Ok(Self {
            request,
            graph: OperatorGraph::of(request.spec),
            cuts: Cuts::of(request.spec, request.formats),
            memory: Memory::new(request),
            texts: loads.iter().map(|load| load.texts).min().unwrap_or(1),
            loads,
            links: Links::new(request),
            profiles: profiles.collect::<Result<_, _>>()?,
            tables: BTreeMap::new(),
            weights: BTreeMap::new(),
            held: BTreeMap::new(),
            slowest: Vec::new(),
            splits: 0,
        })
    }

    /// Bytes of a tile of a usual ring of this workload.
    pub fn tile(&self) -> f64 {
        let rows = cost_model::mean(&self.loads, &Load::rows);
        rows * f64::from(self.request.spec.hidden) * 4.0 / TILES_OF_ALL
    }

    fn tables(&mut self, member: usize, cutting: Cutting) -> Rc<Tables> {
        let (request, profile, loads) = (self.request, self.profiles[member], &self.loads);
        let Cutting { devices, means, by_rows, .. } = cutting;
        let made = self.tables.entry((member, devices, means.tiles, by_rows.whole));
        let make = || Rc::new(Tables::new(request, profile, cutting, loads));
        Rc::clone(made.or_insert_with(make))
    }

    /// The rings of another request for the same model, devices and workload, which differs in
    /// memory and links alone.
    pub fn again<'b>(&self, request: &'b Request<'b>) -> Result<Rings<'b>, ProfileError> {
        Ok(Rings {
            tables: self.tables.clone(),
            weights: self.weights.clone(),
            held: self.held.clone(),
            ..Rings::new(request)?
        })
    }

    fn held(&mut self, cutting: Cutting) -> Rc<ShardBytes> {
        let (request, memory, units) = (self.request, &self.memory, cutting.units);
        let weights = self.weights.entry(units);
        let weights = weights.or_insert_with(|| Rc::new(memory.weights_by(request.spec, units)));
        let cut = cutting.by_rows.others(request.spec.layers);
        let make = || Rc::new(memory.held(request, weights, cutting));
        Rc::clone(self.held.entry((units, cutting.runs(), cut)).or_insert_with(make))
    }

    /// How the work of a ring is cut, in units for so many devices.
    fn cutting(&self, ring: Ring<'_>) -> Cutting {
        let Ring { members, means, by_rows } = ring;
        let texts = if by_rows.whole { self.texts } else { 1 };
        let units = Units::new(self.request.spec, self.cuts, members.len(), texts);
        Cutting { devices: members.len(), units, means, by_rows }
    }

    /// The problem of a ring whose devices reach one another as `reach` says.
    fn problem(
        &mut self,
        ring: Ring<'_>,
        reach: &[Reach],
        corrections: &[i64],
        endless: bool,
    ) -> Result<(Cutting, Problem), Missing> {
        let cutting = self.cutting(ring);
        let tables: Vec<Rc<Tables>> =
            ring.members.iter().map(|&m| self.tables(m, cutting)).collect();
        let held = if endless { Rc::default() } else { self.held(cutting) };
        let seats: Vec<Seat<'_>> = ring
            .members
            .iter()
            .enumerate()
            .map(|(at, &m)| Seat {
                tables: &tables[at],
                reach: reach[at],
                // Half of all bytes there are: sums of them do not overflow.
                budget: if endless { u64::MAX / 2 } else { self.request.offers[m].budget.0 },
                correction: corrections.get(at).copied().unwrap_or(0),
                threads: self.request.offers[m].threads,
            })
            .collect();
        self.splits += 1;
        cost_model::problem(self.request, &self.memory, &seats, cutting, &self.loads, &held)
            .map(|problem| (cutting, problem))
    }

    /// What the cables of each device of a ring carry.
    ///
    /// # Errors
    /// When a link that it needs has no profile.
    pub fn reaches(&self, ring: Ring<'_>) -> Result<Vec<Reach>, ProfileError> {
        let each = 0..ring.members.len();
        each.map(|at| cost_model::reach(&self.links, ring.members, at, ring.means)).collect()
    }

    /// A lower bound of what any split of this ring costs: memory without end, and links as in
    /// `reach`.
    pub fn bound(&mut self, ring: Ring<'_>, reach: &[Reach]) -> Option<f64> {
        let (_, problem) = self.problem(ring, reach, &[], true).ok()?;
        // Rings are asked about one set of devices after another.
        self.slowest.retain(|known| known.members == ring.members);
        let Transport { tiles, wire, .. } = ring.means;
        let same =
            |known: &&Slowest| known.tiles == tiles && known.wire == wire && known.reach == reach;
        if let Some(known) = self.slowest.iter().find(same) {
            return problem.bound_with(known.nanos);
        }
        let (members, nanos) = (ring.members.to_vec(), problem.slowest());
        self.slowest.push(Slowest { members, reach: reach.to_vec(), tiles, wire, nanos });
        problem.bound_with(nanos)
    }

    /// A lower bound of what any plan of any set of these devices costs: each computes as if it were
    /// alone.
    pub fn relaxed(
        &mut self,
        members: &[usize],
        by_rows: RowLayers,
        free: &[Reach],
    ) -> Option<f64> {
        let means = Transport {
            tiles: 1,
            exchange: galaxy_common::Exchange::Ring,
            wire: galaxy_common::WireType::F32,
            link: galaxy_common::LinkType::Tls,
        };
        let cutting = self.cutting(Ring { members, means, by_rows });
        let (request, loads) = (self.request, self.loads.clone());
        let alone = Cutting { devices: 1, ..cutting };
        let tables: Vec<Tables> = members
            .iter()
            .map(|&m| Tables::new(request, self.profiles[m], alone, &loads))
            .collect();
        let seats: Vec<Seat<'_>> = tables
            .iter()
            .zip(free)
            .map(|(tables, &reach)| Seat {
                tables,
                reach,
                budget: u64::MAX / 2,
                correction: 0,
                threads: 1,
            })
            .collect();
        let held = ShardBytes::default();
        let problem = cost_model::problem(request, &self.memory, &seats, cutting, &loads, &held);
        problem.ok()?.bound()
    }

    /// The cost of the best split by the cost model, by what memory is expected to be needed; none where
    /// none fits.
    pub fn price(&mut self, ring: Ring<'_>) -> Option<f64> {
        self.price_below(ring, f64::INFINITY)
    }

    /// The cost that [`Self::price`] gives, if it is less than `limit`.
    pub fn price_below(&mut self, ring: Ring<'_>, limit: f64) -> Option<f64> {
        let reach = self.reaches(ring).ok()?;
        let (_, problem) = self.problem(ring, &reach, &[], false).ok()?;
        let split = problem.solve_below(limit).ok()?;
        split.cost.is_finite().then_some(split.cost)
    }

    /// The closed form's cost of the split that `by` finds; infinite where it does not fit.
    pub fn price_by(&mut self, ring: Ring<'_>, by: By) -> f64 {
        let Ok(reach) = self.reaches(ring) else { return f64::INFINITY };
        let problem = self.problem(ring, &reach, &[], false);
        let split = problem.and_then(|(_, problem)| by.split(&problem));
        split.map_or(f64::INFINITY, |split| split.cost)
    }

    /// The best plan of a ring that fits by what memory is expected to be needed, not lowered.
    ///
    /// # Errors
    /// When none fits; or a link has no profile.
    pub fn expected(&mut self, ring: Ring<'_>) -> Result<Candidate, PlanningError> {
        let reach = self.reaches(ring)?;
        let found = self.candidate(ring, &reach, &[], Strategy::Auto, By::Exact);
        let (_, split, plan) =
            found.map_err(|missing| self.missing(ring, Strategy::Auto, missing))?;
        Ok(Candidate { plan, needs: Vec::new(), closed_form: split.cost })
    }

    /// The best plan of a ring that fits, as `by` finds its split.
    ///
    /// # Errors
    /// When none fits; or a link has no profile.
    pub fn fit(
        &mut self,
        ring: Ring<'_>,
        strategy: Strategy,
        by: By,
    ) -> Result<Candidate, PlanningError> {
        let reach = self.reaches(ring)?;
        let mut corrections = vec![0i64; ring.members.len()];
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let found = self.candidate(ring, &reach, &corrections, strategy, by);
            let (problem, split, plan) =
                found.map_err(|missing| self.missing(ring, strategy, missing))?;
            let expected = |place: usize, granted: u64| {
                granted - problem.devices[place].room + problem.bytes(&split, place)
            };
            let far_below = ring.members.iter().enumerate().all(|(place, &m)| {
                let granted = self.request.offers[m].budget.0;
                // What all of a block takes is counted only for devices that may own rows.
                let counted = problem.devices[place].owner || split.rows[place] == 0;
                counted && expected(place, granted) < granted / 2
            });
            if far_below {
                return Ok(Candidate { plan, needs: Vec::new(), closed_form: split.cost });
            }
            let needs = candidate::needs(self.request, &plan)?;
            let above = candidate::above(&plan, &needs);
            if above.is_empty() {
                return Ok(Candidate { plan, needs, closed_form: split.cost });
            }
            for (at, _) in above {
                let name = &plan.ring[at].name;
                let place = ring.members.iter().position(|&m| self.request.offers[m].name == *name);
                let Some(place) = place else { continue };
                let budget = self.request.offers[ring.members[place]].budget.0;
                corrections[place] += needs[at].total().0 as i64 - expected(place, budget) as i64;
            }
            last = Some(candidate::too_large(strategy, &plan, &needs));
        }
        Err(last.unwrap_or(PlanningError::Nothing { why: "no attempt was made".into() }))
    }

    /// Whether no number of tiles makes this ring fit, because its weights alone do not.
    pub fn hopeless(&mut self, ring: Ring<'_>, strategy: Strategy, by: By) -> bool {
        let Ok(reach) = self.reaches(ring) else { return true };
        let Ok((_, _, plan)) = self.candidate(ring, &reach, &[], strategy, by) else {
            return false;
        };
        let weights = |device| budget::weights(&self.graph, self.request.formats, device);
        plan.ring.iter().any(|device| weights(device) > device.budget)
    }

    /// The plan of the split that `by` finds.
    fn candidate(
        &mut self,
        ring: Ring<'_>,
        reach: &[Reach],
        corrections: &[i64],
        strategy: Strategy,
        by: By,
    ) -> Result<(Problem, Split, Plan), Missing> {
        let (cutting, problem) = self.problem(ring, reach, corrections, false)?;
        let split = by.split(&problem)?;
        let plan = candidate::ring(self.request, strategy, ring.members, cutting, &split);
        Ok((problem, split, plan))
    }

    fn missing(&self, ring: Ring<'_>, strategy: Strategy, missing: Missing) -> PlanningError {
        let device = missing.device.map(|at| self.request.offers[ring.members[at]].name.clone());
        let granted: u64 = ring.members.iter().map(|&m| self.request.offers[m].budget.0).sum();
        let (count, granted) = (ring.members.len(), galaxy_common::Bytes(granted));
        let bytes = galaxy_common::Bytes(missing.bytes.max(1));
        PlanningError::Memory {
            strategy,
            device,
            missing: bytes,
            what: format!(
                "{}: raise memory, add devices, or lower max_rows",
                match count {
                    1 => format!("it grants {granted}"),
                    _ => format!("{count} devices grant {granted} together"),
                }
            ),
        }
    }
}

/// So many units in `n` parts that are as equal as can be.
pub(crate) fn equal_parts(total: usize, n: usize) -> Vec<usize> {
    (0..n).map(|d| total / n + usize::from(d < total % n)).collect()
}

/// The split in equal parts.
fn equal(problem: &Problem) -> Split {
    let n = problem.devices.len();
    let share = |total: usize| equal_parts(total, n);
    let mut split = Split {
        heads: share(problem.heads),
        columns: share(problem.columns),
        vocabulary: share(problem.vocabulary),
        rows: share(problem.rows),
        cost: 0.0,
    };
    split.cost = problem.price(&split);
    split
}

/// The device that a split asks too much of most.
fn worst(problem: &Problem, split: &Split) -> Missing {
    let above = |d: usize| problem.bytes(split, d).saturating_sub(problem.devices[d].room);
    let device = (0..problem.devices.len()).max_by_key(|&d| (above(d), std::cmp::Reverse(d)));
    Missing { bytes: device.map_or(1, above).max(1), device }
}
