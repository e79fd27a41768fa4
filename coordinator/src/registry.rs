//! The registry: who belongs to the cluster, kept beside the cluster file.
//!
//! `members.json` has the invitations with their secrets, the identities that were issued by them, and the members that
//! were removed; it is on disk before anything is signed, and before anybody learns of a change. `devices.d/` has a
//! file for each device that joined.

pub mod ledger;
pub mod slowness;

use crate::cluster::{self, Cluster, ClusterError, DIRECTORY, DeviceConfig};
use galaxy_common::{
    DeviceName,
    plan::MAX_DEVICES,
    private::{PrivateError, read_secret},
    replace::{SECRET, replace},
};
use galaxy_proto::{
    identity::{Authority, Identity, IdentityError, Moment, Role},
    join::{Binding, Contact, Facts, Grant, JoinLine, JoinRequest, Pin, Proof, Request},
};
use ledger::{Denial, InviteError, Ledger, RemoveError, Terms};
use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The file of the ledger, beside the cluster file.
pub const LEDGER: &str = "members.json";
/// How many days an issued certificate is valid.
const DAYS: u32 = 365;
/// The most bytes of a ledger that is read.
const MAX_BYTES: u64 = 16 << 20;

/// What is wrong with the registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A file cannot be read or written.
    #[error("{} cannot be read or written: {source}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others may read or write the ledger.
    #[error(transparent)]
    Private(#[from] PrivateError),
    /// The file is no ledger.
    #[error("{} is no list of members: {why}", path.display())]
    Ledger {
        /// The file of the ledger.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The authority failed, or its files are wrong.
    #[error(transparent)]
    Authority(#[from] IdentityError),
    /// The cluster has no authority.
    #[error(
        "nobody can join: the cluster file names no authority. Add `authority = \"keys\"` to [cluster], the directory in which `galaxy keys init` made `ca`, and start the coordinator again"
    )]
    NoAuthority,
    /// An invitation, or an identity without one, is denied.
    #[error(transparent)]
    Invite(#[from] InviteError),
    /// Nobody can be removed.
    #[error(transparent)]
    Remove(#[from] RemoveError),
    /// The cluster file, or that of a device, is wrong.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The cluster has as many devices as it may have.
    #[error("a cluster has at most {MAX_DEVICES} devices")]
    Many,
}

/// Why a machine does not join.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The ledger denies it.
    #[error(transparent)]
    Denied(#[from] Denial),
    /// The registry has failed.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// The registry of a cluster. Its calls block on the disk.
pub struct Registry {
    file: PathBuf,
    base: PathBuf,
    authority: Option<(Authority, Pin)>,
    identity: Identity,
    ledger: Mutex<Ledger>,
}

impl Registry {
    /// Opens the registry of the cluster that `file` describes. From now on `identity` refuses whoever was removed.
    ///
    /// # Errors
    /// When its files cannot be read, or are malformed.
    pub fn open(
        file: &Path,
        cluster: &Cluster,
        identity: &Identity,
    ) -> Result<Self, RegistryError> {
        let base = file.parent().unwrap_or(Path::new("")).to_owned();
        let authority = cluster.authority.as_deref().map(|path| {
            let authority = Authority::open(path)?;
            let pin = authority.pin()?;
            Ok::<_, RegistryError>((authority, pin))
        });
        let ledger = load(&base.join(LEDGER))?;
        identity.denied().take(ledger.removed());
        Ok(Self {
            file: file.to_owned(),
            base,
            authority: authority.transpose()?,
            identity: identity.clone(),
            ledger: Mutex::new(ledger),
        })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the ledger: what `change` returns is true once the ledger is on disk.
    fn change<T, E: From<RegistryError>>(
        &self,
        change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut ledger = self.ledger();
        let mut next = ledger.clone();
        let value = change(&mut next)?;
        let path = self.base.join(LEDGER);
        save(&path, &next).map_err(|source| RegistryError::File { path, source })?;
        *ledger = next;
        Ok(value)
    }

    /// The devices of the cluster's files, without those that were removed.
    ///
    /// # Errors
    /// When a file is not in order.
    pub fn devices(&self) -> Result<Vec<DeviceConfig>, ClusterError> {
        let devices = match Cluster::open(&self.file) {
            Err(ClusterError::Devices { devices: 0 }) => Vec::new(),
            cluster => cluster?.devices,
        };
        let removed = self.identity.denied().now();
        Ok(devices.into_iter().filter(|device| !removed.has(&device.name)).collect())
    }

    /// Names that are taken, and that the ledger may not know.
    fn others(&self) -> Result<Vec<DeviceName>, RegistryError> {
        let mut names: Vec<_> = self.devices()?.into_iter().map(|device| device.name).collect();
        names.push(self.identity.name().clone());
        // Identities that `galaxy keys issue` made lie beside the authority.
        let Some((authority, _)) = &self.authority else { return Ok(names) };
        let entries = fs::read_dir(authority.directory()).into_iter().flatten().flatten();
        let named = entries.filter_map(|entry| DeviceName::new(entry.file_name().to_str()?).ok());
        names.extend(named);
        Ok(names)
    }

    /// Creates an invitation, for machines that reach the coordinator at one of `addresses`.
    ///
    /// # Errors
    /// Without an authority, when its terms are out of bounds, or the disk fails.
    pub fn invite(
        &self,
        terms: Terms,
        by: String,
        addresses: Vec<String>,
    ) -> Result<(JoinLine, Moment), RegistryError> {
        let (_, pin) = self.authority.as_ref().ok_or(RegistryError::NoAuthority)?;
        let others = self.others()?;
        let taken = |name: &DeviceName| others.contains(name);
        let (invitation, secret, until) = self.change(|ledger| {
            Ok::<_, RegistryError>(ledger.invite(Moment::now(), terms, by, taken)?)
        })?;
        Ok((JoinLine { addresses, pin: *pin, invitation, secret }, until))
    }

    /// Decides on a request to join, and signs a certificate if it is granted; the use of the invitation is on disk
    /// then.
    ///
    /// # Errors
    /// The reason why the machine does not join.
    pub fn admit(&self, ask: &JoinRequest, binding: &Binding) -> Result<Grant, Refused> {
        let (authority, _) = self.authority.as_ref().ok_or(RegistryError::NoAuthority)?;
        let others = self.others()?;
        let taken = |name: &DeviceName| others.contains(name);
        let admitted = self.change(|ledger| {
            Ok::<_, Refused>(ledger.admit(Moment::now(), ask, binding, taken)?)
        })?;
        let ledger::Admitted { name, role, key, secret } = admitted;
        let certificate =
            authority.certify(&name, role, DAYS, &key).map_err(RegistryError::from)?;
        let proof = Proof::of_host(&secret, binding, &ask.request, &key, &certificate);
        Ok(Grant { name, role, certificate, proof })
    }

    /// Issues an identity into `into` without an invitation, which is not needed where the authority is.
    ///
    /// # Errors
    /// Without an authority, when the name cannot be given, or the disk fails.
    pub fn enrol(
        &self,
        name: &DeviceName,
        role: Role,
        into: &Path,
        contact: &Contact,
    ) -> Result<(), RegistryError> {
        let (authority, _) = self.authority.as_ref().ok_or(RegistryError::NoAuthority)?;
        let request = Request::new().map_err(IdentityError::from)?;
        let key = request.key();
        self.change(|ledger| {
            let enrolled = ledger.enrol(Moment::now(), (name, role), &key);
            enrolled.map_err(|error| RegistryError::Invite(error.into()))
        })?;
        authority.issue_for(name, role, DAYS, &request, into)?;
        let failed = |source| RegistryError::File { path: into.to_owned(), source };
        contact.save(into).map_err(failed)
    }

    /// Notes where a device is: writes its file, or changes the addresses in it. Returns all devices.
    ///
    /// `here` is the address of this machine at which the device has reached us: there, others reach devices of this
    /// machine.
    ///
    /// # Errors
    /// When files cannot be read or written, or there are too many devices.
    pub fn settle(
        &self,
        name: &DeviceName,
        facts: &Facts,
        reached: &[SocketAddr],
        here: IpAddr,
    ) -> Result<Vec<DeviceConfig>, RegistryError> {
        // One at a time.
        let _ledger = self.ledger();
        let mut devices = self.devices()?;
        let mut addresses = reached.iter().map(SocketAddr::to_string);
        let Some(address) = addresses.next() else { return Ok(devices) };
        let addresses: Vec<String> = addresses.collect();
        let known = devices.iter().position(|device| device.name == *name);
        if known.is_none() && devices.len() >= MAX_DEVICES {
            return Err(RegistryError::Many);
        }
        let memory = DeviceConfig::granted(facts.memory);
        let threads = Some(facts.threads);
        let device = match known {
            Some(at) => DeviceConfig { address, addresses, ..devices[at].clone() },
            None => DeviceConfig {
                name: name.clone(),
                address,
                addresses,
                memory,
                threads,
                share: None,
            },
        };
        let mut changed = Vec::new();
        match known {
            Some(at) if devices[at] == device => {}
            Some(at) => changed.push(at),
            None => {
                devices.push(device.clone());
                changed.push(devices.len() - 1);
            }
        }
        if let Some(at) = known {
            devices[at] = device;
        }
        if !here.is_loopback() {
            for (at, near) in devices.iter_mut().enumerate().filter(|(_, device)| device.is_here())
            {
                if put_first(near, here) && !changed.contains(&at) {
                    changed.push(at);
                }
            }
        }
        let directory = self.base.join(DIRECTORY);
        for at in changed {
            cluster::write(&directory, &devices[at])
                .map_err(|source| RegistryError::File { path: directory.clone(), source })?;
        }
        // What the cluster file itself says of a device holds.
        Ok(self.devices()?)
    }

    /// Removes a member for good: once that is on disk, the member is refused. Returns the devices that are left.
    ///
    /// # Errors
    /// When there is nobody of that name, or the disk fails.
    pub fn remove(
        &self,
        name: &DeviceName,
        by: String,
    ) -> Result<Vec<DeviceConfig>, RegistryError> {
        if name == self.identity.name() {
            return Err(RemoveError::Coordinator(name.clone()).into());
        }
        let others = self.others()?;
        self.change(|ledger| {
            Ok::<_, RegistryError>(ledger.remove(Moment::now(), name, by, &others)?)
        })?;
        self.identity.denied().take(self.ledger().removed());
        let path = self.base.join(DIRECTORY);
        cluster::remove(&path, name).map_err(|source| RegistryError::File { path, source })?;
        Ok(self.devices()?)
    }

    /// Everybody with an issued identity, and the names of those that were removed.
    pub fn members(&self) -> (Vec<(DeviceName, Role)>, Vec<DeviceName>) {
        let ledger = self.ledger();
        let issued = ledger.issued().map(|(name, role)| (name.clone(), role)).collect();
        (issued, ledger.removed().names.into_iter().collect())
    }
}

/// Puts `here` first among the addresses of a device of this machine. Says whether that changed anything.
fn put_first(device: &mut DeviceConfig, here: IpAddr) -> bool {
    let Some((_, port)) = device.address.rsplit_once(':') else { return false };
    let Ok(port) = port.parse() else { return false };
    let address = SocketAddr::new(here, port).to_string();
    if device.addresses.first() == Some(&address) {
        return false;
    }
    device.addresses.retain(|other| *other != address);
    device.addresses.insert(0, address);
    device.addresses.truncate(galaxy_proto::join::MAX_ADDRESSES);
    true
}

fn load(path: &Path) -> Result<Ledger, RegistryError> {
    let bytes = match read_secret(path, MAX_BYTES) {
        Err(error) if error.is_absent() => return Ok(Ledger::default()),
        bytes => bytes?,
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| RegistryError::Ledger { path: path.to_owned(), why: error.to_string() })
}

/// Writes the ledger, whole or not at all; it is on the disk when this returns. Only its owner may read it, because it
/// has secrets.
fn save(path: &Path, ledger: &Ledger) -> io::Result<()> {
    replace(path, &serde_json::to_vec_pretty(ledger).map_err(io::Error::other)?, SECRET)
}
