//! Devices: those of the cluster file, and those that joined, each in a file of its own that people may edit.

use super::{
    ClusterError, contents,
    table::{Section, line_of},
};
use galaxy_common::{
    Bytes, DeviceName,
    plan::MAX_DEVICES,
    replace::{PUBLIC, replace},
};
use galaxy_proto::channel::is_loopback;
use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};
use toml::de::DeTable;

/// The directory of devices that joined, beside the cluster file.
pub const DIRECTORY: &str = "devices.d";
/// The keys that the table of a device may have.
pub(super) const KEYS: &[&str] = &["name", "address", "addresses", "memory", "threads", "share"];
/// The share of a device's free memory that it grants by default.
const GRANTED: f64 = 0.6;
/// Bytes of a megabyte: granted memory is in whole ones, which people read and write.
const MEGABYTE: u64 = 1_000_000;
/// The most addresses that a device may have beside its first.
const MORE: usize = 8;

/// A device, as the cluster file describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceConfig {
    /// Its name, as in its certificate.
    pub name: DeviceName,
    /// The address of its worker, as `host:port`.
    pub address: String,
    /// Other addresses of its worker, in case it does not answer at the first.
    pub addresses: Vec<String>,
    /// The memory that it grants.
    pub memory: Bytes,
    /// Threads for kernels; none for as many as its worker was started with.
    pub threads: Option<u16>,
    /// Relative weight of work. Where one device has it, the split is by hand, and a device without
    /// it weighs 1.
    pub share: Option<f64>,
}

impl DeviceConfig {
    /// The address by which `other` reaches this device: not loopback, unless both are on the coordinator's machine.
    pub fn address_for(&self, other: &Self) -> &str {
        let far = self.addresses.iter().find(|address| !is_loopback(address));
        match far.filter(|_| is_loopback(&self.address) && !is_loopback(&other.address)) {
            Some(address) => address,
            None => &self.address,
        }
    }

    /// The memory that a device grants by default: most of what is free, in whole megabytes.
    pub fn granted(free: Bytes) -> Bytes {
        Bytes(((free.0 as f64 * GRANTED) as u64 / MEGABYTE).max(1) * MEGABYTE)
    }

    /// Whether the device is on the coordinator's machine.
    pub fn is_here(&self) -> bool {
        is_loopback(&self.address)
    }

    fn read(section: &Section<'_>) -> Result<Self, ClusterError> {
        let name = section.required("name", section.text("name")?)?;
        let name = DeviceName::new(name)
            .map_err(|e| ClusterError::Value { at: section.place("name"), why: e.to_string() })?;
        let address = section.required("address", section.text("address")?)?.trim().to_owned();
        let addresses = section.texts("addresses", MORE)?;
        let addresses: Vec<String> = addresses.into_iter().map(str::to_owned).collect();
        if !is_address(&address) {
            return Err(ClusterError::Address { at: section.place("address"), address });
        }
        if let Some(wrong) = addresses.iter().find(|address| !is_address(address)) {
            let address = wrong.clone();
            return Err(ClusterError::Address { at: section.place("addresses"), address });
        }
        let memory: Bytes = section.required("memory", section.parsed("memory")?)?;
        if memory.0 == 0 {
            let why = "a device that grants nothing can take no part".to_owned();
            return Err(ClusterError::Value { at: section.place("memory"), why });
        }
        let share = section.number("share")?;
        if let Some(share) = share.filter(|share| !(*share > 0.0 && share.is_finite())) {
            return Err(ClusterError::Share { at: section.place("share"), share });
        }
        let threads = section.whole("threads", 1, 1024)?.map(|t| t as u16);
        Ok(Self { name, address, addresses, memory, threads, share })
    }

    /// The text of the device's file.
    fn text(&self) -> String {
        let Self { name, address, addresses, memory, threads, share } = self;
        let mut text = String::from(
            "# This device joined. What is changed here holds when the coordinator reads it again: on SIGHUP, or when it\n\
             # starts. Where the device moves to another address, it says so itself.\n",
        );
        // Names and addresses have no characters that TOML would have escaped.
        let _ = writeln!(text, "name = \"{name}\"\naddress = \"{address}\"");
        if !addresses.is_empty() {
            let list: Vec<_> = addresses.iter().map(|address| format!("\"{address}\"")).collect();
            let _ = writeln!(text, "addresses = [{}]", list.join(", "));
        }
        let _ = match memory.0 % 1_000_000 {
            0 => writeln!(text, "memory = \"{}MB\"", memory.0 / 1_000_000),
            _ => writeln!(text, "memory = \"{}B\"", memory.0),
        };
        if let Some(threads) = threads {
            let _ = writeln!(text, "threads = {threads}");
        }
        if let Some(share) = share {
            let _ = writeln!(text, "share = {share:?}");
        }
        text
    }
}

/// Reads the devices from the tables of a cluster file.
pub(super) fn devices(sections: &[Section<'_>]) -> Result<Vec<DeviceConfig>, ClusterError> {
    let mut devices: Vec<DeviceConfig> = Vec::with_capacity(sections.len());
    for section in sections {
        let device = DeviceConfig::read(section)?;
        if let Some(i) = devices.iter().position(|d| d.name == device.name) {
            let first = sections[i].place("name").line;
            let name = device.name;
            return Err(ClusterError::NameTwice { at: section.place("name"), name, first });
        }
        if let Some(i) = devices.iter().position(|d| same_address(&d.address, &device.address)) {
            return Err(ClusterError::AddressTwice {
                at: section.place("address"),
                address: device.address,
                other: devices[i].name.clone(),
                first: sections[i].place("address").line,
            });
        }
        devices.push(device);
    }
    // Devices dial each other by these addresses. All on one machine is fine.
    let elsewhere = devices.iter().find(|d| !is_loopback(&d.address));
    let near =
        |d: &DeviceConfig| is_loopback(&d.address) && d.addresses.iter().all(|a| is_loopback(a));
    let here = devices.iter().position(near);
    if let (Some(other), Some(i)) = (elsewhere, here) {
        return Err(ClusterError::Loopback {
            at: sections[i].place("address"),
            device: devices[i].name.clone(),
            address: devices[i].address.clone(),
            other: other.name.clone(),
        });
    }
    Ok(devices)
}

/// The devices that joined, sorted by name. Two may have the same address: one of them is elsewhere now, and will say
/// so.
pub(super) fn of_directory(directory: &Path) -> Result<Vec<DeviceConfig>, ClusterError> {
    let unreadable =
        |e: io::Error| ClusterError::Read { path: directory.to_owned(), why: e.to_string() };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(unreadable)?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
        if paths.len() > MAX_DEVICES {
            return Err(ClusterError::Devices { devices: paths.len() });
        }
    }
    paths.sort();
    let device = |path: PathBuf| {
        let device = contents(&path).and_then(|text| of_file(&text, &path));
        device.map_err(|source| ClusterError::OfDevice { path, source: Box::new(source) })
    };
    paths.into_iter().map(device).collect()
}

fn of_file(text: &str, path: &Path) -> Result<DeviceConfig, ClusterError> {
    let document = DeTable::parse(text).map_err(|e| ClusterError::Syntax {
        line: e.span().map_or(1, |s| line_of(text, s.start)),
        why: e.message().to_owned(),
    })?;
    let section = Section::new(text, "device".to_owned(), 1, document.get_ref(), (KEYS, &[]))?;
    let device = DeviceConfig::read(&section)?;
    if path.file_stem().is_some_and(|stem| stem != device.name.as_str()) {
        let why = "the file of a device has its name".to_owned();
        return Err(ClusterError::Value { at: section.place("name"), why });
    }
    Ok(device)
}

/// Writes the file of a device that joined, whole or not at all.
///
/// # Errors
/// When the directory cannot be created, or the file cannot be written.
pub fn write(directory: &Path, device: &DeviceConfig) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    replace(&directory.join(format!("{}.toml", device.name)), device.text().as_bytes(), PUBLIC)
}

/// Removes the file of a device, if it has one.
///
/// # Errors
/// When it is there and cannot be removed.
pub fn remove(directory: &Path, name: &DeviceName) -> io::Result<()> {
    match fs::remove_file(directory.join(format!("{name}.toml"))) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Whether the text is `host:port` with a port that can be dialled.
pub(super) fn is_address(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| {
        let bracketed = host.starts_with('[') && host.ends_with(']');
        !host.is_empty()
            && (bracketed || !host.contains(':'))
            && !host
                .contains(|c: char| c.is_whitespace() || c.is_control() || c == '"' || c == '\\')
            && port.parse::<u16>().is_ok()
    })
}

/// Whether two texts are one address: letter case, leading zeros and the names of loopback do not
/// make a difference.
fn same_address(a: &str, b: &str) -> bool {
    let key = |text: &str| {
        let (host, port) = text.rsplit_once(':')?;
        let host = host.to_ascii_lowercase();
        let host = if host == "localhost" { "127.0.0.1".to_owned() } else { host };
        Some((host, port.parse::<u16>().ok()?))
    };
    key(a) == key(b)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn device(name: &str, address: &str, addresses: &[&str]) -> DeviceConfig {
        DeviceConfig {
            name: DeviceName::new(name).unwrap(),
            address: address.to_owned(),
            addresses: addresses.iter().map(|&address| address.to_owned()).collect(),
            memory: Bytes(1_234_567_890),
            threads: Some(4),
            share: None,
        }
    }

    #[test]
    fn localhost_and_127_0_0_1_are_the_same_address() {
        assert!(same_address("localhost:7100", "127.0.0.1:7100"));
        assert!(!same_address("localhost:7100", "127.0.0.1:7101"));
    }

    #[test]
    fn files_of_joined_devices_are_read_back_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join(DIRECTORY);
        assert_eq!(of_directory(&directory), Ok(Vec::new()));
        let one = device("pi-1", "192.168.1.20:7100", &["[fd00::20]:7100"]);
        let two = DeviceConfig {
            threads: None,
            share: Some(2.0),
            ..device("pi-2", "[fd00::21]:7100", &[])
        };
        for device in [&two, &one] {
            write(&directory, device).unwrap();
        }
        assert_eq!(of_directory(&directory), Ok(vec![one.clone(), two.clone()]));
        remove(&directory, &one.name).unwrap();
        remove(&directory, &one.name).unwrap();
        assert_eq!(of_directory(&directory), Ok(vec![two]));

        fs::write(directory.join("pi-3.toml"), one.text()).unwrap();
        let error = of_directory(&directory).expect_err("another name").to_string();
        assert!(error.contains("pi-3.toml: line 3: device.name"), "{error}");
        fs::write(directory.join("pi-3.toml"), "memroy = 1").unwrap();
        let error = of_directory(&directory).expect_err("a wrong key").to_string();
        assert!(error.contains("did you mean \"memory\"?"), "{error}");
    }

    #[test]
    fn devices_on_other_machines_do_not_dial_loopback_addresses() {
        let here = device("nuc", "127.0.0.1:7100", &["127.0.0.1:7101", "192.168.1.10:7100"]);
        let other_here = device("twin", "127.0.0.1:7102", &[]);
        let far = device("pi-1", "192.168.1.20:7100", &[]);
        assert_eq!(here.address_for(&far), "192.168.1.10:7100");
        assert_eq!(here.address_for(&other_here), "127.0.0.1:7100");
        assert_eq!(far.address_for(&here), "192.168.1.20:7100");
        assert_eq!(other_here.address_for(&far), "127.0.0.1:7102");
    }
}
