//! Plans that come in, and the places that devices take by them.

use super::{
    AGAIN, Action, DeviceState, EpochStage, Index, Membership, Moving, Now, REPLACE, TICK, WITHOUT,
};
use galaxy_common::Epoch;

impl Membership {
    /// Takes over a plan, and places devices by it.
    pub(super) fn planned(
        &mut self,
        now: Now,
        round: u64,
        ring: Vec<Index>,
        actions: &mut Vec<Action>,
    ) {
        if self.stage == EpochStage::Planning(round) {
            // There is a plan now, and why there was none is over.
            self.planless = false;
            if matches!(self.refusal, Some((None, _))) {
                self.refusal = None;
            }
            let joined = self.intake.take().map_or(Vec::new(), |intake| intake.joined);
            for device in joined.into_iter().filter(|device| !ring.contains(device)) {
                // It was measured: a look tells whether a plan with it is better.
                self.members[device].look = Some(now);
            }
            self.ring = Some(ring);
            self.without = false;
            self.leave_out_fresh(now);
            self.place(now, actions);
        }
    }

    /// Planning has failed, because of a device or of all.
    pub(super) fn plan_failed(
        &mut self,
        now: Now,
        round: u64,
        device: Option<Index>,
        reason: String,
        lasting: bool,
    ) {
        if self.stage == EpochStage::Planning(round) && self.intake.is_some() {
            self.stage = EpochStage::Waiting;
            self.leave_out(now, &reason);
        } else if self.stage == EpochStage::Planning(round) {
            self.stage = EpochStage::Waiting;
            self.moving = Moving::No;
            // Without those that are gone it is nobody's fault.
            self.refusal = Some((device.filter(|_| !self.without), reason));
            self.planless = lasting && !self.without;
            // Those that are gone may come back at any moment.
            match self.without {
                true => self.without_after = now + WITHOUT,
                false => self.place_after = now + REPLACE,
            }
        }
    }

    /// Moves to a better plan, whose devices have made ready: the next epoch is placed by it.
    pub(super) fn moved(
        &mut self,
        now: Now,
        begun: Now,
        ring: Vec<Index>,
        actions: &mut Vec<Action>,
    ) {
        let there = |device: &Index| self.members[*device].state.connected();
        if self.ready().is_some() && ring.iter().all(there) {
            for (device, member) in self.members.iter_mut().enumerate() {
                if matches!(member.state, DeviceState::Ready { .. }) {
                    member.state = DeviceState::Connected;
                    // The others end the old epoch when they take their place in the new.
                    if !ring.contains(&device) {
                        let epoch = self.epoch;
                        actions.push(Action::Cancel { device, epoch });
                    }
                }
            }
            let new =
                |device: &&Index| self.ring.as_ref().is_none_or(|ring| !ring.contains(device));
            self.let_in = ring.iter().filter(new).copied().collect();
            self.ring = Some(ring);
            self.looked(begun);
            self.moving = Moving::Forth;
            self.place(now, actions);
        }
    }

    /// A device has taken its place.
    pub(super) fn placed(
        &mut self,
        now: Now,
        device: Index,
        epoch: Epoch,
        actions: &mut Vec<Action>,
    ) {
        let placing = matches!(self.members[device].state, DeviceState::Placing);
        if self.stage == EpochStage::Live && epoch == self.epoch && placing {
            self.members[device].state = DeviceState::Ready { since: now };
            let heard = &mut self.members[device].heard;
            *heard = now.max(*heard);
            if let Some(epoch) = self.ready() {
                for device in self.ring.iter().flatten() {
                    self.members[*device].put_off = None;
                }
                self.let_in.clear();
                self.refusal = None;
                self.moving = Moving::No;
                actions.push(Action::Ready { epoch });
            }
        }
    }

    /// A device has not taken its place.
    pub(super) fn place_failed(
        &mut self,
        now: Now,
        device: Index,
        epoch: Epoch,
        reason: String,
        actions: &mut Vec<Action>,
    ) {
        if self.stage == EpochStage::Live && epoch == self.epoch {
            self.refusal = Some((Some(device), reason.clone()));
            self.planless = false;
            let moving = self.moving;
            self.give_up(device, reason, actions);
            // Whoever said so: without those that were to be let in it would be as before.
            for device in std::mem::take(&mut self.let_in) {
                self.members[device].put_off = Some(now + AGAIN);
            }
            // The old plan worked: nobody waits longer for it than it takes.
            (self.moving, self.place_after) = match moving {
                Moving::Forth => (Moving::Back, now),
                _ => (Moving::No, now + REPLACE),
            };
        }
    }

    /// Gives out the next epoch, if all devices that have a part in it are still connected.
    pub(super) fn place(&mut self, now: Now, actions: &mut Vec<Action>) {
        if !self.all_connected() {
            self.stage = EpochStage::Waiting;
            self.place_after = now + TICK;
            return;
        }
        self.epoch = self.epoch.max(self.known).next();
        self.stage = EpochStage::Live;
        for device in self.ring.clone().unwrap_or_default() {
            self.members[device].state = DeviceState::Placing;
            actions.push(Action::Place { device, epoch: self.epoch });
        }
    }

    /// Ends the epoch: all devices of it that are still connected lose their places.
    pub(super) fn give_up(&mut self, device: Index, reason: String, actions: &mut Vec<Action>) {
        let epoch = self.epoch;
        self.stage = EpochStage::Waiting;
        self.moving = Moving::No;
        actions.push(Action::Fail { epoch, device, reason });
        for (other, member) in self.members.iter_mut().enumerate() {
            if matches!(member.state, DeviceState::Placing | DeviceState::Ready { .. }) {
                member.state = DeviceState::Connected;
                actions.push(Action::Cancel { device: other, epoch });
            }
        }
    }
}
