//! The cost model, a closed form: what a plan of the layout ring costs, without simulating it.
//!
//! # The formula
//! All terms are nanoseconds, means over the workload's lengths, from tables of profiles. For a device d of
//! D with h heads, c columns, v tokens of the vocabulary and r of the R rows:
//!
//! ```text
//! heads_d(h)    qkv + attention + output product of all rows, import of R (D-1)/D rows into the
//!               block, export of as many out of it, waits of tiles, and what its bytes cost it
//! columns_d(c)  the same of up and down
//! vocab_d(v)    the language head on the wanted rows
//! rows_d(r)     embedding, joins and norms of all layers on r rows, their exports; in layers cut by
//!               rows also the whole block on r rows
//! wire_d(r)     2 (R - r) rows of the hidden width over the slower of its two cables, and
//!               2 (D - 1) times the latency (2 times if tiles go from owner to everyone at once)
//!
//! cost = max rows_d + max vocab_d + fixed + carried max wire_d
//!      + T_attention overlap(max heads_d, max wire_d) + T_mlp overlap(max columns_d, max wire_d)
//! overlap(x, w) = max(x, w) + min(x, w) / tiles
//! ```
//!
//! T are the layers cut by heads or columns; in the others attention gathers keys and values, which
//! is `carried`: their width over that of what a block cut by heads moves. `fixed` is what latency
//! adds where keys and values are narrow.
//!
//! Tiles hide the lesser of compute and wire but for its first tile. The first product of a block runs on
//! tiles of R / (D tiles) rows, and is priced so. With a parallel residual, one gather and one scatter serve
//! both blocks of a layer: T overlap(max heads_d + max columns_d, max wire_d). Causal attention is priced at
//! the mean of what rows see; that late rows see more is left to the simulator.
//!
//! Of several texts at once, R are the rows of all, and attention is that of one text after another. Where
//! cuts stand between texts, attention by rows carries nothing; else it carries what is missing of one text.

use crate::{
    costs::seen_pairs,
    cutting::{Cutting, Transport, Units, count},
    links::Links,
    memory::{Memory, ShardBytes},
    request::Request,
    split::{CostCurve, DeviceCurves, Missing, Problem},
};
use galaxy_common::{DeviceProfile, Exchange, Kernel, ProfileError, Wanted};
use galaxy_model::{ModelSpec, NormPlace};

/// Most points of a table; between them it is linear, as profiles are.
const POINTS: usize = 32;

/// What a cable carries between neighbours of a ring, or to all.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Reach {
    /// Bytes of tiles per second.
    pub rate: f64,
    /// Latency in nanoseconds.
    pub latency: f64,
    /// Nanoseconds of the kernels for a byte sent and one received.
    pub byte_cost: f64,
}

/// The tables of one device in a ring of so many, for one way to cut tiles.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Tables {
    heads: Vec<f64>,
    columns: Vec<f64>,
    vocabulary: Vec<f64>,
    /// Nanoseconds by units of rows, whatever the modes.
    rows: Vec<f64>,
    /// Nanoseconds by units of rows for each block that is cut by heads or columns.
    rows_tensor: Vec<f64>,
    /// Nanoseconds by units of rows for each attention that is cut by rows.
    rows_attention: Vec<f64>,
    /// Nanoseconds by units of rows for each MLP that is cut by rows.
    rows_mlp: Vec<f64>,
}

/// A program that stands for a part of the workload.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Load {
    /// How many texts the program has.
    pub texts: u32,
    /// Tokens of each text.
    pub text: u32,
    /// How many such programs a request takes in the mean.
    pub share: f64,
}

impl Load {
    /// Rows of all its texts together.
    pub fn rows(self) -> f64 {
        f64::from(self.texts) * self.text()
    }

    /// Rows of a text.
    pub fn text(self) -> f64 {
        f64::from(self.text)
    }

    /// How many rows a row sees in a layer, in the mean.
    fn seen(self, spec: &ModelSpec, layer: u32) -> f64 {
        let all = (0, self.text);
        seen_pairs(all, all, spec.sees(layer)) / self.text()
    }

    /// Nanoseconds of attention in a layer, in the mean: for a run of its rows, one text after another.
    pub fn attend(self, device: &DeviceProfile, run: f64, spec: &ModelSpec, heads: f64) -> f64 {
        let texts = (run / self.text()).max(1.0);
        let nanos = |layer| {
            let seen = self.seen(spec, layer);
            texts * device.nanos(Kernel::Attend, &[run / texts, seen, heads])
        };
        if spec.sees_alike(self.text) {
            return nanos(0);
        }
        // Of many layers few differ.
        let mut kinds: Vec<(_, u32, f64)> = Vec::new();
        for layer in 0..spec.layers {
            let sees = spec.sees(layer);
            match kinds.iter_mut().find(|(known, ..)| *known == sees) {
                Some((.., count)) => *count += 1.0,
                None => kinds.push((sees, layer, 1.0)),
            }
        }
        let all: f64 = kinds.iter().map(|(_, layer, count)| count * nanos(*layer)).sum();
        all / f64::from(spec.layers.max(1))
    }

    /// Rows that a language head multiplies.
    pub fn wanted(self, wanted: Wanted) -> f64 {
        match wanted {
            Wanted::LastLogits | Wanted::Token(_) => f64::from(self.texts),
            Wanted::AllLogits => self.rows(),
            _ => 0.0,
        }
    }
}

/// The sum of `of` over all loads, each weighted by its share.
pub(crate) fn mean(loads: &[Load], of: &dyn Fn(Load) -> f64) -> f64 {
    loads.iter().map(|&load| load.share * of(load)).sum()
}

/// Programs of at most `most` lengths, which stand for all of the workload.
pub(crate) fn loads(request: &Request<'_>, most: usize) -> Vec<Load> {
    let mut lengths = request.workload.lengths.clone();
    lengths.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let all: f64 = lengths.iter().map(|l| l.1).sum();
    let share = all / most.max(1) as f64;
    // Runs of like lengths, of about equal weight, each by its mean.
    let mut merged: Vec<(f64, f64)> = Vec::new();
    let (mut sum, mut weight, mut seen) = (0.0, 0.0, 0.0);
    let few = lengths.len() <= most;
    for (length, w) in lengths {
        sum += f64::from(length) * w;
        weight += w;
        seen += w;
        if few || seen + 1e-9 * all >= share * (merged.len() + 1) as f64 {
            merged.push((sum / weight, weight / all));
            (sum, weight) = (0.0, 0.0);
        }
    }
    let limit = request.spec.position_limit().min(request.allowed.max_rows).max(1);
    let load = |(length, share): (f64, f64)| {
        let text = (length.round() as u32).clamp(1, limit);
        let texts = request.batch_size(text);
        Load { texts, text, share: share * f64::from(request.texts()) / f64::from(texts) }
    };
    merged.into_iter().map(load).collect()
}

/// Values of all units from 0 to `count`, from few points of `at`, linear between them.
fn cost_curve(count: usize, at: impl Fn(f64) -> f64) -> Vec<f64> {
    let step = count.div_ceil(POINTS).max(1);
    let mut values = vec![at(0.0)];
    let mut from = 0;
    while from < count {
        let to = (from + step).min(count);
        let (low, high) = (at(from.max(1) as f64), at(to as f64));
        for unit in from + 1..=to {
            let base = from.max(1);
            let share = if to > base { (unit - base) as f64 / (to - base) as f64 } else { 1.0 };
            let value = if unit == to { high } else { low + (high - low) * share };
            // More work never takes less time, whatever the samples say.
            let before = values[values.len() - 1];
            values.push(value.max(before));
        }
        from = to;
    }
    values
}

/// Nanoseconds of logits, by units of the vocabulary.
fn of_vocabulary(
    request: &Request<'_>,
    device: &DeviceProfile,
    units: Units,
    loads: &[Load],
) -> Vec<f64> {
    let (vocabulary, wanted) = (request.spec.extent().vocabulary, request.workload.wanted);
    cost_curve(count(vocabulary, units.vocabulary), |units_of| {
        let words = (units_of * f64::from(units.vocabulary)).min(f64::from(vocabulary));
        let of = |load: Load| device.nanos(Kernel::Language, &[load.wanted(wanted), words]);
        // Where no logits are wanted, the vocabulary is split evenly.
        mean(loads, &of).max(words * 1e-6)
    })
}

impl Tables {
    pub fn new(
        request: &Request<'_>,
        device: &DeviceProfile,
        cutting: Cutting,
        loads: &[Load],
    ) -> Self {
        let Cutting { devices, units, means, by_rows } = cutting;
        let spec = request.spec;
        let mean = |of: &dyn Fn(Load) -> f64| mean(loads, of);
        let attend = |load: Load, run: f64, heads| load.attend(device, run, spec, heads);
        let (d, tiles) = (devices as f64, f64::from(means.tiles));
        let others = (d - 1.0) / d;
        // Into how many runs the rows of a product are cut, and how many rows come from outside.
        let cuts = cutting.runs() as f64;
        let nanos = |kernel, sizes: &[f64]| device.nanos(kernel, sizes);
        let cut = |rows: f64, of: &dyn Fn(f64) -> f64| cuts * of(rows / cuts);
        let moved = |rows: f64| {
            if devices == 1 {
                return 0.0;
            }
            let runs = d * tiles;
            let import = if means.tiles > 1 { others } else { 1.0 };
            runs * import * nanos(Kernel::Import, &[rows / runs])
                + runs * others * nanos(Kernel::ExportAdd, &[rows / runs])
                + 2.0 * (d - 1.0) * tiles * device.wake
        };
        let width = f64::from(spec.head_width);
        let (all_heads, inner) = (f64::from(spec.heads), f64::from(spec.intermediate));
        let qkv = |heads: f64| {
            let kv = Memory::most_kv(spec, units.heads, heads as u32);
            (heads + 2.0 * f64::from(kv)) * width
        };
        let attention = |rows: f64, heads: f64| {
            nanos(Kernel::Qkv, &[rows, qkv(heads)])
                + nanos(Kernel::AttentionOutput, &[rows, heads * width])
        };
        let mlp = |rows: f64, columns: f64| {
            nanos(Kernel::Up, &[rows, columns]) + nanos(Kernel::Down, &[rows, columns])
        };
        let by = |all: u32, unit: u32, of: &dyn Fn(f64) -> f64| {
            cost_curve(count(all, unit), |units_of| {
                let size = (units_of * f64::from(unit)).min(f64::from(all));
                if size == 0.0 { 0.0 } else { of(size) }
            })
        };
        let heads = by(spec.heads, units.heads, &|heads| {
            mean(&|load| {
                let rows = load.rows();
                cut(rows, &|run| attention(run, heads) + attend(load, run, heads)) + moved(rows)
            })
        });
        let columns = by(spec.intermediate, units.columns, &|columns| {
            // A parallel residual's MLP reads the rows that attention reads.
            let moved = |rows| if spec.parallel { 0.0 } else { moved(rows) };
            mean(&|load| {
                let rows = load.rows();
                cut(rows, &|run| mlp(run, columns)) + moved(rows)
            })
        });
        let vocabulary = of_vocabulary(request, device, units, loads);
        let of_rows = |of: &dyn Fn(Load, f64) -> f64| {
            cost_curve(units.rows as usize, |unit| {
                if unit == 0.0 {
                    return 0.0;
                }
                // A device with rows has one at least: one row is not divided.
                mean(&|load| of(load, (load.rows() * unit / f64::from(units.rows)).max(1.0)))
            })
        };
        let layers = f64::from(spec.layers);
        let joins = if spec.parallel { 1.0 } else { 2.0 };
        let norm = if spec.norm_place == NormPlace::Pre { 1.0 } else { 0.0 };
        let rows = of_rows(&|_, own| {
            nanos(Kernel::Embed, &[own])
                + norm * nanos(Kernel::Norm, &[own])
                + joins * layers * tiles * nanos(Kernel::AddNorm, &[own / tiles])
                + nanos(Kernel::Export, &[own])
        });
        let alone = devices == 1;
        let rows_tensor = of_rows(&|_, own| {
            if alone { 0.0 } else { tiles * nanos(Kernel::Export, &[own / tiles]) }
        });
        let kv = 2.0 * f64::from(spec.kv_heads) * width / f64::from(spec.hidden);
        let rows_attention = of_rows(&|load, own| {
            let moved = if alone || by_rows.whole {
                0.0
            } else {
                // Of texts that are cut: about one.
                let foreign = (load.rows() - own).clamp(0.0, load.text());
                nanos(Kernel::Export, &[own.min(load.text()) * kv])
                    + nanos(Kernel::Import, &[foreign * kv])
                    + (d - 1.0) * device.wake
            };
            attention(own, all_heads) + attend(load, own, all_heads) + moved
        });
        let rows_mlp = of_rows(&|_, own| mlp(own, inner));
        Self { heads, columns, vocabulary, rows, rows_tensor, rows_attention, rows_mlp }
    }
}

/// A device of a ring, as the closed form sees it.
pub(crate) struct Seat<'a> {
    pub tables: &'a Tables,
    pub reach: Reach,
    /// Bytes that it grants.
    pub budget: u64,
    /// Bytes to be added to what is expected of it: those that programs were found to need beyond.
    pub correction: i64,
    pub threads: u16,
}

/// The problem of a ring, with what its units take in `held`; or what is missing on a device that cannot take part at all.
pub(crate) fn problem(
    request: &Request<'_>,
    memory: &Memory,
    seats: &[Seat<'_>],
    cutting: Cutting,
    loads: &[Load],
    held: &ShardBytes,
) -> Result<Problem, Missing> {
    let spec = request.spec;
    let Cutting { devices: d, units, means, by_rows } = cutting;
    let cut = by_rows.others(spec.layers);
    let n = units.rows as usize;
    let alone = d == 1;
    let mean_rows = mean(loads, &Load::rows);
    let bytes = means.wire.row(spec.hidden.into()) as f64;
    let hops = match means.exchange {
        Exchange::Ring => (d - 1) as f64,
        Exchange::Direct => 1.0,
    };
    let latency = seats.iter().map(|s| s.reach.latency).fold(0.0, f64::max);
    let mut devices = Vec::with_capacity(d);
    let mut short: Option<Missing> = None;
    for (at, seat) in seats.iter().enumerate() {
        let base = |owner: bool| {
            let fixed = memory.fixed(request, cutting, owner, seat.threads);
            fixed.saturating_add_signed(seat.correction)
        };
        let owner = base(true) <= seat.budget;
        let Some(room) = seat.budget.checked_sub(base(owner)) else {
            let bytes = base(owner) - seat.budget;
            short =
                short.filter(|m| m.bytes >= bytes).or(Some(Missing { bytes, device: Some(at) }));
            continue;
        };
        let t = seat.tables;
        let counts = [
            f64::from(if spec.parallel { cut.attention } else { cut.attention + cut.mlp }),
            f64::from(by_rows.attention),
            f64::from(by_rows.mlp),
        ];
        let rows = (0..=n).map(|r| {
            t.rows[r]
                + counts[0] * t.rows_tensor[r]
                + counts[1] * t.rows_attention[r]
                + counts[2] * t.rows_mlp[r]
        });
        let wire = (0..=n).map(|r| {
            if alone {
                return 0.0;
            }
            let moved = 2.0 * mean_rows * (n - r) as f64 / n as f64 * bytes;
            moved / seat.reach.rate * 1e9 + 2.0 * hops * latency
        });
        let moved = 2.0 * mean_rows * (1.0 - 1.0 / d as f64) * bytes * seat.reach.byte_cost;
        let with = |nanos: &[f64], bytes: &[u64], moved: f64| CostCurve {
            nanos: nanos.iter().map(|t| t + moved).collect(),
            bytes: bytes.to_vec(),
        };
        let moved_by_mlp = if spec.parallel { 0.0 } else { moved };
        devices.push(DeviceCurves {
            heads: with(&t.heads, &held.heads, moved),
            columns: with(&t.columns, &held.columns, moved_by_mlp),
            vocabulary: CostCurve { nanos: t.vocabulary.clone(), bytes: held.vocabulary.clone() },
            rows: rows.collect(),
            wire: wire.collect(),
            owner,
            room,
        });
    }
    if let Some(short) = short {
        return Err(short);
    }
    let kv = f64::from(spec.kv_heads) * f64::from(spec.head_width) / f64::from(spec.hidden);
    // Between whole texts nothing is carried; else what a device lacks of a text that is cut.
    let others = 1.0 - 1.0 / d as f64;
    let foreign = mean(loads, &|load| load.text().min(load.rows() * others));
    let (sequence, part) = match by_rows.whole {
        true => (0.0, 0.0),
        false if alone => (f64::from(by_rows.attention), 1.0),
        false => (f64::from(by_rows.attention), foreign / (mean_rows * others)),
    };
    let fixed = if alone { 0.0 } else { sequence * hops * latency * (1.0 - 2.0 * kv).max(0.0) };
    let units_of =
        |of: fn(&DeviceCurves) -> &CostCurve| devices.first().map_or(0, |s| of(s).nanos.len() - 1);
    Ok(Problem {
        heads: units_of(|s| &s.heads),
        columns: units_of(|s| &s.columns),
        vocabulary: units_of(|s| &s.vocabulary),
        devices,
        rows: n,
        attention: f64::from(cut.attention),
        mlp: f64::from(cut.mlp),
        carried: sequence * kv * part,
        fixed,
        tiles: f64::from(means.tiles),
        parallel_residual: spec.parallel,
    })
}

/// What a device's two cables of a ring carry, or all its cables together.
///
/// # Errors
/// When a link that it needs has no profile.
pub(crate) fn reach(
    links: &Links<'_>,
    ring: &[usize],
    at: usize,
    means: Transport,
) -> Result<Reach, ProfileError> {
    let n = ring.len();
    if n == 1 {
        return Ok(Reach { rate: f64::INFINITY, latency: 0.0, byte_cost: 0.0 });
    }
    let peers: Vec<(usize, usize)> = match means.exchange {
        Exchange::Ring => vec![((at + n - 1) % n, (at + 1) % n)],
        Exchange::Direct => (0..n).filter(|&p| p != at).map(|p| (p, p)).collect(),
    };
    let mut reach = Reach { rate: f64::INFINITY, latency: 0.0, byte_cost: 0.0 };
    for &(before, after) in &peers {
        let into = links.get(means.link, ring[before], ring[at])?;
        let out = links.get(means.link, ring[at], ring[after])?;
        reach.rate = reach.rate.min(into.busy_rate).min(out.busy_rate);
        reach.latency = reach.latency.max(into.latency).max(out.latency);
        reach.byte_cost += (out.send_cost + into.receive_cost) / peers.len() as f64;
    }
    Ok(reach)
}
