//! What operations of a plan's programs cost, by the profiles of its devices and links.

use galaxy_common::{
    BatchShape, ClusterProfile, DeviceProfile, Kernel, LinkProfile, Plan, ProfileError, Rank, Row,
    Span,
};
use galaxy_graph::{
    ByteCost, Cable, Costs, Disk, FRAME_OVERHEAD, LinkRate, Program, links,
    program::{Lane, OpKind, Operation, Region},
};
use galaxy_model::ModelSpec;
use std::collections::BTreeMap;

/// Bytes that sockets of both ends hold before the receiver reads.
const WINDOW: u64 = 4 << 20;

/// Bytes per second of a disk that nobody has measured: what slow flash gives.
const DISK: f64 = 100e6;

/// Costs for [`galaxy_graph::simulate()`].
pub struct ProfileCosts<'a> {
    hidden: f64,
    causal: bool,
    shape: &'a BatchShape,
    devices: Vec<&'a DeviceProfile>,
    links: BTreeMap<(Rank, Rank), &'a LinkProfile>,
    cables: Vec<Option<Cable>>,
}

impl<'a> ProfileCosts<'a> {
    /// The costs of programs of `plan` for batches of `shape`.
    ///
    /// # Errors
    /// When a device of the ring, or a link that its programs use, has no profile.
    pub fn new(
        spec: &ModelSpec,
        plan: &Plan,
        shape: &'a BatchShape,
        profile: &'a ClusterProfile,
    ) -> Result<Self, ProfileError> {
        let name = |rank: Rank| &plan.ring[rank.index()].name;
        let devices = plan.ring.iter().map(|d| profile.device(&d.name));
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        let mut between = BTreeMap::new();
        for (from, to) in links(plan) {
            between.insert((from, to), profile.link(name(from), name(to), plan.link)?);
        }
        let cables = plan.ranked().map(|(_, d)| cable(profile, &d.name, plan)).collect();
        let hidden = f64::from(spec.hidden);
        Ok(Self { hidden, causal: spec.causal, shape, devices, links: between, cables })
    }

    /// Nanoseconds that the bytes of a send or receive cost the kernels of its device.
    pub(crate) fn links_of(&self, program: &Program, op: &Operation, bytes: u64) -> f64 {
        let each = match program.lanes[usize::from(op.lane.0)].0 {
            Lane::Send(to) => self.byte_cost(program.rank, to).send,
            Lane::Receive(from) => self.byte_cost(from, program.rank).receive,
            _ => 0.0,
        };
        bytes as f64 * each
    }

    /// Pairs of the `queries` with the `keys` that they see, for each text: (query rows, pairs).
    fn pairs(&self, queries: Span<Row>, keys: Span<Row>) -> impl Iterator<Item = (f64, f64)> + '_ {
        let causal = self.causal;
        self.shape.placed().filter_map(move |(text, segment)| {
            let (rows, seen) = (queries.intersect(text), keys.intersect(text));
            let past = f64::from(rows.len()) * f64::from(segment.past);
            let pairs = seen_pairs(rows, seen, causal) + past;
            (pairs > 0.0).then(|| (f64::from(rows.len()), pairs))
        })
    }
}

/// Pairs of query rows and key rows of one text. A causal row sees itself and those before it.
pub(crate) fn seen_pairs(queries: Span<Row>, keys: Span<Row>, causal: bool) -> f64 {
    if !causal {
        return f64::from(queries.len()) * f64::from(keys.len());
    }
    // Query row i sees the keys up to i: none before the first key, all after the last.
    let first = queries.start().max(keys.start());
    let last = queries.end().min(keys.end()).max(first);
    let within = f64::from(last - first);
    let least = f64::from(first - keys.start() + 1);
    let after = f64::from(queries.end().saturating_sub(keys.end().max(queries.start())));
    within * (2.0 * least + within - 1.0) / 2.0 + after * f64::from(keys.len())
}

/// All links of a device go over one network interface, which carries what its fastest link was
/// measured to carry.
fn cable(profile: &ClusterProfile, name: &galaxy_common::DeviceName, plan: &Plan) -> Option<Cable> {
    let most = |mine: &dyn Fn(&LinkProfile) -> bool| {
        let of = profile.links.iter().filter(|l| l.link == plan.link && mine(l));
        of.map(|l| l.busy_rate.max(l.rate)).fold(0.0, f64::max) * FRAME_OVERHEAD
    };
    let (out, into) = (most(&|l| l.from == *name), most(&|l| l.to == *name));
    (out > 0.0 && into > 0.0).then_some(Cable { out, into })
}

fn size(region: Option<&Region>) -> (f64, f64) {
    region.map_or((0.0, 0.0), |r| (f64::from(r.rows.len()), f64::from(r.columns.len())))
}

impl Costs for ProfileCosts<'_> {
    fn compute(&self, program: &Program, op: &Operation) -> u64 {
        let device = self.devices[program.rank.index()];
        let (read, write) = (size(op.reads.first()), size(op.writes.first()));
        // Row operations were measured on the hidden width, and cost by values.
        let rows =
            |kernel, (rows, width): (f64, f64)| device.nanos(kernel, &[rows * width / self.hidden]);
        let nanos = match op.kind {
            OpKind::Embed(_) => rows(Kernel::Embed, write),
            OpKind::Rows(_) => rows(Kernel::Norm, write),
            OpKind::Product { kernel, .. } => {
                let columns = if kernel.is_cut_by_inputs() { read.1 } else { write.1 };
                device.nanos(kernel, &[write.0, columns])
            }
            OpKind::Attend { heads, .. } => {
                let queries = op.writes.first().map_or(Span::empty(), |r| r.rows);
                let keys = op.reads.get(1).map_or(Span::empty(), |r| r.rows);
                let texts = self.pairs(queries, keys);
                let heads = f64::from(heads.len());
                texts.map(|(q, pairs)| device.nanos(Kernel::Attend, &[q, pairs / q, heads])).sum()
            }
            OpKind::Join { .. } => rows(Kernel::Join, write),
            OpKind::Export { staged: true } | OpKind::Add => rows(Kernel::ExportAdd, write),
            OpKind::Export { staged: false } => rows(Kernel::Export, write),
            OpKind::Import => rows(Kernel::Import, write),
            OpKind::Select => rows(Kernel::Export, write),
            OpKind::Keep { .. } | OpKind::Emit { .. } => rows(Kernel::Export, read),
            // A pass over the logits, and one over the candidates.
            OpKind::Shortlist { .. } => rows(Kernel::Norm, (op.reads.len() as f64, read.1)),
            OpKind::Collect => rows(Kernel::Import, read),
            OpKind::Choose => 0.0,
            OpKind::Send { .. } | OpKind::Receive { .. } | OpKind::Load { .. } => 0.0,
        };
        let wake = if op.waits.is_empty() { 0.0 } else { device.wake };
        (nanos + wake) as u64
    }

    fn link(&self, from: Rank, to: Rank) -> LinkRate {
        // Profiles count bytes of tiles, the simulator those on the wire.
        let link = self.links.get(&(from, to));
        LinkRate {
            latency: link.map_or(0, |l| l.latency as u64),
            rate: link.map_or(f64::INFINITY, |l| l.busy_rate * FRAME_OVERHEAD),
            window: WINDOW,
            burst: 0,
        }
    }

    fn cable(&self, rank: Rank) -> Option<Cable> {
        self.cables[rank.index()]
    }

    fn disk(&self, rank: Rank) -> Option<Disk> {
        let device = self.devices[rank.index()];
        let known = |rate: f64| if rate > 0.0 { rate } else { DISK };
        let each = known(device.disk);
        Some(Disk { all: device.disk_shared.max(each), each })
    }

    fn byte_cost(&self, from: Rank, to: Rank) -> ByteCost {
        self.links.get(&(from, to)).map_or_else(ByteCost::default, |l| ByteCost {
            send: l.send_cost,
            receive: l.receive_cost,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_those_that_a_mask_leaves() {
        let span = |a, b| Span::<Row>::new(a, b);
        for causal in [false, true] {
            for (q, k) in [((0, 5), (0, 5)), ((3, 6), (0, 6)), ((0, 4), (2, 9)), ((5, 9), (1, 4))] {
                let count = (q.0..q.1)
                    .flat_map(|i| (k.0..k.1).map(move |j| (i, j)))
                    .filter(|(i, j)| !causal || j <= i)
                    .count();
                let got = seen_pairs(span(q.0, q.1), span(k.0, k.1), causal);
                assert_eq!(got, count as f64, "{q:?} {k:?} {causal}");
            }
        }
    }
}
