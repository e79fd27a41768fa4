//! The largest sizes that a config may give: far above those of any model that is real.

pub(super) const MAX_WIDTH: u32 = 1 << 20;
pub(super) const MAX_INTERMEDIATE: u32 = 1 << 22;
pub(super) const MAX_LAYERS: u32 = 4096;
pub(super) const MAX_HEADS: u32 = 1 << 16;
pub(super) const MAX_VOCABULARY: u32 = 1 << 24;
pub(super) const MAX_POSITIONS: u32 = 1 << 24;
/// Token types are stored as bytes.
pub(super) const MAX_TYPES: u32 = 1 << 8;
pub(super) const MAX_PIXELS: u32 = 1 << 13;
pub(super) const MAX_PATCH: u32 = 1 << 10;
pub(super) const MAX_CHANNELS: u32 = 16;
