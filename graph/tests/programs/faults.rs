//! Programs that are broken on purpose, each in one way: the verifier finds it, and says what it is.

use super::{Case, Random, case};
use galaxy_common::Bytes;
use galaxy_graph::{
    VerifyError,
    program::{Lane, LaneId, OpId, OpKind, Wait},
    simulate,
};

impl Case {
    fn find(&self, rank: usize, kind: impl Fn(&OpKind) -> bool) -> OpId {
        let at = self.programs[rank].operations.iter().position(|op| kind(&op.kind));
        OpId(at.unwrap() as u32)
    }
    /// Removes an operation from its lane and everything that counted on it there.
    fn remove(&mut self, rank: usize, id: OpId) {
        let program = &mut self.programs[rank];
        let lane = program.operation(id).lane;
        let ids = &mut program.lanes[usize::from(lane.0)].1;
        let place = ids.iter().position(|&i| i == id).unwrap() as u32;
        ids.retain(|&i| i != id);
        program.operations.remove(id.0 as usize);
        for (_, ids) in &mut program.lanes {
            for i in ids.iter_mut().filter(|i| i.0 > id.0) {
                i.0 -= 1;
            }
        }
        for op in &mut program.operations {
            for wait in op.waits.iter_mut().filter(|w| w.lane == lane && w.count > place) {
                wait.count -= 1;
            }
        }
    }
}

#[test]
fn a_missing_receive_is_found() {
    let mut case = case();
    assert_eq!(case.verify(), Ok(()));
    let last = case.programs[1].operations.len() - 1;
    let receive = (0..=last)
        .rev()
        .find(|&i| matches!(case.programs[1].operations[i].kind, OpKind::Receive { .. }));
    case.remove(1, OpId(receive.unwrap() as u32));
    let found = case.verify().unwrap_err();
    assert!(
        matches!(found, VerifyError::Unmatched { .. } | VerifyError::Mismatch { .. }),
        "{found}"
    );
}

#[test]
fn a_double_write_is_found() {
    let mut case = case();
    let imports: Vec<usize> = (0..case.programs[0].operations.len())
        .filter(|&i| case.programs[0].operations[i].kind == OpKind::Import)
        .collect();
    let first = case.programs[0].operations[imports[0]].writes[0];
    case.programs[0].operations[imports[1]].writes[0] = first;
    let found = case.verify().unwrap_err();
    assert!(matches!(found, VerifyError::DoubleWrite { .. }), "{found}");
}

#[test]
fn an_uncovered_read_is_found() {
    let mut case = case();
    let import = case.find(0, |k| *k == OpKind::Import);
    case.remove(0, import);
    let found = case.verify().unwrap_err();
    assert!(matches!(found, VerifyError::UncoveredRead { .. }), "{found}");
    // And a read that is covered, but too early.
    let mut case = self::case();
    let import = case.find(0, |k| *k == OpKind::Import);
    case.programs[0].operations[import.0 as usize].waits.clear();
    let found = case.verify().unwrap_err();
    assert!(matches!(found, VerifyError::UncoveredRead { .. }), "{found}");
}

#[test]
fn a_cycle_through_lane_order_is_found() {
    let mut case = case();
    // The first send waits for the last operation of the compute lane, which waits for the answer
    // to that send.
    let send = case.find(0, |k| matches!(k, OpKind::Send { .. }));
    let compute = &case.programs[0].lanes[0];
    assert_eq!(compute.0, Lane::Compute);
    let wait = Wait { lane: LaneId(0), count: compute.1.len() as u32 };
    case.programs[0].operations[send.0 as usize].waits = vec![wait].into();
    let found = case.verify().unwrap_err();
    assert!(matches!(found, VerifyError::Cycle { .. }), "{found}");
    assert!(simulate(&case.programs, &Random(1, u64::MAX)).is_err());
}

#[test]
fn a_budget_overflow_is_found_with_both_numbers() {
    let mut case = case();
    case.plan.ring[1].budget = Bytes(1_000_000);
    let found = case.verify().unwrap_err();
    let VerifyError::Budget { device, grants, needs } = &found else { panic!("{found}") };
    assert_eq!((device.as_str(), *grants), ("d1", Bytes(1_000_000)));
    assert!(needs.0 > 32_000_000);
    assert!(found.to_string().contains("1.0 MB"), "{found}");
}

#[test]
fn memory_reused_too_early_is_found() {
    let mut case = case();
    // A tile arrives in the slot of the tile before it, which may not have been imported yet.
    let receives: Vec<usize> = (0..case.programs[0].operations.len())
        .filter(|&i| matches!(case.programs[0].operations[i].kind, OpKind::Receive { .. }))
        .collect();
    let tensor = |op: usize| case.programs[0].operations[op].writes[0].tensor.0 as usize;
    let (former, next) = (tensor(receives[0]), tensor(receives[1]));
    case.programs[0].tensors[next].slot = case.programs[0].tensors[former].slot;
    let found = case.verify().unwrap_err();
    assert!(matches!(found, VerifyError::Reuse { .. }), "{found}");
}

#[test]
fn an_incomplete_sum_is_found() {
    let mut case = case();
    for op in &mut case.programs[2].operations {
        if let OpKind::Export { staged } = &mut op.kind
            && *staged
        {
            *staged = false;
            op.reads.truncate(1);
            break;
        }
    }
    let found = case.verify().unwrap_err();
    assert!(matches!(found, VerifyError::Content { .. }), "{found}");
}
