use super::*;
use crate::least_memory::tests::{Random, cells, random_graph};

fn random_lives(random: &mut Random, count: usize, steps: usize, bytes: usize) -> Vec<Lifetime> {
    let life = |_| {
        let first = random.under(steps);
        let last = (first + random.under(1 + steps / 2)).min(steps - 1);
        Lifetime { bytes: random.under(bytes) as u64, first, last }
    };
    (0..count).map(life).collect()
}

/// Lives that do not fit the 4 bytes that are live: four units, the first two in one half and the last
/// two in the other, and then two pairs across.
fn crossed() -> Vec<Lifetime> {
    let life = |(bytes, first, last)| Lifetime { bytes, first, last };
    let units = [(1, 1, 2), (1, 1, 3), (1, 2, 2), (1, 2, 3)];
    let pairs = [(2, 0, 0), (2, 0, 1), (2, 3, 4), (2, 4, 4)];
    units.into_iter().chain(pairs).map(life).collect()
}

/// Nothing overlaps, all is aligned and inside the arena, and the arena is not below its bound.
fn check(lives: &[Lifetime], alignment: u64, placed: &Placement) {
    assert!(placed.size >= placed.bound);
    assert!(placed.size.is_multiple_of(alignment));
    for (i, (one, &offset)) in lives.iter().zip(&placed.offsets).enumerate() {
        assert!(offset.is_multiple_of(alignment));
        assert!(offset + one.bytes <= placed.size);
        for (other, &second) in lives.iter().zip(&placed.offsets).take(i) {
            let apart = offset + one.bytes <= second || second + other.bytes <= offset;
            let empty = one.bytes == 0 || other.bytes == 0;
            assert!(apart || empty || !one.meets(other), "{one:?} and {other:?} overlap");
        }
    }
}

/// The smallest arena, by all offsets.
fn brute(lives: &[Lifetime], placed: &mut Vec<u64>, best: &mut u64) {
    let ends = lives.iter().zip(&*placed).map(|(life, offset)| offset + life.bytes);
    let size = ends.max().unwrap_or(0);
    if size >= *best {
        return;
    }
    let Some(life) = lives.get(placed.len()) else {
        *best = size;
        return;
    };
    for offset in 0..(*best).saturating_sub(life.bytes) {
        let overlaps = |(other, &second): (&Lifetime, &u64)| {
            life.meets(other) && offset < second + other.bytes && second < offset + life.bytes
        };
        if !lives.iter().zip(&*placed).any(overlaps) {
            placed.push(offset);
            brute(lives, placed, best);
            placed.pop();
        }
    }
}

#[test]
fn small_arenas_are_those_of_brute_force() {
    let mut random = Random(5);
    let mut above = 0;
    for case in 0..400 {
        let count = random.under(8);
        let lives = random_lives(&mut random, count, 6, 5);
        let placed = place(&lives, 1).expect("the lives make sense");
        check(&lives, 1, &placed);
        let mut best = placed.size + 1;
        brute(&lives, &mut Vec::new(), &mut best);
        assert_eq!(placed.size, best, "case {case}: {lives:?}");
        above += usize::from(placed.size > placed.bound);
    }
    println!("{above} arenas of 400 are larger than their bound");
}

#[test]
fn the_exact_search_finds_the_smallest_arena() {
    let mut random = Random(6);
    let mut above = 0;
    for case in 0..500 {
        let extra = random.under(4);
        let mut lives = random_lives(&mut random, extra, 5, 4);
        lives.extend(crossed());
        // Some of them take more, or live longer.
        for life in &mut lives {
            life.bytes += (random.under(16) / 15) as u64;
            life.last = (life.last + random.under(16) / 15).min(4);
        }
        lives.sort_by_key(|life| life.first);
        let items = aligned(&lives, 1).expect("the lives make sense");
        // From a bad start.
        let bound = bound(&items);
        let found = exact::better(&items, bound, 1000, usize::MAX).expect("1000 is not the least");
        let mut offsets = vec![0; lives.len()];
        items.iter().zip(&found.offsets).for_each(|(item, &at)| offsets[item.number] = at);
        check(&lives, 1, &Placement { offsets, size: found.size, bound });
        if found.size > bound {
            above += 1;
            let mut best = found.size;
            brute(&lives, &mut Vec::new(), &mut best);
            assert_eq!(found.size, best, "case {case}: {lives:?}");
        }
    }
    println!("{above} least arenas of 500 are larger than their bound");
    assert!(above > 0);
}

#[test]
fn an_arena_may_have_to_be_larger_than_what_is_live() {
    let lives = crossed();
    let placed = place(&lives, 1).expect("the lives make sense");
    check(&lives, 1, &placed);
    assert_eq!((placed.size, placed.bound), (5, 4));
}

#[test]
fn nothing_overlaps() {
    let mut random = Random(7);
    for _ in 0..200 {
        let (count, steps) = (1 + random.under(60), 1 + random.under(60));
        let alignment = [1, 4, 64][random.under(3)];
        let lives = random_lives(&mut random, count, steps, 500);
        let placed = place_within(&lives, alignment, 50_000).expect("the lives make sense");
        check(&lives, alignment, &placed);
    }
    assert_eq!(place(&[], 1), Ok(Placement { offsets: vec![], size: 0, bound: 0 }));
}

#[test]
fn lives_that_make_no_sense_are_refused() {
    let life = |bytes, first, last| Lifetime { bytes, first, last };
    assert_eq!(place(&[life(1, 0, 0)], 0), Err(PlaceError::NoAlignment));
    let backwards = PlaceError::Backwards { item: 1, first: 3, last: 2 };
    assert_eq!(place(&[life(1, 0, 0), life(1, 3, 2)], 1), Err(backwards));
    let most = life(u64::MAX, 0, 0);
    assert_eq!(place(&[most, life(1, 1, 1)], 1), Err(PlaceError::TooManyBytes));
    assert_eq!(place(&[most], 64), Err(PlaceError::TooManyBytes));
}

#[test]
fn the_bound_of_a_graph_is_its_peak() {
    let mut random = Random(8);
    for case in 0..500 {
        let operators = 1 + random.under(12);
        let graph = random_graph(&mut random, operators);
        let least = graph.least(1000).expect("the graph makes sense");
        let lives = lifetimes(&graph, &least.order).expect("the order is one");
        let items = aligned(&lives.lifetimes, 1).expect("the lives make sense");
        assert_eq!(bound(&items), least.peak, "case {case}: {graph:?}");
    }
}

#[test]
fn results_in_place_are_the_same_item() {
    let graph = MemoryGraph {
        bytes: vec![8, 8, 8, 2],
        inputs: vec![0],
        kept: vec![2],
        operators: vec![
            crate::least_memory::MemoryOperator {
                reads: vec![0],
                makes: vec![1],
                workspace: 3,
                in_place: Some((0, 1)),
            },
            crate::least_memory::MemoryOperator {
                reads: vec![1],
                makes: vec![2],
                workspace: 0,
                in_place: Some((1, 2)),
            },
        ],
    };
    let lives = lifetimes(&graph, &[0, 1]).expect("the order is one");
    assert_eq!(lives.buffers, [Some(0), Some(0), Some(0), None]);
    assert_eq!(lives.workspaces, [Some(1), None]);
    let life = |bytes, first, last| Lifetime { bytes, first, last };
    assert_eq!(lives.lifetimes, [life(8, 0, 1), life(3, 0, 0)]);
    assert!(lifetimes(&graph, &[1, 0]).is_err());
}

#[test]
fn arenas_of_networks_are_not_much_above_their_bound() {
    let mut random = Random(9);
    for _ in 0..4 {
        let graph = cells(&mut random, 14, 5);
        let least = graph.least(20_000).expect("the graph makes sense");
        let lives = lifetimes(&graph, &least.order).expect("the order is one").lifetimes;
        let placed = place_within(&lives, 1, 1_000_000).expect("the lives make sense");
        check(&lives, 1, &placed);
        println!("{} items: {} bytes, bound {}", lives.len(), placed.size, placed.bound);
        assert_eq!(placed.bound, least.peak);
        assert!(placed.size * 5 <= placed.bound * 6);
    }
}
