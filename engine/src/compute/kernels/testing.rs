//! Helpers of the kernels' tests: random values, whole areas, and comparing with f64.

use super::area::{Area, AreaMut, Extent};

/// Numbers between -1 and 1, the same in every run (a xorshift generator).
pub(crate) struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Random {
    pub(crate) fn values(&mut self, len: usize) -> Vec<f32> {
        let mut next = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }
}

fn extent(rows: usize, columns: usize) -> Extent {
    Extent { start: 0, rows, columns, stride: columns }
}

pub(crate) fn whole(values: &[f32], rows: usize, columns: usize) -> Area<'_> {
    Area::new(values, extent(rows, columns)).expect("it fits")
}

pub(crate) fn whole_mut(values: &mut [f32], rows: usize, columns: usize) -> AreaMut<'_> {
    AreaMut::new(values, extent(rows, columns)).expect("it fits")
}

/// Checks that values are within 1e-5 of the largest one.
pub(crate) fn close(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(0.0_f64, |a, b| a.max(b.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= 1e-5 * scale, "{what}: at {at} {got} and not {want}");
    }
}
