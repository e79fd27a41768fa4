//! The verifier: proves a set of programs right without running them.
//!
//! It knows nothing of lowering. What it proves: every send has its receive, in the order of the
//! link; nothing can deadlock, even if every send waits for its receive; every element is written
//! once and every read is covered by writes that are finished by then; memory changes hands only
//! when its last use is over; sums are complete; results are given exactly once; and no device
//! exceeds its budget.

mod contents;
mod data;
mod operands;
mod order;

use crate::{
    budget,
    operators::OperatorGraph,
    pieces::{self, Piece},
    program::{Element, LaneId, Memory, OpId, Output, OutputKind, Program, Reduce},
};
use galaxy_common::{BatchShape, Bytes, DeviceName, Plan, PlanError, Rank, Wanted};
use galaxy_model::{Formats, ModelSpec};
use std::fmt;

/// One operation of one device, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The rank of the device whose program it is.
    pub rank: Rank,
    /// The operation's id.
    pub op: OpId,
    /// What the operation does.
    pub what: String,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} operation {} ({})", self.rank, self.op.0, self.what)
    }
}

/// What is wrong with a set of programs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// The plan is not valid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Not one program for each rank, or ids that point nowhere.
    #[error("the programs are malformed: {0}")]
    Malformed(String),
    /// A send without its receive, or a receive without its send.
    #[error("{site} has no counterpart on the link from rank {from} to rank {to}")]
    Unmatched {
        /// The end without a counterpart.
        site: Site,
        /// The rank that sends.
        from: Rank,
        /// The rank that receives.
        to: Rank,
    },
    /// Two ends of a link that disagree.
    #[error("{send} meets {receive}, which expects something else: {why}")]
    Mismatch {
        /// The sending end.
        send: Site,
        /// The receiving end.
        receive: Site,
        /// How they differ.
        why: String,
    },
    /// Operations that wait for each other.
    #[error("{} operations wait for each other, among them {site}", count)]
    Cycle {
        /// One of these operations.
        site: Site,
        /// How many operations cannot start.
        count: usize,
    },
    /// An element that is written twice.
    #[error("{site} writes rows {rows:?} of tensor {tensor} again")]
    DoubleWrite {
        /// The second writer.
        site: Site,
        /// The tensor that is written.
        tensor: u32,
        /// The rows that are written again.
        rows: galaxy_common::Span<galaxy_common::Row>,
    },
    /// An element that is read but not (yet) written.
    #[error("{site} reads rows {rows:?} of tensor {tensor}, not all of which are written by then")]
    UncoveredRead {
        /// The operation that reads.
        site: Site,
        /// The tensor that is read.
        tensor: u32,
        /// The rows that it reads.
        rows: galaxy_common::Span<galaxy_common::Row>,
    },
    /// Memory that is used again while its former content may still be in use.
    #[error("{site} may overwrite slot {slot} while {former} still uses it")]
    Reuse {
        /// The new writer.
        site: Site,
        /// The slot that is used again.
        slot: u32,
        /// The operation that used it before.
        former: Site,
    },
    /// An operation reads fewer rows or columns than its result needs, or others.
    #[error("{site} reads too little at {at}: it needs {needed}")]
    Reach {
        /// The operation that reads.
        site: Site,
        /// The place of the region among those that it reads.
        at: usize,
        /// The rows or columns that it needs.
        needed: String,
    },
    /// A tensor that is read or written as another element type than its own.
    #[error("{site} takes tensor {tensor} for {want:?}, and it is {have:?}")]
    Element {
        /// The operation that reads or writes.
        site: Site,
        /// The tensor's number.
        tensor: u32,
        /// The tensor's element type.
        have: Element,
        /// The element type that the operation takes it for.
        want: Element,
    },
    /// An operation whose workspace is too small.
    #[error("{site} works in {needs} bytes, and has {has}")]
    Workspace {
        /// The operation with that workspace.
        site: Site,
        /// Bytes that it has.
        has: u64,
        /// Bytes that it needs.
        needs: u64,
    },
    /// A tensor larger than its slot.
    #[error("rank {rank}: tensor {tensor} does not fit slot {slot}")]
    Slot {
        /// The rank of the device whose program it is.
        rank: Rank,
        /// The tensor's number.
        tensor: u32,
        /// The slot's number.
        slot: u32,
    },
    /// A value of the wrong stage, or a sum that lacks a part or has one twice.
    #[error("{site} reads {have}, and needs {want}")]
    Content {
        /// The operation that reads.
        site: Site,
        /// What it reads, for people.
        have: String,
        /// What it needs, for people.
        want: String,
    },
    /// Results that do not make up what was wanted.
    #[error("the results of sequence {segment} are not complete: {why}")]
    Results {
        /// The segment of these results.
        segment: usize,
        /// What is missing or given twice.
        why: String,
    },
    /// A device is asked for more memory than it grants.
    #[error("the plan needs {needs} on device {device}, which grants {grants}: {} are missing; raise its memory, lower max_rows, or give it a smaller share", Bytes(needs.0 - grants.0))]
    Budget {
        /// The device that grants too little.
        device: DeviceName,
        /// Bytes that the plan needs there.
        needs: Bytes,
        /// Bytes that the device grants.
        grants: Bytes,
    },
}

/// Proves `programs` right for `plan` and `shape`; see the module.
///
/// `formats` are those of the model's matrices as devices hold them, for budgets and what comes from disk.
///
/// # Errors
/// The first thing that cannot be proved.
pub fn verify(
    spec: &ModelSpec,
    formats: &Formats,
    plan: &Plan,
    shape: &BatchShape,
    programs: &[Program],
) -> Result<(), VerifyError> {
    plan.validate(spec.extent())?;
    let graph = OperatorGraph::of(spec);
    let pieces =
        plan.ring.iter().map(|device| pieces::of_device(&graph, formats, device)).collect();
    verify_graph(&graph, pieces, plan, shape, programs)?;
    results(spec, shape, programs)?;
    for (program, device) in programs.iter().zip(&plan.ring) {
        let stream = program.slot_bytes(Memory::Stream);
        let buffer = device.streaming.as_ref().map_or(Bytes(0), |streaming| streaming.buffer);
        if stream > buffer {
            let why = format!("{} loads into {stream} of a buffer of {buffer}", device.name);
            return Err(VerifyError::Malformed(why));
        }
        let cache = budget::cache(spec, plan.cache, device);
        let needs = budget::of_program(spec, formats, device, program);
        let needs = budget::Needs { cache, ..needs }.total();
        if needs > device.budget {
            return Err(VerifyError::Budget {
                device: device.name.clone(),
                needs,
                grants: device.budget,
            });
        }
    }
    Ok(())
}

/// Proves that `programs` compute what the graph says, whatever model that is: everything of [`verify`] but
/// budgets, and whether results make up what was wanted. `pieces` are those of each device that reads its
/// weights from disk.
///
/// # Errors
/// The first thing that cannot be proved.
pub fn verify_graph(
    graph: &OperatorGraph,
    pieces: Vec<Vec<Piece>>,
    plan: &Plan,
    shape: &BatchShape,
    programs: &[Program],
) -> Result<(), VerifyError> {
    well_formed(plan, programs)?;
    let order = order::order(programs)?;
    for (rank, program) in programs.iter().enumerate() {
        data::accesses(graph, programs, rank, &order)?;
        operands::check(graph, shape, program)?;
    }
    contents::check(graph, pieces, plan, shape, programs, &order)
}

pub(crate) fn site(program: &Program, op: OpId) -> Site {
    let what = format!("{:?}", program.operation(op).kind);
    Site { rank: program.rank, op, what }
}

fn well_formed(plan: &Plan, programs: &[Program]) -> Result<(), VerifyError> {
    let bad = |why: String| Err(VerifyError::Malformed(why));
    if programs.len() != plan.ring.len() {
        return bad(format!("{} programs for {} devices", programs.len(), plan.ring.len()));
    }
    for (index, program) in programs.iter().enumerate() {
        if program.rank.index() != index {
            return bad(format!("program {index} says it is of rank {}", program.rank));
        }
        let mut on_lane = vec![0usize; program.operations.len()];
        for (at, (_, ids)) in program.lanes.iter().enumerate() {
            for id in ids {
                let Some(op) = program.operations.get(id.0 as usize) else {
                    return bad(format!("rank {index}: lane {at} names operation {}", id.0));
                };
                if op.lane != LaneId(at as u8) {
                    return bad(format!("rank {index}: operation {} is on two lanes", id.0));
                }
                on_lane[id.0 as usize] += 1;
            }
        }
        if let Some(op) = on_lane.iter().position(|&n| n != 1) {
            return bad(format!("rank {index}: operation {op} is not on exactly one lane"));
        }
        for (number, op) in program.operations.iter().enumerate() {
            for wait in &op.waits {
                let lane = program.lanes.get(usize::from(wait.lane.0));
                if lane.is_none_or(|(_, ids)| wait.count as usize > ids.len()) {
                    return bad(format!("rank {index}: operation {number} waits for nothing"));
                }
            }
            for region in op.reads.iter().chain(&op.writes) {
                let tensor = program.tensors.get(region.tensor.0 as usize);
                let inside = tensor.is_some_and(|t| {
                    t.rows.contains(region.rows) && region.columns.end() <= t.width
                });
                if !inside {
                    return bad(format!("rank {index}: operation {number} leaves its tensor"));
                }
            }
        }
        for (number, tensor) in program.tensors.iter().enumerate() {
            let bytes = tensor.bytes();
            let slot = program.slots.get(tensor.slot.0 as usize);
            if slot.is_none_or(|s| s.memory != tensor.memory || s.bytes < bytes) {
                return Err(VerifyError::Slot {
                    rank: program.rank,
                    tensor: number as u32,
                    slot: tensor.slot.0,
                });
            }
        }
    }
    Ok(())
}

fn results(spec: &ModelSpec, shape: &BatchShape, programs: &[Program]) -> Result<(), VerifyError> {
    for (index, (rows, segment)) in shape.placed().enumerate() {
        let wrong = |why: String| Err(VerifyError::Results { segment: index, why });
        let of = |o: &&Output| o.segment as usize == index;
        let outputs: Vec<&Output> = programs.iter().flat_map(|p| &p.outputs).filter(of).collect();
        // Rectangles of (rows, columns) that must tile the whole, and what the whole is.
        let mut parts: Vec<(u32, u32, u32, u32)> = Vec::new();
        let mut pooled = 0;
        for output in &outputs {
            match (segment.wanted, output.kind) {
                (Wanted::Hidden, OutputKind::Hidden { rows }) => {
                    parts.push((rows.start(), rows.end(), 0, 1));
                }
                (Wanted::Pooled(_), OutputKind::Pooled { reduce, rows }) => {
                    pooled += if reduce == Reduce::Row { segment.rows } else { rows };
                }
                (Wanted::Classes, OutputKind::Classes) | (Wanted::Token(_), OutputKind::Token) => {
                    pooled += segment.rows;
                }
                (
                    Wanted::LastLogits | Wanted::AllLogits,
                    OutputKind::Logits { rows, vocabulary },
                ) => parts.push((rows.start(), rows.end(), vocabulary.start(), vocabulary.end())),
                (_, kind) => return wrong(format!("a result of another kind: {kind:?}")),
            }
        }
        let (from, to, columns) = match segment.wanted {
            Wanted::Hidden => (0, rows.len(), 1),
            Wanted::AllLogits => (0, rows.len(), spec.extent().vocabulary),
            Wanted::LastLogits => (rows.len() - 1, rows.len(), spec.extent().vocabulary),
            Wanted::Nothing => continue,
            Wanted::Pooled(_) | Wanted::Classes | Wanted::Token(_) => {
                if pooled != segment.rows {
                    return wrong(format!("{pooled} rows of {} are in it", segment.rows));
                }
                continue;
            }
        };
        let mut area = 0u64;
        for (at, a) in parts.iter().enumerate() {
            area += u64::from(a.1 - a.0) * u64::from(a.3 - a.2);
            let meets = |b: &(u32, u32, u32, u32)| {
                a.0.max(b.0) < a.1.min(b.1) && a.2.max(b.2) < a.3.min(b.3)
            };
            if a.0 < from || a.1 > to || a.3 > columns || parts[..at].iter().any(meets) {
                return wrong(format!("rows {}..{} are given twice or not wanted", a.0, a.1));
            }
        }
        let whole = u64::from(to - from) * u64::from(columns);
        if area != whole {
            return wrong(format!("{area} of {whole} values are given"));
        }
    }
    Ok(())
}
