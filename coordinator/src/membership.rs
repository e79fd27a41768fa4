//! Who is there: a state machine `(now, event) -> actions` for the devices of a cluster.
//!
//! It never reads a clock and never touches a socket; the driver of [`crate::fleet::RemoteFleet`] does both.
//! A device is lost when nothing has come from it for [`SILENCE`], however late answers are: one
//! that is slow still answers, because workers answer pings from their I/O side.

use galaxy_common::Epoch;
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
    /// The device holds its shard and its links stand.
    Placed {
        /// Which device.
        device: Index,
        /// In which epoch.
        epoch: Epoch,
    },
    /// The device refused or failed to take its place, or a plan could not be made.
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

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Form a fresh connection and ask the device to describe itself.
    Connect {
        /// Which device.
        device: Index,
        /// Which attempt.
        attempt: u64,
    },
    /// Throw the connection away, with every call on it.
    Disconnect {
        /// Which device.
        device: Index,
    },
    /// Ask for health.
    Ping {
        /// Which device.
        device: Index,
        /// Which attempt.
        attempt: u64,
    },
    /// Send the device its part of the plan.
    Place {
        /// Which device.
        device: Index,
        /// In which epoch.
        epoch: Epoch,
    },
    /// Tell the device to abort the epoch.
    Cancel {
        /// Which device.
        device: Index,
        /// Which epoch.
        epoch: Epoch,
    },
    /// Fail what runs in the epoch.
    Fail {
        /// Which epoch.
        epoch: Epoch,
        /// Because of whom.
        device: Index,
        /// Why.
        reason: String,
    },
    /// Every device is in place: programs may run.
    Ready {
        /// In which epoch.
        epoch: Epoch,
    },
}

/// Where a device stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Not reached; the next attempt is due at `retry`.
    Unreachable {
        /// When to try again.
        retry: Now,
        /// Why not.
        reason: String,
        /// Whether it was connected before.
        lost: bool,
    },
    /// An attempt is under way.
    Connecting {
        /// Since when.
        since: Now,
        /// Why the last one failed; empty for the first.
        reason: String,
        /// Whether it was connected before.
        lost: bool,
    },
    /// Connected, without a place.
    Connected,
    /// Loading its shard, forming its links.
    Placing,
    /// In its place.
    Ready {
        /// Since when.
        since: Now,
    },
}

impl State {
    /// The word for status replies.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Unreachable { lost: true, .. } | Self::Connecting { lost: true, .. } => "lost",
            Self::Unreachable { .. } | Self::Connecting { .. } => "unreachable",
            Self::Connected => "connected",
            Self::Placing => "placing",
            Self::Ready { .. } => "ready",
        }
    }
    /// Whether a connection stands.
    pub fn connected(&self) -> bool {
        matches!(self, Self::Connected | Self::Placing | Self::Ready { .. })
    }
}

#[derive(Debug, Clone)]
struct Member {
    state: State,
    attempt: u64,
    failures: u32,
    heard: Now,
    pinged: Option<Now>,
}

/// The state machine.
#[derive(Debug, Clone)]
pub struct Membership {
    members: Vec<Member>,
    /// The latest that was given out, here or by a coordinator before us.
    epoch: Epoch,
    /// Whether the epoch has been given out and not been given up.
    live: bool,
    /// No placement before.
    place_after: Now,
    /// Why the last placement failed, and who said so.
    refusal: Option<(Index, String)>,
    /// When something happened last.
    seen: Now,
}

impl Membership {
    /// All devices unreachable, and due for an attempt. Epochs after `start` are given out.
    pub fn new(devices: usize, start: Epoch) -> Self {
        let state = State::Unreachable { retry: Now::ZERO, reason: String::new(), lost: false };
        let member = Member { state, attempt: 0, failures: 0, heard: Now::ZERO, pinged: None };
        Self {
            members: vec![member; devices],
            epoch: start,
            live: false,
            place_after: Now::ZERO,
            refusal: None,
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
        let all = self.members.iter().all(|m| matches!(m.state, State::Ready { .. }));
        (self.live && all).then_some(self.epoch)
    }

    /// Who keeps the cluster from being ready, and why, in words for a person.
    pub fn obstacle(&self) -> Option<(Index, String)> {
        if self.ready().is_some() {
            return None;
        }
        for (device, member) in self.members.iter().enumerate() {
            if let State::Unreachable { reason, lost, .. }
            | State::Connecting { reason, lost, .. } = &member.state
            {
                let reason = match (reason.is_empty(), lost) {
                    (true, _) => "is being connected".to_owned(),
                    (false, true) => format!("was lost: {reason}"),
                    (false, false) => format!("is not reachable: {reason}"),
                };
                return Some((device, reason));
            }
        }
        if let Some((device, reason)) = &self.refusal {
            return Some((*device, format!("has not taken its place: {reason}")));
        }
        let placing = |m: &Member| !matches!(m.state, State::Ready { .. });
        let device = self.members.iter().position(placing).unwrap_or(0);
        Some((device, "is being placed".to_owned()))
    }

    /// Takes an event in and says what to do. `now` is when it happened: events that had to wait
    /// keep their time, so that a device is not blamed for what kept us.
    pub fn handle(&mut self, now: Now, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.excuse(now);
        match event {
            Event::Tick => {}
            Event::Connected { device, attempt, epoch } => {
                let member = &mut self.members[device];
                if member.attempt == attempt && matches!(member.state, State::Connecting { .. }) {
                    // While a device connects no epoch is live. It refuses those that it knows.
                    self.epoch = self.epoch.max(epoch);
                    member.state = State::Connected;
                    member.heard = now;
                    member.pinged = None;
                    member.failures = 0;
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
            Event::Placed { device, epoch } => {
                let placing = matches!(self.members[device].state, State::Placing);
                if self.live && epoch == self.epoch && placing {
                    self.members[device].state = State::Ready { since: now };
                    let heard = &mut self.members[device].heard;
                    *heard = now.max(*heard);
                    if let Some(epoch) = self.ready() {
                        self.refusal = None;
                        actions.push(Action::Ready { epoch });
                    }
                }
            }
            Event::PlaceFailed { device, epoch, reason } => {
                if self.live && epoch == self.epoch {
                    self.refusal = Some((device, reason.clone()));
                    self.place_after = now + REPLACE;
                    self.give_up(device, reason, &mut actions);
                }
            }
            Event::Spoiled { epoch, device, reason } => {
                if self.live && epoch == self.epoch {
                    self.give_up(device, reason, &mut actions);
                }
            }
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
        let all = self.members.iter().all(|m| m.state == State::Connected);
        if all && now >= self.place_after {
            self.epoch = self.epoch.next();
            self.live = true;
            for (device, member) in self.members.iter_mut().enumerate() {
                member.state = State::Placing;
                actions.push(Action::Place { device, epoch: self.epoch });
            }
        }
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
        actions.push(Action::Disconnect { device });
        if was && self.live {
            self.give_up(device, reason, actions);
        }
    }

    /// Ends the epoch: every device that is still there goes back to being merely connected.
    fn give_up(&mut self, device: Index, reason: String, actions: &mut Vec<Action>) {
        let epoch = self.epoch;
        self.live = false;
        actions.push(Action::Fail { epoch, device, reason });
        for (other, member) in self.members.iter_mut().enumerate() {
            if matches!(member.state, State::Placing | State::Ready { .. }) {
                member.state = State::Connected;
                actions.push(Action::Cancel { device: other, epoch });
            }
        }
    }
}

#[cfg(test)]
mod tests;
