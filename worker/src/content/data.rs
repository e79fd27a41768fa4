//! The data of one model in the cache: which of its pieces are there, and which tasks wait for others.
//!
//! Two things tell what is there. The *map* on disk has a bit for each piece whose bytes the disk is known to hold; a
//! worker that is started again continues from it. The states in memory say more: a piece counts as here only once
//! its digest was found right in the life of this process.

use super::ContentError;
use crate::tasks::lock;
use galaxy_common::{Bytes, private::Folder};
use galaxy_model::{
    Arrivals,
    manifest::{Digest, Manifest},
    pieces::Pieces,
};
use std::{
    collections::VecDeque,
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    sync::{Arc, Condvar, Mutex, mpsc},
    time::{Duration, Instant},
};
use tokio::sync::Notify;

/// How long a reader waits for a piece. A fetch ends by itself before, when its sources are silent.
const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes that are written between two syncs of the disk.
const SYNC_BYTES: u64 = 16 << 20;
/// The longest time between two syncs.
const SYNC_EVERY: Duration = Duration::from_millis(500);
/// Pieces that may wait for the disk.
const SYNC_QUEUE: usize = 256;

/// The state of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PieceState {
    /// The piece is not there.
    Absent,
    /// The map has the piece, and its digest was not checked yet.
    Kept,
    /// The piece is being checked, or was asked for.
    Coming,
    /// The piece is there, and its digest is right.
    Here,
}

struct States {
    pieces: Vec<PieceState>,
    /// Pieces that a reader waits for.
    wanted: VecDeque<u32>,
    /// None while a fetch runs; otherwise the reason why nothing comes.
    closed: Option<String>,
    /// Grows with every piece that is here.
    arrived: u64,
    /// The number of the latest fetch.
    fetch: u64,
}

/// The data of one model.
pub(crate) struct Data {
    pub(crate) content: Digest,
    pub(crate) manifest: Manifest,
    pub(crate) pieces: Pieces,
    file: File,
    map: Mutex<Map>,
    states: Mutex<States>,
    changed: Condvar,
    /// Notified when a reader waits for pieces that were not asked for.
    pub(crate) asked: Notify,
}

/// The map, as it is on disk.
struct Map {
    bits: Vec<u8>,
    file: File,
}

impl Data {
    /// Opens data and map under `dir`, or creates them.
    pub(crate) fn open(
        dir: &Folder,
        content: Digest,
        manifest: Manifest,
        pieces: Pieces,
    ) -> Result<Self, ContentError> {
        let (file, map) = (dir.file("data")?, dir.file("map")?);
        let bits = kept_bits(&file, &map, &pieces);
        let bits = bits.map_err(|source| ContentError::file(dir.path(), source))?;
        let kept = |piece: u32| match bit(&bits, piece) {
            true => PieceState::Kept,
            false => PieceState::Absent,
        };
        let states = States {
            pieces: (0..pieces.count()).map(kept).collect(),
            wanted: VecDeque::new(),
            closed: Some("nothing fetches it".to_owned()),
            arrived: 0,
            fetch: 0,
        };
        Ok(Self {
            content,
            manifest,
            pieces,
            file,
            map: Mutex::new(Map { bits, file: map }),
            states: Mutex::new(states),
            changed: Condvar::new(),
            asked: Notify::new(),
        })
    }

    /// The file of the data, as the model reads it.
    pub(crate) fn reader(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    pub(crate) fn state(&self, piece: u32) -> PieceState {
        lock(&self.states).pieces.get(piece as usize).copied().unwrap_or(PieceState::Absent)
    }

    /// Sets the state of a piece; wakes readers if it is here now.
    pub(crate) fn set(&self, piece: u32, state: PieceState) {
        let mut states = lock(&self.states);
        let Some(at) = states.pieces.get_mut(piece as usize) else { return };
        let news = state == PieceState::Here && *at != PieceState::Here;
        *at = state;
        if news {
            states.arrived += 1;
            drop(states);
            self.changed.notify_all();
        }
    }

    /// Takes the pieces that a reader waits for and nobody has asked for: those that are absent, and those whose
    /// digest is to be checked.
    pub(crate) fn take_wanted(&self) -> (Vec<u32>, Vec<u32>) {
        let mut states = lock(&self.states);
        let (mut absent, mut kept) = (Vec::new(), Vec::new());
        while let Some(piece) = states.wanted.pop_front() {
            match states.pieces[piece as usize] {
                PieceState::Absent => absent.push(piece),
                PieceState::Kept => {
                    states.pieces[piece as usize] = PieceState::Coming;
                    kept.push(piece);
                }
                PieceState::Coming | PieceState::Here => {}
            }
        }
        (absent, kept)
    }

    /// A bit for each piece, set if it is here, and a number that grows when there are more.
    pub(crate) fn holding(&self) -> (u64, Vec<u8>) {
        let states = lock(&self.states);
        let mut bits = vec![0u8; states.pieces.len().div_ceil(8)];
        for (at, state) in states.pieces.iter().enumerate() {
            if *state == PieceState::Here {
                bits[at / 8] |= 1 << (at % 8);
            }
        }
        (states.arrived, bits)
    }
    /// The number of [`Data::holding`] alone.
    pub(crate) fn arrived(&self) -> u64 {
        lock(&self.states).arrived
    }

    /// Reads a piece that is here.
    pub(crate) fn read(&self, piece: u32) -> io::Result<Option<Vec<u8>>> {
        match self.state(piece) {
            PieceState::Here => self.read_raw(piece).map(Some),
            _ => Ok(None),
        }
    }

    fn read_raw(&self, piece: u32) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.pieces.bytes(piece) as usize];
        self.file.read_exact_at(&mut bytes, self.pieces.span(piece).start)?;
        Ok(bytes)
    }

    /// Checks the digest of a piece that is on disk; the piece is here then, else absent.
    pub(crate) fn check(&self, piece: u32) -> bool {
        // A piece that cannot be read is fetched again; if it cannot be written, that error says why.
        let right = self.read_raw(piece).is_ok_and(|bytes| self.manifest.is(piece, &bytes));
        self.set(piece, if right { PieceState::Here } else { PieceState::Absent });
        right
    }

    /// Writes a piece whose digest was found right. The disk may not hold it yet.
    pub(crate) fn write(&self, piece: u32, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.pieces.span(piece).start)?;
        self.set(piece, PieceState::Here);
        Ok(())
    }

    /// The error of a disk that does not take a piece.
    pub(crate) fn disk_error(&self, source: io::Error) -> ContentError {
        let (model, needs) = (self.manifest.name().to_owned(), Bytes(self.pieces.total()));
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ContentError::Full { model, needs }
            }
            _ => ContentError::File { path: self.content.to_string().into(), source },
        }
    }

    /// Syncs these pieces to the disk, and sets their bits on the map after that.
    fn keep(&self, pieces: &mut Vec<u32>) -> io::Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        self.file.sync_data()?;
        let mut map = lock(&self.map);
        let Map { bits, file } = &mut *map;
        for piece in pieces.drain(..) {
            let at = (piece / 8) as usize;
            bits[at] |= 1 << (piece % 8);
            file.write_all_at(&bits[at..at + 1], at as u64)?;
        }
        Ok(())
    }

    /// Opens the data for a fetch: readers wait for pieces from now on. When the returned value is dropped, nothing
    /// comes any more. An earlier fetch has no say any more.
    pub(crate) fn begin(self: &Arc<Self>) -> Opened {
        let map = lock(&self.map);
        let mut states = lock(&self.states);
        states.closed = None;
        states.fetch += 1;
        for (piece, state) in (0..).zip(&mut states.pieces) {
            // Left over from a fetch that was given up.
            if *state == PieceState::Coming {
                *state = if bit(&map.bits, piece) { PieceState::Kept } else { PieceState::Absent };
            }
        }
        Opened { data: self.clone(), fetch: states.fetch }
    }
}

/// The bits of the map. A map that is too short, or data of another length, was never finished: nothing is there, and
/// both files get their full lengths.
fn kept_bits(file: &File, map: &File, pieces: &Pieces) -> io::Result<Vec<u8>> {
    let mut bits = vec![0; pieces.count().div_ceil(8) as usize];
    let whole = file.metadata()?.len() == pieces.total();
    if !whole || map.metadata()?.len() != bits.len() as u64 {
        map.set_len(0)?;
        file.set_len(pieces.total())?;
        map.set_len(bits.len() as u64)?;
    }
    map.read_exact_at(&mut bits, 0)?;
    Ok(bits)
}

/// Data that a fetch brings pieces to.
pub(crate) struct Opened {
    data: Arc<Data>,
    fetch: u64,
}

impl Opened {
    /// Ends the fetch: nothing comes any more, and `why` is what readers get to know.
    pub(crate) fn close(&self, why: &str) {
        let mut states = lock(&self.data.states);
        if states.fetch == self.fetch {
            states.closed.get_or_insert_with(|| why.to_owned());
            drop(states);
            self.data.changed.notify_all();
        }
    }
}
impl Drop for Opened {
    fn drop(&mut self) {
        self.close("fetching it was given up");
    }
}

impl Arrivals for Data {
    fn wait(&self, bytes: Range<u64>) -> Result<(), String> {
        let range = self.pieces.covering(bytes);
        let mut states = lock(&self.states);
        let (mut deadline, mut arrived) = (Instant::now() + PATIENCE, states.arrived);
        loop {
            let missing = |states: &States, piece: &u32| {
                states.pieces.get(*piece as usize).is_none_or(|state| *state != PieceState::Here)
            };
            let Some(first) = range.clone().find(|piece| missing(&states, piece)) else {
                return Ok(());
            };
            if let Some(why) = &states.closed {
                let held = Bytes(self.pieces.bytes(first));
                return Err(format!("piece {first} ({held}) has not come: {why}"));
            }
            let mut news = false;
            for piece in range.clone() {
                let state = states.pieces.get(piece as usize);
                let idle = matches!(state, Some(PieceState::Absent | PieceState::Kept));
                if idle && !states.wanted.contains(&piece) {
                    states.wanted.push_back(piece);
                    news = true;
                }
            }
            if news {
                self.asked.notify_one();
            }
            let now = Instant::now();
            if states.arrived != arrived {
                (deadline, arrived) = (now + PATIENCE, states.arrived);
            }
            if now >= deadline {
                return Err(format!("piece {first} has not come, nor any other for {PATIENCE:?}"));
            }
            let left = deadline - now;
            let waited = self.changed.wait_timeout(states, left);
            states = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

/// Syncs to the disk what was written, beside the fetch. Ends when the sender is dropped; then all is on the map.
pub(crate) fn keeper(data: Arc<Data>) -> (mpsc::SyncSender<u32>, impl FnOnce() -> io::Result<()>) {
    let (sender, written) = mpsc::sync_channel(SYNC_QUEUE);
    let work = move || {
        let (mut pieces, mut bytes, mut since) = (Vec::new(), 0, Instant::now());
        loop {
            let left = SYNC_EVERY.saturating_sub(since.elapsed());
            let over = match written.recv_timeout(left) {
                Ok(piece) => {
                    bytes += data.pieces.bytes(piece);
                    pieces.push(piece);
                    false
                }
                Err(mpsc::RecvTimeoutError::Timeout) => false,
                Err(mpsc::RecvTimeoutError::Disconnected) => true,
            };
            if over || bytes >= SYNC_BYTES || since.elapsed() >= SYNC_EVERY {
                data.keep(&mut pieces)?;
                (bytes, since) = (0, Instant::now());
            }
            if over {
                return Ok(());
            }
        }
    };
    (sender, work)
}

/// Whether a bit is set; one beyond the end is not.
pub(crate) fn bit(bits: &[u8], at: u32) -> bool {
    bits.get((at / 8) as usize).is_some_and(|byte| byte >> (at % 8) & 1 == 1)
}
