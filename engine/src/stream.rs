//! Weight streaming: the file that holds a shard, and the buffer that its pieces pass through.
//!
//! Loaders write the buffer, the compute lane reads it; the waits of a program keep them apart, and the
//! buffer checks it. A piece that the file does not give, or not as it was written, is read again from the
//! model's files, there and then: a run takes longer, and no wrong value is ever computed with.

mod file;
mod ring;

pub use file::StreamError;
pub(crate) use file::{FileRequest, ShardFile};
pub(crate) use ring::{InUse, Ring, RingRead};

use galaxy_common::PIECE_ALIGNMENT;
use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// The function that fills in the values of a piece anew, from the model's files.
pub(crate) type Remake = Box<dyn Fn(usize, &mut [u8]) -> Result<(), StreamError> + Send + Sync>;

/// The pieces of a shard, and where they go.
pub struct Stream {
    file: ShardFile,
    ring: Ring,
    agents: u16,
    remake: Remake,
    remade: AtomicU64,
    /// The bytes per second that each loader reads at most, as the bits of an f64; 0 for no bound.
    limit: AtomicU64,
}

impl Stream {
    pub(crate) fn new(file: ShardFile, ring: Ring, agents: u16, remake: Remake) -> Self {
        Self { file, ring, agents, remake, remade: AtomicU64::new(0), limit: AtomicU64::new(0) }
    }

    /// The number of loaders that read it.
    pub(crate) fn agents(&self) -> u16 {
        self.agents
    }

    /// The bytes of the buffer.
    pub(crate) fn bytes(&self) -> u64 {
        self.ring.bytes()
    }

    /// How often a piece was read from the model's files, because the shard's file did not give it.
    pub fn remade(&self) -> u64 {
        self.remade.load(Ordering::Relaxed)
    }

    /// Reads a piece into its place in the buffer.
    ///
    /// # Errors
    /// When the place is in use, which is a broken program; when the piece can be had neither from the file
    /// nor from the model's.
    pub(crate) fn load(&self, piece: usize, place: Range<u64>) -> Result<(), StreamError> {
        let begun = Instant::now();
        let mut room = self.ring.write(place)?;
        self.read(piece, room.bytes())?;
        let limit = f64::from_bits(self.limit.load(Ordering::Relaxed));
        if limit > 0.0 {
            let least = Duration::from_secs_f64(room.bytes().len() as f64 / limit);
            std::thread::sleep(least.saturating_sub(begun.elapsed()));
        }
        Ok(())
    }

    /// Limits each loader to so many bytes per second: for measuring, where one reader of a disk does not reach all of
    /// it.
    pub fn limit(&self, rate: f64) {
        self.limit.store(rate.to_bits(), Ordering::Relaxed);
    }

    /// Reads all pieces by so many loaders, as a program without kernels would: for measuring. Gives the bytes that
    /// were read.
    ///
    /// # Errors
    /// As a load; when the buffer is too small for so many.
    pub fn read_all(&self, loaders: u16) -> Result<u64, StreamError> {
        let all: Vec<u64> = self.file.stored().collect();
        let loaders = usize::from(loaders.max(1));
        let room = self.bytes() / loaders as u64 / PIECE_ALIGNMENT * PIECE_ALIGNMENT;
        let one = |loader: usize| -> Result<(), StreamError> {
            let start = loader as u64 * room;
            let mut own = all.iter().enumerate().skip(loader).step_by(loaders);
            own.try_for_each(|(at, bytes)| self.load(at, start..start + bytes))
        };
        if all.iter().any(|bytes| *bytes > room) {
            return Err(StreamError::Memory(all.iter().max().unwrap_or(&0) * loaders as u64));
        }
        std::thread::scope(|scope| {
            let running: Vec<_> = (0..loaders)
                .map(|at| {
                    let one = &one;
                    scope.spawn(move || one(at))
                })
                .collect();
            let ended = |one: std::thread::ScopedJoinHandle<'_, _>| {
                one.join().unwrap_or_else(|_| Err(StreamError::Program("a loader ended".into())))
            };
            running.into_iter().try_for_each(ended)
        })?;
        Ok(all.iter().sum())
    }

    /// Reads a piece, from the shard's file or else from the model's.
    ///
    /// # Errors
    /// As [`Stream::load`].
    pub(crate) fn read(&self, piece: usize, into: &mut [u8]) -> Result<(), StreamError> {
        let Err(why) = self.file.read(piece, into) else { return Ok(()) };
        tracing::warn!(error = %why, piece, "a piece of the shard is read from the model's files instead");
        self.remade.fetch_add(1, Ordering::Relaxed);
        (self.remake)(piece, into)?;
        // The file may be gone, or its disk full or broken: then the next reader does the same.
        if let Err(why) = self.file.mend(piece, into) {
            tracing::warn!(error = %why, piece, "the shard's file stays as it is");
        }
        Ok(())
    }

    /// A piece in the buffer, for a kernel.
    ///
    /// # Errors
    /// When it is being written, which is a broken program.
    pub(crate) fn piece(&self, place: Range<u64>) -> Result<RingRead<'_>, InUse> {
        self.ring.read(place)
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("file", &self.file).field("agents", &self.agents).finish()
    }
}
