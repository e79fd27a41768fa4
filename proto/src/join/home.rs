//! Where a machine keeps the identities that it joined with: `$GALAXY_HOME`, or `~/.galaxy`; and, in each of them,
//! the name and addresses of the coordinator.

use crate::identity::{IdentityError, Role};
use galaxy_common::DeviceName;
use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

/// The file beside a certificate that says who the coordinator is and where: its name, then an address a line.
const FILE: &str = "coordinator";
/// The most bytes of the file: a larger one is something else.
const MAX_BYTES: u64 = 16 << 10;

/// Why an identity is not stored.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct StoreError(#[from] IdentityError);

/// The directory of this machine's identities; none without a home directory.
pub fn home() -> Option<PathBuf> {
    let named =
        |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| !p.as_os_str().is_empty());
    named("GALAXY_HOME").or_else(|| Some(named("HOME")?.join(".galaxy")))
}

/// The directory of the identity of a role that this machine joined with, in a home.
pub fn identity_in(home: &Path, role: Role) -> PathBuf {
    home.join(role.to_string())
}

/// The coordinator of an identity's cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Contact {
    /// The coordinator's name.
    pub name: DeviceName,
    /// The addresses at which it may be reached, as host:port.
    pub addresses: Vec<String>,
}

impl Contact {
    /// Reads the contact from the directory of an identity; none if this machine did not get the identity by joining.
    ///
    /// # Errors
    /// When the file cannot be read, or holds something else.
    pub fn load(identity: &Path) -> io::Result<Option<Self>> {
        let path = identity.join(FILE);
        let wrong = || {
            let why = format!("{} does not say who the coordinator is", path.display());
            io::Error::new(io::ErrorKind::InvalidData, why)
        };
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Ok(found) if found.len() > MAX_BYTES => return Err(wrong()),
            _ => {}
        }
        let text = fs::read_to_string(&path)?;
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let name = lines.next().and_then(|name| DeviceName::new(name).ok()).ok_or_else(wrong)?;
        let addresses: Vec<String> = lines.map(str::to_owned).collect();
        if addresses.is_empty() { Err(wrong()) } else { Ok(Some(Self { name, addresses })) }
    }

    /// Writes the contact into the directory of an identity.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, identity: &Path) -> io::Result<()> {
        let Self { name, addresses } = self;
        fs::write(identity.join(FILE), format!("{name}\n{}\n", addresses.join("\n")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_contact_of_the_coordinator_survives_saving_and_loading() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Contact::load(dir.path()).unwrap(), None);
        let name = DeviceName::new("coordinator").unwrap();
        let addresses = vec!["192.168.1.10:7000".to_owned(), "[fd00::10]:7000".to_owned()];
        let contact = Contact { name, addresses };
        contact.save(dir.path()).unwrap();
        assert_eq!(Contact::load(dir.path()).unwrap(), Some(contact));
        fs::write(dir.path().join(FILE), "coordinator\n").unwrap();
        assert!(Contact::load(dir.path()).is_err());
    }
}
