//! The axes of values, and what an operator reads along them to compute a part of its result.

use galaxy_common::{Span, span::Unit};

/// The axes of a value. Tensors hold all of them as rows x columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Axes {
    /// A text: as many rows as it has tokens, of so many columns.
    Text {
        /// Columns, where one device has all of them.
        columns: u32,
    },
    /// An image: `height` rows of `width` pixels, the channels of a pixel side by side. Images of a batch
    /// stand one below another.
    Image {
        /// Rows of the image.
        height: u32,
        /// Pixels in a row.
        width: u32,
        /// Channels of a pixel.
        channels: u32,
    },
}

impl Axes {
    /// Columns of a row.
    pub fn columns(self) -> u32 {
        match self {
            Self::Text { columns } => columns,
            Self::Image { width, channels, .. } => width.saturating_mul(channels),
        }
    }
}

/// A window along one axis: neighbours that are reduced to one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    /// How many elements it sees.
    pub kernel: u32,
    /// How far apart these are; 1 for next to each other.
    pub dilation: u32,
    /// How far it moves from one result to the next.
    pub stride: u32,
    /// Padding before the axis: how far the first window begins before it.
    pub before: u32,
    /// Padding after the axis: how far a window may end behind it.
    pub after: u32,
}

impl Window {
    /// From its first element to its last: K = dilation (kernel - 1) + 1.
    pub fn extent(&self) -> u32 {
        self.dilation.saturating_mul(self.kernel.saturating_sub(1)).saturating_add(1)
    }

    /// How many results it has along an axis of `of` elements.
    ///
    /// # Errors
    /// The reason, for people, why it has none, or some that see nothing but padding.
    pub fn results(&self, of: u32) -> Result<u32, String> {
        let extent = self.extent();
        if self.kernel == 0 || self.dilation == 0 || self.stride == 0 {
            return Err("a window is of at least one, and moves by at least one".to_owned());
        }
        if self.before.max(self.after) >= extent {
            return Err(format!("a window of {extent} would see nothing but padding"));
        }
        let padded = of.saturating_add(self.before).saturating_add(self.after);
        match padded.checked_sub(extent) {
            Some(room) if of > 0 => Ok(room / self.stride + 1),
            _ => Err(format!("a window of {extent} does not fit {padded}")),
        }
    }

    /// The elements, of `of`, that the results `own` read: `[start S - P, (end - 1) S + K - P)`, clipped.
    fn reads(&self, own: (u32, u32), of: u32) -> (u32, u32) {
        let at = |result: u32| u64::from(result) * u64::from(self.stride);
        let clipped = |padded: u64| padded.saturating_sub(self.before.into()).min(of.into()) as u32;
        let end = at(own.1.saturating_sub(1)) + u64::from(self.extent());
        (clipped(at(own.0)), clipped(end))
    }
}

/// Which part of an axis is read to compute a part of the result: of a text, of an image, or of a row of
/// pixels.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reach {
    /// The same part of the axis.
    Same,
    /// The same part, and all before it.
    Before,
    /// All of the axis.
    All,
    /// The part and a halo around it.
    Window(Window),
}

impl Reach {
    /// The part of `read` that is needed to compute `own` of `made`; nothing where `own` is not in it.
    pub fn of<U: Unit>(self, own: Span<U>, made: Span<U>, read: Span<U>) -> Span<U> {
        let own = own.intersect(made);
        if own.is_empty() {
            return Span::empty();
        }
        let (start, end) = (own.start() - made.start(), own.end() - made.start());
        let (from, to) = match self {
            Self::Same => (start, end.min(read.len())),
            Self::Before => (0, end.min(read.len())),
            Self::All => (0, read.len()),
            Self::Window(window) => window.reads((start, end), read.len()),
        };
        Span::new(read.start() + from.min(to), read.start() + to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use galaxy_common::Row;

    #[test]
    fn a_window_reaches_all_values_that_the_kernel_reads() {
        let mut seen = 0;
        for code in 0..3u32.pow(5) * 8 {
            let digit = |at: u32| code / 3u32.pow(at) % 3;
            let window = Window {
                kernel: 1 + digit(0),
                dilation: 1 + digit(1),
                stride: 1 + digit(2),
                before: digit(3),
                after: digit(4),
            };
            let length = 1 + code / 3u32.pow(5);
            let Ok(results) = window.results(length) else { continue };
            for start in 0..results {
                for end in start + 1..=results {
                    // Each of what the kernel sees of each result.
                    let sees = |result: u32| {
                        let first = i64::from(result * window.stride) - i64::from(window.before);
                        (0..window.kernel).map(move |k| first + i64::from(k * window.dilation))
                    };
                    let inside = |at: &i64| (0..i64::from(length)).contains(at);
                    let all: Vec<i64> = (start..end).flat_map(sees).filter(inside).collect();
                    let (own, made) =
                        (Span::<Row>::new(10 + start, 10 + end), Span::new(10, 10 + results));
                    let read = Span::new(20, 20 + length);
                    let found = Reach::Window(window).of(own, made, read);
                    for at in all {
                        assert!(found.has(20 + at as u32), "{window:?} {own:?} {found:?}");
                        seen += 1;
                    }
                    assert!(read.contains(found));
                }
            }
        }
        assert!(seen > 1000);
    }

    #[test]
    fn the_reach_of_a_window_is_clipped_to_the_rows_of_the_input() {
        let window = Window { kernel: 3, dilation: 2, stride: 2, before: 2, after: 2 };
        assert_eq!((window.extent(), window.results(9)), (5, Ok(5)));
        let (made, read) = (Span::<Row>::new(5, 10), Span::<Row>::new(9, 18));
        let of = |reach: Reach, start, end| reach.of(Span::new(start, end), made, read);
        // Of the first image nothing, of this one its clipped ends.
        assert_eq!(of(Reach::Window(window), 0, 6), Span::new(9, 12));
        assert_eq!(of(Reach::Window(window), 6, 8), Span::new(9, 16));
        assert_eq!(of(Reach::Window(window), 9, 12), Span::new(15, 18));
        assert_eq!(of(Reach::Window(window), 0, 5), Span::empty());
        assert_eq!(of(Reach::Before, 6, 8), Span::new(9, 12));
        assert_eq!(of(Reach::All, 6, 8), read);
        assert!(window.results(0).is_err());
        assert!(Window { before: 5, ..window }.results(9).is_err());
        assert!(Window { stride: 0, ..window }.results(9).is_err());
        assert!(Window { before: 0, after: 0, ..window }.results(4).is_err());
    }
}
