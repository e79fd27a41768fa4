use super::*;
use crate::units::Bytes;

#[test]
fn apportion_is_exact_and_proportional() {
    let spans = apportion::<Row>(284, &[2, 1, 1]);
    assert_eq!(spans.iter().map(|s| s.len()).collect::<Vec<_>>(), [142, 71, 71]);
    let spans = apportion::<Row>(1, &[1, 1, 0]);
    assert_eq!(spans.iter().map(|s| s.len()).collect::<Vec<_>>(), [1, 0, 0]);
    let spans = apportion::<Row>(5, &[0, 3, 3]);
    assert_eq!(spans.iter().map(|s| s.len()).collect::<Vec<_>>(), [0, 3, 2]);
    assert_eq!(apportion::<Row>(9, &[u32::MAX, u32::MAX, 1])[2].len(), 0);
}

#[test]
fn plans_with_invalid_rows_or_blocks_are_refused() {
    let part = Assignment {
        blocks: vec![BlockAssignment {
            layers: Span::first(1),
            heads: Span::first(2),
            columns: Span::first(4),
        }],
        row_weight: 1,
        vocabulary: Span::empty(),
    };
    let name = DeviceName::new("a").expect("a name");
    let mut plan = Plan {
        model: "m".into(),
        fingerprint: "f".into(),
        strategy: Strategy::Local,
        layout: Layout::Ring,
        modes: Modes::uniform(1, Mode::Tensor),
        exchange: Exchange::Ring,
        link: LinkType::Tls,
        wire: WireType::F32,
        activations: Activations::default(),
        tiles: 1,
        max_rows: MAX_ROWS,
        cache: Cache::NONE,
        ring: vec![DevicePlan {
            name,
            budget: Bytes(0),
            threads: 1,
            prefill: part.clone(),
            decode: part,
            streaming: None,
        }],
    };
    let extent = Extent { layers: 1, heads: 2, intermediate: 4, vocabulary: 0 };
    assert_eq!(plan.validate(extent), Ok(()));
    for rows in [0, MAX_ROWS + 1, u32::MAX] {
        plan.max_rows = rows;
        assert_eq!(plan.validate(extent), Err(PlanError::Rows { rows }));
    }
    plan.max_rows = 1;
    let block = plan.ring[0].prefill.blocks[0];
    for bad in [
        vec![block, block],
        vec![BlockAssignment { layers: Span::empty(), ..block }, block],
        vec![BlockAssignment { layers: Span::first(2), ..block }],
        vec![BlockAssignment { heads: Span::first(3), ..block }],
        vec![BlockAssignment { columns: Span::first(u32::MAX), ..block }],
    ] {
        plan.ring[0].prefill.blocks = bad;
        let refused = plan.validate(extent);
        assert!(matches!(refused, Err(PlanError::Blocks { .. })), "{refused:?}");
    }
}

#[test]
fn strategy_names_parse_back() {
    for s in Strategy::ALL {
        assert_eq!(s.to_string().parse(), Ok(s));
    }
    let wrong = "ring".parse::<Strategy>().expect_err("no strategy");
    assert!(wrong.contains("known are auto local megatron galaxy"), "{wrong}");
}
