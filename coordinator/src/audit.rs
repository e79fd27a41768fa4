//! The audit log: who did what to this cluster, a JSON object on each line.
//!
//! Only what concerns the operator is written: who drained it, who joined or was removed, who was
//! refused. A line is whole when [`Audit::record`] returns, but not synced to disk.

use galaxy_proto::{
    door::{Peer, Sampled},
    identity::Moment,
};
use serde_json::{Value, json};
use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// An audit log, or none. Copies write to the same file.
#[derive(Clone, Debug, Default)]
pub struct Audit {
    file: Option<Arc<Mutex<File>>>,
    /// Samples refusals, which are many where somebody means harm.
    refusals: Arc<Sampled>,
}

impl Audit {
    /// A log that writes nothing.
    pub fn none() -> Self {
        Self::default()
    }

    /// Opens a log, and appends to what is in it. Only its owner may read it.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        Ok(Self { file: Some(Arc::new(Mutex::new(file))), ..Self::default() })
    }

    /// Writes that `peer` did `action`, with further details.
    pub fn record(&self, peer: &Peer, action: &str, details: Value) {
        let Some(file) = &self.file else { return };
        let (name, role) = peer.identity.as_ref().map(|(name, role)| (name, role)).unzip();
        let line = json!({
            "time": Moment::now().to_string(),
            "name": name.map(ToString::to_string),
            "role": role.map(ToString::to_string),
            "address": peer.address.to_string(),
            "action": action,
            "details": details,
        });
        // In one piece, so that no line is cut by another.
        let line = format!("{line}\n");
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(line.as_bytes()) {
            tracing::warn!(%error, "the audit log cannot be written");
        }
    }

    /// Writes that `peer` was refused, and why. Of many refusals only some are written, with the
    /// number of those that were left out since the last one.
    pub fn refused(&self, peer: &Peer, why: &str) {
        if let Some(left_out) = self.refusals.take() {
            self.record(peer, "refused", json!({ "why": why, "left_out": left_out }));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::DeviceName;
    use galaxy_proto::identity::Role;

    #[test]
    fn audit_lines_name_the_caller_and_the_action() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let name = DeviceName::new("anna").unwrap();
        let address = ([127, 0, 0, 1], 9).into();
        let anna = Peer { identity: Some((name, Role::Admin)), address };
        let nobody = Peer { identity: None, address };
        for _ in 0..2 {
            let audit = Audit::open(&path).unwrap();
            audit.record(&anna, "drain", json!({ "off": false }));
            for _ in 0..100 {
                audit.refused(&nobody, "not an \"admin\"\n");
            }
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines[0]["name"], "anna");
        assert_eq!(lines[0]["role"], "admin");
        assert_eq!(lines[0]["details"]["off"], false);
        assert_eq!(lines[1]["name"], Value::Null);
        assert!(lines.len() < 100, "refusals are sampled: {} lines", lines.len());
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
