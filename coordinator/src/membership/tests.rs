//! The membership in virtual time: a world of devices that answer, answer late, or do not.

use super::*;

#[derive(Clone, Copy, PartialEq)]
enum SimulatedDevice {
    /// Answers every ping after this time.
    Answers(Duration),
    /// Takes connections down with it: every call fails at once.
    Killed,
    /// Says nothing at all.
    Frozen,
}

struct World {
    membership: Membership,
    devices: Vec<SimulatedDevice>,
    epochs: Vec<Epoch>,
    /// The devices that the plan gives a part, or why there is no plan.
    plan: Result<Vec<Index>, &'static str>,
    now: Now,
    due: Vec<(Now, Event)>,
    log: Vec<(Now, Action)>,
}

/// How long a plan takes.
const PLANNING: Duration = Duration::from_millis(1);
const FAST: SimulatedDevice = SimulatedDevice::Answers(Duration::from_millis(2));

impl World {
    fn new(devices: usize) -> Self {
        Self {
            membership: Membership::new(devices, Epoch(100), None, None),
            devices: vec![FAST; devices],
            epochs: vec![Epoch(0); devices],
            plan: Ok((0..devices).collect()),
            now: Now::ZERO,
            due: Vec::new(),
            log: Vec::new(),
        }
    }

    fn send(&mut self, event: Event) {
        let actions = self.membership.handle(self.now, event);
        for action in actions {
            self.log.push((self.now, action.clone()));
            self.answer(action);
        }
    }

    fn answer(&mut self, action: Action) {
        let now = self.now;
        let (device, event) = match action {
            Action::Connect { device, attempt } => {
                let epoch = self.epochs[device];
                (device, Event::Connected { device, attempt, epoch })
            }
            Action::Plan { round } => {
                let event = match self.plan.clone() {
                    Ok(ring) => Event::Planned { round, ring },
                    Err(reason) => {
                        let (device, reason) = (None, reason.to_owned());
                        Event::PlanFailed { round, device, reason, lasting: true }
                    }
                };
                self.due.push((now + PLANNING, event));
                return;
            }
            Action::Ping { device, attempt } => {
                let epoch = self.epochs[device];
                (device, Event::Pong { device, attempt, asked: now, epoch })
            }
            Action::Place { device, epoch } => {
                if let SimulatedDevice::Answers(_) = self.devices[device] {
                    self.epochs[device] = epoch;
                }
                (device, Event::Placed { device, epoch })
            }
            _ => return,
        };
        match self.devices[device] {
            SimulatedDevice::Answers(after) => self.due.push((now + after, event)),
            SimulatedDevice::Frozen => {}
            SimulatedDevice::Killed => {
                let attempt = self.membership.members[device].attempt;
                let reason = "connection refused".to_owned();
                let at = now + Duration::from_millis(1);
                self.due.push((at, Event::Broken { device, attempt, reason }));
            }
        }
    }

    /// Lets time pass in steps of a millisecond.
    fn run(&mut self, for_: Duration) {
        let end = self.now + for_;
        while self.now < end {
            self.now += Duration::from_millis(1);
            let (due, later): (Vec<_>, Vec<_>) =
                std::mem::take(&mut self.due).into_iter().partition(|(at, _)| *at <= self.now);
            self.due = later;
            for (_, event) in due {
                self.send(event);
            }
            if self.now.as_millis().is_multiple_of(TICK.as_millis()) {
                self.send(Event::Tick);
            }
        }
    }

    fn first(&self, after: Now, which: impl Fn(&Action) -> bool) -> Option<Now> {
        self.log.iter().find(|(at, a)| *at >= after && which(a)).map(|(at, _)| *at)
    }
}

fn seconds(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

#[test]
fn when_all_devices_answer_the_cluster_is_ready() {
    let mut world = World::new(3);
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    assert_eq!(world.membership.obstacle(), None);
    world.run(seconds(60.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
}

#[test]
fn a_frozen_device_is_lost_within_three_seconds_of_silence() {
    let mut world = World::new(3);
    world.run(seconds(1.234));
    let frozen = world.now;
    world.devices[1] = SimulatedDevice::Frozen;
    world.run(seconds(6.0));
    let fail = |a: &Action| matches!(a, Action::Fail { epoch: Epoch(101), device: 1, .. });
    let at = world.first(frozen, fail).expect("a loss");
    assert!(at - frozen <= seconds(3.0), "{:?}", at - frozen);
    for device in [0, 2] {
        let cancel = Action::Cancel { device, epoch: Epoch(101) };
        assert_eq!(world.first(frozen, |a| *a == cancel), Some(at));
    }
    assert_eq!(world.membership.state(1).word(), "lost");
    let (device, reason) = world.membership.obstacle().expect("not ready");
    assert!(device == Some(1) && reason.contains("was lost"), "{reason}");
}

#[test]
fn a_killed_device_is_lost_at_once_and_comes_back_with_a_new_epoch() {
    let mut world = World::new(2);
    world.run(seconds(1.0));
    let killed = world.now;
    world.devices[0] = SimulatedDevice::Killed;
    world.run(seconds(10.0));
    let at = world.first(killed, |a| matches!(a, Action::Fail { .. })).expect("a loss");
    assert!(at - killed <= PING + TICK, "{:?}", at - killed);
    let attempts = world
        .log
        .iter()
        .filter(|(t, a)| *t > killed && matches!(a, Action::Connect { .. }))
        .count();
    assert!((4..=8).contains(&attempts), "{attempts} attempts in 10 s");
    world.devices[0] = FAST;
    world.epochs[0] = Epoch(0);
    world.run(RETRY_MAX + TICK * 2);
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
}

#[test]
fn a_device_twenty_times_slower_is_not_lost() {
    let mut world = World::new(2);
    world.run(seconds(1.0));
    world.devices[1] = SimulatedDevice::Answers(Duration::from_millis(40));
    world.run(seconds(30.0));
    world.devices[1] = SimulatedDevice::Answers(Duration::from_millis(1900));
    world.run(seconds(30.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
}

#[test]
fn a_worker_that_reports_no_epoch_is_lost_and_placed_again() {
    let mut world = World::new(2);
    world.run(seconds(1.0));
    world.epochs[1] = Epoch(0);
    world.run(seconds(2.0));
    assert!(world.first(seconds(1.0), |a| matches!(a, Action::Fail { device: 1, .. })).is_some());
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
}

#[test]
fn a_pong_from_before_the_placement_is_ignored() {
    let mut world = World::new(1);
    world.run(seconds(1.0));
    let attempt = world.membership.members[0].attempt;
    let asked = Now::ZERO;
    world.send(Event::Pong { device: 0, attempt, asked, epoch: Epoch(0) });
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
}

#[test]
fn a_refused_placement_is_named_and_tried_again_later() {
    let mut world = World::new(2);
    world.run(Duration::from_millis(104));
    assert_eq!(world.membership.epoch(), Epoch(101));
    world.due.clear();
    let reason = "not enough memory".to_owned();
    world.send(Event::PlaceFailed { device: 1, epoch: Epoch(101), reason });
    let (device, reason) = world.membership.obstacle().expect("not ready");
    assert!(device == Some(1) && reason.contains("not enough memory"), "{reason}");
    let refused = world.now;
    world.run(REPLACE + TICK * 2);
    let place = |a: &Action| matches!(a, Action::Place { .. });
    let again = world.first(refused, place).expect("another try");
    assert!(again - refused >= REPLACE);
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
}

#[test]
fn a_spoiled_epoch_is_replaced_without_reconnecting() {
    let mut world = World::new(3);
    world.run(seconds(1.0));
    let from = world.now;
    let spoiled = Event::Spoiled { epoch: Epoch(101), device: 2, reason: "link closed".to_owned() };
    world.send(spoiled.clone());
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert_eq!(world.first(from, |a| matches!(a, Action::Connect { .. })), None);
    world.send(spoiled);
    assert_eq!(world.membership.ready(), Some(Epoch(102)), "an old epoch cannot be spoiled");
}

#[test]
fn a_new_epoch_is_above_those_that_devices_report() {
    let mut world = World::new(3);
    world.epochs[1] = Epoch(1 << 50);
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch((1 << 50) + 1)));
}

#[test]
fn a_stalled_driver_does_not_count_as_silence_of_devices() {
    let mut world = World::new(3);
    world.run(seconds(1.0));
    // The driver was busy: no ticks, and answers that waited for it.
    let told = world.now + Duration::from_millis(3);
    let pong = |device| Event::Pong { device, attempt: 1, asked: told, epoch: Epoch(101) };
    world.now += seconds(20.0);
    for device in 0..3 {
        assert_eq!(world.membership.handle(told, pong(device)), []);
    }
    world.send(Event::Tick);
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    let pings =
        world.log.iter().filter(|(at, a)| *at == world.now && matches!(a, Action::Ping { .. }));
    assert_eq!(pings.count(), 3, "everybody is asked at once");
    world.devices[2] = SimulatedDevice::Frozen;
    world.due.clear();
    world.run(seconds(3.0));
    assert_eq!(world.membership.state(2).word(), "lost");
}

#[test]
fn events_of_an_old_connection_attempt_are_ignored() {
    let mut world = World::new(1);
    world.run(seconds(1.0));
    let reason = "late".to_owned();
    world.send(Event::Broken { device: 0, attempt: 0, reason });
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
}

fn moves(ring: &[Index]) -> Event {
    Event::Move { begun: Now::MAX, ring: ring.to_vec() }
}

#[test]
fn losing_a_device_without_a_part_keeps_the_cluster_ready() {
    let mut world = World::new(3);
    world.plan = Ok(vec![2, 0]);
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    assert_eq!(world.membership.state(1), &DeviceState::Connected);
    let from = world.now;
    world.devices[1] = SimulatedDevice::Killed;
    world.run(seconds(10.0));
    assert_eq!(world.membership.state(1).word(), "lost");
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    assert_eq!(world.first(from, |a| matches!(a, Action::Fail { .. })), None);
    // It comes back and knows of a later epoch, of another coordinator: ours goes on.
    (world.devices[1], world.epochs[1]) = (FAST, Epoch(500));
    world.run(seconds(10.0));
    assert_eq!(world.membership.state(1), &DeviceState::Connected);
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    world.devices[0] = SimulatedDevice::Killed;
    world.run(seconds(5.0));
    assert_eq!(world.membership.obstacle().expect("lost").0, Some(0));
    (world.devices[0], world.epochs[0]) = (FAST, Epoch(0));
    world.run(seconds(5.0));
    assert_eq!(world.membership.ready(), Some(Epoch(501)), "above all that is known");
}

#[test]
fn the_first_plan_waits_for_every_device() {
    let mut world = World::new(3);
    world.plan = Ok(vec![0, 2]);
    world.devices[1] = SimulatedDevice::Killed;
    world.run(seconds(10.0));
    assert_eq!(world.membership.ready(), None);
    assert_eq!(world.membership.obstacle().expect("not there").0, Some(1));
    world.devices[1] = FAST;
    world.run(RETRY_MAX + TICK * 2);
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
}

#[test]
fn with_shares_by_hand_only_devices_of_the_ring_are_waited_for() {
    let mut world = World::new(2);
    world.membership = Membership::new(2, Epoch(100), Some(vec![1]), None);
    world.plan = Ok(vec![1]);
    world.devices[0] = SimulatedDevice::Killed;
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
}

#[test]
fn a_failed_plan_is_named_and_tried_again() {
    let mut world = World::new(2);
    world.plan = Err("12 MB are missing");
    world.run(seconds(1.0));
    let (device, reason) = world.membership.obstacle().expect("no plan");
    assert!(device.is_none() && reason.contains("12 MB are missing"), "{reason}");
    assert!(world.membership.is_planless(), "all are there");
    assert_eq!(world.membership.planning(), None, "it rests before it tries again");
    world.plan = Ok(vec![0, 1]);
    world.devices = vec![SimulatedDevice::Answers(Duration::from_millis(200)); 2];
    world.run(REPLACE + TICK * 3 - world.now);
    let placing = Some((Some(0), "is being placed".to_owned()));
    assert_eq!(world.membership.obstacle(), placing, "there is a plan now");
    assert!(!world.membership.is_planless());
    world.run(TICK * 2);
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
}

#[test]
fn a_device_lost_during_the_first_planning_is_waited_for() {
    let mut world = World::new(2);
    world.run(Duration::from_millis(102));
    assert_eq!(world.membership.stage, EpochStage::Planning(1));
    world.devices[1] = SimulatedDevice::Killed;
    let reason = "gone".to_owned();
    let attempt = world.membership.members[1].attempt;
    world.send(Event::Broken { device: 1, attempt, reason });
    world.run(seconds(5.0));
    assert_eq!(world.membership.ready(), None);
    assert_eq!(world.first(Now::ZERO, |a| matches!(a, Action::Place { .. })), None);
    world.devices[1] = FAST;
    world.run(RETRY_MAX + TICK * 2);
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
}

#[test]
fn a_move_takes_in_a_left_out_device_and_fails_no_request() {
    let mut world = World::new(3);
    world.plan = Ok(vec![0, 1]);
    world.run(seconds(1.0));
    let from = world.now;
    world.send(moves(&[2, 0]));
    assert!(world.membership.moving() && world.membership.ready().is_none());
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert!(!world.membership.moving());
    assert_eq!(world.first(from, |a| matches!(a, Action::Fail { .. })), None);
    let cancels: Vec<_> =
        world.log.iter().filter(|(_, a)| matches!(a, Action::Cancel { .. })).collect();
    assert_eq!(cancels, [&(from, Action::Cancel { device: 1, epoch: Epoch(101) })]);
    assert_eq!(world.membership.state(1), &DeviceState::Connected);
}

#[test]
fn a_refused_move_returns_to_the_old_plan_at_once() {
    let mut world = World::new(2);
    world.run(seconds(1.0));
    world.send(moves(&[1]));
    world.due.clear();
    let reason = "no memory".to_owned();
    let refused = Event::PlaceFailed { device: 1, epoch: Epoch(102), reason };
    world.send(refused);
    assert!(world.membership.moving(), "on the way back");
    world.run(Duration::from_millis(20));
    assert_eq!(world.membership.ready(), Some(Epoch(103)));
    assert!(!world.membership.moving());
}

#[test]
fn a_device_that_a_failed_move_would_have_taken_in_is_put_off() {
    let mut world = World::new(3);
    world.plan = Ok(vec![0, 1]);
    world.run(seconds(1.0));
    for (epoch, device) in [(102, 2), (104, 0)] {
        world.send(moves(&[0, 2]));
        world.due.clear();
        let reason = "no link".to_owned();
        world.send(Event::PlaceFailed { device, epoch: Epoch(epoch), reason });
        world.run(seconds(1.0));
        assert_eq!(world.membership.ready(), Some(Epoch(epoch + 1)));
        let put_off =
            |after| [0, 1, 2].map(|device| world.membership.put_off(world.now + after, device));
        assert_eq!(put_off(Now::ZERO), [false, false, true], "whoever said so");
        assert_eq!(put_off(AGAIN), [false; 3]);
        assert!(world.membership.counts(2), "where it is needed it may take part");
    }
    world.plan = Ok(vec![0, 2]);
    world.send(moves(&[0, 2]));
    world.run(seconds(1.0));
    assert!(!world.membership.put_off(world.now, 2), "it has taken its place");
}

#[test]
fn a_device_that_dies_during_a_move_is_lost() {
    let mut world = World::new(2);
    world.run(seconds(1.0));
    let from = world.now;
    world.devices[1] = SimulatedDevice::Killed;
    world.send(moves(&[1, 0]));
    world.run(seconds(3.0));
    assert!(!world.membership.moving());
    let fail = |a: &Action| matches!(a, Action::Fail { epoch: Epoch(102), device: 1, .. });
    assert!(world.first(from, fail).is_some());
    (world.devices[1], world.epochs[1]) = (FAST, Epoch(0));
    world.run(seconds(3.0));
    assert_eq!(world.membership.ready(), Some(Epoch(103)));
}

#[test]
fn a_move_of_a_cluster_that_is_not_ready_is_ignored() {
    let mut world = World::new(2);
    world.send(moves(&[0]));
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    assert_eq!(world.membership.ring.as_deref(), Some(&[0, 1][..]));
}

/// Three devices, of which those of the ring may be gone for `patience` seconds.
fn impatient(patience: f64) -> World {
    let mut world = World::new(3);
    world.membership = Membership::new(3, Epoch(100), None, Some(seconds(patience)));
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    world
}

fn plans(world: &World, after: Now) -> usize {
    world.log.iter().filter(|(at, a)| *at >= after && matches!(a, Action::Plan { .. })).count()
}

#[test]
fn a_device_lost_for_longer_than_the_patience_is_planned_around() {
    let mut world = impatient(5.0);
    world.devices[2] = SimulatedDevice::Killed;
    let from = world.now;
    world.run(seconds(5.0));
    assert_eq!(world.membership.ready(), None, "it is waited for");
    assert_eq!(plans(&world, from), 0);
    world.plan = Ok(vec![0, 1]);
    world.run(seconds(2.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert_eq!(world.membership.obstacle(), None);
    // It may come and go, and nobody is the worse for it.
    world.devices[2] = FAST;
    world.run(seconds(5.0));
    world.devices[2] = SimulatedDevice::Killed;
    world.run(seconds(20.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert_eq!(plans(&world, from), 1);
    assert_eq!(world.first(from, |a| *a == Action::Look), None);
}

#[test]
fn a_device_back_within_the_patience_takes_its_old_place() {
    let mut world = impatient(5.0);
    world.devices[2] = SimulatedDevice::Killed;
    let from = world.now;
    world.run(seconds(3.0));
    world.devices[2] = FAST;
    world.run(RETRY_MAX + TICK * 2);
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert!(world.membership.ring.as_ref().is_some_and(|ring| ring.contains(&2)));
    world.run(seconds(100.0));
    assert_eq!(world.first(from, |a| *a == Action::Look), None, "the plan counts on it");
}

#[test]
fn a_lost_device_without_which_no_plan_fits_is_waited_for() {
    let mut world = impatient(5.0);
    world.devices[2] = SimulatedDevice::Killed;
    world.plan = Err("12 MB are missing");
    let from = world.now;
    world.run(seconds(10.0));
    let (device, reason) = world.membership.obstacle().expect("no plan");
    assert!(device == Some(2) && reason.contains("lost"), "{reason}");
    assert!(reason.contains("do not go on without it: 12 MB are missing"), "{reason}");
    assert!(!world.membership.is_planless(), "it may come back");
    assert_eq!(plans(&world, from), 1);
    world.run(WITHOUT);
    assert_eq!(plans(&world, from), 2, "it is tried again, now and then");
    world.plan = Ok(vec![0, 1, 2]);
    world.devices[2] = FAST;
    world.run(RETRY_MAX + TICK * 2);
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
}

#[test]
fn plan_searches_for_a_returned_device_repeat_until_one_is_decided() {
    let mut world = impatient(1.0);
    world.devices[2] = SimulatedDevice::Killed;
    world.plan = Ok(vec![0, 1]);
    world.run(seconds(3.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    world.devices[2] = FAST;
    let from = world.now;
    let looks = |world: &World, from: Now| -> Vec<Now> {
        let all = world.log.iter().filter(|(at, a)| *at >= from && *a == Action::Look);
        all.map(|(at, _)| *at).collect()
    };
    world.run(RETRY_MAX + TICK * 2);
    let due = world.membership.next_look(2).expect("it is back");
    assert!(due >= from + STEADY && due <= world.now + STEADY, "{due:?}");
    assert_eq!(world.membership.next_look(0), None, "it has a part");
    world.run(STEADY);
    let first = looks(&world, from);
    assert!(first.len() == 1 && first[0] >= due && first[0] <= due + TICK * 2, "{first:?}");
    assert_eq!(world.membership.next_look(2), Some(first[0] + LOOK));
    world.run(LOOK + TICK * 2);
    assert_eq!(looks(&world, from).len(), 2, "nobody said what came of it");
    world.send(Event::Kept { begun: world.now });
    world.run(LOOK * 3);
    assert_eq!(looks(&world, from).len(), 2);
    // Once more, and then it takes part.
    world.devices[2] = SimulatedDevice::Killed;
    world.run(seconds(1.0));
    world.devices[2] = FAST;
    let from = world.now;
    world.run(STEADY + RETRY_MAX + TICK * 2);
    assert_eq!(looks(&world, from).len(), 1);
    world.send(moves(&[0, 1, 2]));
    world.run(LOOK * 3);
    assert_eq!(looks(&world, from).len(), 1);
    assert_eq!(world.membership.ready(), Some(Epoch(103)));
}

#[test]
fn the_last_device_goes_on_alone_and_no_device_means_no_plan() {
    let mut world = impatient(1.0);
    world.devices[1] = SimulatedDevice::Killed;
    world.devices[2] = SimulatedDevice::Frozen;
    world.plan = Ok(vec![0]);
    world.run(seconds(6.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    world.devices[0] = SimulatedDevice::Killed;
    let from = world.now;
    world.run(seconds(30.0));
    assert_eq!(plans(&world, from), 0);
    // Whoever is there first waits a moment for the others, and goes on, though the last plan was another's.
    world.devices[2] = FAST;
    world.plan = Ok(vec![2]);
    let back = world.now;
    world.run(RETRY_MAX + seconds(1.0) + TICK * 2);
    assert_eq!(world.membership.ready(), Some(Epoch(103)));
    let planned = world.first(from, |a| matches!(a, Action::Plan { .. })).expect("a plan");
    assert!(planned >= back + seconds(1.0));
}

#[test]
fn after_an_outage_the_first_devices_back_wait_for_the_others() {
    let mut world = impatient(5.0);
    world.devices = vec![SimulatedDevice::Killed; 3];
    world.run(seconds(20.0));
    for device in 0..3 {
        world.devices[device] = FAST;
        world.run(seconds(1.0));
    }
    world.run(RETRY_MAX);
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert!(world.membership.ring.as_ref().is_some_and(|ring| ring.len() == 3));
}

#[test]
fn a_device_that_keeps_leaving_and_returning_is_planned_around() {
    let mut world = impatient(5.0);
    let (from, mut around) = (world.now, false);
    for _ in 0..10 {
        world.devices[2] = SimulatedDevice::Killed;
        world.run(seconds(1.0));
        let gone = !world.membership.state(2).connected();
        world.plan = if gone { Ok(vec![0, 1]) } else { Ok(vec![0, 1, 2]) };
        world.devices[2] = FAST;
        world.run(seconds(2.0));
        around |= world.membership.ring == Some(vec![0, 1]);
    }
    assert!(around, "{:?}", world.membership);
    assert!(plans(&world, from) < 10, "{}", plans(&world, from));
}

#[test]
fn a_plan_with_a_lost_device_is_not_computed_again_at_once() {
    let mut world = impatient(1.0);
    world.devices[2] = SimulatedDevice::Killed;
    let from = world.now;
    world.run(seconds(10.0));
    let plans = plans(&world, from);
    assert!((1..=100).contains(&plans), "{plans}");
}

#[test]
fn a_device_that_returns_during_a_plan_search_is_considered_later() {
    let mut world = impatient(1.0);
    world.devices[2] = SimulatedDevice::Killed;
    world.plan = Ok(vec![0, 1]);
    world.run(seconds(3.0));
    let begun = world.now;
    world.devices[2] = FAST;
    world.run(RETRY_MAX + TICK * 2);
    world.send(Event::Kept { begun });
    world.run(STEADY);
    assert!(world.first(begun, |a| *a == Action::Look).is_some());
}

mod joining;

/// An epoch that a device reports is believed as far as an earlier coordinator can have given it out.
#[test]
fn a_device_that_reports_an_impossible_epoch_is_left_out() {
    let mut world = impatient(5.0);
    world.devices[2] = SimulatedDevice::Killed;
    world.run(seconds(1.0));
    world.devices[2] = FAST;
    world.epochs[2] = Epoch(u64::MAX);
    world.plan = Ok(vec![0, 1]);
    world.run(seconds(20.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)), "the others go on");
    assert!(!world.membership.state(2).connected());
    // Others that are started again are placed by what they were told.
    world.epochs = vec![Epoch(102), Epoch(102), Epoch(0)];
    world.plan = Ok(vec![0, 1, 2]);
    world.membership = Membership::new(3, Epoch(50), None, None);
    (world.log, world.due) = (Vec::new(), Vec::new());
    world.run(seconds(5.0));
    assert_eq!(world.membership.ready(), Some(Epoch(103)));
}
