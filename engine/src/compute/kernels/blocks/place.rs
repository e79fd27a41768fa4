//! A matrix in blocks as it is held: where values and headers are, how those of a file get there, and what they
//! stand for.
//!
//! First stand the codes of all panels, then the headers of all. A panel is 16 columns. Its codes are in groups of
//! 32 inputs, a group in lines of 64 bytes: four bytes of each column. Byte `b` of a column in line `l < 4` has the
//! low four bits of the codes of inputs `4 l + b` and, above them, `16 + 4 l + b`. Codes of 5 bits have another
//! line, in which bit `l` of byte `b` is that of input `4 l + b`; codes of 6 bits have two, each with two bits of
//! half of the inputs; those of 8 bits have eight lines, a code in a byte. The headers of a panel are those of its
//! blocks, as [`super::coding`] reads them: a part of a block has a whole header.
// Hot path of loading: no locks, no logging, no allocation.
#![allow(unsafe_code)]

use super::{GROUP, LINE, coding::Coding, each_coding, vectors::Arrays};
use crate::weights::PANEL;
use galaxy_common::{WeightBlock, WeightFormat};
use galaxy_model::blocks;
use std::ops::Range;

/// Where the parts of a matrix in blocks are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockLayout {
    format: WeightFormat,
    block: WeightBlock,
    /// The number of groups of inputs of a panel.
    groups: usize,
    /// The place within its block of the first group.
    phase: usize,
    /// The number of headers of a panel.
    headers: usize,
    /// Bytes of the codes of all panels.
    codes: usize,
}

impl BlockLayout {
    /// The layout of a matrix of so many inputs and columns, the columns filled up to panels, whose first
    /// input is `first` of the whole matrix; none where values stand by themselves.
    pub(crate) fn new(
        format: WeightFormat,
        (inputs, first): (usize, usize),
        columns: usize,
    ) -> Option<Self> {
        let block = format.block()?;
        let groups = inputs.div_ceil(GROUP);
        let phase = first / GROUP % (block.values as usize / GROUP);
        let headers = block.most(inputs as u64) as usize;
        let codes = columns * format.held_values(inputs as u64) as usize;
        Some(Self { format, block, groups, phase, headers, codes })
    }

    /// Bytes of the codes: where they end, headers begin.
    pub(crate) fn codes(&self) -> usize {
        self.codes
    }

    /// The place within its block of the first group.
    pub(crate) fn phase(&self) -> usize {
        self.phase
    }

    /// Bytes of the codes of a panel, and of its headers.
    pub(crate) fn panel(&self) -> (usize, usize) {
        (self.groups * self.unit(), self.headers * self.header())
    }

    /// Bytes of the codes of a group of a panel.
    fn unit(&self) -> usize {
        self.block.bits as usize * LINE
    }

    /// Bytes of a header of a panel.
    fn header(&self) -> usize {
        self.block.scales as usize * PANEL
    }

    /// Where the codes of a group begin, and the header of its block.
    fn of(&self, panel: usize, group: usize) -> (usize, usize) {
        let in_block = self.block.values as usize / GROUP;
        let header = panel * self.headers + (self.phase + group) / in_block;
        let unit = panel * self.groups + group;
        (unit * self.unit(), self.codes + header * self.header())
    }

    /// Whether a group of a panel is the first of its block, or of the panel.
    fn begins(&self, group: usize) -> bool {
        let in_block = self.block.values as usize / GROUP;
        group == 0 || (self.phase + group).is_multiple_of(in_block)
    }

    /// The fields of a header, one column after the other: `(width, where it stands for a column in a file,
    /// where in a header)`, in bytes.
    fn fields(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let words = match self.format {
            WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => 2,
            WeightFormat::Mxfp4 => 0,
            _ => 1,
        };
        let bytes = self.block.scales as usize - 2 * words;
        let words = (0..words).map(|at| (2, 2 * at));
        let first = 2 * words.len();
        let bytes = (0..bytes).map(move |at| (1, first + at));
        words.chain(bytes).map(|(width, at)| (width, at, at * PANEL))
    }

    /// Puts blocks of one output, as a file has them, to a column of a panel: the groups from `skip` of the first
    /// block on, to groups `to`.
    ///
    /// # Panics
    /// When there are fewer blocks, or the groups do not stand in their blocks as those of the layout do.
    pub(crate) fn place(
        &self,
        row: &[u8],
        skip: usize,
        to: Range<usize>,
        (panel, lane): (usize, usize),
        held: &mut [u8],
    ) {
        let in_block = self.block.values as usize / GROUP;
        assert!(to.is_empty() || (self.phase + to.start) % in_block == skip % in_block);
        let first = to.start;
        for group in to {
            let from = skip + group - first;
            let block =
                &row[from / in_block * self.block.bytes as usize..][..self.block.bytes as usize];
            let (codes, header) = self.of(panel, group);
            let lines = &mut held[codes + 4 * lane..];
            match blocks::pairs(self.format, block, from % in_block) {
                Some(pairs) => {
                    for (line, four) in pairs.as_chunks::<4>().0.iter().enumerate() {
                        lines[line * LINE..line * LINE + 4].copy_from_slice(four);
                    }
                }
                None => self.write(&blocks::codes(self.format, block, from % in_block), lines),
            }
            if group == first || self.begins(group) {
                let own = blocks::header(self.format, block);
                for (width, at, to) in self.fields() {
                    held[header + to + width * lane..][..width]
                        .copy_from_slice(&own[at..at + width]);
                }
            }
        }
    }

    /// Writes the codes of a group of a column to its lines, of which the first begins `lines`.
    fn write(&self, codes: &[u8; GROUP], lines: &mut [u8]) {
        let mut put = |line: usize, four: [u8; 4]| {
            lines[line * LINE..line * LINE + 4].copy_from_slice(&four);
        };
        let fours = codes.as_chunks::<4>().0;
        if self.block.bits == 8 {
            fours.iter().enumerate().for_each(|(line, four)| put(line, *four));
            return;
        }
        let (low, high) = fours.split_at(4);
        for (line, (low, high)) in low.iter().zip(high).enumerate() {
            let both = u32::from_le_bytes(*low) & 0x0f0f_0f0f
                | (u32::from_le_bytes(*high) & 0x0f0f_0f0f) << 4;
            put(line, both.to_le_bytes());
        }
        let above = |mask: u32| fours.iter().map(move |four| u32::from_le_bytes(*four) >> 4 & mask);
        if self.block.bits == 5 {
            let bits = above(0x0101_0101).zip(0..).fold(0, |all, (bit, line)| all | bit << line);
            put(4, bits.to_le_bytes());
        }
        if self.block.bits == 6 {
            for half in 0..2 {
                let own = above(0x0303_0303).skip(4 * half).take(4);
                let bits = own.zip(0..).fold(0, |all, (bits, line)| all | bits << (2 * line));
                put(4 + half, bits.to_le_bytes());
            }
        }
    }

    /// Copies groups `from` of a column of `other`'s matrix to groups from `to` on of a column of its own.
    ///
    /// # Panics
    /// When the groups do not stand in their blocks alike.
    pub(crate) fn copy(
        &self,
        other: (&Self, &[u8]),
        from: Range<usize>,
        (panel, lane): (usize, usize),
        to: (usize, (usize, usize)),
        held: &mut [u8],
    ) {
        let (layout, bytes) = other;
        let (first, (to_panel, to_lane)) = to;
        let in_block = self.block.values as usize / GROUP;
        let alike = (self.phase + first) % in_block == (layout.phase + from.start) % in_block;
        assert!(from.is_empty() || alike);
        for (at, group) in from.enumerate() {
            let (codes, header) = layout.of(panel, group);
            let (to_codes, to_header) = self.of(to_panel, first + at);
            for line in (0..self.unit()).step_by(LINE) {
                let four = &bytes[codes + line + 4 * lane..][..4];
                held[to_codes + line + 4 * to_lane..][..4].copy_from_slice(four);
            }
            if at == 0 || self.begins(first + at) {
                for (width, _, field) in self.fields() {
                    let own = &bytes[header + field + width * lane..][..width];
                    held[to_header + field + width * to_lane..][..width].copy_from_slice(own);
                }
            }
        }
    }

    /// The values of a group of a panel: those of all columns of one input, then of the next.
    pub(crate) fn widen(&self, held: &[u8], panel: usize, group: usize) -> [[f32; PANEL]; GROUP] {
        let (codes, header) = self.of(panel, group);
        let in_block = self.block.values as usize / GROUP;
        let codes = &held[codes..codes + self.unit()];
        let header = &held[header..header + self.header()];
        each_coding!(
            self.format,
            C => widen::<C>(codes, header, (self.phase + group) % in_block),
            unreachable!("it has blocks")
        )
    }
}

/// The values of a group: those of all columns of one input, then of the next.
fn widen<C: Coding>(codes: &[u8], header: &[u8], group: usize) -> [[f32; PANEL]; GROUP] {
    assert!(codes.len() == C::BITS * LINE && header.len() == C::HEADER * PANEL);
    let v = Arrays;
    // SAFETY: any processor has arrays, and by the assertion codes and header are whole.
    let group =
        unsafe { super::tile::Group::new::<C>(v, codes.as_ptr(), header.as_ptr(), group, 0) };
    let mut out = [[0.0; PANEL]; GROUP];
    for (input, out) in out.iter_mut().enumerate() {
        let codes = &group.codes[input / 4];
        let (scale, minimum) = group.scales[input / (GROUP / 2)];
        for (column, out) in out.iter_mut().enumerate() {
            let code = i32::from(codes[4 * column + input % 4]) - C::OFFSET;
            let value = scale[column] * code as f32;
            *out = if C::MINIMA { value + minimum[column] } else { value };
        }
    }
    out
}
