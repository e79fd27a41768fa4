//! Devices that join the cluster while it runs, and those that are removed from it.

use super::{AGAIN, Action, DeviceState, EpochStage, Index, Member, Membership, Moving, Now};

/// Devices that joined, while they are being taken in.
#[derive(Debug, Clone)]
pub(super) struct Intake {
    /// The devices that joined.
    pub(super) joined: Vec<Index>,
    /// The ring before they joined.
    pub(super) ring: Vec<Index>,
}

impl Membership {
    /// Whether devices that joined are being taken in.
    pub fn taking_in(&self) -> bool {
        self.intake.is_some()
    }

    /// Whether plans count on a device.
    pub fn counts(&self, device: Index) -> bool {
        self.members[device].counts()
    }

    /// Whether a device was removed.
    pub fn removed(&self, device: Index) -> bool {
        self.members[device].removed
    }

    /// Why no plan counts on a device that belongs to the cluster.
    pub fn left_out(&self, device: Index) -> Option<&str> {
        self.members[device].out.as_ref().map(|(why, _)| why.as_str())
    }

    /// The devices that joined, are connected, and are to be counted on now.
    pub fn joining(&self, now: Now) -> Vec<Index> {
        let due = |m: &Member| !m.removed && m.state.connected() && m.due(now);
        let members = self.members.iter().enumerate();
        members.filter(|(_, member)| due(member)).map(|(device, _)| device).collect()
    }

    pub(super) fn add(&mut self, now: Now, device: Index) {
        // Before the first plan all are waited for anyway.
        let out = self.ring.as_ref().map(|_| ("it has just joined".to_owned(), now));
        let fresh = out.is_none();
        let member = Member { fresh, ..Member::new(now, out) };
        match self.members.get_mut(device) {
            // Answers to earlier attempts do not count.
            Some(known) => *known = Member { attempt: known.attempt + 1, ..member },
            None => self.members.push(member),
        }
    }

    pub(super) fn remove(&mut self, now: Now, device: Index, actions: &mut Vec<Action>) {
        let needed = self.needs(device);
        let reason = "it was removed from the cluster".to_owned();
        let member = &mut self.members[device];
        member.removed = true;
        member.look = None;
        member.state =
            DeviceState::Unreachable { retry: Now::MAX, reason: reason.clone(), lost: false };
        actions.push(Action::Disconnect { device });
        if !needed {
            return;
        }
        if self.stage == EpochStage::Live {
            self.give_up(device, reason, actions);
        }
        // A plan that is being made counts on it.
        self.stage = EpochStage::Waiting;
        self.moving = Moving::No;
        self.intake = None;
        self.place_after = now;
        let left = self.ring.take().map(|ring| ring.into_iter().filter(|d| *d != device));
        self.ring = left.map(Iterator::collect).filter(|ring: &Vec<_>| !ring.is_empty());
    }

    /// Counts on the devices that joined and are connected. Nothing runs.
    pub(super) fn take_in(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.gathering = false;
        let joined = self.joining(now);
        let (true, Some(ring)) = (self.ready().is_some() && !joined.is_empty(), self.ring.clone())
        else {
            return;
        };
        for (device, member) in self.members.iter_mut().enumerate() {
            if matches!(member.state, DeviceState::Ready { .. }) {
                member.state = DeviceState::Connected;
                actions.push(Action::Cancel { device, epoch: self.epoch });
            }
            if joined.contains(&device) {
                member.out = None;
            }
        }
        self.ring = Some(ring.iter().chain(&joined).copied().collect());
        self.intake = Some(Intake { joined, ring });
        self.let_in.clear();
        self.stage = EpochStage::Waiting;
        self.moving = Moving::Forth;
        self.place_after = now;
    }

    /// Leaves out the devices that joined during the first planning: they are taken in later, as others are.
    pub(super) fn leave_out_fresh(&mut self, now: Now) {
        for member in self.members.iter_mut().filter(|member| member.fresh) {
            member.fresh = false;
            member.out = Some(("it has just joined".to_owned(), now));
        }
    }

    /// Goes back to the ring before, without the devices that were to be taken in.
    pub(super) fn leave_out(&mut self, now: Now, reason: &str) {
        let Some(Intake { joined, ring }) = self.intake.take() else { return };
        for device in joined {
            self.members[device].out = Some((format!("no plan with it: {reason}"), now + AGAIN));
        }
        self.ring = Some(ring);
        self.moving = Moving::Back;
        self.place_after = now;
    }
}
