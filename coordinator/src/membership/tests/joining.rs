//! Devices that join and devices that are removed while the cluster runs.

use super::*;

/// A ready cluster of `devices` whose members may be gone for 5 s, and one more that has joined.
fn joined(devices: usize, new: SimulatedDevice) -> World {
    let mut world = World::new(devices);
    world.membership = Membership::new(devices, Epoch(100), None, Some(seconds(5.0)));
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    world.devices.push(new);
    world.epochs.push(Epoch(0));
    world.send(Event::Added { device: devices });
    world
}

fn gathers(world: &World) -> usize {
    world.log.iter().filter(|(_, action)| *action == Action::Gather).count()
}

#[test]
fn a_joined_device_is_planned_with_once_no_program_runs() {
    let mut world = joined(2, FAST);
    world.run(seconds(1.0));
    assert_eq!(gathers(&world), 1, "asked for once");
    assert_eq!(world.membership.ready(), Some(Epoch(101)), "what runs goes on");
    assert!(world.membership.left_out(2).is_some() && !world.membership.counts(2));

    world.plan = Ok(vec![0, 1, 2]);
    let quiet = world.now;
    world.send(Event::Quiet);
    assert!(world.membership.moving() && world.membership.taking_in());
    for device in [0, 1] {
        let cancel = Action::Cancel { device, epoch: Epoch(101) };
        assert_eq!(
            world.first(quiet, |a| *a == cancel),
            Some(quiet),
            "no place while it is measured"
        );
    }
    assert!(world.first(quiet, |a| matches!(a, Action::Fail { .. })).is_none(), "nothing fails");
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert!(world.membership.counts(2) && !world.membership.taking_in());
    world.run(seconds(60.0));
    assert_eq!((gathers(&world), world.membership.ready()), (1, Some(Epoch(102))));
}

#[test]
fn the_old_plan_serves_while_a_plan_with_a_joined_device_is_sought() {
    let mut world = joined(2, FAST);
    world.run(seconds(1.0));
    let quiet = world.now;
    world.plan = Ok(vec![0, 1]);
    world.send(Event::Quiet);
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert!(world.membership.counts(2));
    let looked = world.first(quiet, |action| *action == Action::Look);
    assert!(looked.is_some_and(|at| at < quiet + seconds(1.0)), "{looked:?}");
}

#[test]
fn a_joined_device_that_cannot_be_measured_is_left_out_for_a_while() {
    let mut world = joined(2, FAST);
    world.run(seconds(1.0));
    world.send(Event::Unmeasured { device: 2, reason: "it says no word".to_owned() });
    world.send(Event::Quiet);
    world.run(AGAIN / 2);
    assert_eq!((gathers(&world), world.membership.ready()), (1, Some(Epoch(101))), "nobody waited");
    assert!(world.membership.left_out(2).is_some_and(|why| why.contains("it says no word")));
    world.run(AGAIN);
    assert_eq!(gathers(&world), 2);
}

#[test]
fn without_a_plan_for_a_joined_device_the_old_plan_is_taken_again() {
    let mut world = joined(2, FAST);
    world.run(seconds(1.0));
    world.plan = Err("its links cannot be measured");
    world.send(Event::Quiet);
    world.run(PLANNING);
    let why = world.membership.left_out(2).unwrap_or_default().to_owned();
    assert!(why.contains("its links cannot be measured"), "{why}");
    assert!(world.membership.moving(), "requests wait");
    world.plan = Ok(vec![0, 1]);
    world.run(REPLACE + seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert!(!world.membership.counts(2));
    world.run(AGAIN / 2);
    assert_eq!(gathers(&world), 1, "not again at once");
    world.run(AGAIN);
    assert_eq!(gathers(&world), 2, "but later");
}

#[test]
fn a_device_that_joins_and_freezes_does_not_keep_requests_waiting() {
    let mut world = joined(2, FAST);
    world.run(seconds(1.0));
    world.devices[2] = SimulatedDevice::Frozen;
    let quiet = world.now;
    world.plan = Ok(vec![0, 1]);
    world.send(Event::Quiet);
    world.run(seconds(4.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert!(world.first(quiet, |a| matches!(a, Action::Fail { .. })).is_none());
}

#[test]
fn a_device_that_joins_before_the_first_plan_is_waited_for() {
    let mut world = World::new(1);
    world.devices = vec![SimulatedDevice::Frozen];
    world.run(seconds(1.0));
    world.devices = vec![FAST, FAST];
    world.epochs.push(Epoch(0));
    world.plan = Ok(vec![0, 1]);
    world.send(Event::Added { device: 1 });
    world.run(seconds(12.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    assert_eq!(gathers(&world), 0);
}

#[test]
fn a_removed_device_is_shut_out_at_once_and_planned_around() {
    let mut world = joined(3, SimulatedDevice::Frozen);
    world.plan = Ok(vec![0, 2]);
    let removed = world.now;
    world.send(Event::Removed { device: 1 });
    let at = |which: Action| world.first(removed, |a| *a == which);
    assert_eq!(at(Action::Disconnect { device: 1 }), Some(removed));
    assert_eq!(at(Action::Cancel { device: 0, epoch: Epoch(101) }), Some(removed));
    assert_eq!(
        world.first(removed, |a| matches!(a, Action::Fail { device: 1, .. })),
        Some(removed)
    );
    world.run(seconds(3.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)), "within 3 s, and without its patience");
    world.run(seconds(120.0));
    let after = |a: &Action| {
        matches!(
            a,
            Action::Connect { device: 1, .. }
                | Action::Ping { device: 1, .. }
                | Action::Place { device: 1, .. }
        )
    };
    assert_eq!(world.first(removed, after), None, "nobody asks it any more");
}

#[test]
fn removing_an_idle_device_keeps_the_epoch_and_removing_all_is_named() {
    let mut world = joined(2, FAST);
    world.run(seconds(0.5));
    world.send(Event::Removed { device: 2 });
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    for device in [0, 1] {
        world.send(Event::Removed { device });
    }
    world.run(seconds(30.0));
    let (whose, why) = world.membership.obstacle().expect("no devices");
    assert!(whose.is_none() && why.contains("galaxy invite"), "{why}");
    // One that comes under an old name, by the hand of a person.
    world.plan = Ok(vec![1]);
    world.send(Event::Added { device: 1 });
    world.run(seconds(1.0));
    assert!(world.membership.ready().is_some());
}

#[test]
fn a_device_with_a_changed_address_is_reconnected_at_once() {
    let mut world = joined(2, SimulatedDevice::Frozen);
    let changed = world.now;
    world.send(Event::Changed { device: 0 });
    let connects = |a: &Action| matches!(a, Action::Connect { device: 0, .. });
    assert_eq!(world.first(changed, connects), Some(changed));
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
}

#[test]
fn a_device_that_joins_during_the_first_planning_is_taken_in_after_it() {
    let mut world = World::new(1);
    // The first tick connects it, and the plan is begun.
    while world.membership.planning().is_none() {
        world.run(seconds(0.001));
    }
    world.devices.push(FAST);
    world.epochs.push(Epoch(0));
    world.send(Event::Added { device: 1 });
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(101)));
    assert_eq!(gathers(&world), 1);
    world.plan = Ok(vec![0, 1]);
    world.send(Event::Quiet);
    world.run(seconds(1.0));
    assert_eq!(world.membership.ready(), Some(Epoch(102)));
    assert!(world.membership.counts(1));
}
