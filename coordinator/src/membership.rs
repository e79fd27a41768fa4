//! Who is there: a state machine `(now, event) -> actions` for the devices of a cluster.
//!
//! It knows all devices of the cluster file, and those that join while it runs. Those that the last plan gave a part are its *ring*; the
//! others stay connected and keep nobody waiting. Before the first plan everybody is waited for. After
//! it, one of the ring that is gone for longer than the cluster's patience is planned around; once it has
//! been back for [`STEADY`], whoever plans looks whether it is worth while to have it again.
//!
//! A device that joins is counted on once nothing runs: all devices leave their places, so that it and its links can be
//! measured, and a plan is made with it. If none can be, the one before is taken again, without the new device. One
//! that is removed keeps its number, and is not asked for any more.
//!
//! It never reads a clock and never touches a socket; the driver of [`crate::fleet::RemoteFleet`] does both.
//! A device is lost when nothing has come from it for [`SILENCE`], however late answers are: one
//! that is slow still answers, because workers answer pings from their I/O side.

mod action;
mod belief;
mod joining;
mod obstacle;
mod placing;

pub use action::{Action, State};

use galaxy_common::Epoch;
use joining::Intake;
use std::time::Duration;

/// A point in time: since the driver started.
pub type Now = Duration;

/// How often each device is asked for its health.
pub const PING: Duration = Duration::from_millis(500);
/// How long a device may say nothing. With the ping and the tick on top, a loss is declared within 3 s.
pub const SILENCE: Duration = Duration::from_millis(2500);
/// How long forming a connection may take before the attempt is given up.
pub const CONNECT: Duration = Duration::from_secs(5);
/// Waiting time before the first new attempt to reach a device; doubles up to [`RETRY_MAX`].
pub const RETRY_MIN: Duration = Duration::from_millis(500);
/// Longest waiting time between two attempts.
pub const RETRY_MAX: Duration = Duration::from_secs(2);
/// Waiting time after a refused placement: it will most often be refused again.
pub const REPLACE: Duration = Duration::from_secs(2);
/// After a plan without those that are gone could not be made: it will most often fail again.
pub const WITHOUT: Duration = Duration::from_secs(15);
/// How long a device that has come must have stayed before it may take part.
pub const STEADY: Duration = Duration::from_secs(10);
/// When nothing came of a look, until the next.
pub const LOOK: Duration = Duration::from_secs(60);
/// When a device that joined, or that was to be let in, could not be, until the next try.
pub const AGAIN: Duration = Duration::from_secs(600);
/// How often the driver must send [`Event::Tick`].
pub const TICK: Duration = Duration::from_millis(100);

/// A device by its place in the cluster file.
pub type Index = usize;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Time passed.
    Tick,
    /// A connection stands, and the device has described itself.
    Connected {
        /// Which device.
        device: Index,
        /// Which attempt.
        attempt: u64,
        /// The latest epoch that it knows of; 0 for none.
        epoch: Epoch,
    },
    /// A connection could not be formed, or broke, or the device is not who it should be.
    Broken {
        /// Which device.
        device: Index,
        /// Which attempt.
        attempt: u64,
        /// Why.
        reason: String,
    },
    /// The device answered a ping.
    Pong {
        /// Which device.
        device: Index,
        /// Which attempt.
        attempt: u64,
        /// When it was asked.
        asked: Now,
        /// The epoch that it is placed in; 0 for none.
        epoch: Epoch,
    },
    /// Something else came from the device: progress, results.
    Heard {
        /// Which device.
        device: Index,
        /// Which attempt.
        attempt: u64,
    },
    /// There is a plan.
    Planned {
        /// Which time.
        round: u64,
        /// The devices that it gives a part, by rank.
        ring: Vec<Index>,
    },
    /// A plan could not be made.
    PlanFailed {
        /// Which time.
        round: u64,
        /// Because of whom, if it is a device.
        device: Option<Index>,
        /// Why.
        reason: String,
        /// Whether there is none for these devices as they are, so that asking again does not help.
        lasting: bool,
    },
    /// The plan was compared with the best one for all that were there, and stays.
    Kept {
        /// When the look at it began.
        begun: Now,
    },
    /// There is a better plan, and nothing runs: all move to a new epoch. Ignored unless the cluster
    /// is ready and everybody of the new ring is there.
    Move {
        /// When the look that found it began.
        begun: Now,
        /// The devices that it gives a part, by rank.
        ring: Vec<Index>,
    },
    /// A device joined: the next in number, or one that was removed.
    Added {
        /// Which device.
        device: Index,
    },
    /// A device that joined cannot be measured: it is tried again later.
    Unmeasured {
        /// Which device.
        device: Index,
        /// Why.
        reason: String,
    },
    /// A device is at another address, or grants something else: it is connected anew.
    Changed {
        /// Which device.
        device: Index,
    },
    /// A device does not belong to the cluster any more.
    Removed {
        /// Which device.
        device: Index,
    },
    /// Nothing runs, as was asked for by [`Action::Gather`], and nothing will before the next epoch.
    Quiet,
    /// The device holds its shard and its links stand.
    Placed {
        /// Which device.
        device: Index,
        /// In which epoch.
        epoch: Epoch,
    },
    /// The device refused or failed to take its place.
    PlaceFailed {
        /// Which device.
        device: Index,
        /// In which epoch.
        epoch: Epoch,
        /// Why.
        reason: String,
    },
    /// A program failed: the links of the epoch are of no further use.
    Spoiled {
        /// Which epoch.
        epoch: Epoch,
        /// Who said so.
        device: Index,
        /// Why.
        reason: String,
    },
}

#[derive(Debug, Clone)]
struct Member {
    state: State,
    attempt: u64,
    failures: u32,
    heard: Now,
    pinged: Option<Now>,
    /// When it was last connected,
    came: Now,
    /// and lost; of one that never stays for [`STEADY`] since, the first time.
    gone: Option<Now>,
    /// When to look whether it should take part, if no plan was made or looked at with it.
    look: Option<Now>,
    /// Why no plan counts on it, and when to try one that does.
    out: Option<(String, Now)>,
    /// Whether it joined before the first plan, and no plan was begun with it yet.
    fresh: bool,
    removed: bool,
    /// No look lets it in before: a move that was to do it has failed.
    put_off: Option<Now>,
}

impl Member {
    /// Unreachable, and due for an attempt.
    fn new(now: Now, out: Option<(String, Now)>) -> Self {
        let state = State::Unreachable { retry: now, reason: String::new(), lost: false };
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

    /// Whether it is time to count on it.
    fn due(&self, now: Now) -> bool {
        self.out.as_ref().is_some_and(|(_, at)| now >= *at)
    }

    /// Whether plans may count on it.
    fn counts(&self) -> bool {
        !self.removed && self.out.is_none()
    }
}

/// How far the next epoch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Devices are waited for.
    Waiting,
    /// A plan is being made, in this round.
    Planning(u64),
    /// The epoch has been given out and not been given up.
    Live,
}

/// Whether the cluster is on its way from one plan to another, of its own accord.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moving {
    No,
    /// To the new plan,
    Forth,
    /// or back to the old one, because the new one was refused.
    Back,
}

/// The state machine.
#[derive(Debug, Clone)]
pub struct Membership {
    members: Vec<Member>,
    /// The devices that the last plan gave a part, by rank; none before the first plan.
    ring: Option<Vec<Index>>,
    /// The epoch given out last.
    epoch: Epoch,
    /// The latest that any device knows of: given out here or by a coordinator before us.
    known: Epoch,
    /// Where epochs began when this did: by the clock of this machine.
    start: Epoch,
    stage: Stage,
    rounds: u64,
    moving: Moving,
    /// No plan before,
    place_after: Now,
    /// and none without those that are gone.
    without_after: Now,
    /// How long those of the ring may be gone; none is given if all are always waited for.
    patience: Option<Duration>,
    /// Whether the plan that is being made is one without some of the ring.
    without: bool,
    /// Whether somebody waits until nothing runs.
    gathering: bool,
    /// Whom the move that is going on gives a part, and who had none before.
    let_in: Vec<Index>,
    /// Whom the plan that is being made takes in.
    intake: Option<Intake>,
    /// Why the last plan or placement failed, and who said so,
    refusal: Option<(Option<Index>, String)>,
    /// and whether that was for want of any plan for all that are needed.
    planless: bool,
    /// When something happened last.
    seen: Now,
}

impl Membership {
    /// All devices unreachable, and due for an attempt. Epochs after `start` are given out. `ring` are
    /// the devices that have a part, where that is known before any plan. Who has a part and is gone for
    /// longer than `patience` is planned around.
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
            stage: Stage::Waiting,
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

    /// Where a device stands.
    pub fn state(&self, device: Index) -> &State {
        &self.members[device].state
    }

    /// The epoch given out last.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The epoch that programs may run in.
    pub fn ready(&self) -> Option<Epoch> {
        let all = self.needed().all(|(_, m)| matches!(m.state, State::Ready { .. }));
        (self.stage == Stage::Live && all).then_some(self.epoch)
    }

    /// The round of the plan that is being made.
    pub fn planning(&self) -> Option<u64> {
        match self.stage {
            Stage::Planning(round) => Some(round),
            Stage::Waiting | Stage::Live => None,
        }
    }

    /// Whether the plan that is being made is one without some that the last one counted on.
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

    /// Whether a look may not let a device in yet, because a move that was to do it has failed.
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
                if member.attempt == attempt && matches!(member.state, State::Connecting { .. }) {
                    // It refuses epochs that it knows.
                    self.known = self.known.max(epoch);
                    member.state = State::Connected;
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
                let elsewhere = matches!(member.state, State::Ready { since } if asked >= since)
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
                if self.stage == Stage::Live && epoch == self.epoch {
                    self.give_up(device, reason, &mut actions);
                }
            }
            Event::Added { device } => self.add(now, device),
            Event::Changed { device } => {
                let reason = "its address or what it grants has changed".to_owned();
                self.lose(now, device, reason, &mut actions);
                if let State::Unreachable { retry, .. } = &mut self.members[device].state {
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

    /// Time in which nothing at all happened, not even a tick, is our own silence: nobody was
    /// asked in it, and it counts against nobody.
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
                State::Connecting { since, .. } if now >= *since + CONNECT => {
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
                State::Unreachable { retry, reason, lost } if now >= *retry => {
                    member.attempt += 1;
                    member.state =
                        State::Connecting { since: now, reason: reason.clone(), lost: *lost };
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
        if self.stage == Stage::Waiting
            && self.needed().next().is_some()
            && now >= self.place_after
            && (all || self.goes_on_without(now))
        {
            self.rounds += 1;
            self.stage = Stage::Planning(self.rounds);
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
        self.needed().all(|(_, m)| m.state == State::Connected)
    }

    /// Whether those that are there are to go on without those of the ring that are gone.
    fn goes_on_without(&self, now: Now) -> bool {
        let Some(patience) = self.patience.filter(|_| self.ring.is_some()) else { return false };
        let gone = |m: &Member| m.gone.is_some_and(|since| now >= since + patience);
        let there = |m: &Member| m.state == State::Connected;
        // After a failure of the network they come back one by one: the first does not begin alone.
        let stayed = |m: &Member| m.counts() && there(m) && now >= m.came + patience;
        now >= self.without_after
            && self.members.iter().any(stayed)
            && self.needed().all(|(_, m)| there(m) || gone(m))
    }

    /// All that were there by then were counted on, or looked at.
    fn looked(&mut self, by: Now) {
        let seen = self.members.iter_mut().filter(|m| m.state.connected() && m.came <= by);
        seen.for_each(|m| m.look = None);
    }

    fn lose(&mut self, now: Now, device: Index, reason: String, actions: &mut Vec<Action>) {
        let member = &mut self.members[device];
        let (was, lost) = match &member.state {
            State::Unreachable { .. } => return,
            State::Connecting { lost, .. } => (false, *lost),
            _ => (true, true),
        };
        let wait = RETRY_MIN.saturating_mul(1 << member.failures.min(4)).min(RETRY_MAX);
        member.failures = member.failures.saturating_add(1);
        member.state = State::Unreachable { retry: now + wait, reason: reason.clone(), lost };
        if was {
            // One that comes and goes is gone all the time.
            let first = member.gone.filter(|_| now < member.came + STEADY);
            member.gone = first.or(Some(now));
        }
        actions.push(Action::Disconnect { device });
        let joining = |intake: &Intake| intake.joined.contains(&device);
        if self.intake.as_ref().is_some_and(joining) {
            self.stage = Stage::Waiting;
            return self.leave_out(now, &format!("it was lost: {reason}"));
        }
        if self.needs(device) {
            self.intake = None;
            self.moving = Moving::No;
            if was && self.stage == Stage::Live {
                self.give_up(device, reason, actions);
            }
        }
    }
}

#[cfg(test)]
mod tests;
