//! Sums of products of a few rows with groups of inputs of a panel.
// Hot path: no locks, no logging, no allocation.
#![allow(unsafe_code)]

use super::{LINE, Tail, coding::Coding, record, vectors::Vectors};
use crate::{compute::kernels::packed::PAIR, weights::PANEL};

/// Some rows times some groups of inputs of a panel.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// The codes of the first of these groups.
    pub(super) codes: *const u8,
    /// The headers of the panel.
    pub(super) headers: *const u8,
    /// The number of the first group, counted from the first block of the panel.
    pub(super) first: usize,
    /// The number of groups.
    pub(super) groups: usize,
    /// The rounded rows: all of a group, then all of the next.
    pub(super) rows: *const u8,
    pub(super) count: usize,
    /// The sums of the first row; those of the next are [`PAIR`] behind.
    pub(super) sums: *mut f32,
    /// Whether the products are added to the sums, instead of taking their place.
    pub(super) add: bool,
}

/// How far ahead codes are fetched, where few rows leave their arithmetic waiting for memory, in bytes. On Zen 4
/// with 4 KB 28 GB/s are read, without 24, and with more or with several panels at a time 12 to 25.
const AHEAD: usize = 4096;

impl Tile {
    /// Fetches what comes [`AHEAD`] of group `at`: the codes of as many bytes as it has, and its header.
    #[inline(always)]
    fn fetch<V: Vectors, C: Coding>(&self, v: V, at: usize) {
        let unit = C::BITS * LINE;
        let codes = self.codes.wrapping_add(at * unit + AHEAD);
        for line in 0..C::BITS {
            v.fetch(codes.wrapping_add(line * LINE));
        }
        // A header has several lines: each of the groups of its block fetches a part.
        let header = PANEL * C::HEADER;
        let place = self.first + at + AHEAD / unit;
        let part = place / C::GROUPS * header + place % C::GROUPS * (header / C::GROUPS);
        v.fetch(self.headers.wrapping_add(part));
    }
}

/// Up to so many rows are multiplied four at a time, their sums in registers: to read codes again, which are near by
/// then, takes less time than to load and store sums with each group.
const BY_FOUR: usize = 16;

/// Multiplies the rows of a tile with its groups of inputs, and adds the products to its sums.
///
/// # Safety
/// The processor has the instructions of `v`. All that the tile points to is there: of codes and headers what its
/// groups have in format `C`, records of `V` for all rows and groups, and a panel of sums for each row.
// SAFETY: callers promise what is asked above.
#[inline(always)]
pub(super) unsafe fn sum<V: Vectors, C: Coding>(v: V, tile: Tile) {
    for column in (0..PANEL).step_by(V::LANES) {
        if tile.count > BY_FOUR {
            // SAFETY: as this function's.
            unsafe { many::<V, C>(v, tile, column) };
            continue;
        }
        for first in (0..tile.count).step_by(4) {
            // SAFETY: as this function's; these rows are among those of the tile.
            unsafe {
                match tile.count - first {
                    1 => few::<V, C, 1>(v, tile, column, first),
                    2 => few::<V, C, 2>(v, tile, column, first),
                    3 => few::<V, C, 3>(v, tile, column, first),
                    _ => few::<V, C, 4>(v, tile, column, first),
                }
            }
        }
    }
}

/// The codes of a group, and its scales and minima.
pub(super) struct Group<V: Vectors> {
    pub(super) codes: [V::Codes; 8],
    pub(super) scales: [(V::Floats, V::Floats); 2],
}

impl<V: Vectors> Group<V> {
    /// Reads group `at` of a tile.
    ///
    /// # Safety
    /// As [`sum`].
    // SAFETY: callers promise what is asked above.
    #[inline(always)]
    unsafe fn read<C: Coding>(v: V, tile: &Tile, at: usize, column: usize) -> Self {
        let place = tile.first + at;
        // SAFETY: a group has so many lines by the format, and its block a header.
        unsafe {
            let codes = tile.codes.add(at * C::BITS * LINE);
            let header = tile.headers.add(place / C::GROUPS * PANEL * C::HEADER);
            Self::new::<C>(v, codes, header, place % C::GROUPS, column)
        }
    }

    /// Reads group `group` of a block, of the columns from `column` on.
    ///
    /// # Safety
    /// The processor has the instructions; `codes` begins the lines of the group, `header` the block's header.
    // SAFETY: callers promise what is asked above.
    #[inline(always)]
    pub(super) unsafe fn new<C: Coding>(
        v: V,
        codes: *const u8,
        header: *const u8,
        group: usize,
        column: usize,
    ) -> Self {
        // SAFETY: all lines are there, and the header is.
        unsafe {
            let line = |line: usize| codes.wrapping_add(line * LINE + 4 * column);
            let mut codes = [v.load(line(0)); 8];
            if C::BITS == 8 {
                for (at, codes) in codes.iter_mut().enumerate() {
                    *codes = v.load(line(at));
                }
            } else {
                for at in 0..4 {
                    let both = v.load(line(at));
                    codes[at] = v.low(both);
                    codes[at + 4] = v.high(both);
                }
            }
            if C::BITS == 5 {
                let bits = v.load(line(4));
                for (at, codes) in codes.iter_mut().enumerate() {
                    *codes = v.fifth(*codes, bits, at);
                }
            }
            if C::BITS == 6 {
                for half in 0..2 {
                    let bits = v.load(line(4 + half));
                    for at in 0..4 {
                        codes[4 * half + at] = v.sixth(codes[4 * half + at], bits, at);
                    }
                }
            }
            if let Some(table) = &C::TABLE {
                for codes in &mut codes {
                    *codes = v.lookup(table, *codes);
                }
            }
            if Self::signed::<C>() {
                for codes in &mut codes {
                    *codes = v.signed_codes(*codes);
                }
            }
            let first = C::scales(v, header, group, 0, column);
            let second = if C::HALVES { C::scales(v, header, group, 1, column) } else { first };
            Self { codes, scales: [first, second] }
        }
    }

    /// Whether codes are read as signed bytes, where the instructions have no others.
    const fn signed<C: Coding>() -> bool {
        V::BIAS != 0 && (C::BITS == 8 || C::TABLE.is_some())
    }

    /// Adds the products of the group to the sums of some rows. Their products take turns, so that none waits for
    /// itself.
    ///
    /// # Safety
    /// The processor has the instructions, and each of `records` begins a record.
    // SAFETY: callers promise what is asked above.
    #[inline(always)]
    unsafe fn add<C: Coding, const ROWS: usize>(
        &self,
        v: V,
        records: [*const u8; ROWS],
        mut sums: [V::Floats; ROWS],
    ) -> [V::Floats; ROWS] {
        let offset = if Self::signed::<C>() { V::BIAS - C::OFFSET } else { -C::OFFSET };
        // SAFETY: a record has packed values and a tail.
        unsafe {
            let tail = |record: *const u8| record.add(V::PACKED).cast::<Tail>().read_unaligned();
            let mut dots = [[v.start(0); 2]; ROWS];
            for (dots, record) in dots.iter_mut().zip(records) {
                let [low, high] = tail(record).sums;
                let first = if C::HALVES { low } else { low + high };
                *dots = [v.start(offset * first), v.start(offset * high)];
            }
            for line in 0..8 {
                let half = if C::HALVES { line / 4 } else { 0 };
                for (dots, record) in dots.iter_mut().zip(records) {
                    dots[half] = v.dot(dots[half], self.codes[line], record, line);
                }
            }
            for ((sum, dots), record) in sums.iter_mut().zip(dots).zip(records) {
                let Tail { by, all, .. } = tail(record);
                let by = v.splat(by);
                *sum = v.mul_add(v.mul(v.end(dots[0]), self.scales[0].0), by, *sum);
                if C::HALVES {
                    *sum = v.mul_add(v.mul(v.end(dots[1]), self.scales[1].0), by, *sum);
                }
                if C::MINIMA {
                    *sum = v.mul_add(self.scales[0].1, v.splat(all), *sum);
                }
            }
        }
        sums
    }
}

/// [`sum`] of so few rows, from the `first` on, that their sums stay in registers.
///
/// # Safety
/// As there, and the tile has these rows.
// SAFETY: callers promise what is asked above.
#[inline(always)]
unsafe fn few<V: Vectors, C: Coding, const ROWS: usize>(
    v: V,
    tile: Tile,
    column: usize,
    first: usize,
) {
    // SAFETY: as this function's.
    unsafe {
        let place = tile.sums.add(first * PAIR + column);
        let mut sums = [v.zero(); ROWS];
        if tile.add {
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = v.floats(place.add(row * PAIR));
            }
        }
        for at in 0..tile.groups {
            if column == 0 && first == 0 {
                tile.fetch::<V, C>(v, at);
            }
            let group = Group::read::<C>(v, &tile, at, column);
            let mut records = [tile.rows; ROWS];
            for (row, from) in records.iter_mut().enumerate() {
                *from = tile.rows.add((at * tile.count + first + row) * record::<V>());
            }
            sums = group.add::<C, ROWS>(v, records, sums);
        }
        for (row, sum) in sums.into_iter().enumerate() {
            v.store(place.add(row * PAIR), sum);
        }
    }
}

/// [`sum`] of any number of rows.
///
/// # Safety
/// As there.
// SAFETY: callers promise what is asked above.
#[inline(always)]
unsafe fn many<V: Vectors, C: Coding>(v: V, tile: Tile, column: usize) {
    // SAFETY: as this function's.
    unsafe {
        if !tile.add {
            for row in 0..tile.count {
                v.store(tile.sums.add(row * PAIR + column), v.zero());
            }
        }
        for at in 0..tile.groups {
            let group = Group::read::<C>(v, &tile, at, column);
            for row in 0..tile.count {
                one::<V, C>(v, &tile, &group, (at, row, column));
            }
        }
    }
}

/// Adds what a group gives to the sums of a row.
///
/// # Safety
/// As [`sum`].
// SAFETY: callers promise what is asked above.
#[inline(always)]
unsafe fn one<V: Vectors, C: Coding>(
    v: V,
    tile: &Tile,
    group: &Group<V>,
    (at, row, column): (usize, usize, usize),
) {
    // SAFETY: as this function's.
    unsafe {
        let record = tile.rows.add((at * tile.count + row) * record::<V>());
        let place = tile.sums.add(row * PAIR + column);
        let [sum] = group.add::<C, 1>(v, [record], [v.floats(place)]);
        v.store(place, sum);
    }
}
