//! Attention: rows see others of their text.

use super::{
    Axes, Axis, Cut, CutSide, Operate, OperatorId, Reach, Sizes, ValueId, WeightId, Window, Work,
    product::shared,
};
use galaxy_common::{Head, Row, Share, Span};
use galaxy_model::RelativeBias;
use smallvec::SmallVec;

/// Computes softmax(queries x keys' * scale) x values, head by head.
#[derive(Clone, PartialEq, Debug)]
pub struct Attention {
    /// Queries, keys and values, side by side in a row.
    pub input: ValueId,
    /// The value that it computes.
    pub output: ValueId,
    /// The product that computes the value that it reads.
    pub projection: OperatorId,
    /// The layer whose keys and values these are: its number in the KV cache.
    pub layer: u32,
    /// How many query heads it has.
    pub heads: u32,
    /// Query heads that share a key-value head.
    pub group: u32,
    /// Columns of a head.
    pub width: u32,
    /// What scores are multiplied by.
    pub scale: f32,
    /// The soft cap c of scores, if there is one: a scaled score s becomes c tanh(s / c).
    pub cap: Option<f32>,
    /// How many earlier rows a row sees; `None` for all.
    pub window_before: Option<u32>,
    /// How many later rows a row sees; `None` for all, 0 in causal attention.
    pub window_after: Option<u32>,
    /// The relative position bias that is added to scores, and its table; `None` without one.
    pub relative_bias: Option<(RelativeBias, WeightId)>,
}

impl Attention {
    /// The key-value heads that these query heads use.
    pub fn kv_heads(&self, heads: Span<Head>) -> Span<Head> {
        shared(self.group, heads)
    }

    /// The rows of a text that the rows `own` see.
    pub fn sees(&self, own: Span<Row>, text: Span<Row>) -> Span<Row> {
        self.reach(1).of(own, text, text)
    }
}

impl Operate for Attention {
    fn name(&self) -> String {
        match (self.window_before, self.window_after, self.relative_bias) {
            (_, _, Some((distances, _))) => format!("attention (with {distances:?})"),
            (Some(behind), ..) => format!("attention (of {behind} rows before)"),
            (None, Some(0), None) => "attention (causal)".to_owned(),
            (None, Some(ahead), None) => format!("attention (of {ahead} rows after)"),
            (None, None, None) => "attention".to_owned(),
        }
    }
    fn reads(&self) -> SmallVec<[ValueId; 2]> {
        // Queries, then keys and values.
        SmallVec::from_slice(&[self.input; 2])
    }
    fn makes(&self) -> ValueId {
        self.output
    }
    fn weights(&self) -> SmallVec<[WeightId; 8]> {
        self.relative_bias.iter().map(|(_, table)| *table).collect()
    }
    fn shape(&self, read: &[Axes]) -> Result<Axes, String> {
        let queries = self.heads * self.width;
        let keys = 2 * self.kv_heads(Span::first(self.heads)).len() * self.width;
        let all = Axes::Text { columns: queries + keys };
        match read.iter().all(|axes| *axes == all) {
            true => Ok(Axes::Text { columns: queries }),
            false => Err(format!("{queries} columns of queries and {keys} of keys, not {read:?}")),
        }
    }
    fn cut(&self) -> Option<Cut> {
        Some(Cut { axis: Axis::Heads, side: CutSide::Outputs, count: self.heads })
    }
    fn share_columns(&self, share: Span<Share>) -> Option<(u32, u32)> {
        let columns = share.len() * self.width;
        Some((columns, columns))
    }
    fn reach(&self, at: usize) -> Reach {
        // As far as any text goes.
        let far = |rows: Option<u32>| rows.unwrap_or(u32::MAX / 4).min(u32::MAX / 4);
        match (at, self.window_before, self.window_after) {
            (0, ..) => Reach::Same,
            (_, None, Some(0)) => Reach::Before,
            (_, None, None) => Reach::All,
            (_, behind, ahead) => {
                let (before, after) = (far(behind), far(ahead));
                let kernel = before + 1 + after;
                Reach::Window(Window { kernel, dilation: 1, stride: 1, before, after })
            }
        }
    }
    fn work(&self, sizes: Sizes) -> Work {
        // Queries times keys, and their weights times values.
        let operations = 4.0 * sizes.pairs * f64::from(sizes.outputs);
        Work { operations, ..Work::default() }
    }
}
