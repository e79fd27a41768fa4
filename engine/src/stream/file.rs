//! A device's shard in one file, piece after piece as kernels read them.
//!
//! # Format
//! Little endian. A header of whole blocks of 4096 bytes: `GALXSHRD`, the format's version (u32), how many
//! pieces there are (u32), what they are of (32 bytes, `galaxy_graph::pieces::identity`), of each piece the
//! bytes of its values (u64), and the CRC-32C of all that (u32); then zeros. Then the pieces: values, zeros, and
//! in the last 4 bytes of the last block the CRC-32C of values and zeros.
//!
//! It is written beside its place and moved there when it is complete. What was written before a crash is
//! used again as far as it is good.

use super::InUse;
use crate::{compute::kernels::lines::Lines, weights::WeightError};
use galaxy_common::PIECE_ALIGNMENT;
use galaxy_graph::pieces::Piece;
use rustix::fs::{Advice, FlockOperation, Mode, OFlags, fadvise, flock, fsync, open};
use std::{
    fs::{DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, FileExt},
    path::{Path, PathBuf},
};

const MAGIC: &[u8; 8] = b"GALXSHRD";
/// The version of the format. It changes with the format, with how matrices are packed, and with what is
/// believed of where they come from.
const VERSION: u32 = 2;
/// Bytes of a read or a write: large enough for any disk, few enough to be checked while in a cache.
const STEP: usize = 2 << 20;
const BLOCK: usize = PIECE_ALIGNMENT as usize;

/// Why weights cannot be read from disk.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The system refused an operation on a file.
    #[error("{} cannot be {what}: {source}", path.display())]
    Io {
        /// The operation, as a participle: opened, written, ...
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is no shard, or one of something else.
    #[error("{} is not the shard that is wanted: {why}", path.display())]
    Foreign {
        /// The path of the file.
        path: PathBuf,
        /// The difference that was found.
        why: &'static str,
    },
    /// The bytes are not those that were written.
    #[error("piece {piece} of {} is damaged", path.display())]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// The number of the piece.
        piece: usize,
    },
    /// The model's files do not give a piece.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// There is no memory for the buffer that is read through.
    #[error("there is no memory for a buffer of {0} bytes")]
    Memory(u64),
    /// The program reads into a part of the buffer that is in use.
    #[error("{0}")]
    Program(String),
}

impl From<InUse> for StreamError {
    fn from(in_use: InUse) -> Self {
        Self::Program(in_use.to_string())
    }
}

/// The shard file that is wanted.
pub(crate) struct FileRequest<'a> {
    /// The path of the file.
    pub(crate) path: &'a Path,
    /// The identity of its content: model, pieces and formats.
    pub(crate) identity: [u8; 32],
    /// The pieces of the shard, in order.
    pub(crate) pieces: &'a [Piece],
}

/// An open shard file.
pub(crate) struct ShardFile {
    path: PathBuf,
    file: File,
    /// Whether reads go around the page cache.
    direct: bool,
    places: Vec<PieceLocation>,
}

/// Where a piece is in the file, in bytes.
#[derive(Clone, Copy)]
struct PieceLocation {
    from: u64,
    /// The bytes of its values.
    values: usize,
    /// The bytes of all that it takes, with zeros and checksum.
    stored: usize,
}

impl std::fmt::Debug for ShardFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let direct = if self.direct { "" } else { ", through the page cache" };
        write!(f, "{} of {} pieces{direct}", self.path.display(), self.places.len())
    }
}

impl FileRequest<'_> {
    fn header(&self) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((self.pieces.len() as u32).to_le_bytes());
        header.extend(self.identity);
        self.pieces.iter().for_each(|piece| header.extend(piece.bytes.to_le_bytes()));
        header.extend(crc32c::crc32c(&header).to_le_bytes());
        header.resize(header.len().next_multiple_of(BLOCK), 0);
        header
    }

    fn places(&self) -> (Vec<PieceLocation>, u64) {
        let mut at = self.header().len() as u64;
        let place = |piece: &Piece| {
            let (values, stored) = (piece.bytes as usize, piece.stored() as usize);
            at += piece.stored();
            PieceLocation { from: at - piece.stored(), values, stored }
        };
        (self.pieces.iter().map(place).collect(), at)
    }

    /// The bytes of the whole file.
    pub(crate) fn bytes(&self) -> u64 {
        self.places().1
    }

    /// Opens the file, if it is there and is the one that is wanted. Pieces are not looked at: they are
    /// checked when they are read.
    ///
    /// # Errors
    /// When it is not there, cannot be read, or is another one.
    pub(crate) fn open(&self) -> Result<ShardFile, StreamError> {
        let path = self.path.to_path_buf();
        let io = |source: io::Error| StreamError::Io { what: "opened", path: path.clone(), source };
        let foreign = |why| Err(StreamError::Foreign { path: path.clone(), why });
        let (file, direct) = opened(self.path, OFlags::RDONLY).map_err(io)?;
        let (places, all) = self.places();
        let mut shard = ShardFile { path: path.clone(), file, direct, places };
        if shard.file.metadata().map_err(io)?.len() != all {
            return foreign("it has another length");
        }
        let header = self.header();
        let mut there = Lines::<u8>::zeroed(header.len().max(1 << 16))
            .map_err(|_| StreamError::Memory(header.len() as u64))?;
        let there = &mut there.values_mut()[..header.len()];
        if let Err(why) = shard.file.read_exact_at(there, 0) {
            // Some file systems open files for direct reads, and then do not read them.
            if !(shard.direct && why.kind() == io::ErrorKind::InvalidInput) {
                return Err(io(why));
            }
            (shard.file, shard.direct) = (File::open(self.path).map_err(io)?, false);
            shard.file.read_exact_at(there, 0).map_err(io)?;
        }
        if !there.starts_with(MAGIC) {
            return foreign("it is no shard");
        }
        match *there == header[..] {
            true => Ok(shard),
            false => foreign("it is of another model or plan, or of another version"),
        }
    }

    /// Writes the file: `make` fills in the values of each piece. What a broken-off attempt has left is used
    /// as far as it is good.
    ///
    /// # Errors
    /// When a piece cannot be made or written; the file is not there then.
    pub(crate) fn write(
        &self,
        mut make: impl FnMut(usize, &mut [u8]) -> Result<(), StreamError>,
    ) -> Result<(), StreamError> {
        let mut name = self.path.as_os_str().to_owned();
        name.push(".part");
        let path = PathBuf::from(name);
        let io = |what| {
            let path = path.clone();
            move |source: io::Error| StreamError::Io { what, path, source }
        };
        let directory = self.path.parent().unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(io("made"))?;
        let (file, direct) = opened(&path, OFlags::RDWR | OFlags::CREATE).map_err(io("opened"))?;
        // Another process that writes the same file goes first, and is then found to have done so.
        flock(&file, FlockOperation::LockExclusive).map_err(|e| io("locked")(e.into()))?;
        if self.open().is_ok() {
            // Its own name may be gone, or be of another's attempt by now.
            return Ok(());
        }
        let (places, all) = self.places();
        let part = ShardFile { path: path.clone(), file, direct, places };
        let largest = self.pieces.iter().map(Piece::stored).max().unwrap_or(0);
        let header = self.header();
        let room = (largest as usize).max(header.len()).max(1 << 16);
        let mut room = Lines::<u8>::zeroed(room).map_err(|_| StreamError::Memory(room as u64))?;
        let room = room.values_mut();
        let first = &mut room[..header.len()];
        let begun = part.file.read_exact_at(first, 0).is_ok() && *first == header[..];
        let mut good = 0;
        if begun {
            let mut is_good = |at: &usize| part.read(*at, &mut room[..part.places[*at].stored]);
            good = (0..self.pieces.len()).take_while(|at| is_good(at).is_ok()).count();
        } else {
            part.file.set_len(0).map_err(io("written"))?;
            first.copy_from_slice(&header);
            part.file.write_all_at(first, 0).map_err(io("written"))?;
        }
        for (at, piece) in self.pieces.iter().enumerate().skip(good) {
            let room = &mut room[..piece.stored() as usize];
            make(at, &mut room[..piece.bytes as usize])?;
            part.put(at, room).map_err(io("written"))?;
        }
        part.file.set_len(all).map_err(io("written"))?;
        fsync(&part.file).map_err(|e| io("written")(e.into()))?;
        forget(&part.file);
        std::fs::rename(&path, self.path).map_err(io("put into its place"))?;
        // That it has its name now is to survive, too.
        let named = File::open(directory).and_then(|directory| Ok(fsync(directory)?));
        named.map_err(io("put into its place"))
    }
}

impl ShardFile {
    /// Reads a piece, values and all that is behind them, and checks it.
    ///
    /// # Errors
    /// When it cannot be read, or is not what was written.
    pub(crate) fn read(&self, piece: usize, into: &mut [u8]) -> Result<(), StreamError> {
        let damaged = || StreamError::Damaged { path: self.path.clone(), piece };
        let PieceLocation { from, stored, .. } = *self.places.get(piece).ok_or_else(damaged)?;
        if into.len() != stored || stored < 4 {
            return Err(damaged());
        }
        let (mut at, mut sum) = (from, 0);
        let end = into.len() - 4;
        let mut done = 0;
        for step in into.chunks_mut(STEP) {
            self.file.read_exact_at(step, at).map_err(|source| StreamError::Io {
                what: "read",
                path: self.path.clone(),
                source,
            })?;
            let summed = step.len().min(end.saturating_sub(done));
            sum = crc32c::crc32c_append(sum, &step[..summed]);
            at += step.len() as u64;
            done += step.len();
        }
        if !self.direct {
            // A second copy in the page cache would be held against the device's budget.
            let length = std::num::NonZeroU64::new(stored as u64);
            let _ = fadvise(&self.file, from, length, Advice::DontNeed);
        }
        if into[end..] == sum.to_le_bytes() { Ok(()) } else { Err(damaged()) }
    }

    /// Bytes of each piece in the file.
    pub(crate) fn stored(&self) -> impl Iterator<Item = u64> {
        self.places.iter().map(|place| place.stored as u64)
    }

    /// Writes a piece, whose values were read anew, back to its place.
    ///
    /// # Errors
    /// When the file is gone, or cannot be written.
    pub(crate) fn mend(&self, piece: usize, room: &mut [u8]) -> Result<(), StreamError> {
        let mut mend = || -> io::Result<()> {
            let (file, direct) = opened(&self.path, OFlags::RDWR)?;
            let places = self.places.clone();
            let other = Self { path: self.path.clone(), file, direct, places };
            other.put(piece, room)?;
            Ok(fsync(&other.file)?)
        };
        let io = |source| StreamError::Io { what: "mended", path: self.path.clone(), source };
        mend().map_err(io)
    }

    /// Writes a piece: its values, zeros behind them, and the checksum.
    fn put(&self, piece: usize, room: &mut [u8]) -> io::Result<()> {
        let PieceLocation { from, values, .. } = self.places[piece];
        let end = room.len() - 4;
        room[values..end].fill(0);
        let sum = crc32c::crc32c(&room[..end]);
        room[end..].copy_from_slice(&sum.to_le_bytes());
        let mut at = from;
        for step in room.chunks(STEP) {
            self.file.write_all_at(step, at)?;
            at += step.len() as u64;
        }
        Ok(())
    }
}

/// Opens a file around the page cache, where the file system has that.
fn opened(path: &Path, flags: OFlags) -> io::Result<(File, bool)> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    #[cfg(target_os = "linux")]
    if let Ok(file) = open(path, flags | OFlags::DIRECT, mode) {
        return Ok((File::from(file), true));
    }
    Ok((File::from(open(path, flags, mode)?), false))
}

/// Lets go of what the page cache has of a file.
fn forget(file: &File) {
    // Where the system has no such advice, it decides by itself.
    let _ = fadvise(file, 0, None, Advice::DontNeed);
}
