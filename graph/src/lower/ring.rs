//! Rings of devices, and the routes of tiles around them.

use galaxy_common::{Exchange, Layout, Plan, Rank, plan::Phase};

/// Devices in ring order. Positions count from 0 along the ring; ranks are the plan's.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    ranks: Vec<Rank>,
}

/// What a device does with the tiles of one owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Hop {
    /// Takes them from the device before it.
    pub receive: bool,
    /// Passes them to the device after it.
    pub send: bool,
}

/// Where a device gets a gathered tile from, and to which it passes it on, as positions of the ring.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Route {
    pub from: Option<usize>,
    pub to: Vec<usize>,
}

impl Ring {
    /// The devices that have a part in the layers: by plan, not by batch, so that links stay the same.
    pub fn layers(plan: &Plan, phase: Phase) -> Self {
        Self::of(plan, |d| {
            let part = d.assignment(phase);
            match plan.layout {
                Layout::Replicated | Layout::Stages => part.any_heads() || part.any_columns(),
                Layout::Ring => part.in_layers(),
            }
        })
    }

    /// The devices of the head: those that have a slice of the vocabulary, and those that own rows;
    /// except in stages, also all others that have a part in the layers.
    pub fn head(plan: &Plan, phase: Phase) -> Self {
        let layers = Self::layers(plan, phase);
        Self::of(plan, |d| {
            let part = d.assignment(phase);
            let rank = plan.rank_of(&d.name);
            let owns = match plan.layout {
                Layout::Stages => part.row_weight > 0,
                _ => rank.is_some_and(|r| layers.position(r).is_some()),
            };
            owns || !part.vocabulary.is_empty()
        })
    }

    fn of(plan: &Plan, part: impl Fn(&galaxy_common::DevicePlan) -> bool) -> Self {
        Self { ranks: plan.ranked().filter(|(_, d)| part(d)).map(|(rank, _)| rank).collect() }
    }

    pub fn len(&self) -> usize {
        self.ranks.len()
    }
    pub fn rank(&self, at: usize) -> Rank {
        self.ranks[at]
    }
    pub fn position(&self, rank: Rank) -> Option<usize> {
        self.ranks.iter().position(|&r| r == rank)
    }
    pub fn next(&self, at: usize) -> usize {
        (at + 1) % self.len()
    }
    pub fn previous(&self, at: usize) -> usize {
        (at + self.len() - 1) % self.len()
    }
    /// Pairs of each device and the one after it.
    pub fn around(&self) -> impl Iterator<Item = (Rank, Rank)> + '_ {
        (0..self.len()).map(|at| (self.rank(at), self.rank(self.next(at))))
    }
    /// The position `steps` before `at`.
    pub fn back(&self, at: usize, steps: usize) -> usize {
        (at + self.len() - steps % self.len()) % self.len()
    }
    /// Steps along the ring from `from` to `to`.
    fn distance(&self, from: usize, to: usize) -> usize {
        (to + self.len() - from) % self.len()
    }
    /// Owners in the order in which their gathered tiles reach `me`: itself, then backwards.
    pub fn arrivals(&self, me: usize) -> impl Iterator<Item = usize> + use<> {
        let n = self.len();
        (0..n).map(move |step| (me + n - step) % n)
    }
    /// Owners in the order in which `me` computes their sums (Galaxy, §III-D.2): the device before
    /// it first, itself last.
    pub fn departures(&self, me: usize) -> impl Iterator<Item = usize> + use<> {
        let n = self.len();
        (1..=n).map(move |step| (me + n - step) % n)
    }

    /// AllGather: tiles of `owner` go along the ring up to the last device that needs them.
    pub fn gather_hop(&self, owner: usize, me: usize, needs: &[bool]) -> Hop {
        let last = (1..self.len()).rev().find(|d| needs[(owner + d) % self.len()]).unwrap_or(0);
        let here = self.distance(owner, me);
        Hop { receive: here > 0 && here <= last, send: here < last }
    }

    /// AllGather by either way: along the ring, or from the owner straight to all that need it, the
    /// device after it first.
    pub fn gather_route(
        &self,
        exchange: Exchange,
        owner: usize,
        me: usize,
        needs: &[bool],
    ) -> Route {
        match exchange {
            Exchange::Ring => {
                let hop = self.gather_hop(owner, me, needs);
                Route {
                    from: hop.receive.then(|| self.previous(me)),
                    to: hop.send.then(|| self.next(me)).into_iter().collect(),
                }
            }
            Exchange::Direct if owner == me => {
                let others = (1..self.len()).map(|step| (me + step) % self.len());
                Route { from: None, to: others.filter(|&at| needs[at]).collect() }
            }
            Exchange::Direct => Route { from: needs[me].then_some(owner), to: Vec::new() },
        }
    }

    /// ReduceScatter: sums for `owner` start at the first device after it that contributes, and end
    /// at the owner.
    pub fn scatter_hop(&self, owner: usize, me: usize, contributes: &[bool]) -> Hop {
        let Some(first) = (1..self.len()).find(|d| contributes[(owner + d) % self.len()]) else {
            return Hop::default();
        };
        match self.distance(owner, me) {
            0 => Hop { receive: true, send: false },
            here => Hop { receive: here > first, send: here >= first },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_routes_start_and_end_at_devices_that_take_part() {
        let ring = Ring { ranks: (0..4).map(Rank).collect() };
        // Rank 2 needs nothing but passes on; rank 3 is the last that needs.
        let needs = [true, true, false, true];
        assert_eq!(ring.gather_hop(0, 0, &needs), Hop { receive: false, send: true });
        assert_eq!(ring.gather_hop(0, 2, &needs), Hop { receive: true, send: true });
        assert_eq!(ring.gather_hop(0, 3, &needs), Hop { receive: true, send: false });
        // From 3: 0 and 1 need, 2 is after the last.
        assert_eq!(ring.gather_hop(3, 1, &needs), Hop { receive: true, send: false });
        assert_eq!(ring.gather_hop(3, 2, &needs), Hop::default());
        // Sums for 0 when 1 does not contribute start at 2.
        let contributes = [true, false, true, true];
        assert_eq!(ring.scatter_hop(0, 1, &contributes), Hop::default());
        assert_eq!(ring.scatter_hop(0, 2, &contributes), Hop { receive: false, send: true });
        assert_eq!(ring.scatter_hop(0, 3, &contributes), Hop { receive: true, send: true });
        assert_eq!(ring.scatter_hop(0, 0, &contributes), Hop { receive: true, send: false });
        assert_eq!(ring.scatter_hop(0, 0, &[true, false, false, false]), Hop::default());
    }

    #[test]
    fn direct_routes_go_only_to_devices_that_need_the_tile() {
        let ring = Ring { ranks: (0..4).map(Rank).collect() };
        let needs = [true, true, false, true];
        let route = |owner, me| ring.gather_route(Exchange::Direct, owner, me, &needs);
        assert_eq!(route(1, 1), Route { from: None, to: vec![3, 0] });
        assert_eq!(route(1, 2), Route::default());
        assert_eq!(route(1, 3), Route { from: Some(1), to: vec![] });
        let route = |owner, me| ring.gather_route(Exchange::Ring, owner, me, &needs);
        assert_eq!(route(0, 2), Route { from: Some(1), to: vec![3] });
    }
}
