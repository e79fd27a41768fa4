//! Reading vectors, and rows of tables.

use super::ModelDir;
use crate::{
    blocks::round,
    error::ModelError,
    matrix::interleaved_rows,
    spec::*,
    tensor::{Matrix, Table, Vector},
    widen::widen,
};
use galaxy_common::WeightFormat;

/// The most bytes of table rows that are read into a buffer on the stack.
const FEW_BYTES: usize = 16 << 10;

/// A run of values of a tensor: a vector, or one row of a table.
pub(crate) struct Run {
    pub(super) name: String,
    shard: usize,
    pub(crate) format: WeightFormat,
    offset: u64,
    pub(crate) count: u32,
    paired: u64,
    /// The format to which rows of a table are rounded as they are read, if they are.
    rounded: Option<WeightFormat>,
}

impl Run {
    /// Bytes that so many values take in the file.
    fn bytes(&self, values: u32) -> u64 {
        self.format.bytes(1, values.into())
    }

    fn widen(&self, bytes: &[u8], out: &mut [f32]) {
        widen(self.format, bytes, out);
        if let Some(format) = self.rounded {
            round(format, out);
        }
    }
}

impl ModelDir {
    /// Reads a whole vector, widened to f32.
    ///
    /// # Errors
    /// When the model has no such vector, or the file cannot be read.
    pub fn vector(&self, which: Vector) -> Result<Vec<f32>, ModelError> {
        let run = self.run(which)?;
        let mut out = vec![0.0; run.count as usize];
        let mut bytes = vec![0; run.bytes(run.count) as usize];
        self.store.read_at(run.shard, &mut bytes, run.offset)?;
        run.widen(&bytes, &mut out);
        if run.paired > 0 {
            let width = (out.len() / run.paired as usize).max(1);
            for head in out.chunks_exact_mut(width) {
                let pairs = head.to_vec();
                for (at, value) in (0..).zip(head) {
                    *value = pairs[interleaved_rows(at, width as u64) as usize];
                }
            }
        }
        if self.spec.norms_from_one && which.is_norm() {
            out.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(out)
    }

    /// Reads rows of a table, widened to f32. Rows that follow one another are read in one go.
    ///
    /// # Shapes
    /// `out` is `[ids.len(), hidden]`, row-major.
    ///
    /// # Errors
    /// When there is no such table or row, `out` has another size, or the file cannot be read.
    pub fn embedding_rows(
        &self,
        table: Table,
        ids: &[u32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let hidden = self.spec.hidden as usize;
        let known = &self.tables[usize::from(table == Table::Position)];
        let (name, rows, run) = match known.get() {
            Some(known) => known,
            None => {
                let found = self.table(table)?;
                known.get_or_init(|| found)
            }
        };
        let (name, rows) = (|| name.clone(), *rows);
        let (need, have) = (ids.len().saturating_mul(hidden) as u64, out.len() as u64);
        if need != have {
            return Err(ModelError::Area { tensor: name(), need, have });
        }
        if let Some(&id) = ids.iter().find(|&&id| id >= rows) {
            return Err(ModelError::Row { tensor: name(), id, rows });
        }
        let row_bytes = run.bytes(run.count) as usize;
        // At least one row, and otherwise at most 4 MiB.
        let most = ((4 << 20) / row_bytes).max(1);
        let (mut few, mut many) = ([0; FEW_BYTES], Vec::new());
        let mut done = 0;
        while done < ids.len() {
            let first = ids[done];
            let following = ids[done..].iter().zip(0..most as u32);
            let count = following.take_while(|&(&id, i)| id - first.min(id) == i && id >= first);
            let count = count.count();
            let bytes = match few.get_mut(..count * row_bytes) {
                Some(bytes) => bytes,
                None => {
                    many.resize(count * row_bytes, 0);
                    &mut many[..]
                }
            };
            let at = run.offset + u64::from(first) * row_bytes as u64;
            self.store.read_at(run.shard, bytes, at)?;
            run.widen(bytes, &mut out[done * hidden..][..count * hidden]);
            done += count;
        }
        Ok(())
    }

    pub(crate) fn table(&self, table: Table) -> Result<(String, u32, Run), ModelError> {
        let absent = |what: &str| ModelError::NotInModel { what: what.to_owned() };
        let (pattern, rows) = match (table, &self.spec.positions) {
            (Table::Word, _) if self.spec.patches.is_some() => {
                return Err(absent("token embedding table"));
            }
            (Table::Word, _) => (self.token_embedding, self.spec.vocabulary),
            (Table::Position, Positions::Learned { rows, .. }) => {
                (self.family.names.position, *rows)
            }
            (Table::Position, Positions::Rotary { .. }) => {
                return Err(absent("table of positions"));
            }
        };
        let name = self.full(pattern, 0, ".weight");
        let count = self.spec.hidden;
        // A tensor that is no module's weight has a batch of one before its rows.
        let shape = [1, rows.into(), count.into()];
        let bare = usize::from(!pattern.ends_with('!'));
        let (tensor, format) = self.store.tensor(&name, &shape[bare..])?;
        let (shard, offset) = (tensor.shard, tensor.offset);
        let rounded = self.embedding_format().filter(|_| table == Table::Word);
        Ok((name.clone(), rows, Run { name, shard, format, offset, count, paired: 0, rounded }))
    }

    pub(super) fn run(&self, which: Vector) -> Result<Run, ModelError> {
        use Vector::*;
        let absent = || ModelError::NotInModel { what: format!("{which:?}") };
        let count = which.width(&self.spec).ok_or_else(absent)?;
        let names = &self.family.names;
        let (weight, bias) = ([".weight", ".gamma"], [".bias", ".beta"]);
        let (pattern, layer, endings) = match which {
            QueryBias(l) => (names.query, l, bias),
            KeyBias(l) => (names.key, l, bias),
            ValueBias(l) => (names.value, l, bias),
            AttentionOutputBias(l) => (names.attention_output, l, bias),
            UpBias(l) => (names.up, l, bias),
            GateBias(l) => (names.gate, l, bias),
            DownBias(l) => (names.down, l, bias),
            QueryHeadNorm(l) => (names.query_norm, l, weight),
            KeyHeadNorm(l) => (names.key_norm, l, weight),
            AttentionNorm(l) => (names.attention_norm, l, weight),
            AttentionNormBias(l) => (names.attention_norm, l, bias),
            MlpNorm(l) => (names.mlp_norm, l, weight),
            MlpNormBias(l) => (names.mlp_norm, l, bias),
            AttentionSumNorm(l) => (names.attention_sum_norm, l, weight),
            MlpSumNorm(l) => (names.mlp_sum_norm, l, weight),
            PatchBias => (names.patch, 0, bias),
            ClassRow => (names.class_row, 0, weight),
            EmbeddingNorm => (names.embedding_norm, 0, weight),
            EmbeddingNormBias => (names.embedding_norm, 0, bias),
            FinalNorm => (names.final_norm, 0, weight),
            FinalNormBias => (names.final_norm, 0, bias),
            TokenTypes => (names.token_type, 0, weight),
            RelativeBias => (names.relative_bias, 0, weight),
            ClassDenseBias => (names.class_dense, 0, bias),
            ClassNorm => (names.class_norm, 0, weight),
            ClassNormBias => (names.class_norm, 0, bias),
            ClassOutputBias => (names.class_output, 0, bias),
            LanguageBias => (names.language_head, 0, bias),
        };
        let of = match which {
            QueryBias(l) => Some(Matrix::Query(l)),
            KeyBias(l) => Some(Matrix::Key(l)),
            ValueBias(l) => Some(Matrix::Value(l)),
            GateBias(l) => Some(Matrix::Gate(l)),
            UpBias(l) => Some(Matrix::Up(l)),
            _ => None,
        };
        let (shape, before) = match (which, of) {
            (TokenTypes, _) => {
                let types = self.spec.token_types;
                (vec![types.into(), (count / types).into()], 0)
            }
            (ClassRow, _) => (vec![1, 1, count.into()], 0),
            (RelativeBias, _) => {
                let heads = self.spec.heads;
                (vec![(count / heads).into(), heads.into()], 0)
            }
            (_, Some(of)) => (vec![self.stored(of)], self.before(of)),
            (_, None) => (vec![count.into()], 0),
        };
        // Checkpoints that came from TensorFlow call a norm's weights gamma and beta.
        let modern = self.full(pattern, layer, endings[0]);
        let old = self.full(pattern, layer, endings[1]);
        let name = if !self.store.has(&modern) && self.store.has(&old) { old } else { modern };
        let (tensor, format) = self.store.tensor(&name, &shape)?;
        let skip = format.bytes(1, before);
        let (shard, offset) = (tensor.shard, tensor.offset + skip);
        let paired = tensor.paired;
        Ok(Run { name, shard, format, offset, count, paired, rounded: None })
    }
}
