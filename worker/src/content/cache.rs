//! The cache: what this device was brought of models, by content, within a bound.
//!
//! ```text
//! DIR/lock                      held while a worker uses it
//! DIR/DIGEST/manifest           the model's, whose digest is the name; when it was last opened
//! DIR/DIGEST/data               all pieces at their places; with holes where they are not there
//! DIR/DIGEST/map                a bit for each piece that the disk holds
//! ```

use super::{ContentError, Room, data::Data};
use crate::core::lock;
use galaxy_common::Bytes;
use galaxy_model::{
    ModelDir,
    manifest::{Digest, MAX_MANIFEST_BYTES, Manifest},
};
use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
    time::SystemTime,
};

/// How much of a file system is lost at both ends of a run of pieces.
const PAGES: u64 = 8192;

/// Where a worker keeps what it was brought of models, and how much.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Its own directory: no two workers share one.
    pub dir: PathBuf,
    /// Most bytes on disk.
    pub limit: Bytes,
}

/// The cache of a worker.
pub(crate) struct Cache {
    dir: PathBuf,
    limit: Bytes,
    /// Data that somebody uses.
    open: Mutex<HashMap<Digest, Weak<Data>>>,
    /// Locked from the first use to our end.
    lock: Mutex<Option<File>>,
}

/// One model on disk.
struct Entry {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Cache {
    /// The cache of this config. A worker that needs none never touches it.
    pub(crate) fn new(config: CacheConfig) -> Self {
        let CacheConfig { dir, limit } = config;
        Self { dir, limit, open: Mutex::default(), lock: Mutex::default() }
    }

    /// Where files of shards are that do not fit into memory. Not under its bound: they are what a plan
    /// needs, and the last plan's only.
    pub(crate) fn shards(&self) -> PathBuf {
        self.dir.join("shards")
    }

    /// Makes it if it is not there, and sees to it that nobody else uses it.
    pub(crate) fn take(&self) -> Result<(), ContentError> {
        let mut held = lock(&self.lock);
        if held.is_some() {
            return Ok(());
        }
        let file = |source| ContentError::file(&self.dir, source);
        fs::create_dir_all(&self.dir).map_err(file)?;
        let lock = File::create(self.dir.join("lock")).map_err(file)?;
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
        *held = Some(lock);
        Ok(())
    }

    fn entry(&self, content: Digest) -> PathBuf {
        self.dir.join(content.to_string())
    }

    /// The manifest of a content, if it is kept.
    pub(crate) fn manifest(&self, content: Digest) -> Option<Manifest> {
        let file = File::open(self.entry(content).join("manifest")).ok()?;
        let mut bytes = Vec::new();
        file.take(MAX_MANIFEST_BYTES).read_to_end(&mut bytes).ok()?;
        if Digest::of(&bytes) != content {
            return None;
        }
        Manifest::from_bytes(&bytes).ok()
    }

    /// Keeps a manifest whose digest was found right.
    pub(crate) fn keep_manifest(&self, content: Digest, bytes: &[u8]) -> Result<(), ContentError> {
        let dir = self.entry(content);
        let file = |source| ContentError::file(&dir, source);
        fs::create_dir_all(&dir).map_err(file)?;
        // Its digest is looked at whenever it is read.
        fs::write(dir.join("manifest"), bytes).map_err(file)
    }

    /// The model of a manifest, and its data. What is used already is used together.
    pub(crate) fn model(
        &self,
        content: Digest,
        manifest: Manifest,
    ) -> Result<(Arc<ModelDir>, Arc<Data>), ContentError> {
        let path = self.entry(content);
        let mut open = lock(&self.open);
        open.retain(|_, data| data.strong_count() > 0);
        let data = match open.get(&content).and_then(Weak::upgrade) {
            Some(data) => data,
            None => {
                let data = self.data(&path, content, manifest)?;
                open.insert(content, Arc::downgrade(&data));
                data
            }
        };
        if let Ok(file) = File::options().append(true).open(path.join("manifest")) {
            // When it was used last; nothing depends on it but the order in which models go.
            drop(file.set_modified(SystemTime::now()));
        }
        let reader = data.reader().map_err(|source| ContentError::file(&path, source))?;
        let model = ModelDir::arriving(&data.manifest, &path, reader, data.clone())?;
        Ok((Arc::new(model), data))
    }

    fn data(
        &self,
        path: &Path,
        content: Digest,
        manifest: Manifest,
    ) -> Result<Arc<Data>, ContentError> {
        let file = |source| ContentError::file(path, source);
        let pieces = manifest.pieces(path)?;
        let data = Data::open(path, content, manifest, pieces).map_err(file)?;
        Ok(Arc::new(data))
    }

    /// Makes room for the pieces `missing` of `data`, of which `wanted` bytes are needed in all:
    /// models that were used longest ago go first, those in use after the others. False if
    /// pieces of former plans leave no room: the content itself begins anew then, where it may.
    pub(crate) fn room(
        &self,
        data: &Data,
        missing: &[u32],
        wanted: u64,
        room: Room,
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
        if room == Room::Beside {
            return Ok(false);
        }
        // Whoever reads it still has it open.
        for name in ["data", "map"] {
            fs::remove_file(own.join(name)).map_err(|e| ContentError::file(&own, e))?;
        }
        open.remove(&data.content);
        Ok(false)
    }

    /// What is on disk. Anything that is no content of ours is left alone.
    fn entries(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let ours = path.file_name().and_then(|n| n.to_str()).map(str::parse::<Digest>);
            if !matches!(ours, Some(Ok(_))) {
                continue;
            }
            let (mut bytes, mut used) = (0, SystemTime::UNIX_EPOCH);
            for file in fs::read_dir(&path)? {
                let about = file?.metadata()?;
                // What it takes on disk: there are holes.
                bytes += about.blocks() * 512;
                used = used.max(about.modified()?);
            }
            entries.push(Entry { path, bytes, used });
        }
        Ok(entries)
    }
}

fn manifest_bytes(entry: &Path) -> u64 {
    fs::metadata(entry.join("manifest")).map_or(0, |about| about.blocks() * 512)
}
