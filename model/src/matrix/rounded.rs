//! Matrices that are rounded to blocks of few bits as they are read.
// Hot path of loading, as the module above it.

use super::{Area, BUFFER_BYTES, MatrixSource, Storage};
use crate::{
    blocks::{encode, round},
    error::ModelError,
};
use std::ops::Range;

/// Outputs that are read together where the checkpoint has a row for each output: those of a panel.
const STRIP: u32 = 16;
/// Outputs that are read together where the checkpoint has a row for each input: fewer would be a small piece of each
/// row.
const WIDE_STRIP: u32 = 256;

impl MatrixSource<'_> {
    /// Whether its values are rounded as they are read.
    pub(super) fn rounds(&self) -> bool {
        self.format != self.stored
    }

    /// Passes on the values of whole blocks of `inputs` and some outputs, before rounding and run by run, each with its
    /// output and its first input. `inputs` begin and end between blocks.
    pub(crate) fn each_run(
        &self,
        inputs: Range<u32>,
        outputs: Range<u32>,
        scratch: &mut Vec<u8>,
        mut each: impl FnMut(u32, u32, &[f32]),
    ) -> Result<(), ModelError> {
        let width = match self.storage {
            Storage::OutputRows => STRIP,
            Storage::InputRows => WIDE_STRIP,
        };
        // A multiple of the values of every block; a strip of so many inputs fits into the buffer.
        let height = (BUFFER_BYTES / 4) as u32 / width / 256 * 256;
        let (mut strip, mut run) = (Vec::new(), Vec::new());
        for first in outputs.clone().step_by(width as usize) {
            let columns = first..outputs.end.min(first.saturating_add(width));
            for input in inputs.clone().step_by(height as usize) {
                let rows = input..inputs.end.min(input.saturating_add(height));
                let stride = columns.len();
                strip.resize(rows.len() * stride, 0.0);
                let window = self.window(rows, columns.clone(), strip.len(), stride, 0)?;
                self.read_window(window, &mut strip, scratch)?;
                for (at, output) in columns.clone().enumerate() {
                    run.clear();
                    run.extend(strip[at..].iter().step_by(stride));
                    each(output, input, &run);
                }
            }
        }
        Ok(())
    }

    /// The inputs, extended to whole blocks at both ends.
    pub(crate) fn whole_blocks(&self, inputs: Range<u32>) -> Range<u32> {
        if inputs.is_empty() {
            return inputs;
        }
        let values = self.format.block().map_or(1, |block| block.values);
        let end = inputs.end.div_ceil(values).saturating_mul(values);
        inputs.start / values * values..end.min(self.inputs)
    }

    /// Reads the inputs' blocks of some outputs, rounded, one output after another. `out` has exactly their size.
    pub(super) fn rounded_rows(
        &self,
        inputs: Range<u32>,
        outputs: Range<u32>,
        out: &mut [u8],
    ) -> Result<(), ModelError> {
        let inputs = self.whole_blocks(inputs);
        let row = self.format.bytes(inputs.len() as u64, 1) as usize;
        let (first_input, first_output) = (inputs.start, outputs.start);
        self.each_run(inputs, outputs, &mut Vec::new(), |output, input, values| {
            let at = (output - first_output) as usize * row
                + self.format.bytes((input - first_input).into(), 1) as usize;
            let bytes = self.format.bytes(values.len() as u64, 1) as usize;
            encode(self.format, values, &mut out[at..at + bytes]);
        })
    }

    /// Reads values as [`MatrixSource::read_f32`] does, which has checked that they fit: as they are after rounding.
    pub(super) fn rounded_f32(
        &self,
        (inputs, outputs): Area,
        out: &mut [f32],
        stride: usize,
        at: usize,
        scratch: &mut Vec<u8>,
    ) -> Result<(), ModelError> {
        let first_output = outputs.start;
        let mut rounded = Vec::new();
        let whole = self.whole_blocks(inputs.clone());
        self.each_run(whole, outputs, scratch, |output, first, values| {
            rounded.clear();
            rounded.extend_from_slice(values);
            round(self.format, &mut rounded);
            let column = at + (output - first_output) as usize;
            for (input, value) in (first..).zip(&rounded) {
                if inputs.contains(&input) {
                    out[(input - inputs.start) as usize * stride + column] = *value;
                }
            }
        })
    }
}
