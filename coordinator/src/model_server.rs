//! The model server: a worker that has no directory of the model is sent what it asks for.
//!
//! The coordinator calls, as always: so a worker needs no address of it, and a coordinator behind a
//! router can supply a model, too. Each supply has a connection of its own, so that signs of life
//! do not wait behind pieces.

use crate::{cluster::DeviceConfig, connection::connect};
use galaxy_model::{
    ModelDir, ModelError,
    manifest::{Digest, Manifest},
    pieces::Pieces,
};
use galaxy_proto::{
    fault::from_status,
    identity::Identity,
    v1::{self, Supplied, Wants, supplied::Event},
};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    ops::ControlFlow,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::sync::{OnceCell, mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;

/// How many pieces may wait for the network.
const AHEAD: usize = 4;
/// How many messages of wants may wait for the disk.
const WANTS: usize = 64;
/// The most bytes of one part of a manifest.
const PART_BYTES: usize = 1 << 20;
/// The time between two signs of life while a manifest is computed.
const PREPARING: Duration = Duration::from_secs(1);
/// The file that keeps a manifest beside its model.
const KEPT: &str = ".galaxy-manifest";
/// The version of the format of a stored manifest.
const KEPT_VERSION: u32 = 1;

/// Supplies workers with a model.
pub(crate) struct ModelServer {
    path: PathBuf,
    ready: OnceCell<Arc<ServedModel>>,
    /// How many bytes have their digests computed, and how many bytes there are.
    progress: watch::Sender<(u64, u64)>,
}

/// A model that can be supplied.
struct ServedModel {
    model: ModelDir,
    pieces: Pieces,
    content: Digest,
    manifest: Vec<u8>,
}

/// A manifest as it is stored, for files that have not changed since.
#[derive(Serialize, Deserialize)]
struct StoredManifest {
    version: u32,
    files: Vec<Stamp>,
    manifest: Vec<u8>,
}

/// What tells whether a file has changed.
#[derive(Serialize, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Stamp {
    name: String,
    bytes: u64,
    changed: (i64, i64),
}

impl ModelServer {
    /// A server of the model in this directory. Nothing is read before somebody needs it.
    pub(crate) fn new(path: &Path) -> Self {
        let (ready, progress) = (OnceCell::new(), watch::Sender::new((0, 0)));
        Self { path: path.to_owned(), ready, progress }
    }

    /// Sends a worker what it wants of the model, until it hangs up.
    ///
    /// # Errors
    /// The reason why it was not sent, for people. The worker knows of it, too, and reports the outcome.
    pub(crate) async fn supply(
        &self,
        device: &DeviceConfig,
        identity: &Identity,
    ) -> Result<(), String> {
        let mut connection = connect(device, identity).await?;
        let (supplied, stream) = mpsc::channel(AHEAD);
        let call = connection.supply(ReceiverStream::new(stream));
        let (answer, content) = tokio::join!(call, self.offer(&supplied));
        let mut asked = answer.map_err(|status| from_status(&status).to_string())?.into_inner();
        let content = content?;
        // Reading blocks: the disk has a thread of its own for as long as this supply lives.
        let (wants, work) = mpsc::channel(WANTS);
        let (over, reading) = oneshot::channel();
        let read = move || drop(over.send(bring(&content, work, &supplied)));
        std::thread::Builder::new()
            .name("supply".to_owned())
            .spawn(read)
            .map_err(|error| error.to_string())?;
        let asking = async move {
            while let Ok(Some(wanted)) = asked.message().await {
                if wants.send(wanted).await.is_err() {
                    return;
                }
            }
        };
        asking.await;
        reading.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    }

    /// Offers the content to a worker; while it is not known, says that it is being found out.
    async fn offer(&self, supplied: &mpsc::Sender<Supplied>) -> Result<Arc<ServedModel>, String> {
        let mut ticks = tokio::time::interval(PREPARING);
        let ready = self.ready();
        tokio::pin!(ready);
        let gone = |_| "it hung up".to_owned();
        let content = loop {
            tokio::select! {
                content = &mut ready => break content?,
                _ = ticks.tick() => {
                    let (bytes_done, bytes_total) = *self.progress.borrow();
                    let preparing = v1::Preparing { bytes_done, bytes_total };
                    send(supplied, Event::Preparing(preparing)).await.map_err(gone)?;
                }
            }
        };
        let offer = v1::Offer {
            content: content.content.0.to_vec(),
            manifest_bytes: content.manifest.len() as u64,
            fingerprint: content.model.fingerprint().to_owned(),
        };
        send(supplied, Event::Offer(offer)).await.map_err(gone)?;
        Ok(content)
    }

    /// The content that can be supplied, with the manifest that is kept beside the model or a new one.
    async fn ready(&self) -> Result<Arc<ServedModel>, String> {
        let make = || async {
            let (path, progress) = (self.path.clone(), self.progress.clone());
            let made = tokio::task::spawn_blocking(move || {
                ServedModel::of(ModelDir::open(&path)?, &progress)
            });
            let made = made.await.map_err(|error| error.to_string())?;
            made.map(Arc::new).map_err(|error| error.to_string())
        };
        self.ready.get_or_try_init(make).await.cloned()
    }
}

async fn send(
    supplied: &mpsc::Sender<Supplied>,
    event: Event,
) -> Result<(), mpsc::error::SendError<Supplied>> {
    supplied.send(Supplied { event: Some(event) }).await
}

/// Sends what is wanted, in that order, until nobody wants more.
fn bring(
    content: &ServedModel,
    mut work: mpsc::Receiver<Wants>,
    supplied: &mpsc::Sender<Supplied>,
) -> Result<(), ModelError> {
    let give = |event| supplied.blocking_send(Supplied { event: Some(event) });
    while let Some(Wants { manifest, pieces, .. }) = work.blocking_recv() {
        if manifest {
            for part in content.manifest.chunks(PART_BYTES) {
                if give(Event::Manifest(part.to_vec())).is_err() {
                    return Ok(());
                }
            }
        }
        for piece in pieces {
            let mut data = Vec::new();
            content.model.read_piece(&content.pieces, piece, &mut data)?;
            if give(Event::Piece(v1::Piece { piece, data: data.into() })).is_err() {
                return Ok(());
            }
        }
    }
    Ok(())
}

impl ServedModel {
    fn of(model: ModelDir, progress: &watch::Sender<(u64, u64)>) -> Result<Self, ModelError> {
        let pieces = model.pieces()?;
        let stamps = stamps(model.path());
        let manifest = match kept(model.path(), &stamps) {
            Some(manifest) => manifest,
            None => {
                let config_path = model.path().join("config.json");
                let config = fs::read(&config_path)
                    .map_err(|source| ModelError::Io { path: config_path, source })?;
                let made = Manifest::of(&model, config, &mut |done, total| {
                    progress.send_replace((done, total));
                    ControlFlow::Continue(())
                })?;
                let damaged = || ModelError::Manifest { why: "it was given up".to_owned() };
                let bytes = made.ok_or_else(damaged)?.to_bytes()?;
                keep(model.path(), stamps, &bytes);
                bytes
            }
        };
        let content = Digest::of(&manifest);
        Ok(Self { model, pieces, content, manifest })
    }
}

/// The files of a model, as they are now.
fn stamps(dir: &Path) -> Vec<Stamp> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let stamp = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        let about = fs::metadata(&path).ok()?;
        let used = name == "config.json" || name.contains(".safetensors");
        used.then(|| Stamp {
            name,
            bytes: about.len(),
            changed: (about.mtime(), about.mtime_nsec()),
        })
    };
    let mut stamps: Vec<_> = entries.filter_map(|entry| stamp(entry.ok()?.path())).collect();
    stamps.sort();
    stamps
}

/// The stored manifest, if the files have not changed since.
fn kept(dir: &Path, stamps: &[Stamp]) -> Option<Vec<u8>> {
    let bytes = fs::read(dir.join(KEPT)).ok()?;
    let kept: StoredManifest = postcard::from_bytes(&bytes).ok()?;
    let same = kept.version == KEPT_VERSION && kept.files == stamps;
    // One of another build is made anew.
    let manifest = same.then(|| Manifest::from_bytes(&kept.manifest).ok())??;
    manifest.pieces(dir).ok()?;
    Some(kept.manifest)
}

/// Stores a manifest beside its model. Where that cannot be written to, it is computed again next time.
fn keep(dir: &Path, files: Vec<Stamp>, manifest: &[u8]) {
    let kept = StoredManifest { version: KEPT_VERSION, files, manifest: manifest.to_vec() };
    let Ok(bytes) = postcard::to_stdvec(&kept) else { return };
    let (new, path) = (dir.join(format!("{KEPT}.new")), dir.join(KEPT));
    // Whole, or not at all.
    if let Err(error) = fs::write(&new, bytes).and_then(|()| fs::rename(&new, &path)) {
        drop(fs::remove_file(&new));
        tracing::warn!(path = %path.display(), %error, "the manifest is not kept: the model is read again at the next start");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use galaxy_model::shape::Shape;

    fn model(dir: &Path) -> ModelDir {
        Shape::bert(1, 64, 4).write(dir, u64::MAX, &mut |_| {}).unwrap();
        ModelDir::open(dir).unwrap()
    }

    #[test]
    fn a_manifest_is_computed_once_and_again_when_files_change() {
        let dir = tempfile::tempdir().unwrap();
        let progress = watch::Sender::new((0, 0));
        let first = ServedModel::of(model(dir.path()), &progress).unwrap();
        assert_eq!(*progress.borrow(), (first.pieces.total(), first.pieces.total()));
        progress.send_replace((0, 0));
        let again = ServedModel::of(model(dir.path()), &progress).unwrap();
        assert_eq!(again.content, first.content);
        // The files were written anew, so they may be others.
        assert_ne!(*progress.borrow(), (0, 0));
        progress.send_replace((0, 0));
        let opened = ModelDir::open(dir.path()).unwrap();
        let third = ServedModel::of(opened, &progress).unwrap();
        assert_eq!((third.content, *progress.borrow()), (first.content, (0, 0)));
        // What is damaged is no manifest.
        fs::write(dir.path().join(KEPT), b"x").unwrap();
        let opened = ModelDir::open(dir.path()).unwrap();
        assert_eq!(ServedModel::of(opened, &progress).unwrap().content, first.content);
        assert_ne!(*progress.borrow(), (0, 0));
    }
}
