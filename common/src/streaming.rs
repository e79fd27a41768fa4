//! How a device computes with weights that do not stay in its memory (PIPELOAD; Demand Layering).

use crate::{
    WeightFormat,
    span::{Piece, Span},
    units::Bytes,
};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// The alignment of pieces, in files and in memory: what direct reads need on every disk that we know.
pub const PIECE_ALIGNMENT: u64 = 4096;
/// The most loaders: no disk serves more of them better.
pub const MAX_LOADERS: u16 = 16;

/// The largest buffer, in bytes: more memory than any device has.
const LARGEST: u64 = 1 << 48;

/// Weights that are read from disk while others are computed with, piece by piece in the order of use, and
/// leave when they are used.
///
/// Pieces are the matrices that a device holds, or columns of them; they have numbers
/// (`galaxy_graph::pieces::pieces`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Streaming {
    /// The format of most of the matrices, as they stand in the file and in the buffer: each in its own format, or
    /// f32 where all are widened.
    pub format: WeightFormat,
    /// The most bytes of a piece of a matrix that can be cut.
    pub piece: Bytes,
    /// The memory that pieces pass through.
    pub buffer: Bytes,
    /// How pieces share the buffer.
    pub room: Room,
    /// The number of loaders that read at once, each the next piece when it has had the fewest bytes so far
    /// (PIPELOAD's loading agents, whose pieces are alike, take turns).
    pub loaders: u16,
    /// The pieces that stay in memory instead, in order.
    pub resident: Vec<Span<Piece>>,
}

/// How pieces share a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Room {
    /// As a ring of bytes: many small pieces, or one large one (Demand Layering, the circular queue).
    Ring,
    /// In so many equal parts, in turns. With one part nothing is read while there is work; with two the next piece
    /// is read during the work with the last (Demand Layering's synchronous pipeline).
    Parts(u16),
}

/// How devices that cannot hold their weights read them: what a cluster file says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub enum Reading {
    /// The smallest buffer and the fewest loaders that are predicted fastest.
    #[default]
    Auto,
    /// No weights are read while programs run: what does not fit is an error.
    Preload,
    /// A piece is read, then computed with.
    Sequential,
    /// A buffer of two parts, in turns (Demand Layering's synchronous pipeline).
    Sync,
    /// A ring with room for the two largest pieces (Demand Layering's asynchronous pipeline).
    Async,
    /// So many loaders, and a ring with room for a layer of each and one that is computed with (PIPELOAD).
    PipeLoad(u16),
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Preload => f.write_str("preload"),
            Self::Sequential => f.write_str("sequential"),
            Self::Sync => f.write_str("sync"),
            Self::Async => f.write_str("async"),
            Self::PipeLoad(agents) => write!(f, "pipeload-{agents}"),
        }
    }
}

impl FromStr for Reading {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let agents = || text.strip_prefix("pipeload-")?.parse().ok();
        let agents = agents().filter(|agents| (1..=MAX_LOADERS).contains(agents));
        match (text, agents) {
            ("auto", _) => Ok(Self::Auto),
            ("preload", _) => Ok(Self::Preload),
            ("sequential", _) => Ok(Self::Sequential),
            ("sync", _) => Ok(Self::Sync),
            ("async", _) => Ok(Self::Async),
            (_, Some(agents)) => Ok(Self::PipeLoad(agents)),
            _ => Err(format!(
                "{text:?} is no way to read weights: known are auto, preload, sequential, sync, async, and pipeload-1 to pipeload-{MAX_LOADERS}"
            )),
        }
    }
}

impl Streaming {
    /// Bytes of a piece where nothing else is asked for: enough that a disk reads it in one go, few enough that two
    /// of them fit into any device.
    pub const PIECE: Bytes = Bytes(16 << 20);

    /// Whether a piece stays in memory.
    pub fn keeps(&self, piece: u32) -> bool {
        let after = self.resident.partition_point(|kept| kept.end() <= piece);
        self.resident.get(after).is_some_and(|kept| kept.has(piece))
    }

    /// Checks that the loaders, the buffer and the resident pieces are possible.
    ///
    /// # Errors
    /// The first thing that is wrong, as a message.
    pub fn validate(&self) -> Result<(), &'static str> {
        if !(1..=MAX_LOADERS).contains(&self.loaders) {
            return Err("it has 1 to 16 loaders");
        }
        if self.room == Room::Parts(0) {
            return Err("its buffer has no part");
        }
        if !self.buffer.0.is_multiple_of(PIECE_ALIGNMENT) || self.buffer.0 > LARGEST {
            return Err("its buffer is not made of blocks of 4096 bytes, or is beyond any memory");
        }
        let mut next = 0;
        for kept in &self.resident {
            if kept.is_empty() || kept.start() < next {
                return Err("the pieces that stay are not in order");
            }
            next = kept.end();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_policy_names_parse_back() {
        use Reading::*;
        for reading in [Auto, Preload, Sequential, Sync, Async, PipeLoad(1), PipeLoad(16)] {
            assert_eq!(reading.to_string().parse(), Ok(reading));
        }
        for wrong in ["", "pipeload", "pipeload-0", "pipeload-17", "pipeload-x", "Auto"] {
            assert!(wrong.parse::<Reading>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn listed_pieces_stay_resident_and_invalid_streaming_is_refused() {
        let mut streaming = Streaming {
            format: WeightFormat::F16,
            piece: Streaming::PIECE,
            buffer: Bytes(8192),
            room: Room::Ring,
            loaders: 1,
            resident: vec![Span::new(0, 2), Span::new(5, 6)],
        };
        assert_eq!(streaming.validate(), Ok(()));
        let kept: Vec<u32> = (0..9).filter(|&piece| streaming.keeps(piece)).collect();
        assert_eq!(kept, [0, 1, 5]);
        for wrong in [
            Streaming { loaders: 0, ..streaming.clone() },
            Streaming { buffer: Bytes(8191), ..streaming.clone() },
            Streaming { buffer: Bytes(u64::MAX / 4096 * 4096), ..streaming.clone() },
            Streaming { room: Room::Parts(0), ..streaming.clone() },
        ] {
            assert!(wrong.validate().is_err(), "{wrong:?}");
        }
        streaming.resident.reverse();
        assert!(streaming.validate().is_err());
    }
}
