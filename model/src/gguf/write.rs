//! Writes a model as a GGUF file, with its matrices rounded: `galaxy quantise` does it, and llama.cpp can read the
//! file.
//!
//! The inverse of reading one: names, fields and the order of rows are those of the file's architecture. What was
//! written is read again before it takes its place, and must be the same model.

mod fields;
mod header;
mod tokenizer;

use crate::{
    Matrix, ModelDir, Positions, Table, Vector,
    blocks::{self, encode},
    error::ModelError,
    quantise::{Rounded, SquaredErrors},
    spec::NormPlace,
};
use fields::Architecture;
use galaxy_common::{
    WeightFormat,
    replace::{PUBLIC, replace_with},
};
use half::{bf16, f16};
use header::Field;
use std::{
    io::{self, BufWriter, Write},
    path::Path,
};

/// Tensors begin at multiples of this, which is what readers assume where a file gives no alignment.
const ALIGNMENT: u64 = super::ALIGNMENT;
/// How many rows are written together, where heads do not decide it.
const TOGETHER: u32 = 64;

/// Where the values of a tensor come from.
#[derive(Clone)]
enum Source {
    /// The rows of a matrix. The number is the heads whose rows the file stores in pairs, if it does.
    Matrix(Matrix, Option<u32>),
    /// The token embedding table, rounded like a language head.
    TokenEmbedding,
    /// The table of learned positions, as it is.
    Positions,
    /// A vector. The number is the heads whose values the file stores in pairs, if it does.
    Vector(Vector, Option<u32>),
    /// The divisors of rotary frequencies.
    Divisors(Vec<f32>),
}

/// A tensor to be written.
struct Planned {
    name: String,
    source: Source,
    /// The shape, the fastest dimension first, as files have it.
    shape: Vec<u64>,
    format: WeightFormat,
}

impl Planned {
    fn bytes(&self) -> u64 {
        let row = self.shape.first().copied().unwrap_or(1);
        self.format.bytes(row, self.shape.iter().skip(1).product())
    }
}

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
        let planned = self.planned(&architecture)?;
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

    /// All tensors of the file, in their order.
    fn planned(&self, architecture: &Architecture) -> Result<Vec<Planned>, ModelError> {
        let spec = self.spec();
        let heads = |paired: bool, heads: u32| (architecture.in_pairs && paired).then_some(heads);
        let matrix = |which: Matrix| {
            let (name, paired) = named(which);
            let (inputs, outputs) = which.shape(spec)?;
            let source = Source::Matrix(which, paired.and_then(|of| heads(true, of(spec))));
            let (format, shape) = (self.formats().of(which), vec![inputs.into(), outputs.into()]);
            Some(Planned { name: name?, source, shape, format })
        };
        let vector = |which: Vector| {
            let (name, paired) = named_vector(which, spec.norm_place)?;
            let source = Source::Vector(which, paired.and_then(|of| heads(true, of(spec))));
            let shape = match which {
                Vector::TokenTypes => vec![spec.hidden.into(), spec.token_types.into()],
                _ => vec![u64::from(which.width(spec)?)],
            };
            Some(Planned { name, source, shape, format: WeightFormat::F32 })
        };
        let shape = vec![spec.hidden.into(), spec.vocabulary.into()];
        let words = || {
            let name = "token_embd.weight".to_owned();
            if self.tied() {
                let format = self.formats().of(Matrix::LanguageHead);
                let source = Source::Matrix(Matrix::LanguageHead, None);
                return Ok(Planned { name, source, shape, format });
            }
            let own = self.table(Table::Word)?.2.format;
            let to =
                self.quantisation().and_then(|to| to.format(Matrix::LanguageHead, spec.hidden));
            let format = to.unwrap_or(own);
            Ok::<_, ModelError>(Planned { name, source: Source::TokenEmbedding, shape, format })
        };
        let mut planned = vec![words()?];
        if let Some(divisors) = architecture.divisors(self)? {
            let (name, shape) = (super::DIVISORS.to_owned(), vec![divisors.len() as u64]);
            let source = Source::Divisors(divisors);
            planned.push(Planned { name, source, shape, format: WeightFormat::F32 });
        }
        if let Positions::Learned { rows, .. } = spec.positions {
            let shape = vec![spec.hidden.into(), rows.into()];
            let (name, source) = ("position_embd.weight".to_owned(), Source::Positions);
            planned.push(Planned { name, source, shape, format: WeightFormat::F32 });
        }
        planned.extend(Vector::all(spec).filter_map(vector));
        let tied = self.tied();
        let own = |which: &Matrix| !(tied && *which == Matrix::LanguageHead);
        planned.extend(Matrix::all(spec).filter(own).filter_map(matrix));
        Ok(planned)
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
            let mut squares = SquaredErrors::default();
            let mut written = 0;
            self.rows_of(tensor, &mut |values, row| {
                let bytes = encoded(tensor.format, values, row, &mut squares);
                written += bytes.len() as u64;
                out.write_all(&bytes)?;
                progress(done + written, offset);
                Ok(())
            })?;
            done += written.next_multiple_of(ALIGNMENT);
            let filled = (written.next_multiple_of(ALIGNMENT) - written) as usize;
            out.write_all(&[0; ALIGNMENT as usize][..filled])?;
            rounded.extend(self.rounding_error(tensor, squares)?);
        }
        Ok(rounded)
    }

    /// What rounding did to a tensor that has rows; `None` for vectors.
    fn rounding_error(
        &self,
        tensor: &Planned,
        squares: SquaredErrors,
    ) -> Result<Option<Rounded>, ModelError> {
        let (matrix, stored) = match tensor.source {
            Source::Matrix(which, _) => (which, self.matrix(which)?.stored),
            Source::TokenEmbedding => (Matrix::LanguageHead, self.table(Table::Word)?.2.format),
            Source::Vector(..) | Source::Divisors(_) | Source::Positions => return Ok(None),
        };
        let (tensor, format) = (tensor.name.clone(), tensor.format);
        Ok(Some(Rounded { matrix, tensor, stored, format, error: squares.relative() }))
    }

    /// Passes on the values of a tensor, some rows at a time, with the number of values in a row.
    fn rows_of(&self, tensor: &Planned, each: &mut Each<'_>) -> Result<(), Failure> {
        let row = tensor.shape.first().map_or(1, |row| *row as usize);
        match &tensor.source {
            Source::Divisors(values) => each(values, row),
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
        let unwritten = |why| ModelError::Unwritten { path: self.opened().to_owned(), why };
        let (mut have, want) = (written.spec().clone(), self.spec().clone());
        have.family.clone_from(&want.family);
        // A head that nothing computes is in no file.
        have.headless.clone_from(&want.headless);
        if let (
            Positions::Rotary { inverse_frequencies: have, .. },
            Positions::Rotary { inverse_frequencies: want, .. },
        ) = (&mut have.positions, &want.positions)
        {
            // Frequencies were divided and multiplied by the same number: they agree in all but the last digit.
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs();
            if have.len() == want.len() && have.iter().zip(want).all(near) {
                have.clone_from(want);
            }
        }
        let fields = |spec| serde_json::to_value(spec).unwrap_or_default();
        let (have, want) = (fields(have), fields(want));
        let differs =
            want.as_object().and_then(|want| want.iter().find(|(key, v)| have[*key] != **v));
        match differs {
            Some((key, value)) => Err(unwritten(format!(
                "a GGUF file of its architecture does not say that its {key} is {value}"
            ))),
            None => Ok(()),
        }?;
        match self.sentence()?.differs_from(&written.sentence()?) {
            Some(what) => Err(unwritten(format!("a GGUF file does not say {what}"))),
            None => Ok(()),
        }
    }
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

/// A function of a model's description that counts the heads whose rows may be stored in pairs.
type Heads = fn(&crate::ModelSpec) -> u32;

/// The name of a matrix in GGUF files, if it has one, and how its heads are counted, if their rows may be in pairs.
fn named(which: Matrix) -> (Option<String>, Option<Heads>) {
    let in_layer = |layer: u32, name: &str| Some(format!("blk.{layer}.{name}.weight"));
    match which {
        Matrix::Query(l) => (in_layer(l, "attn_q"), Some(|spec| spec.heads)),
        Matrix::Key(l) => (in_layer(l, "attn_k"), Some(|spec| spec.kv_heads)),
        Matrix::Value(l) => (in_layer(l, "attn_v"), None),
        Matrix::AttentionOutput(l) => (in_layer(l, "attn_output"), None),
        Matrix::Gate(l) => (in_layer(l, "ffn_gate"), None),
        Matrix::Up(l) => (in_layer(l, "ffn_up"), None),
        Matrix::Down(l) => (in_layer(l, "ffn_down"), None),
        Matrix::LanguageHead => (Some("output.weight".to_owned()), None),
        Matrix::Patch | Matrix::ClassDense | Matrix::ClassOutput => (None, None),
    }
}

/// The name of a vector in GGUF files, if it has one, and how its heads are counted, if their values may be in pairs.
fn named_vector(which: Vector, place: NormPlace) -> Option<(String, Option<Heads>)> {
    // Norms behind blocks have other names than those before them.
    let (attention, mlp) = match place {
        NormPlace::Pre => ("attn_norm", "ffn_norm"),
        NormPlace::Post => ("attn_output_norm", "layer_output_norm"),
    };
    let in_layer = |layer: u32, name: &str| format!("blk.{layer}.{name}");
    let heads: (Heads, Heads) = (|spec| spec.heads, |spec| spec.kv_heads);
    Some(match which {
        Vector::QueryBias(l) => (in_layer(l, "attn_q.bias"), Some(heads.0)),
        Vector::KeyBias(l) => (in_layer(l, "attn_k.bias"), Some(heads.1)),
        Vector::ValueBias(l) => (in_layer(l, "attn_v.bias"), None),
        Vector::AttentionOutputBias(l) => (in_layer(l, "attn_output.bias"), None),
        Vector::UpBias(l) => (in_layer(l, "ffn_up.bias"), None),
        Vector::GateBias(l) => (in_layer(l, "ffn_gate.bias"), None),
        Vector::DownBias(l) => (in_layer(l, "ffn_down.bias"), None),
        Vector::QueryHeadNorm(l) => (in_layer(l, "attn_q_norm.weight"), None),
        Vector::KeyHeadNorm(l) => (in_layer(l, "attn_k_norm.weight"), None),
        Vector::AttentionNorm(l) => (in_layer(l, &format!("{attention}.weight")), None),
        Vector::AttentionNormBias(l) => (in_layer(l, &format!("{attention}.bias")), None),
        Vector::MlpNorm(l) => (in_layer(l, &format!("{mlp}.weight")), None),
        Vector::MlpNormBias(l) => (in_layer(l, &format!("{mlp}.bias")), None),
        Vector::EmbeddingNorm => ("token_embd_norm.weight".to_owned(), None),
        Vector::EmbeddingNormBias => ("token_embd_norm.bias".to_owned(), None),
        Vector::TokenTypes => ("token_types.weight".to_owned(), None),
        Vector::FinalNorm => ("output_norm.weight".to_owned(), None),
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
