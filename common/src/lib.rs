//! The vocabulary that every part of Galaxy shares: names and numbers with
//! units, the plan, the batch shape, and the frames that carry tensors.
//!
//! Nothing here opens a socket, reads a clock or touches a tensor. Every type
//! that comes from outside is parsed once into a form that cannot be invalid.

pub mod assignment;
pub mod blocks;
mod extent;
pub mod format;
pub mod frame;
pub mod generate;
pub mod ids;
pub mod plan;
pub mod printable;
#[cfg(unix)]
pub mod private;
pub mod profile;
pub mod rate;
pub mod replace;
pub mod sampling;
pub mod shape;
pub mod span;
pub mod spread;
pub mod streaming;
pub mod units;

pub use assignment::{Assignment, BlockAssignment, DevicePlan};
pub use blocks::BlockTables;
pub use format::{UnknownFormat, WeightBlock, WeightFormat};
pub use frame::{FrameError, FrameHeader, HEADER_BYTES, MAX_PAYLOAD_BYTES};
pub use generate::{Burst, GenerateOptions, GeneratedToken, Prompt, Sequence, TokenGoal};
pub use ids::{DeviceName, Epoch, NameError, Rank, RequestId, SequenceNumber};
pub use plan::{
    Activations, Cache, CacheType, Exchange, Layout, LinkType, Mode, Modes, Plan, PlanError,
    Strategy, WireType, apportion,
};
pub use profile::{
    ClusterProfile, DeviceProfile, Kernel, LinkProfile, PROFILE_VERSION, ProfileError, Table,
};
pub use rate::{LinkRate, RateError};
pub use sampling::{Fallback, Sampling, SamplingError, SamplingParams};
pub use shape::{BatchShape, CandidateCount, Pooling, Segment, ShapeError, Wanted};
pub use span::{Column, Head, Layer, Piece, Row, Share, Span, Token, Unit};
pub use spread::Spread;
pub use streaming::{MAX_LOADERS, PIECE_ALIGNMENT, Reading, Room, Streaming};
pub use units::{Bytes, UnitError};
