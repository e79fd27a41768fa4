//! The driver: performs what the membership and the drift say.

mod report;

use super::{
    Message, Shared, calls,
    device_table::Notice,
    own_limit,
    planning::{self, Failure, PlanningResult, Verdict},
};
use crate::{
    cluster::DeviceConfig,
    drift::{self, Change, Drift},
    fleet::Readiness,
    membership::{Action, Event, Index, Membership, Now, TICK},
    placement::{self, Placement},
};
use galaxy_common::Epoch;
use galaxy_planner::Offer;
use std::{
    collections::VecDeque,
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};
use tokio::{
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::MissedTickBehavior,
};

/// How long letting go of the devices may take when the fleet is closed.
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
    drift: Drift,
    calls: Vec<Calls>,
    /// Tasks that make plans, compare them, or measure devices that joined.
    plans: JoinSet<()>,
    /// What the listener last heard of each device, so that it hears nothing twice.
    said: Vec<String>,
    /// The last reason without a plan that the listener heard.
    unplanned: String,
    /// Which devices were connected at the last look.
    there: Vec<bool>,
    /// The last plan or failure, with the offers and profiles that it is for.
    planned: Option<PlanningResult>,
    /// The plan from which the cluster moves, while it moves.
    before: Option<Arc<Placement>>,
    /// When the last look at another plan began.
    look_begun: Now,
}

/// Handles messages and ticks until the fleet is closed.
pub(super) async fn drive(shared: Arc<Shared>, mut inbox: mpsc::Receiver<Message>, start: Epoch) {
    let cluster = shared.cluster();
    let devices = cluster.devices.len();
    let ring = shared.device_table().placement.as_ref().map(|placement| placement.ring.clone());
    // A split by hand counts on all.
    let patience = (!cluster.by_hand()).then_some(cluster.patience);
    let mut driver = Driver {
        membership: Membership::new(devices, start, ring, patience),
        drift: Drift::new(2 * devices, cluster.drift),
        calls: (0..devices).map(|_| Calls::default()).collect(),
        plans: JoinSet::new(),
        said: vec![String::new(); devices],
        unplanned: String::new(),
        there: vec![false; devices],
        planned: None,
        before: None,
        look_begun: Now::ZERO,
        shared: shared.clone(),
    };
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !shared.stopped.load(Ordering::SeqCst) {
        // What was told comes before a tick: silence is judged when all signs of life are in.
        let tick = |shared: &Shared| Message::Event(shared.now(), Event::Tick);
        let message = tokio::select! {
            biased;
            () = shared.stop.notified() => break,
            told = inbox.recv() => told.unwrap_or_else(|| tick(&shared)),
            _ = ticks.tick() => tick(&shared),
        };
        driver.handle(message);
    }
    driver.farewell().await;
}

impl Driver {
    fn handle(&mut self, message: Message) {
        // Kept until the readiness tells everybody who waits at the gate.
        let mut guard = None;
        match message {
            Message::Event(at, event) => self.step(at, event),
            Message::Planned { round, made } => {
                let event = self.take(round, made);
                self.step(self.shared.now(), event);
            }
            Message::Ran { epoch, samples } => {
                if self.membership.ready() == Some(epoch)
                    && let Some(change) = self.drift.observe(self.shared.now(), &samples)
                {
                    self.look(change);
                }
            }
            Message::Devices(devices) => self.update(devices),
            Message::Quiet(quiet) => {
                let present = self.shared.device_table().placement.clone();
                let before = std::mem::replace(&mut self.before, present);
                self.step(self.shared.now(), Event::Quiet);
                if !self.membership.taking_in() {
                    self.before = before;
                }
                guard = Some(quiet);
            }
            Message::Looked { change, present, verdict } => {
                guard = self.conclude(&change, &present, verdict);
            }
        }
        while let Some(ended) = self.plans.try_join_next() {
            if ended.is_err() {
                self.broke_off();
            }
        }
        self.report_absent();
        self.show();
        drop(guard);
        for calls in &mut self.calls {
            while calls.running.try_join_next().is_some() {}
        }
    }

    /// Brings the devices up to what the files say. Devices keep their index, also those that are removed.
    fn update(&mut self, wanted: Vec<DeviceConfig>) {
        let mut cluster = (*self.shared.cluster()).clone();
        let mut events = Vec::new();
        for (device, known) in cluster.devices.iter_mut().enumerate() {
            let new = wanted.iter().find(|new| new.name == known.name);
            match (new, self.membership.removed(device)) {
                (None, false) => events.push(Event::Removed { device }),
                (None, true) => continue,
                (Some(_), true) => events.push(Event::Added { device }),
                (Some(new), false) => {
                    // Where else it may be found is no reason to let go of it.
                    if (DeviceConfig { addresses: known.addresses.clone(), ..new.clone() })
                        != *known
                    {
                        events.push(Event::Changed { device });
                    }
                }
            }
            if let Some(new) = new {
                known.clone_from(new);
            }
        }
        for new in wanted {
            if !cluster.devices.iter().any(|known| known.name == new.name) {
                events.push(Event::Added { device: cluster.devices.len() });
                cluster.devices.push(new);
            }
        }
        let devices = cluster.devices.len();
        *self.shared.cluster.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(cluster);
        self.shared.device_table().grow(devices);
        self.calls.resize_with(devices, Calls::default);
        self.said.resize(devices, String::new());
        self.there.resize(devices, false);
        self.drift.grow(2 * devices);
        for event in events {
            self.step(self.shared.now(), event);
        }
        for device in (0..devices).filter(|device| self.membership.state(*device).connected()) {
            self.calls[device].running.spawn(calls::tell_removed(self.shared.clone(), device));
        }
    }

    /// A plan or a look panicked, and will report nothing.
    fn broke_off(&mut self) {
        self.drift.dropped();
        if let Some(round) = self.membership.planning() {
            let (device, reason) = (None, "planning broke off".to_owned());
            let failed = Event::PlanFailed { round, device, reason, lasting: false };
            self.step(self.shared.now(), failed);
        }
    }

    fn step(&mut self, at: Now, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.speak(&event);
            // A plan that was refused gives way to the one that worked.
            if let (Event::PlaceFailed { .. }, true) = (&event, self.membership.moving())
                && let Some(before) = self.before.take()
            {
                self.put(before);
            }
            for action in self.membership.handle(at, event) {
                match action {
                    Action::Plan { round } => events.extend(self.plan(round)),
                    action => self.perform(action),
                }
            }
        }
    }

    /// What the connected devices offer, in the order of the file; where the split is by hand, what all devices offer.
    fn offers(&self, wanted: impl Fn(Index) -> bool) -> Vec<Offer> {
        let cluster = self.shared.cluster();
        let table = self.shared.device_table();
        let by_hand = cluster.by_hand();
        let devices = cluster.devices.iter().enumerate();
        let devices = devices.filter(|(i, _)| self.membership.counts(*i) && wanted(*i));
        let there = devices.filter(|(i, _)| by_hand || self.membership.state(*i).connected());
        there
            .map(|(i, device)| match &table.entries[i].description {
                Some(said) => {
                    let threads = u16::try_from(said.threads).unwrap_or(u16::MAX);
                    placement::offer(device, Some(threads), own_limit(said.memory_bytes))
                }
                None => placement::offer(device, None, None),
            })
            .collect()
    }

    /// Starts to make a plan, or takes the last one if devices offer the same. After a failure profiles are collected
    /// again: what was missing may be there now.
    fn plan(&mut self, round: u64) -> Option<Event> {
        let offers = self.offers(|_| true);
        let last = self.planned.as_ref().and_then(|made| Some((made, made.outcome.as_ref().ok()?)));
        let there = |device: &Index| self.membership.state(*device).connected();
        let holds = |(made, placement): &(&PlanningResult, &Arc<Placement>)| {
            made.offers == offers && placement.ring.iter().all(there)
        };
        if let Some((_, placement)) = last.filter(holds) {
            let event = Event::Planned { round, ring: placement.ring.clone() };
            self.unplanned.clear();
            return Some(event);
        }
        let (worked, before) =
            (last.is_some(), self.planned.as_ref().and_then(|m| m.profile.clone()));
        let (shared, factors) = (self.shared.clone(), self.drift.factors());
        // What runs goes on as soon as those that joined are measured; what a better plan needs of the
        // model comes while it does.
        let kept = self.before.clone().filter(|_| self.membership.taking_in());
        self.plans.spawn(async move {
            let before = (worked, before);
            let made = match kept {
                Some(kept) if !shared.cluster().by_hand() => {
                    planning::keep(&shared, offers, before, kept).await
                }
                _ => planning::make(shared.clone(), offers, factors, before).await,
            };
            shared.send(Message::Planned { round, made }).await;
        });
        None
    }

    /// Takes over the outcome of a planning: a plan, or the reason why there is none.
    fn take(&mut self, round: u64, made: Result<PlanningResult, Failure>) -> Event {
        let made = match made {
            // What was made for all is taken again when they are back.
            Ok(PlanningResult { outcome: Err((device, reason)), .. })
                if self.membership.without() || self.membership.taking_in() =>
            {
                return Event::PlanFailed { round, device, reason, lasting: false };
            }
            Ok(made) => self.planned.insert(made),
            Err((device, reason)) => {
                return Event::PlanFailed { round, device, reason, lasting: false };
            }
        };
        let placement = match &mut made.outcome {
            Ok(placement) => placement,
            Err((device, reason)) => {
                let (device, reason) = (*device, reason.clone());
                return Event::PlanFailed { round, device, reason, lasting: true };
            }
        };
        let mut table = self.shared.device_table();
        table.profile = made.profile.clone();
        let known = table.placement.as_ref().filter(|known| known.plan == placement.plan);
        let news = known.is_none();
        if let Some(known) = known {
            // The same plan stays the same one: programs are kept by it.
            Arc::make_mut(placement).plan = known.plan.clone();
        }
        table.placement = Some(placement.clone());
        drop(table);
        let placement = placement.clone();
        self.unplanned.clear();
        if news {
            self.announce(&placement);
        }
        Event::Planned { round, ring: placement.ring.clone() }
    }

    /// Tells the listener of a plan, and of the devices that it leaves out.
    fn announce(&self, placement: &Placement) {
        let Placement { what, predicted, .. } = placement;
        (self.shared.listener)(Notice::Planned { what: what.clone(), predicted: *predicted });
        let left_out = placement.left_out.iter();
        for (device, reason) in left_out.filter(|(device, _)| self.membership.counts(*device)) {
            let (device, reason) = (self.shared.device(*device).name.clone(), reason.clone());
            (self.shared.listener)(Notice::LeftOut { device, reason });
        }
    }

    /// Starts to look for a better plan with the curves of `change`.
    fn look(&mut self, change: Change) {
        self.look_begun = self.shared.now();
        for (track, was) in &change.moved {
            let (now, (device, disk)) = (change.factors[*track], drift::whose(*track));
            let device = self.shared.device(device).name;
            (self.shared.listener)(Notice::Drift { device, disk, was: *was, now });
        }
        let present = self.shared.device_table().placement.clone();
        let profile = self.planned.as_ref().and_then(|made| made.profile.clone());
        let (Some(present), Some(profile)) = (present, profile) else {
            self.drift.dropped();
            return;
        };
        // Whoever came or went while the plan was in force may take part, or not.
        let known = |offer: &Offer| planning::covers(&profile, offer);
        let willing = |device| !self.membership.put_off(self.look_begun, device);
        let offers = self.offers(willing).into_iter();
        let (offers, unknown): (Vec<_>, Vec<_>) = offers.partition(known);
        for offer in unknown {
            let place = self.shared.cluster().devices.iter().position(|d| d.name == offer.name);
            let Some(device) = place else { continue };
            let why = match profile.device(&offer.name) {
                Ok(_) => "it has other threads than when it was measured",
                Err(_) => "it was not measured",
            };
            let reason = format!("{why}: start the coordinator again");
            let notice = Notice::LeftOut { device: offer.name, reason: reason.clone() };
            self.say(device, reason, notice);
        }
        self.plans.spawn(planning::look(self.shared.clone(), offers, profile, present, change));
    }

    /// Puts a plan in force, made for what devices offer now.
    fn put(&mut self, placement: Arc<Placement>) {
        let offers = self.offers(|_| true);
        if let Some(made) = &mut self.planned {
            (made.offers, made.outcome) = (offers, Ok(placement.clone()));
        }
        self.shared.device_table().placement = Some(placement);
    }

    /// Acts on the verdict of a look. While the returned guard lives, nothing runs.
    fn conclude(
        &mut self,
        change: &Change,
        present: &Arc<Placement>,
        verdict: Verdict,
    ) -> Option<tokio::sync::OwnedRwLockWriteGuard<()>> {
        let listener = self.shared.listener.clone();
        match verdict {
            Verdict::Unknown { reason } => {
                listener(Notice::Stays { reason });
                self.drift.refused(self.shared.now());
                None
            }
            Verdict::Unready { reason, passes } => {
                listener(Notice::Stays { reason });
                let at = self.shared.now();
                if !passes {
                    // It would be so again: what devices do now is expected of them.
                    self.drift.keep(change);
                    self.step(at, Event::Kept { begun: self.look_begun });
                }
                self.drift.refused(at);
                None
            }
            Verdict::Overtaken => {
                self.drift.dropped();
                None
            }
            Verdict::Keep { now, then } => {
                listener(Notice::Kept { now, then });
                self.drift.keep(change);
                self.step(self.shared.now(), Event::Kept { begun: self.look_begun });
                None
            }
            Verdict::Move { placement, now, then, guard } => {
                let in_force = {
                    let table = self.shared.device_table();
                    table.placement.as_ref().is_some_and(|p| Arc::ptr_eq(p, present))
                };
                let at = self.shared.now();
                if in_force && self.membership.ready().is_some() {
                    self.put(placement.clone());
                    self.before = Some(present.clone());
                    let (begun, ring) = (self.look_begun, placement.ring.clone());
                    self.step(at, Event::Move { begun, ring });
                }
                if !self.membership.moving() {
                    // Somebody was lost meanwhile: first things first.
                    if self.before.take().is_some() {
                        self.put(present.clone());
                    }
                    self.drift.dropped();
                    return None;
                }
                let what = placement.what.clone();
                listener(Notice::Moving { what, now, then });
                self.announce(&placement);
                self.drift.moved(at, change);
                Some(guard)
            }
        }
    }

    fn perform(&mut self, action: Action) {
        let shared = self.shared.clone();
        match action {
            Action::Connect { device, attempt } => {
                shared.device_table().entries[device].attempt = attempt;
                self.calls[device].running.spawn(calls::connect(shared, device, attempt));
            }
            Action::Disconnect { device } => {
                self.calls[device].running.abort_all();
                shared.device_table().entries[device].clear();
            }
            Action::Ping { device, attempt } => {
                self.calls[device].running.spawn(calls::ping(shared, device, attempt));
            }
            Action::Place { device, epoch } => {
                let calls = &mut self.calls[device];
                let Some(placement) = shared.device_table().placement.clone() else { return };
                // Those that a look lets in have made ready. Where there are others in the ring, these
                // load first, and give up links that do not come.
                let moves = self.membership.moving() && !shared.cluster().by_hand();
                let before = self.before.as_ref().filter(|_| moves);
                let prepared = before.is_some_and(|before| {
                    !placement.ring.iter().any(|device| before.ring.contains(device))
                });
                let placing = calls::place(shared, placement, device, epoch, prepared);
                calls.placing = Some(calls.running.spawn(placing));
            }
            Action::Cancel { device, epoch } => {
                if let Some(placing) = self.calls[device].placing.take() {
                    placing.abort();
                }
                self.calls[device].running.spawn(calls::cancel(shared, device, epoch));
            }
            Action::Look => {
                if let Some(change) = self.drift.ask(self.shared.now()) {
                    self.look(change);
                }
            }
            Action::Gather => {
                let joining = self.membership.joining(shared.now());
                self.plans.spawn(async move {
                    for (device, reason) in planning::measure(&shared, &joining).await {
                        shared.tell(Event::Unmeasured { device, reason }).await;
                    }
                    let quiet = shared.plan_lock.clone().write_owned().await;
                    shared.send(Message::Quiet(quiet)).await;
                });
            }
            // Taken care of where the plan is made.
            Action::Plan { .. } => {}
            Action::Fail { epoch, device, reason } => {
                shared.device_table().ended = Some((epoch, device, reason.clone()));
                if self.membership.state(device).connected() {
                    let name = shared.device(device).name.clone();
                    let notice = Notice::Spoiled { device: name, epoch, reason: reason.clone() };
                    self.say(device, reason, notice);
                }
            }
            Action::Ready { epoch } => {
                shared.sequence.store(0, Ordering::SeqCst);
                self.drift.begin();
                self.before = None;
                let placement = {
                    let mut table = shared.device_table();
                    table.begin(epoch);
                    table.placement.clone()
                };
                if let Some(placement) = placement {
                    let plan = placement.plan.clone();
                    (shared.listener)(Notice::Ready { epoch, plan });
                }
            }
        }
    }

    /// Ends the epoch everywhere, as far as devices answer soon.
    async fn farewell(&mut self) {
        let reason = "the coordinator ends".to_owned();
        self.shared.readiness.send_replace(Readiness::waiting(reason));
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
