//! Who is there: a state machine `(now, event) -> actions` for the devices of a cluster.
//!
//! It knows all devices of the cluster file, and those that join while it runs. Those that the last plan gave a part
//! are its *ring*; the others stay connected and keep no device waiting. Before the first plan all devices are waited
//! for. After it, a device of the ring that is gone for longer than the cluster's patience is planned around; once it
//! has been back for [`STEADY`], the planner looks whether a plan with it is better.
//!
//! A device that joins is counted on once nothing runs: all devices leave their places, so that it and its links can be
//! measured, and a plan is made with it. If that fails, the plan before is taken again, without the new device. A
//! device that is removed keeps its index, and is not connected any more.
//!
//! It never reads a clock and never touches a socket; the driver of [`crate::fleet::RemoteFleet`] does both. A device
//! is lost when nothing has come from it for [`SILENCE`], however late answers are: one that is slow still answers,
//! because workers answer pings from their I/O side.

mod action;
mod belief;
mod joining;
mod obstacle;
mod placing;

pub use action::{Action, DeviceState};

use galaxy_common::Epoch;
use joining::Intake;
use std::time::Duration;

/// A point in time, as the duration since the driver started.
pub type Now = Duration;

/// How often each device is asked for its health.
pub const PING: Duration = Duration::from_millis(500);
/// The heartbeat timeout: how long a device may say nothing. With the ping and the tick on top, a loss is declared
/// within 3 s.
pub const SILENCE: Duration = Duration::from_millis(2500);
/// How long forming a connection may take before the attempt is given up.
pub const CONNECT: Duration = Duration::from_secs(5);
/// Waiting time before the first new attempt to reach a device; doubles up to [`RETRY_MAX`].
pub const RETRY_MIN: Duration = Duration::from_millis(500);
/// Longest waiting time between two attempts.
pub const RETRY_MAX: Duration = Duration::from_secs(2);
/// Waiting time after a refused placement: it will most often be refused again.
pub const REPLACE: Duration = Duration::from_secs(2);
/// Waiting time after planning without the lost devices has failed: it will most often fail again.
pub const WITHOUT: Duration = Duration::from_secs(15);
/// How long a device must have been connected before it may take part.
pub const STEADY: Duration = Duration::from_secs(10);
/// Waiting time after a look that came to nothing, until the next.
pub const LOOK: Duration = Duration::from_secs(60);
/// Waiting time after a device could not be taken in, or could not be let in by a move, until it is tried again.
pub const AGAIN: Duration = Duration::from_secs(600);
/// How often the driver must send [`Event::Tick`].
pub const TICK: Duration = Duration::from_millis(100);

/// A device by its place among the devices of the cluster.
pub type Index = usize;

/// What happened: the input of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Some time has passed.
    Tick,
    /// A connection is formed, and the device has described itself.
    Connected {
        /// The device that is connected.
        device: Index,
        /// The attempt to connect that succeeded.
        attempt: u64,
        /// The latest epoch that the device knows of; 0 for none.
        epoch: Epoch,
    },
    /// A connection could not be formed, or broke, or the device is not who it should be.
    Broken {
        /// The device of the connection.
        device: Index,
        /// The attempt to connect that failed, or whose connection broke.
        attempt: u64,
        /// The reason, for people.
        reason: String,
    },
    /// The device answered a ping.
    Pong {
        /// The device that answered.
        device: Index,
        /// The attempt by which the device is connected.
        attempt: u64,
        /// When the device was asked.
        asked: Now,
        /// The epoch that the device is placed in; 0 for none.
        epoch: Epoch,
    },
    /// Something else came from the device: progress, results.
    Heard {
        /// The device that was heard.
        device: Index,
        /// The attempt by which the device is connected.
        attempt: u64,
    },
    /// There is a plan for the devices.
    Planned {
        /// The round of planning that has ended.
        round: u64,
        /// The devices that the plan gives a part, by rank.
        ring: Vec<Index>,
    },
    /// Planning has failed.
    PlanFailed {
        /// The round of planning that has ended.
        round: u64,
        /// The device that stands in the way, if it is one.
        device: Option<Index>,
        /// The reason, for people.
        reason: String,
        /// Whether there is no plan for these devices as they are, so that asking again does not help.
        lasting: bool,
    },
    /// The plan was compared with the best one for all devices that were connected, and stays.
    Kept {
        /// When the look at the plan began.
        begun: Now,
    },
    /// There is a better plan, and nothing runs: all devices move to a new epoch. Ignored unless the cluster is ready
    /// and every device of the new ring is connected.
    Move {
        /// When the look that found the plan began.
        begun: Now,
        /// The devices that the plan gives a part, by rank.
        ring: Vec<Index>,
    },
    /// A device joined: with the next index, or with that of one that was removed.
    Added {
        /// The device that joined.
        device: Index,
    },
    /// A device that joined cannot be measured: it is tried again later.
    Unmeasured {
        /// The device that cannot be measured.
        device: Index,
        /// The reason, for people.
        reason: String,
    },
    /// A device has another address, or grants something else: it is connected anew.
    Changed {
        /// The device that has changed.
        device: Index,
    },
    /// A device does not belong to the cluster any more.
    Removed {
        /// The device that was removed.
        device: Index,
    },
    /// Nothing runs, as was asked for by [`Action::Gather`], and nothing will before the next epoch.
    Quiet,
    /// The device holds its shard, and its links are formed.
    Placed {
        /// The device that is in its place.
        device: Index,
        /// The epoch of its place.
        epoch: Epoch,
    },
    /// The device refused or failed to take its place.
    PlaceFailed {
        /// The device that did not take its place.
        device: Index,
        /// The epoch of the place.
        epoch: Epoch,
        /// The reason, for people.
        reason: String,
    },
    /// A program failed: the links of the epoch are of no further use.
    Spoiled {
        /// The epoch whose links are of no use.
        epoch: Epoch,
        /// The device because of which the program failed.
        device: Index,
        /// The reason, for people.
        reason: String,
    },
}

#[derive(Debug, Clone)]
struct Member {
    state: DeviceState,
    attempt: u64,
    failures: u32,
    heard: Now,
    pinged: Option<Now>,
    /// When the device was last connected.
    came: Now,
    /// When the device was lost; if it never stayed for [`STEADY`] since, when it was lost first.
    gone: Option<Now>,
    /// When to look for a plan with it; none once a plan or a look has taken it into account.
    look: Option<Now>,
    /// Why plans do not count on it, and when to try one that does; none if they do.
    out: Option<(String, Now)>,
    /// Whether it joined before the first plan, and no planning has begun with it yet.
    fresh: bool,
    removed: bool,
    /// Until when no look lets it in, because a move that was to do so has failed.
    put_off: Option<Now>,
}

impl Member {
    /// A device that is unreachable, and due for an attempt.
    fn new(now: Now, out: Option<(String, Now)>) -> Self {
        let state = DeviceState::Unreachable { retry: now, reason: String::new(), lost: false };
        let (pinged, gone, look) = (None, None, None);
        let (attempt, failures) = (0, 0);
        Self {
            state,
            attempt,
            failures,
            heard: now,
            pinged,
            came: now,
            gone,
            look,
            out,
            fresh: false,
            removed: false,
            put_off: None,
        }
    }

    /// Whether it is time to count on the device.
    fn due(&self, now: Now) -> bool {
        self.out.as_ref().is_some_and(|(_, at)| now >= *at)
    }

    /// Whether plans may count on the device.
    fn counts(&self) -> bool {
        !self.removed && self.out.is_none()
    }
}

/// How far the next epoch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EpochStage {
    /// Devices are waited for.
    Waiting,
    /// The plan of this round is awaited.
    Planning(u64),
    /// The epoch has been given out, and has not been given up.
    Live,
}

/// Whether the cluster is on its way from one plan to another, of its own accord.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moving {
    No,
    /// The cluster moves to the new plan.
    Forth,
    /// The cluster moves back to the old plan, because the new one was refused.
    Back,
}

/// The state machine that follows which devices are there.
#[derive(Debug, Clone)]
pub struct Membership {
    members: Vec<Member>,
    /// The devices that the last plan gave a part, by rank; none before the first plan.
    ring: Option<Vec<Index>>,
    /// The epoch given out last.
    epoch: Epoch,
    /// The latest epoch that any device knows of: given out here or by an earlier coordinator.
    known: Epoch,
    /// The epoch with which this coordinator began, by the clock of this machine.
    start: Epoch,
    stage: EpochStage,
    rounds: u64,
    moving: Moving,
    /// When the next planning may begin.
    place_after: Now,
    /// When the next planning without the lost devices may begin.
    without_after: Now,
    /// How long devices of the ring may be gone before they are planned around; none if all are always waited for.
    patience: Option<Duration>,
    /// Whether the planning of this round is without some of the ring.
    without: bool,
    /// Whether the driver waits until nothing runs, so that devices can be taken in.
    gathering: bool,
    /// The devices that the present move gives a part, and that had none before.
    let_in: Vec<Index>,
    /// The devices that joined and are being taken in, if there are some.
    intake: Option<Intake>,
    /// The device because of which the last plan or placement failed, if it was one, and the reason.
    refusal: Option<(Option<Index>, String)>,
    /// Whether the last planning failed because there is no plan for all devices that are needed.
    planless: bool,
    /// When the last event happened.
    seen: Now,
}

impl Membership {
    /// All devices are unreachable, and due for an attempt. Epochs after `start` are given out. `ring` are the devices
    /// that have a part, where that is known before any plan. Devices with a part that are gone for longer than
    /// `patience` are planned around.
    pub fn new(
        devices: usize,
        start: Epoch,
        ring: Option<Vec<Index>>,
        patience: Option<Duration>,
    ) -> Self {
        Self {
            members: vec![Member::new(Now::ZERO, None); devices],
            ring,
            epoch: start,
            known: start,
            start,
            stage: EpochStage::Waiting,
            rounds: 0,
            moving: Moving::No,
            place_after: Now::ZERO,
            without_after: Now::ZERO,
            patience,
            without: false,
            let_in: Vec::new(),
            gathering: false,
            intake: None,
            refusal: None,
            planless: false,
            seen: Now::ZERO,
        }
    }

    /// The state of a device.
    pub fn state(&self, device: Index) -> &DeviceState {
        &self.members[device].state
    }

    /// The epoch given out last.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The epoch that programs may run in; none while they may not run.
    pub fn ready(&self) -> Option<Epoch> {
        let all = self.needed().all(|(_, m)| matches!(m.state, DeviceState::Ready { .. }));
        (self.stage == EpochStage::Live && all).then_some(self.epoch)
    }

    /// The round of the planning whose plan is awaited.
    pub fn planning(&self) -> Option<u64> {
        match self.stage {
            EpochStage::Planning(round) => Some(round),
            EpochStage::Waiting | EpochStage::Live => None,
        }
    }

    /// Whether the planning of this round is without some devices of the ring.
    pub fn without(&self) -> bool {
        self.without
    }

    /// Whether the cluster is on its way to another plan, of its own accord.
    pub fn moving(&self) -> bool {
        self.moving != Moving::No
    }

    /// When a plan with this device, which came back and has no part, is looked for.
    pub fn next_look(&self, device: Index) -> Option<Now> {
        self.members[device].look.filter(|_| self.patience.is_some() && !self.needs(device))
    }

    /// The devices that the cluster is waiting for or runs on.
    fn needed(&self) -> impl Iterator<Item = (Index, &Member)> {
        self.members.iter().enumerate().filter(|(device, _)| self.needs(*device))
    }

    fn needs(&self, device: Index) -> bool {
        self.members[device].counts()
            && self.ring.as_ref().is_none_or(|ring| ring.contains(&device))
    }

    /// Whether a look may not let a device in yet, because a move that was to do so has failed.
    pub fn put_off(&self, now: Now, device: Index) -> bool {
        self.members[device].put_off.is_some_and(|until| now < until)
    }

    /// Takes an event in and says what to do. `now` is when it happened: events that had to wait
    /// keep their time, so that a device is not blamed for what kept us.
    pub fn handle(&mut self, now: Now, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.excuse(now);
        match self.doubted(now, event) {
            Event::Tick => {}
            Event::Connected { device, attempt, epoch } => {
                let member = &mut self.members[device];
                if member.attempt == attempt
                    && matches!(member.state, DeviceState::Connecting { .. })
                {
                    // It refuses epochs that it knows.
                    self.known = self.known.max(epoch);
                    member.state = DeviceState::Connected;
                    member.heard = now;
                    member.pinged = None;
                    member.failures = 0;
                    member.came = now;
                    member.look = Some(now + STEADY);
                    // With it the others may be able to.
                    let patience = self.patience.unwrap_or_default();
                    self.without_after = self.without_after.min(now + patience);
                }
            }
            Event::Broken { device, attempt, reason } => {
                if self.members[device].attempt == attempt {
                    self.lose(now, device, reason, &mut actions);
                }
            }
            Event::Heard { device, attempt } => self.hear(now, device, attempt),
            Event::Pong { device, attempt, asked, epoch } => {
                self.hear(now, device, attempt);
                let member = &self.members[device];
                // A worker that was restarted answers on the old connection's successor.
                let elsewhere = matches!(member.state, DeviceState::Ready { since } if asked >= since)
                    && epoch != self.epoch;
                if member.attempt == attempt && elsewhere {
                    let reason = "it was restarted, or placed by another coordinator".to_owned();
                    self.lose(now, device, reason, &mut actions);
                }
            }
            Event::Planned { round, ring } => self.planned(now, round, ring, &mut actions),
            Event::PlanFailed { round, device, reason, lasting } => {
                self.plan_failed(now, round, device, reason, lasting);
            }
            Event::Kept { begun } => self.looked(begun),
            Event::Move { begun, ring } => self.moved(now, begun, ring, &mut actions),
            Event::Placed { device, epoch } => self.placed(now, device, epoch, &mut actions),
            Event::PlaceFailed { device, epoch, reason } => {
                self.place_failed(now, device, epoch, reason, &mut actions);
            }
            Event::Spoiled { epoch, device, reason } => {
                if self.stage == EpochStage::Live && epoch == self.epoch {
                    self.give_up(device, reason, &mut actions);
                }
            }
            Event::Added { device } => self.add(now, device),
            Event::Changed { device } => {
                let reason = "its address or what it grants has changed".to_owned();
                self.lose(now, device, reason, &mut actions);
                if let DeviceState::Unreachable { retry, .. } = &mut self.members[device].state {
                    *retry = now;
                }
            }
            Event::Removed { device } => self.remove(now, device, &mut actions),
            Event::Unmeasured { device, reason } => {
                let member = &mut self.members[device];
                if member.out.is_some() {
                    member.out = Some((format!("it was not measured: {reason}"), now + AGAIN));
                }
            }
            Event::Quiet => self.take_in(now, &mut actions),
        }
        self.advance(now, &mut actions);
        actions
    }

    fn hear(&mut self, now: Now, device: Index, attempt: u64) {
        let member = &mut self.members[device];
        if member.attempt == attempt && member.state.connected() {
            member.heard = now.max(member.heard);
        }
    }

    /// Time in which nothing at all happened, not even a tick, is our own silence: no device was asked in it, and it
    /// counts against none.
    fn excuse(&mut self, now: Now) {
        let gap = now.saturating_sub(self.seen);
        self.seen = now.max(self.seen);
        if gap > PING {
            for member in &mut self.members {
                member.heard += gap;
            }
        }
    }

    /// What follows from time and from the states alone.
    fn advance(&mut self, now: Now, actions: &mut Vec<Action>) {
        for device in 0..self.members.len() {
            let member = &self.members[device];
            match &member.state {
                DeviceState::Connecting { since, .. } if now >= *since + CONNECT => {
                    let reason = format!("no answer within {} s", CONNECT.as_secs());
                    self.lose(now, device, reason, actions);
                }
                state if state.connected() && now >= member.heard + SILENCE => {
                    let reason = format!("no sign of life for {:.1} s", SILENCE.as_secs_f64());
                    self.lose(now, device, reason, actions);
                }
                _ => {}
            }
            let member = &mut self.members[device];
            match &member.state {
                DeviceState::Unreachable { retry, reason, lost } if now >= *retry => {
                    member.attempt += 1;
                    member.state =
                        DeviceState::Connecting { since: now, reason: reason.clone(), lost: *lost };
                    actions.push(Action::Connect { device, attempt: member.attempt });
                }
                state if state.connected() && member.pinged.is_none_or(|p| now >= p + PING) => {
                    member.pinged = Some(now);
                    actions.push(Action::Ping { device, attempt: member.attempt });
                }
                _ => {}
            }
        }
        let all = self.all_connected();
        if self.stage == EpochStage::Waiting
            && self.needed().next().is_some()
            && now >= self.place_after
            && (all || self.goes_on_without(now))
        {
            self.rounds += 1;
            self.stage = EpochStage::Planning(self.rounds);
            self.without = !all;
            // It is made for all that are there.
            self.looked(now);
            let there = self.members.iter_mut().filter(|m| m.state.connected());
            there.for_each(|m| m.fresh = false);
            actions.push(Action::Plan { round: self.rounds });
        }
        if !self.gathering && self.ready().is_some() && !self.joining(now).is_empty() {
            self.gathering = true;
            actions.push(Action::Gather);
        }
        let due = |m: &Member| {
            m.counts() && m.state.connected() && m.look.is_some_and(|look| now >= look)
        };
        let looks = self.patience.is_some() && self.ready().is_some();
        if looks && self.members.iter().any(due) {
            let connected = self.members.iter_mut().filter(|m| m.state.connected());
            connected.filter(|m| m.look.is_some()).for_each(|m| m.look = Some(now + LOOK));
            actions.push(Action::Look);
        }
    }

    fn all_connected(&self) -> bool {
        self.needed().all(|(_, m)| m.state == DeviceState::Connected)
    }

    /// Whether the connected devices are to go on without those of the ring that are gone.
    fn goes_on_without(&self, now: Now) -> bool {
        let Some(patience) = self.patience.filter(|_| self.ring.is_some()) else { return false };
        let gone = |m: &Member| m.gone.is_some_and(|since| now >= since + patience);
        let there = |m: &Member| m.state == DeviceState::Connected;
        // After a failure of the network they come back one by one: the first does not begin alone.
        let stayed = |m: &Member| m.counts() && there(m) && now >= m.came + patience;
        now >= self.without_after
            && self.members.iter().any(stayed)
            && self.needed().all(|(_, m)| there(m) || gone(m))
    }

    /// Notes that plans or looks have taken into account all devices that were connected at `by`.
    fn looked(&mut self, by: Now) {
        let seen = self.members.iter_mut().filter(|m| m.state.connected() && m.came <= by);
        seen.for_each(|m| m.look = None);
    }

    fn lose(&mut self, now: Now, device: Index, reason: String, actions: &mut Vec<Action>) {
        let member = &mut self.members[device];
        let (was, lost) = match &member.state {
            DeviceState::Unreachable { .. } => return,
            DeviceState::Connecting { lost, .. } => (false, *lost),
            _ => (true, true),
        };
        let wait = RETRY_MIN.saturating_mul(1 << member.failures.min(4)).min(RETRY_MAX);
        member.failures = member.failures.saturating_add(1);
        member.state = DeviceState::Unreachable { retry: now + wait, reason: reason.clone(), lost };
        if was {
            // One that comes and goes is gone all the time.
            let first = member.gone.filter(|_| now < member.came + STEADY);
            member.gone = first.or(Some(now));
        }
        actions.push(Action::Disconnect { device });
        let joining = |intake: &Intake| intake.joined.contains(&device);
        if self.intake.as_ref().is_some_and(joining) {
            self.stage = EpochStage::Waiting;
            return self.leave_out(now, &format!("it was lost: {reason}"));
        }
        if self.needs(device) {
            self.intake = None;
            self.moving = Moving::No;
            if was && self.stage == EpochStage::Live {
                self.give_up(device, reason, actions);
            }
        }
    }
}

#[cfg(test)]
mod tests;
