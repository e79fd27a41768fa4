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

/// The costs of operations and links by profiles, for [`galaxy_graph::simulate()`].
pub struct ProfileCosts<'a> {
    hidden: f64,
    /// What rows see in each layer, or once where all layers are alike.
    sees: Vec<(Option<u32>, Option<u32>)>,
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
        let kinds = spec.layers.min(spec.kinds.len() as u32).max(1);
        let sees = (0..kinds).map(|layer| spec.sees(layer)).collect();
        Ok(Self { hidden, sees, shape, devices, links: between, cables })
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

    /// Pairs of the `queries` with the `keys` that they see in a layer, for each text: (query rows, pairs).
    fn pairs(
        &self,
        layer: u32,
        queries: Span<Row>,
        keys: Span<Row>,
    ) -> impl Iterator<Item = (f64, f64)> + '_ {
        let sees = self.sees[(layer as usize).min(self.sees.len() - 1)];
        self.shape.placed().filter_map(move |(text, segment)| {
            let place = |rows: Span<Row>| {
                let at = |row: u32| segment.context_len + row - text.start();
                let rows = rows.intersect(text);
                if rows.is_empty() { (0, 0) } else { (at(rows.start()), at(rows.end())) }
            };
            let queries = place(queries);
            let pairs = seen_pairs(queries, (0, segment.context_len), sees)
                + seen_pairs(queries, place(keys), sees);
            (pairs > 0.0).then(|| (f64::from(queries.1 - queries.0), pairs))
        })
    }
}

/// Pairs of query rows and key rows of one text, both by their places in it, where a row sees so many rows before
/// itself and so many after; none for all.
pub(crate) fn seen_pairs(
    queries: (u32, u32),
    keys: (u32, u32),
    (behind, ahead): (Option<u32>, Option<u32>),
) -> f64 {
    let [from, to, low, high] = [queries.0, queries.1, keys.0, keys.1].map(i64::from);
    let rows = (to - from) as f64;
    let ends = ahead.map_or(rows * high as f64, |ahead| {
        let by = i64::from(ahead) + 1;
        clamped((from + by, to + by), (low, high))
    });
    let starts = behind.map_or(rows * low as f64, |behind| {
        let by = i64::from(behind);
        clamped((from - by, to - by), (low, high))
    });
    ends - starts
}

/// The sum of the whole numbers in `from..to`, each clamped between `low` and `high`.
fn clamped((from, to): (i64, i64), (low, high): (i64, i64)) -> f64 {
    let below = (to.min(low) - from).max(0);
    let above = (to - from.max(high)).max(0);
    let (first, end) = (from.clamp(low, high), to.clamp(low, high));
    let between = (first + end - 1) * (end - first) / 2;
    (below * low + above * high + between) as f64
}

/// The network interface of a device, which all its links go over: it carries what its fastest link was measured
/// to carry. `None` unless links both ways were measured.
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
                let texts = self.pairs(op.layer, queries, keys);
                let heads = f64::from(heads.len());
                texts.map(|(q, pairs)| device.nanos(Kernel::Attend, &[q, pairs / q, heads])).sum()
            }
            OpKind::AddNorm { .. } => rows(Kernel::AddNorm, write),
            OpKind::Export { staged: true } | OpKind::Add => rows(Kernel::ExportAdd, write),
            OpKind::Export { staged: false } => rows(Kernel::Export, write),
            OpKind::Import => rows(Kernel::Import, write),
            OpKind::Select => rows(Kernel::Export, write),
            OpKind::AppendKv { .. } | OpKind::Emit { .. } => rows(Kernel::Export, read),
            // A pass over the logits, and one over the candidates.
            OpKind::TopK { .. } => rows(Kernel::Norm, (op.reads.len() as f64, read.1)),
            OpKind::GatherCandidates => rows(Kernel::Import, read),
            OpKind::Sample => 0.0,
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
    fn attention_pair_counts_match_the_mask() {
        let masks = [(None, None), (None, Some(0)), (Some(2), Some(0)), (Some(1), Some(3))];
        for (behind, ahead) in masks {
            for (q, k) in [((0, 5), (0, 5)), ((3, 6), (0, 6)), ((0, 4), (2, 9)), ((5, 9), (1, 4))] {
                let sees = |i: u32, j: u32| {
                    behind.is_none_or(|rows| j + rows >= i)
                        && ahead.is_none_or(|rows| j <= i + rows)
                };
                let count = (q.0..q.1)
                    .flat_map(|i| (k.0..k.1).map(move |j| (i, j)))
                    .filter(|(i, j)| sees(*i, *j))
                    .count();
                let got = seen_pairs(q, k, (behind, ahead));
                assert_eq!(got, count as f64, "{q:?} {k:?} {behind:?} {ahead:?}");
            }
        }
    }
}
