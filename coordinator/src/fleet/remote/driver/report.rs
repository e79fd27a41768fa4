//! What the driver shows: the state of each device, the cluster's readiness, and what is new, once.

use super::{
    super::{device_table::Notice, own_limit},
    Driver,
};
use crate::{
    fleet::Readiness,
    membership::{DeviceState, Event, Index},
};
use galaxy_common::Bytes;

impl Driver {
    /// Brings the device table and the readiness up to date with the membership.
    pub(super) fn show(&self) {
        let mut table = self.shared.device_table();
        for (device, entry) in table.entries.iter_mut().enumerate() {
            let state = self.membership.state(device);
            entry.state = state.word();
            entry.look = self.membership.next_look(device);
            entry.removed = self.membership.removed(device);
            entry.out = self.membership.left_out(device).unwrap_or_default().to_owned();
            match state {
                DeviceState::Unreachable { reason, .. }
                | DeviceState::Connecting { reason, .. } => {
                    entry.detail.clone_from(reason);
                }
                DeviceState::Ready { .. } => entry.detail.clear(),
                DeviceState::Connected if self.membership.ready().is_some() => entry.detail.clear(),
                DeviceState::Connected | DeviceState::Placing => {}
            }
        }
        let planless = self.membership.is_planless();
        let readiness = match (self.membership.ready(), self.membership.obstacle()) {
            (Some(epoch), _) => Readiness::Ready(epoch),
            (None, _) if self.membership.taking_in() => {
                let reason =
                    "a device joined: what it can do is measured, and a plan is made with it";
                Readiness::Moving { reason: reason.to_owned() }
            }
            (None, _) if self.membership.moving() => {
                let what = table.placement.as_ref().map(|p| p.what.clone()).unwrap_or_default();
                Readiness::Moving { reason: format!("the cluster moves to another plan: {what}") }
            }
            (None, Some((Some(device), reason))) => {
                if !self.membership.state(device).connected() {
                    // The entry already says why.
                } else if table.entries[device].detail.is_empty() {
                    table.entries[device].detail.clone_from(&reason);
                }
                let name = self.shared.device(device).name.clone();
                let reason = format!("device {name} {reason}");
                Readiness::Waiting { device: Some(name), reason, planless }
            }
            (None, Some((None, reason))) => Readiness::Waiting { device: None, reason, planless },
            (None, None) => Readiness::waiting("it is starting"),
        };
        drop(table);
        self.shared.readiness.send_if_modified(|now| {
            let changed = *now != readiness;
            *now = readiness;
            changed
        });
    }

    /// Tells the listener of an event, once for each thing that is new.
    pub(super) fn speak(&mut self, event: &Event) {
        let (device, text, notice) = match event {
            Event::PlaceFailed { device, reason, .. } => {
                self.shared.device_table().entries[*device].detail.clone_from(reason);
                let name = self.shared.device(*device).name.clone();
                (*device, reason.clone(), Notice::Refused { device: name, reason: reason.clone() })
            }
            Event::Connected { device, .. } => {
                let about = {
                    let table = self.shared.device_table();
                    let Some(said) = &table.entries[*device].description else { return };
                    let memory = own_limit(said.memory_bytes)
                        .map(|limit: Bytes| format!(", grants {limit} at most"))
                        .unwrap_or_default();
                    format!(
                        "version {}, {} threads, {}{memory}",
                        said.version, said.threads, said.processor
                    )
                };
                let name = self.shared.device(*device).name.clone();
                (*device, about.clone(), Notice::Connected { device: name, about })
            }
            Event::Unmeasured { device, reason } => {
                let name = self.shared.device(*device).name.clone();
                let notice = Notice::LeftOut { device: name, reason: reason.clone() };
                (*device, reason.clone(), notice)
            }
            Event::PlanFailed { reason, .. } => {
                if self.unplanned != *reason {
                    self.unplanned.clone_from(reason);
                    let reason = match self.membership.without() {
                        true => format!("for those that are left: {reason}"),
                        false => reason.clone(),
                    };
                    (self.shared.listener)(Notice::Unplanned { reason });
                }
                return;
            }
            _ => return,
        };
        self.say(device, text, notice);
    }

    pub(super) fn say(&mut self, device: Index, text: String, notice: Notice) {
        if self.said[device] != text {
            self.said[device] = text;
            (self.shared.listener)(notice);
        }
    }

    /// Tells the listener of devices that were lost, or that cannot be reached.
    pub(super) fn report_absent(&mut self) {
        for device in 0..self.there.len() {
            let state = self.membership.state(device);
            let was_there = std::mem::replace(&mut self.there[device], state.connected());
            let DeviceState::Unreachable { reason, .. } = state else { continue };
            let (text, at) = (reason.clone(), self.shared.device(device));
            let (name, address, reason) = (at.name.clone(), at.address.clone(), reason.clone());
            if was_there {
                self.say(device, text, Notice::Lost { device: name, reason });
            } else if !reason.is_empty() {
                self.say(device, text, Notice::Unreachable { device: name, address, reason });
            }
        }
    }
}
