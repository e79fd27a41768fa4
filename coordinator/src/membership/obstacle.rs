//! Why a cluster is not ready, for people.

use super::{DeviceState, EpochStage, Index, Membership};

impl Membership {
    /// Whether there is no plan for the devices as they are, though all of them are connected: the
    /// cluster will not be ready before somebody changes it.
    pub fn is_planless(&self) -> bool {
        let mut needed = self.needed().peekable();
        match needed.peek() {
            None => self.ready().is_none(),
            Some(_) => self.planless && needed.all(|(_, member)| member.state.connected()),
        }
    }

    /// What keeps the cluster from being ready: a device, if it is one, and the reason, for people.
    /// None if it is ready.
    pub fn obstacle(&self) -> Option<(Option<Index>, String)> {
        if self.ready().is_some() {
            return None;
        }
        for (device, member) in self.needed() {
            if let DeviceState::Unreachable { reason, lost, .. }
            | DeviceState::Connecting { reason, lost, .. } = &member.state
            {
                let mut reason = match (reason.is_empty(), lost) {
                    (true, _) => "is being connected".to_owned(),
                    (false, true) => format!("was lost: {reason}"),
                    (false, false) => format!("is not reachable: {reason}"),
                };
                if *lost && self.ring.is_some() {
                    match (&self.refusal, self.patience) {
                        (Some((_, why)), _) if self.without => {
                            reason += &format!("; the others do not go on without it: {why}");
                        }
                        (_, Some(patience)) => {
                            reason += &format!(
                                "; after {patience:?} the others go on without it, if they can"
                            );
                        }
                        _ => {}
                    }
                }
                return Some((Some(device), reason));
            }
        }
        match &self.refusal {
            Some((Some(device), reason)) => {
                return Some((Some(*device), format!("has not taken its place: {reason}")));
            }
            Some((None, reason)) => return Some((None, format!("there is no plan: {reason}"))),
            None => {}
        }
        if self.needed().next().is_none() {
            let why = "there are no devices: `galaxy invite` makes a line by which one joins";
            return Some((None, why.to_owned()));
        }
        let mut needed = self.needed();
        match needed.find(|(_, m)| !matches!(m.state, DeviceState::Ready { .. })) {
            Some((device, _)) if self.stage == EpochStage::Live => {
                Some((Some(device), "is being placed".to_owned()))
            }
            _ => Some((None, "a plan is being made".to_owned())),
        }
    }
}
