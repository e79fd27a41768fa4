//! Data: what is written and read, and when.

use super::{VerifyError, order::Order, site};
use crate::{
    operators::OperatorGraph,
    program::{Memory, OpId, Program, Region, TensorId},
};
use std::collections::BTreeMap;

/// Checks that each element is written once, that reads are covered by writes, and that slots are
/// handed on in order.
pub(super) fn accesses(
    graph: &OperatorGraph,
    programs: &[Program],
    rank: usize,
    order: &Order,
) -> Result<(), VerifyError> {
    let program = &programs[rank];
    let mut writes: Vec<Vec<(Region, OpId)>> = vec![Vec::new(); program.tensors.len()];
    // For each tensor, its last access on each lane; and its first access, which orders a slot.
    let mut last: Vec<BTreeMap<u8, OpId>> = vec![BTreeMap::new(); program.tensors.len()];
    let mut by_slot: BTreeMap<u32, Vec<TensorId>> = BTreeMap::new();
    let mut streamed: Vec<TensorId> = Vec::new();
    let operations = || program.operations.iter().enumerate().map(|(i, op)| (OpId(i as u32), op));
    for (id, op) in operations() {
        for region in op.reads.iter().chain(&op.writes) {
            let lasts = &mut last[region.tensor.0 as usize];
            if lasts.is_empty() {
                match program.tensor(region.tensor).memory {
                    Memory::Stream => streamed.push(region.tensor),
                    _ => {
                        let slot = program.tensor(region.tensor).slot.0;
                        by_slot.entry(slot).or_default().push(region.tensor);
                    }
                }
            }
            lasts.insert(op.lane.0, id);
        }
        for region in &op.writes {
            let former = &mut writes[region.tensor.0 as usize];
            if former.iter().any(|(other, _)| meet(other, region).is_some()) {
                let (tensor, rows) = (region.tensor.0, region.rows);
                return Err(VerifyError::DoubleWrite { site: site(program, id), tensor, rows });
            }
            former.push((*region, id));
        }
    }
    for (id, op) in operations() {
        for region in &op.reads {
            let mut covered = 0;
            for (written, writer) in &writes[region.tensor.0 as usize] {
                let Some(area) = meet(written, region) else { continue };
                if order.before(programs, rank, *writer, id) {
                    covered += area;
                }
            }
            if covered != u64::from(region.rows.len()) * u64::from(region.columns.len()) {
                let (tensor, rows) = (region.tensor.0, region.rows);
                return Err(VerifyError::UncoveredRead { site: site(program, id), tensor, rows });
            }
        }
    }
    let handed_on = |former: TensorId, next: TensorId| {
        for (_, writer) in &writes[next.0 as usize] {
            let in_place = graph.in_place(program.operation(*writer), &program.tensors);
            // An operation that writes its result in the place of what it has read is done with
            // that.
            let itself = in_place == Some((former, next));
            for user in last[former.0 as usize].values().filter(|user| !itself || *user != writer) {
                if !order.before(programs, rank, *user, *writer) {
                    return Err(VerifyError::Reuse {
                        site: site(program, *writer),
                        slot: program.tensor(next).slot.0,
                        former: site(program, *user),
                    });
                }
            }
        }
        Ok(())
    };
    for tensors in by_slot.values() {
        tensors.windows(2).try_for_each(|pair| handed_on(pair[0], pair[1]))?;
    }
    // Tensors that lie over one another in the buffer for weights.
    let place = |tensor: TensorId| {
        let slot = program.slots[program.tensor(tensor).slot.0 as usize];
        slot.start..slot.start.saturating_add(slot.bytes)
    };
    for (at, &next) in streamed.iter().enumerate() {
        let own = place(next);
        let meets = |former: &&TensorId| {
            let other = place(**former);
            own.start < other.end && other.start < own.end
        };
        streamed[..at].iter().filter(meets).try_for_each(|&former| handed_on(former, next))?;
    }
    Ok(())
}

/// How many elements two regions share.
fn meet(a: &Region, b: &Region) -> Option<u64> {
    let rows = a.rows.intersect(b.rows).len();
    let columns = a.columns.intersect(b.columns).len();
    (rows > 0 && columns > 0).then(|| u64::from(rows) * u64::from(columns))
}
