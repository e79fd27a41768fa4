//! Writes a model as a GGUF file, with its matrices rounded: `galaxy quantise` does it, and llama.cpp can read the
//! file.
//!
//! The inverse of reading one: names, fields and the order of rows are those of the file's architecture. What was
//! written is read again before it takes its place, and must be the same model.

mod architecture;
mod fields;
mod header;
mod plan;
mod positions;
mod tokenizer;

use crate::{
    Matrix, ModelDir, Positions, Table,
    blocks::{self, encode},
    config::short,
    error::ModelError,
    quantise::{Rounded, SquaredErrors},
};
use architecture::Architecture;
use galaxy_common::{
    WeightFormat,
    replace::{PUBLIC, replace_with},
};
use half::{bf16, f16};
use header::Field;
use plan::{Planned, Source, planned};
use std::{
    io::{self, BufWriter, Write},
    path::Path,
};

/// Tensors begin at multiples of this, which is what readers assume where a file gives no alignment.
const ALIGNMENT: u64 = super::ALIGNMENT;
/// How many rows are written together, where heads do not decide it.
const TOGETHER: u32 = 64;

impl ModelDir {
    /// Writes the model as a GGUF file, with its matrices rounded as [`ModelDir::quantised`] has them, and returns what
    /// rounding did to each. `progress` is called with the bytes that were written, and those that there are. The file
    /// appears at `path` once all of it was written and read again.
    ///
    /// # Errors
    /// [`ModelError::Unwritten`] for a model that cannot be written as a GGUF file, [`ModelError::Io`] when the file
    /// cannot be written or the model cannot be read.
    pub fn write_gguf(
        &self,
        path: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<Rounded>, ModelError> {
        let architecture = Architecture::of(self)?;
        let fields = architecture.fields(self)?;
        let planned = planned(self, &architecture)?;
        let unwritten = |source| ModelError::Io { path: path.to_owned(), source };
        // Errors of the disk name the file that was asked for.
        let failed = |failure| match failure {
            Failure::Io(source) => unwritten(source),
            Failure::Model(error) => error,
        };
        replace_with(path, PUBLIC, |file, new| {
            let mut out = BufWriter::with_capacity(1 << 20, file);
            let rounded = self.write_all(&fields, &planned, &mut out, progress)?;
            out.flush()?;
            drop(out);
            self.same_as(&ModelDir::open_gguf(new)?)?;
            Ok(rounded)
        })
        .map_err(failed)
    }

    fn write_all(
        &self,
        fields: &[(String, Field)],
        planned: &[Planned],
        out: &mut impl Write,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<Rounded>, Failure> {
        let mut head = Vec::new();
        header::head(fields, planned.len(), &mut head);
        let mut offset = 0u64;
        for tensor in planned {
            header::text(&tensor.name, &mut head);
            head.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().for_each(|side| head.extend(side.to_le_bytes()));
            let number = super::FORMATS.iter().find(|(_, format)| *format == tensor.format);
            head.extend(number.map_or(0, |(number, _)| *number).to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset = (offset + tensor.bytes()).next_multiple_of(ALIGNMENT);
        }
        head.resize(head.len().next_multiple_of(ALIGNMENT as usize), 0);
        out.write_all(&head)?;
        let (mut rounded, mut done) = (Vec::new(), 0);
        for tensor in planned {
            let mut written = 0;
            for source in &tensor.sources {
                let mut squares = SquaredErrors::default();
                self.rows_of(tensor, source, &mut |values, row| {
                    let bytes = encoded(tensor.format, values, row, &mut squares);
                    written += bytes.len() as u64;
                    out.write_all(&bytes)?;
                    progress(done + written, offset);
                    Ok(())
                })?;
                rounded.extend(self.rounding_error(tensor, source, squares)?);
            }
            done += written.next_multiple_of(ALIGNMENT);
            let filled = (written.next_multiple_of(ALIGNMENT) - written) as usize;
            out.write_all(&[0; ALIGNMENT as usize][..filled])?;
        }
        Ok(rounded)
    }

    /// What rounding did to a part of a tensor that has rows; `None` for vectors.
    fn rounding_error(
        &self,
        tensor: &Planned,
        source: &Source,
        squares: SquaredErrors,
    ) -> Result<Option<Rounded>, ModelError> {
        let (matrix, stored) = match *source {
            Source::Matrix(which, _) => (which, self.matrix(which)?.stored),
            Source::TokenEmbedding => (Matrix::LanguageHead, self.table(Table::Word)?.2.format),
            Source::Vector(..) | Source::Values(_) | Source::Positions => return Ok(None),
        };
        let (tensor, format) = (tensor.name.clone(), tensor.format);
        Ok(Some(Rounded { matrix, tensor, stored, format, error: squares.relative() }))
    }

    /// Passes on the values of a part of a tensor, some rows at a time, with the number of values in a row.
    fn rows_of(
        &self,
        tensor: &Planned,
        source: &Source,
        each: &mut Each<'_>,
    ) -> Result<(), Failure> {
        let row = tensor.shape.first().map_or(1, |row| *row as usize);
        match source {
            Source::Values(values) => each(values, row),
            Source::Vector(which, heads) => {
                let mut values = self.vector(*which)?;
                if let Some(heads) = heads {
                    let width = values.len() / *heads as usize;
                    values = values.chunks(width).flat_map(|head| interleave(head, 1)).collect();
                }
                each(&values, row)
            }
            Source::TokenEmbedding => self.rows_of_table(Table::Word, row, each),
            Source::Positions => self.rows_of_table(Table::Position, row, each),
            Source::Matrix(which, heads) => self.rows_of_matrix(*which, *heads, each),
        }
    }

    fn rows_of_table(&self, table: Table, row: usize, each: &mut Each<'_>) -> Result<(), Failure> {
        let ids: Vec<u32> = (0..self.table(table)?.1).collect();
        let mut values = Vec::new();
        for ids in ids.chunks(TOGETHER as usize) {
            values.resize(ids.len() * row, 0.0);
            self.embedding_rows(table, ids, &mut values)?;
            each(&values, row)?;
        }
        Ok(())
    }

    fn rows_of_matrix(
        &self,
        which: Matrix,
        heads: Option<u32>,
        each: &mut Each<'_>,
    ) -> Result<(), Failure> {
        let source = self.matrix(which)?;
        let (inputs, outputs) = (source.rows(), source.columns());
        let together = heads.map_or(TOGETHER, |heads| outputs / heads);
        let (row, mut scratch) = (inputs as usize, Vec::new());
        for first in (0..outputs).step_by(together as usize) {
            let last = outputs.min(first + together);
            let mut values = vec![0.0; (last - first) as usize * row];
            source.each_run(0..inputs, first..last, &mut scratch, |output, input, run| {
                let at = (output - first) as usize * row + input as usize;
                values[at..at + run.len()].copy_from_slice(run);
            })?;
            if heads.is_some() {
                values = interleave(&values, row);
            }
            each(&values, row)?;
        }
        Ok(())
    }

    /// Checks that the file that was written reads as this model.
    fn same_as(&self, written: &ModelDir) -> Result<(), ModelError> {
        let unwritten = |why| unwritten(self, why);
        let (mut have, want) = (written.spec().clone(), self.spec().clone());
        have.family.clone_from(&want.family);
        // A head that nothing computes is in no file.
        have.headless.clone_from(&want.headless);
        // Files have the weights of norms as they are.
        have.norms_from_one = want.norms_from_one;
        settle(&mut have.positions, &want.positions);
        if let (Some(have), Some(want)) = (&mut have.local_positions, &want.local_positions) {
            settle(have, want);
        }
        let fields = |spec| serde_json::to_value(spec).unwrap_or_default();
        let (have, want) = (fields(have), fields(want));
        let differs =
            want.as_object().and_then(|want| want.iter().find(|(key, v)| have[*key] != **v));
        if let Some((key, value)) = differs {
            return Err(unwritten(format!(
                "a GGUF file of its architecture does not say that its {key} is {}",
                short(value)
            )));
        }
        match self.sentence()?.differs_from(&written.sentence()?) {
            Some(what) => Err(unwritten(format!("a GGUF file does not say {what}"))),
            None => Ok(()),
        }
    }
}

/// Takes rotary positions for the wanted ones where they agree in all but the last digits: frequencies were divided and
/// multiplied by the same number.
fn settle(have: &mut Positions, want: &Positions) {
    let near = |a: &f32, b: &f32| (a - b).abs() <= 1e-5 * b.abs();
    let all = |have: &[f32], want: &[f32]| {
        have.len() == want.len() && have.iter().zip(want).all(|(a, b)| near(a, b))
    };
    let (
        Positions::Rotary { inverse_frequencies: one, long: long_one, scale: scale_one, .. },
        Positions::Rotary {
            inverse_frequencies: other, long: long_other, scale: scale_other, ..
        },
    ) = (&mut *have, want)
    else {
        return;
    };
    if all(one, other) {
        one.clone_from(other);
    }
    if let (Some(one), Some(other)) = (long_one, long_other)
        && all(&one.inverse_frequencies, &other.inverse_frequencies)
    {
        one.inverse_frequencies.clone_from(&other.inverse_frequencies);
    }
    if near(scale_one, scale_other) {
        *scale_one = *scale_other;
    }
}

/// The error of a model that is not written.
fn unwritten(model: &ModelDir, why: String) -> ModelError {
    ModelError::Unwritten { path: model.opened().to_owned(), why }
}

/// A function that takes some rows, and the number of values in a row.
type Each<'a> = dyn FnMut(&[f32], usize) -> Result<(), Failure> + 'a;

/// The reason why nothing was written.
enum Failure {
    Io(io::Error),
    Model(ModelError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Self::Model(error)
    }
}

/// Interleaves the two halves of a head's rows: the first of the one, the first of the other, and so on.
fn interleave(head: &[f32], row: usize) -> Vec<f32> {
    let rows: Vec<&[f32]> = head.chunks(row).collect();
    let (first, second) = rows.split_at(rows.len() / 2);
    first.iter().zip(second).flat_map(|(a, b)| [*a, *b].concat()).collect()
}

/// Encodes values in a format, and adds the rounding error to `squares`.
fn encoded(
    format: WeightFormat,
    values: &[f32],
    row: usize,
    squares: &mut SquaredErrors,
) -> Vec<u8> {
    match format {
        WeightFormat::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        // These values had 16 bits before, so that nothing is lost.
        WeightFormat::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        WeightFormat::Bf16 => {
            values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()
        }
        _ => {
            let mut bytes = vec![0; format.bytes(row as u64, (values.len() / row) as u64) as usize];
            encode(format, values, &mut bytes);
            let mut rounded = vec![0.0; values.len()];
            blocks::decode(format, &bytes, &mut rounded);
            squares.add(values, &rounded);
            bytes
        }
    }
}

#[cfg(test)]
mod tests;
