//! The frame that carries one tile between two devices: a fixed header, then the tile.
//!
//! All integers are little endian.
//!
//! ```text
//! 0  4   magic "GLXT"
//! 4  1   version
//! 5  1   wire type: 0 f32, 1 f16, 2 q8
//! 6  2   tile
//! 8  4   transfer: which edge of the program this is
//! 12 4   payload bytes
//! 16 8   epoch
//! 24 8   sequence number
//! ```

use crate::{
    ids::{Epoch, SequenceNumber},
    plan::WireType,
};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 32;
/// The largest payload. A program whose tiles are larger is not lowered.
pub const MAX_PAYLOAD_BYTES: u32 = 1 << 30;
const MAGIC: [u8; 4] = *b"GLXT";
const VERSION: u8 = 1;

/// The header that precedes a tile on a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// The epoch of the plan.
    pub epoch: Epoch,
    /// The program of the epoch that the tile belongs to.
    pub sequence: SequenceNumber,
    /// The transfer of the program; the same on both ends.
    pub transfer: u32,
    /// The tile's number in its collective; for people who read traces.
    pub tile: u16,
    /// The number type of the values.
    pub wire: WireType,
    /// Bytes of the tile that follows.
    pub payload: u32,
}

/// Why bytes are no frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Fewer bytes than a header has.
    #[error("a frame header has {HEADER_BYTES} bytes, and {have} are there")]
    Short {
        /// Bytes that are there.
        have: usize,
    },
    /// The bytes do not begin as a frame of Galaxy does.
    #[error("the peer does not speak Galaxy's ring protocol")]
    Magic,
    /// A frame version that this build does not know.
    #[error("the peer sends frames of version {version}; this build knows version {VERSION}")]
    Version {
        /// The version in the peer's header.
        version: u8,
    },
    /// A wire type that this build does not know.
    #[error("wire type {code} is unknown")]
    Wire {
        /// The code in the peer's header.
        code: u8,
    },
    /// A payload above [`MAX_PAYLOAD_BYTES`].
    #[error("a payload of {bytes} bytes is above the limit of {MAX_PAYLOAD_BYTES}")]
    TooLong {
        /// Its length by the header.
        bytes: u32,
    },
}

impl FrameHeader {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = match self.wire {
            WireType::F32 => 0,
            WireType::F16 => 1,
            WireType::Q8 => 2,
        };
        out[6..8].copy_from_slice(&self.tile.to_le_bytes());
        out[8..12].copy_from_slice(&self.transfer.to_le_bytes());
        out[12..16].copy_from_slice(&self.payload.to_le_bytes());
        out[16..24].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[24..32].copy_from_slice(&self.sequence.0.to_le_bytes());
        out
    }

    /// Reads a header from the first [`HEADER_BYTES`] of `bytes`.
    ///
    /// # Errors
    /// When they are too few, not ours, or beyond a limit. Never panics, never allocates.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let short = FrameError::Short { have: bytes.len() };
        let bytes: &[u8; HEADER_BYTES] =
            bytes.get(..HEADER_BYTES).and_then(|b| b.try_into().ok()).ok_or(short)?;
        if bytes[0..4] != MAGIC {
            return Err(FrameError::Magic);
        }
        if bytes[4] != VERSION {
            return Err(FrameError::Version { version: bytes[4] });
        }
        let wire = match bytes[5] {
            0 => WireType::F32,
            1 => WireType::F16,
            2 => WireType::Q8,
            code => return Err(FrameError::Wire { code }),
        };
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let payload = word(12);
        if payload > MAX_PAYLOAD_BYTES {
            return Err(FrameError::TooLong { bytes: payload });
        }
        Ok(Self {
            epoch: Epoch(long(16)),
            sequence: SequenceNumber(long(24)),
            transfer: word(8),
            tile: u16::from_le_bytes([bytes[6], bytes[7]]),
            wire,
            payload,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> FrameHeader {
        FrameHeader {
            epoch: Epoch(0x0102_0304_0506_0708),
            sequence: SequenceNumber(9),
            transfer: 77,
            tile: 3,
            wire: WireType::F16,
            payload: 4096,
        }
    }

    /// The bytes on the wire are a promise to devices that run another build.
    #[test]
    fn frame_header_bytes_are_stable() {
        let want = [
            0x47, 0x4c, 0x58, 0x54, 1, 1, 3, 0, 77, 0, 0, 0, 0, 0x10, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1,
            9, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(header().encode(), want);
        assert_eq!(FrameHeader::decode(&want), Ok(header()));
    }

    #[test]
    fn too_long_and_too_short_frames_are_refused() {
        let mut bytes = header().encode();
        bytes[15] = 0xff;
        assert!(matches!(FrameHeader::decode(&bytes), Err(FrameError::TooLong { .. })));
        assert!(matches!(FrameHeader::decode(&bytes[..31]), Err(FrameError::Short { have: 31 })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_encode_back_unchanged(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            if let Ok(header) = FrameHeader::decode(&bytes) {
                prop_assert_eq!(&header.encode()[..], &bytes[..HEADER_BYTES]);
            }
        }
    }
}
