//! The cache: what this device has fetched of models, by content, within a limit.
//!
//! ```text
//! DIR/lock                      locked while a worker uses it
//! DIR/DIGEST/manifest           the model's, whose digest is the name; when it was last opened
//! DIR/DIGEST/data               all pieces at their places; with holes where they are not there
//! DIR/DIGEST/map                a bit for each piece that the disk holds
//! DIR/DIGEST/own                which pieces of a directory under --models were found right
//! ```

use super::{ContentError, Evictable, data::Data};
use crate::tasks::lock;
use galaxy_common::{
    Bytes,
    private::{Folder, PrivateError},
};
use galaxy_model::{
    ModelDir, Quantisation,
    manifest::{Digest, MAX_MANIFEST_BYTES, Manifest},
};
use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
    time::SystemTime,
};

/// The file of a content's manifest.
const MANIFEST: &str = "manifest";
/// The file that says which pieces of a model directory of this device were found right.
const OWN: &str = "own";
/// The most bytes of that file: a bit for each piece of the largest model, and its files.
const MAX_PROOF_BYTES: u64 = 4 << 20;
/// Bytes that a file system loses at both ends of a run of pieces.
const PAGES: u64 = 8192;

/// The directory of a worker's cache, and its limit.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// The directory of the cache: no two workers share one.
    pub dir: PathBuf,
    /// The most bytes on disk.
    pub limit: Bytes,
}

/// The cache of a worker.
pub(crate) struct Cache {
    dir: PathBuf,
    limit: Bytes,
    /// The data of models that are in use.
    open: Mutex<HashMap<Digest, Weak<Data>>>,
    /// The folder and its lock, from the first use to the worker's end.
    held: Mutex<Option<OpenCache>>,
}

/// The cache while a worker uses it.
struct OpenCache {
    folder: Arc<Folder>,
    /// The lock file, locked as long as the cache is used.
    _lock: File,
}

/// One model on disk.
struct CachedModel {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Cache {
    /// The cache of this config. A worker that needs none never touches it.
    pub(crate) fn new(config: CacheConfig) -> Self {
        let CacheConfig { dir, limit } = config;
        Self { dir, limit, open: Mutex::default(), held: Mutex::default() }
    }

    /// The folder for files of shards that do not fit into memory. Not under the cache's limit: they are what a plan
    /// needs, and only those of the last plan.
    pub(crate) fn shards(&self) -> Result<PathBuf, ContentError> {
        Ok(self.take()?.folder("shards")?.path().to_owned())
    }

    /// Creates the cache if it does not exist, and makes sure that nobody else uses it: no other worker, and no other
    /// user of this machine.
    pub(crate) fn take(&self) -> Result<Arc<Folder>, ContentError> {
        let mut held = lock(&self.held);
        if let Some(held) = &*held {
            return Ok(held.folder.clone());
        }
        // A folder that was a cache before is nothing else, and may be closed to others.
        let folder = match self.dir.join("lock").is_file() {
            true => Folder::mend(&self.dir)?,
            false => Folder::make(&self.dir)?,
        };
        if let Some(mode) = folder.was_open() {
            let dir = self.dir.display();
            tracing::warn!(%dir, "other users could reach into the cache (mode {mode:o}); its mode is 700 now");
        }
        let lock = folder.file("lock")?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                return Err(ContentError::Taken { dir: self.dir.clone() });
            }
            // A file system without locks.
            Err(fs::TryLockError::Error(error)) => {
                tracing::warn!(dir = %self.dir.display(), %error, "the cache cannot be locked");
            }
        }
        let folder = Arc::new(folder);
        *held = Some(OpenCache { folder: folder.clone(), _lock: lock });
        Ok(folder)
    }

    fn entry(&self, content: Digest) -> PathBuf {
        self.dir.join(content.to_string())
    }

    /// The manifest of a content, if it is stored.
    pub(crate) fn manifest(&self, content: Digest) -> Result<Option<Manifest>, ContentError> {
        let entry = match self.take()?.inside(&content.to_string()) {
            Err(error) if error.is_absent() => return Ok(None),
            entry => entry?,
        };
        let bytes = match entry.read_public(MANIFEST, MAX_MANIFEST_BYTES) {
            // One that is too long is not this worker's, and is fetched again.
            Err(PrivateError::Long { .. }) => return Ok(None),
            Err(error) if error.is_absent() => return Ok(None),
            bytes => bytes?,
        };
        if Digest::of(&bytes) != content {
            return Ok(None);
        }
        Ok(Manifest::from_bytes(&bytes).ok())
    }

    /// Stores a manifest whose digest was found right.
    pub(crate) fn keep_manifest(&self, content: Digest, bytes: &[u8]) -> Result<(), ContentError> {
        self.write(content, MANIFEST, bytes)
    }

    /// The proof that was stored of a model directory that was compared with a content.
    pub(crate) fn proof(&self, content: Digest) -> Option<Vec<u8>> {
        let entry = self.take().ok()?.inside(&content.to_string()).ok()?;
        entry.read_public(OWN, MAX_PROOF_BYTES).ok()
    }

    /// Stores the proof of such a directory.
    pub(crate) fn keep_proof(&self, content: Digest, bytes: &[u8]) -> Result<(), ContentError> {
        self.write(content, OWN, bytes)
    }

    /// Writes a file of a content over.
    fn write(&self, content: Digest, name: &str, bytes: &[u8]) -> Result<(), ContentError> {
        let entry = self.take()?.folder(&content.to_string())?;
        let mut file = entry.file(name)?;
        // Its digest is checked whenever it is read.
        let written = file.set_len(0).and_then(|()| file.write_all(bytes));
        written.map_err(|source| ContentError::file(entry.path(), source))
    }

    /// The model of a manifest, and its data. Data that is open already is shared.
    pub(crate) fn model(
        &self,
        content: Digest,
        manifest: Manifest,
        rounded: Option<Quantisation>,
    ) -> Result<(Arc<ModelDir>, Arc<Data>), ContentError> {
        let entry = self.take()?.folder(&content.to_string())?;
        let path = entry.path();
        let mut open = lock(&self.open);
        open.retain(|_, data| data.strong_count() > 0);
        let data = match open.get(&content).and_then(Weak::upgrade) {
            Some(data) => data,
            None => {
                let pieces = manifest.pieces(path)?;
                let data = Arc::new(Data::open(&entry, content, manifest, pieces)?);
                open.insert(content, Arc::downgrade(&data));
                data
            }
        };
        // The time of the last use; only the order in which models are dropped depends on it.
        drop(entry.file(MANIFEST)?.set_modified(SystemTime::now()));
        let reader = data.reader().map_err(|source| ContentError::file(path, source))?;
        let model = ModelDir::arriving(&data.manifest, path, reader, data.clone())?;
        Ok((Arc::new(model.quantised_to(rounded)?), data))
    }

    /// Makes room for the pieces `missing` of `data`, of which `wanted` bytes are needed in all: models that were
    /// used longest ago are dropped first, those in use after the others. False if pieces of former plans leave no
    /// room: where `room` allows it, the pieces of this content are dropped then, too.
    pub(crate) fn room(
        &self,
        data: &Data,
        missing: &[u32],
        wanted: u64,
        room: Evictable,
    ) -> Result<bool, ContentError> {
        let runs = 1 + missing.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count() as u64;
        let bytes = |piece: &u32| data.pieces.bytes(*piece);
        let need = match missing.is_empty() {
            true => 0,
            false => missing.iter().map(bytes).sum::<u64>() + runs * PAGES,
        };
        let own = self.entry(data.content);
        let mut entries = self.entries().map_err(|e| ContentError::file(&self.dir, e))?;
        let mut used: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let mut open = lock(&self.open);
        let in_use = |path: &Path| {
            let content = path.file_name().and_then(|n| n.to_str()?.parse().ok());
            content.is_some_and(|c: Digest| open.get(&c).is_some_and(|d| d.strong_count() > 0))
        };
        entries.sort_by_key(|entry| (in_use(&entry.path), entry.used));
        let mut gone = Vec::new();
        for entry in entries.iter().filter(|entry| entry.path != own) {
            if used + need <= self.limit.0 {
                break;
            }
            tracing::info!(path = %entry.path.display(), bytes = %Bytes(entry.bytes), "dropped from the cache");
            fs::remove_dir_all(&entry.path).map_err(|e| ContentError::file(&entry.path, e))?;
            used -= entry.bytes;
            gone.push(entry.path.clone());
        }
        open.retain(|content, _| !gone.contains(&self.entry(*content)));
        if used + need <= self.limit.0 {
            return Ok(true);
        }
        if wanted + runs * PAGES + manifest_bytes(&own) > self.limit.0 {
            let needed = Bytes(wanted + runs * PAGES + manifest_bytes(&own));
            return Err(ContentError::Small { needed, limit: self.limit, dir: self.dir.clone() });
        }
        if room == Evictable::Beside {
            return Ok(false);
        }
        // Whoever reads it still has it open.
        for name in ["data", "map"] {
            fs::remove_file(own.join(name)).map_err(|e| ContentError::file(&own, e))?;
        }
        open.remove(&data.content);
        Ok(false)
    }

    /// The models on disk. Anything that is no content of a cache is left alone.
    fn entries(&self) -> io::Result<Vec<CachedModel>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let path = entry.path();
            if !entry.file_type()?.is_dir() {
                continue;
            }
            let ours = path.file_name().and_then(|n| n.to_str()).map(str::parse::<Digest>);
            if !matches!(ours, Some(Ok(_))) {
                continue;
            }
            let (mut bytes, mut used) = (0, SystemTime::UNIX_EPOCH);
            for file in fs::read_dir(&path)? {
                let about = file?.metadata()?;
                // The bytes that it takes on disk: there are holes.
                bytes += about.blocks() * 512;
                used = used.max(about.modified()?);
            }
            entries.push(CachedModel { path, bytes, used });
        }
        Ok(entries)
    }
}

fn manifest_bytes(entry: &Path) -> u64 {
    fs::metadata(entry.join(MANIFEST)).map_or(0, |about| about.blocks() * 512)
}
