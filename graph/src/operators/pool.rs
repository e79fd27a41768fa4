//! Pooling of images: a window of pixels becomes one pixel of the result.

use super::{Axes, Operate, Reach, Sizes, ValueId, Window, Work};
use smallvec::SmallVec;
use std::fmt;

/// How the pixels that a window sees become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pooling {
    /// The largest of the pixels.
    Max,
    /// The mean of the pixels.
    Average {
        /// Whether padding counts as zeros, or not at all.
        padded: bool,
    },
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Max => "maximum",
            Self::Average { padded: false } => "average",
            Self::Average { padded: true } => "average with its padding",
        })
    }
}

/// Windows of an image, channel by channel. Each row is pooled along its pixels first, into workspace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pool {
    /// The value that it reads.
    pub input: ValueId,
    /// The value that it computes.
    pub output: ValueId,
    /// How a window becomes one pixel.
    pub pooling: Pooling,
    /// The windows along the height.
    pub rows: Window,
    /// The windows along the width.
    pub pixels: Window,
}

impl Pool {
    /// How many rows are read for `rows` rows of the result, where no edge is near.
    fn rows_read(&self, rows: u32) -> u64 {
        match rows.checked_sub(1) {
            Some(steps) => {
                u64::from(steps) * u64::from(self.rows.stride) + u64::from(self.rows.extent())
            }
            None => 0,
        }
    }
}

impl Operate for Pool {
    fn name(&self) -> String {
        let (rows, pixels) = (self.rows.kernel, self.pixels.kernel);
        format!("pooling ({} of windows of {rows} x {pixels})", self.pooling)
    }
    fn reads(&self) -> SmallVec<[ValueId; 2]> {
        SmallVec::from_slice(&[self.input])
    }
    fn makes(&self) -> ValueId {
        self.output
    }
    fn shape(&self, read: &[Axes]) -> Result<Axes, String> {
        match *read {
            [Axes::Image { height, width, channels }] => Ok(Axes::Image {
                height: self.rows.results(height)?,
                width: self.pixels.results(width)?,
                channels,
            }),
            _ => Err(format!("an image is pooled, not {read:?}")),
        }
    }
    fn is_by_rows(&self) -> bool {
        true
    }
    fn reach(&self, _at: usize) -> Reach {
        Reach::Window(self.rows)
    }
    fn reach_in_row(&self, _at: usize) -> Reach {
        Reach::Window(self.pixels)
    }
    fn workspace(&self, sizes: Sizes) -> u64 {
        self.rows_read(sizes.rows) * u64::from(sizes.outputs) * 4
    }
    fn work(&self, sizes: Sizes) -> Work {
        let read = self.rows_read(sizes.rows) as f64;
        let each = read * f64::from(self.pixels.kernel)
            + f64::from(sizes.rows) * f64::from(self.rows.kernel);
        Work { operations: f64::from(sizes.outputs) * each, ..Work::default() }
    }
}
