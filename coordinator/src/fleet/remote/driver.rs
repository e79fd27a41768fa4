//! The driver: performs what the membership says.

use super::{Shared, board::Notice, calls, own_limit};
use crate::{
    fleet::{Readiness, blocking},
    membership::{Action, Event, Index, Membership, Now, State, TICK},
    placement,
};
use galaxy_common::{Bytes, Epoch};
use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::MissedTickBehavior,
};

/// How long letting go of the devices may take at the end.
const FAREWELL: Duration = Duration::from_millis(500);

/// The calls that run on one connection.
#[derive(Default)]
struct Calls {
    running: JoinSet<()>,
    placing: Option<AbortHandle>,
}

struct Driver {
    shared: Arc<Shared>,
    membership: Membership,
    calls: Vec<Calls>,
    /// What was last said of each device.
    said: Vec<String>,
    /// Which devices were connected when we last looked.
    there: Vec<bool>,
    /// What the last plan was made from, and what came of it.
    planned: Option<(Grants, Planned)>,
}

/// Whether the plan is on the board; else who is to blame, and why.
type Planned = Result<(), (Index, String)>;

/// What devices say of themselves: threads in the order of the file, limits in ring order.
type Grants = (Vec<u16>, Vec<Option<Bytes>>);

/// Runs until the fleet is closed.
pub(super) async fn drive(
    shared: Arc<Shared>,
    mut inbox: mpsc::Receiver<(Now, Event)>,
    start: Epoch,
) {
    let devices = shared.ring.len();
    let mut driver = Driver {
        membership: Membership::new(devices, start),
        calls: (0..devices).map(|_| Calls::default()).collect(),
        said: vec![String::new(); devices],
        there: vec![false; devices],
        planned: None,
        shared: shared.clone(),
    };
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !shared.stopped.load(Ordering::SeqCst) {
        // What was told comes before a tick: silence is judged when all signs of life are in.
        let (at, event) = tokio::select! {
            biased;
            () = shared.stop.notified() => break,
            told = inbox.recv() => told.unwrap_or((shared.now(), Event::Tick)),
            _ = ticks.tick() => (shared.now(), Event::Tick),
        };
        driver.handle(at, event).await;
    }
    driver.farewell().await;
}

impl Driver {
    async fn handle(&mut self, at: Now, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.speak(&event);
            let actions = self.membership.handle(at, event);
            let mut planned = None;
            for action in actions {
                if let Action::Place { epoch, .. } = action {
                    if planned.is_none() {
                        let outcome = self.plan().await;
                        if let Err((device, reason)) = &outcome {
                            let (device, reason) = (*device, reason.clone());
                            events.push_back(Event::PlaceFailed { device, epoch, reason });
                        }
                        planned = Some(outcome.is_ok());
                    }
                    if planned != Some(true) {
                        continue;
                    }
                }
                self.perform(action);
            }
        }
        self.report_absent();
        self.show();
        for calls in &mut self.calls {
            while calls.running.try_join_next().is_some() {}
        }
    }

    /// Makes the plan anew, if the devices say something new.
    async fn plan(&mut self) -> Planned {
        let shared = self.shared.clone();
        let grants: Grants = {
            let board = shared.board();
            let described = |i: usize| board.entries[i].description.as_ref();
            let threads: Vec<u16> = shared
                .cluster
                .devices
                .iter()
                .map(|device| {
                    let entry = shared.ring.iter().position(|d| d.name == device.name);
                    let threads = entry.and_then(described).map_or(1, |d| d.threads);
                    u16::try_from(threads).unwrap_or(u16::MAX).max(1)
                })
                .collect();
            let limit = |i| described(i).and_then(|d| own_limit(d.memory_bytes));
            (threads, (0..shared.ring.len()).map(limit).collect())
        };
        if let Some((from, outcome)) = &self.planned
            && *from == grants
        {
            return outcome.clone();
        }
        let (threads, limits) = grants.clone();
        let made = blocking(move || {
            let plan = placement::plan(&shared.cluster, &shared.model, &threads)?;
            let needs = placement::fit(&shared.model, &plan, &limits)?;
            Ok::<_, placement::PlacementError>((plan, needs))
        })
        .await
        .map_err(|e| (0, e.to_string()))?;
        let outcome = match made {
            Ok((plan, needs)) => {
                let mut board = self.shared.board();
                // The same plan stays the same one: programs are kept by it.
                if *board.plan != plan {
                    board.plan = Arc::new(plan);
                }
                board.needed = needs.iter().map(|n| n.total()).collect();
                Ok(())
            }
            Err(error) => {
                let blamed = match &error {
                    placement::PlacementError::Budget { device, .. } => {
                        self.shared.ring.iter().position(|d| d.name == *device)
                    }
                    _ => None,
                };
                Err((blamed.unwrap_or(0), error.to_string()))
            }
        };
        self.planned = Some((grants, outcome.clone()));
        outcome
    }

    fn perform(&mut self, action: Action) {
        let shared = self.shared.clone();
        match action {
            Action::Connect { device, attempt } => {
                shared.board().entries[device].attempt = attempt;
                self.calls[device].running.spawn(calls::connect(shared, device, attempt));
            }
            Action::Disconnect { device } => {
                self.calls[device].running.abort_all();
                shared.board().entries[device].clear();
            }
            Action::Ping { device, attempt } => {
                self.calls[device].running.spawn(calls::ping(shared, device, attempt));
            }
            Action::Place { device, epoch } => {
                let calls = &mut self.calls[device];
                calls.placing = Some(calls.running.spawn(calls::place(shared, device, epoch)));
            }
            Action::Cancel { device, epoch } => {
                if let Some(placing) = self.calls[device].placing.take() {
                    placing.abort();
                }
                self.calls[device].running.spawn(calls::cancel(shared, device, epoch));
            }
            Action::Fail { epoch, device, reason } => {
                shared.board().ended = Some((epoch, device, reason.clone()));
                if self.membership.state(device).connected() {
                    let name = shared.ring[device].name.clone();
                    let notice = Notice::Spoiled { device: name, epoch, reason: reason.clone() };
                    self.say(device, reason, notice);
                }
            }
            Action::Ready { epoch } => {
                shared.sequence.store(0, Ordering::SeqCst);
                let plan = shared.board().plan.clone();
                (shared.listener)(Notice::Ready { epoch, plan });
            }
        }
    }

    /// Brings the board and the readiness up to the membership.
    fn show(&self) {
        let mut board = self.shared.board();
        for (device, entry) in board.entries.iter_mut().enumerate() {
            let state = self.membership.state(device);
            entry.state = state.word();
            match state {
                State::Unreachable { reason, .. } | State::Connecting { reason, .. } => {
                    entry.detail.clone_from(reason);
                }
                State::Ready { .. } => entry.detail.clear(),
                State::Connected | State::Placing => {}
            }
        }
        let readiness = match (self.membership.ready(), self.membership.obstacle()) {
            (Some(epoch), _) => Readiness::Ready(epoch),
            (None, Some((device, reason))) => {
                if !self.membership.state(device).connected() {
                    // The entry already says why.
                } else if board.entries[device].detail.is_empty() {
                    board.entries[device].detail.clone_from(&reason);
                }
                let name = self.shared.ring[device].name.clone();
                let reason = format!("device {name} {reason}");
                Readiness::Waiting { device: Some(name), reason }
            }
            (None, None) => {
                Readiness::Waiting { device: None, reason: "it is starting".to_owned() }
            }
        };
        drop(board);
        self.shared.readiness.send_if_modified(|now| {
            let changed = *now != readiness;
            *now = readiness;
            changed
        });
    }

    /// Tells the listener, once for each thing that is new.
    fn speak(&mut self, event: &Event) {
        let (device, text, notice) = match event {
            Event::PlaceFailed { device, reason, .. } => {
                self.shared.board().entries[*device].detail.clone_from(reason);
                let name = self.shared.ring[*device].name.clone();
                (*device, reason.clone(), Notice::Refused { device: name, reason: reason.clone() })
            }
            Event::Connected { device, .. } => {
                let about = {
                    let board = self.shared.board();
                    let Some(said) = &board.entries[*device].description else { return };
                    let memory = own_limit(said.memory_bytes)
                        .map(|limit: Bytes| format!(", grants {limit} at most"))
                        .unwrap_or_default();
                    format!(
                        "version {}, {} threads, {}{memory}",
                        said.version, said.threads, said.processor
                    )
                };
                let name = self.shared.ring[*device].name.clone();
                (*device, about.clone(), Notice::Connected { device: name, about })
            }
            _ => return,
        };
        self.say(device, text, notice);
    }

    fn say(&mut self, device: Index, text: String, notice: Notice) {
        if self.said[device] != text {
            self.said[device] = text;
            (self.shared.listener)(notice);
        }
    }

    /// Tells the listener of devices that went away, or that are not to be reached.
    fn report_absent(&mut self) {
        for device in 0..self.there.len() {
            let state = self.membership.state(device);
            let was_there = std::mem::replace(&mut self.there[device], state.connected());
            let State::Unreachable { reason, .. } = state else { continue };
            let (text, at) = (reason.clone(), &self.shared.ring[device]);
            let (name, address, reason) = (at.name.clone(), at.address.clone(), reason.clone());
            if was_there {
                self.say(device, text, Notice::Lost { device: name, reason });
            } else if !reason.is_empty() {
                self.say(device, text, Notice::Unreachable { device: name, address, reason });
            }
        }
    }

    /// Ends the epoch everywhere, as far as devices answer soon.
    async fn farewell(&mut self) {
        let reason = "the coordinator ends".to_owned();
        self.shared.readiness.send_replace(Readiness::Waiting { device: None, reason });
        let epoch = self.membership.epoch();
        let mut farewells = JoinSet::new();
        for device in 0..self.calls.len() {
            self.calls[device].running.abort_all();
            farewells.spawn(calls::cancel(self.shared.clone(), device, epoch));
        }
        let all = async { while farewells.join_next().await.is_some() {} };
        // Devices that do not answer notice by themselves.
        drop(tokio::time::timeout(FAREWELL, all).await);
    }
}
