//! Where profiles are kept: one JSON file for each device, shape and threads, one for all links.

use galaxy_common::{DeviceName, DeviceProfile, LinkProfile, ProfileError};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The most bytes of a file that is read: a device's profile has some ten KB, the links of 128 devices have some MB.
const MAX_BYTES: u64 = 16 << 20;

/// A directory of profiles. It need not exist until something is saved.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Store {
    dir: PathBuf,
}

/// A file of the store that is of no use.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be read.
    #[error("the profile {} cannot be read: {source}", path.display())]
    Read {
        /// The file of the profile.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("the profile {} cannot be written: {source}", path.display())]
    Write {
        /// The file of the profile.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is no profile.
    #[error("the profile {} is damaged: {why}", path.display())]
    Damaged {
        /// The file that is damaged.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The profile has impossible values.
    #[error("{}: {source}", path.display())]
    Values {
        /// The file of the profile.
        path: PathBuf,
        /// What is wrong with the values.
        source: ProfileError,
    },
}

impl Store {
    /// A store in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The directory of the store.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The latest profile of a device for a shape that `accept` takes; nothing where there is none.
    ///
    /// # Errors
    /// When there is none and a file is damaged, of another version, or cannot be read.
    pub fn device(
        &self,
        device: &DeviceName,
        shape: &str,
        accept: impl Fn(&DeviceProfile) -> bool,
    ) -> Result<Option<DeviceProfile>, StoreError> {
        let mut best: Option<DeviceProfile> = None;
        let mut failed = None;
        for path in self.files(&format!("{device}.{shape}.t"))? {
            let profile = match read::<DeviceProfile>(&path) {
                Ok(profile) => profile,
                Err(error) => {
                    failed = Some(error);
                    continue;
                }
            };
            if let Err(source) = profile.check(shape) {
                failed = Some(StoreError::Values { path, source });
            } else if profile.device == *device
                && accept(&profile)
                && best.as_ref().is_none_or(|best| best.measured <= profile.measured)
            {
                best = Some(profile);
            }
        }
        match (best, failed) {
            (None, Some(error)) => Err(error),
            (best, _) => Ok(best),
        }
    }

    /// Stores the profile of a device, in the place of an older one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save_device(&self, profile: &DeviceProfile) -> Result<(), StoreError> {
        let DeviceProfile { device, shape, threads, .. } = profile;
        self.write(&self.dir.join(format!("{device}.{shape}.t{threads}.json")), profile)
    }

    /// All link profiles; none where there is no file.
    ///
    /// # Errors
    /// When the file is damaged or cannot be read. Links of another version or with impossible
    /// values are left out.
    pub fn links(&self) -> Result<Vec<LinkProfile>, StoreError> {
        let path = self.links_path();
        if !path.exists() {
            return Ok(Vec::new());
        }
        let links: Vec<LinkProfile> = read(&path)?;
        Ok(links.into_iter().filter(|link| link.check().is_ok()).collect())
    }

    /// Stores link profiles, each in the place of an older one of the same pair and type.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn save_links(&self, links: &[LinkProfile]) -> Result<(), StoreError> {
        let same =
            |a: &LinkProfile, b: &LinkProfile| (&a.from, &a.to, a.link) == (&b.from, &b.to, b.link);
        // What cannot be read any more is measured anew: its file is replaced.
        let mut all = self.links().unwrap_or_default();
        all.retain(|old| !links.iter().any(|new| same(old, new)));
        all.extend_from_slice(links);
        all.sort_by(|a, b| (&a.from, &a.to, a.link).cmp(&(&b.from, &b.to, b.link)));
        self.write(&self.links_path(), &all)
    }

    fn links_path(&self) -> PathBuf {
        self.dir.join("links.json")
    }

    /// Files whose names begin with `prefix`, sorted.
    fn files(&self, prefix: &str) -> Result<Vec<PathBuf>, StoreError> {
        let read = |source| StoreError::Read { path: self.dir.clone(), source };
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(read(error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(read)?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            if name.starts_with(prefix) && name.ends_with(".json") {
                found.push(path);
            }
        }
        found.sort();
        Ok(found)
    }

    /// Writes a new file beside the old one and moves it there: nobody ever reads half of it.
    fn write(&self, path: &Path, value: &impl Serialize) -> Result<(), StoreError> {
        let failed = |source| StoreError::Write { path: path.to_owned(), source };
        let mut text =
            serde_json::to_string_pretty(value).map_err(|error| failed(io::Error::other(error)))?;
        text.push('\n');
        fs::create_dir_all(&self.dir).map_err(failed)?;
        let new = path.with_extension(format!("json.{}", std::process::id()));
        let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
        written.map_err(|source| {
            // What is left of it helps nobody; that it cannot be removed changes nothing.
            fs::remove_file(&new).ok();
            failed(source)
        })
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, StoreError> {
    let failed = |source| StoreError::Read { path: path.to_owned(), source };
    let damaged = |why: String| StoreError::Damaged { path: path.to_owned(), why };
    if fs::metadata(path).map_err(failed)?.len() > MAX_BYTES {
        return Err(damaged(format!("it has more than {MAX_BYTES} bytes")));
    }
    let text = fs::read(path).map_err(failed)?;
    serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_common::{Bytes, Kernel, LinkType, PROFILE_VERSION, Table};

    fn name(text: &str) -> DeviceName {
        DeviceName::new(text).unwrap()
    }

    fn profile(threads: u16, measured: u64) -> DeviceProfile {
        let table = |kernel: Kernel| Table {
            kernel,
            axes: vec![vec![1, 8]; kernel.axes()],
            nanos: vec![1.5; 1 << kernel.axes()],
            spread: vec![0.01; 1 << kernel.axes()],
        };
        DeviceProfile {
            version: PROFILE_VERSION,
            device: name("pi-1"),
            shape: "s".into(),
            threads,
            engine: "cpu neon".into(),
            measured,
            tables: Kernel::ALL.map(table).to_vec(),
            wake: 5e3,
            memory: Bytes(1 << 30),
            disk: 1e8,
            disk_shared: 0.0,
        }
    }

    fn link(to: &str, megabytes: f64) -> LinkProfile {
        LinkProfile {
            version: PROFILE_VERSION,
            from: name("pi-1"),
            to: name(to),
            link: LinkType::Tls,
            latency: 1e5,
            rate: megabytes * 1e6,
            busy_rate: megabytes * 1e6,
            beside: 0,
            alone: 0.0,
            send_cost: 0.5,
            receive_cost: 0.7,
            spread: 0.01,
            measured: 1,
        }
    }

    #[test]
    fn saved_device_and_link_profiles_are_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("profiles"));
        let any = |_: &DeviceProfile| true;
        assert_eq!(store.device(&name("pi-1"), "s", any).unwrap(), None);
        assert_eq!(store.links().unwrap(), []);
        for (threads, measured) in [(1, 5), (4, 7), (2, 6)] {
            store.save_device(&profile(threads, measured)).unwrap();
        }
        let found = store.device(&name("pi-1"), "s", any).unwrap().unwrap();
        assert_eq!(found, profile(4, 7), "the latest");
        let two = store.device(&name("pi-1"), "s", |p| p.threads == 2).unwrap();
        assert_eq!(two, Some(profile(2, 6)));
        assert_eq!(store.device(&name("pi"), "s", any).unwrap(), None);
        assert_eq!(store.device(&name("pi-1"), "other", any).unwrap(), None);
        store.save_links(&[link("b", 1.0), link("c", 2.0)]).unwrap();
        store.save_links(&[link("b", 3.0)]).unwrap();
        assert_eq!(store.links().unwrap(), [link("b", 3.0), link("c", 2.0)]);
        let left: Vec<_> = fs::read_dir(store.dir()).unwrap().collect();
        assert_eq!(left.len(), 4, "nothing is left of writing");
    }

    #[test]
    fn link_profiles_without_alone_rates_are_still_read() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let mut old = serde_json::to_value([link("b", 1.0)]).unwrap();
        let fields = old[0].as_object_mut().unwrap();
        fields.retain(|name, _| !["alone", "beside"].contains(&name.as_str()));
        fs::write(dir.path().join("links.json"), old.to_string()).unwrap();
        let read = store.links().unwrap();
        assert_eq!(read, [link("b", 1.0)], "neither is known");
        assert!(!read[0].shares_medium());
    }

    #[test]
    fn damaged_or_invalid_profiles_are_never_used() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let find = || store.device(&name("pi-1"), "s", |_| true);
        let path = dir.path().join("pi-1.s.t4.json");
        fs::write(&path, "{").unwrap();
        assert!(matches!(find(), Err(StoreError::Damaged { .. })));
        store.save_device(&DeviceProfile { wake: -1.0, ..profile(4, 1) }).unwrap();
        assert!(matches!(find(), Err(StoreError::Values { .. })));
        store.save_device(&DeviceProfile { version: 0, ..profile(4, 1) }).unwrap();
        assert!(matches!(find(), Err(StoreError::Values { .. })));
        store.save_device(&profile(2, 1)).unwrap();
        assert_eq!(find().unwrap(), Some(profile(2, 1)), "one is damaged, another is not");
        store.save_links(&[link("b", 0.0), link("c", 1.0)]).unwrap();
        assert_eq!(store.links().unwrap(), [link("c", 1.0)]);
        fs::write(dir.path().join("links.json"), "[]]").unwrap();
        assert!(matches!(store.links(), Err(StoreError::Damaged { .. })));
        store.save_links(&[link("b", 1.0)]).unwrap();
        assert_eq!(store.links().unwrap(), [link("b", 1.0)]);
    }
}
