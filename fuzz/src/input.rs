//! Decisions and pieces out of bytes, for targets whose input has a structure of its own.

/// The rest of an input. It never ends: behind the last byte there are zeros.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }
    /// A number from `low` to `high`, both included.
    pub(crate) fn within(&mut self, low: u32, high: u32) -> u32 {
        low + u32::from(self.byte()) % (high - low + 1)
    }
    pub(crate) fn flag(&mut self) -> bool {
        self.byte() % 2 == 1
    }
    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()].clone()
    }
    pub(crate) fn long(&mut self) -> u64 {
        (0..8).fold(0, |n, _| n << 8 | u64::from(self.byte()))
    }
    /// The next piece, whose length stands before it in two bytes, little endian.
    pub(crate) fn piece(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        let (piece, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        piece
    }
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
