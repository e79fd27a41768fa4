//! A part of a model that a request computes with: its first layers, and of each of them the first heads and
//! columns (STI, §4.2: submodels of n layers and m slices of each). Devices hold their shards as before.

use crate::{
    LowerError, Program,
    holdings::Cuts,
    links, lower,
    lower::Lowering,
    operators::{AddNorm, Axes, Axis, CutSide, Operator, OperatorGraph, OperatorId},
    pieces,
};
use galaxy_common::{BatchShape, Layout, Plan, Rank, Span, WeightFormat, plan::Phase};
use galaxy_model::{Formats, ModelSpec, NormPlace};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How much of a model a request computes with.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Selection {
    /// How many layers, from the first on; what stands on top of the layers follows the last of these.
    pub layers: u32,
    /// How many query heads of each layer, from the first on.
    pub heads: u32,
    /// How many columns of the intermediate size of each MLP, from the first on.
    pub columns: u32,
}

impl Selection {
    /// All of a model.
    pub fn all(spec: &ModelSpec) -> Self {
        Self { layers: spec.layers, heads: spec.heads, columns: spec.intermediate }
    }

    /// The description of the selected part of a model.
    fn model(self, spec: &ModelSpec) -> ModelSpec {
        let Self { layers, heads, columns } = self;
        let kv_heads = heads / spec.group().max(1);
        ModelSpec { layers, heads, kv_heads, intermediate: columns, ..spec.clone() }
    }

    /// The plan by which devices compute the selected part.
    fn plan(self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        let (layers, heads) = (Span::first(self.layers), Span::first(self.heads));
        plan.modes.iter_mut().for_each(|modes| modes.layers = modes.layers.intersect(layers));
        plan.modes.retain(|modes| !modes.layers.is_empty());
        for device in &mut plan.ring {
            for part in [&mut device.prefill, &mut device.decode] {
                for block in &mut part.blocks {
                    block.layers = block.layers.intersect(layers);
                    block.heads = block.heads.intersect(heads);
                    block.columns = block.columns.intersect(Span::first(self.columns));
                }
                part.blocks.retain(|block| !block.layers.is_empty());
            }
        }
        plan
    }

    /// Why a model and a plan have no such part; none where they have.
    fn wrong(self, spec: &ModelSpec, formats: &Formats, plan: &Plan) -> Option<&'static str> {
        let Self { layers, heads, columns } = self;
        let all = Self::all(spec);
        let wide = heads != all.heads || columns != all.columns;
        let cuts = Cuts::of(spec, formats);
        let whole = |own: u32, all: u32, cut| own == all || own.is_multiple_of(cut);
        let streams = plan.ring.iter().any(|device| device.streaming.is_some());
        Some(if layers == 0 || heads == 0 || columns == 0 {
            "it has no layers, heads or columns"
        } else if layers > all.layers || heads > all.heads || columns > all.columns {
            "the model has fewer layers, heads or columns"
        } else if !heads.is_multiple_of(spec.group().max(1)) {
            "heads that share keys and values go together"
        } else if heads != all.heads && !spec.head_width.is_multiple_of(WeightFormat::PANEL) {
            "heads of this width are computed all or none: select layers or columns"
        } else if !whole(heads, all.heads, cuts.heads) || !whole(columns, all.columns, cuts.columns)
        {
            "weights in blocks are cut between them alone: select a multiple of 32 columns"
        } else if wide && streams {
            "pieces of weights on disk are read whole: select layers alone"
        } else if layers != all.layers && plan.layout == Layout::Stages {
            "a pipeline runs all its layers"
        } else {
            return None;
        })
    }
}

impl OperatorGraph {
    /// The graph of the selected part, with the same ids: what is not selected stays, and is not asked for.
    fn select(&self, spec: &ModelSpec, selection: Selection) -> Self {
        let mut graph = self.clone();
        let count = |axis: Axis, all: u32| match axis {
            Axis::Heads => selection.heads,
            Axis::Columns => selection.columns,
            Axis::Tokens => all,
        };
        let kv_heads = selection.heads / spec.group().max(1);
        let mut counts = vec![0; graph.operators.len()];
        for (operator, selected) in graph.operators.iter_mut().zip(&mut counts) {
            let (value, columns) = match operator {
                Operator::Product(product) => {
                    let Some(cut) = &mut product.cut else { continue };
                    let all = cut.count.max(1);
                    cut.count = count(cut.axis, all);
                    *selected = cut.count;
                    let (inputs, outputs) = product.shape;
                    product.shape = match (cut.side, &product.heads) {
                        (CutSide::Inputs, _) => (inputs / all * cut.count, outputs),
                        (_, Some(heads)) => (inputs, (cut.count + 2 * kv_heads) * heads.width),
                        (_, None) => (inputs, outputs / all * cut.count),
                    };
                    let gates = if product.gated { 2 } else { 1 };
                    (product.output, product.shape.1 / gates)
                }
                Operator::Attention(attention) => {
                    attention.heads = selection.heads;
                    (attention.output, selection.heads * attention.width)
                }
                _ => continue,
            };
            graph.values[value.0 as usize].axes = Axes::Text { columns };
        }
        for operator in &mut graph.operators {
            if let Operator::Add(add) = operator {
                add.sums.iter_mut().for_each(|(id, shares)| *shares = counts[id.0 as usize]);
            }
        }
        if selection.layers < spec.layers {
            graph.end_after(selection.layers as usize, spec.norm_place);
        }
        graph
    }

    /// Puts what stands on top of the layers behind the first so many of them.
    fn end_after(&mut self, layers: usize, place: NormPlace) {
        let Some(&top) = self.layers.last() else { return };
        self.layers.truncate(layers);
        let Some(last) = self.layers.last_mut() else { return };
        let made = |of: &[Operator], id: OperatorId| of[id.0 as usize].operate().makes();
        if place == NormPlace::Pre {
            // The norm after the last layer of all follows this one instead of the next layer's.
            let norm = top.after_mlp.norm;
            let after = AddNorm { norm, ..last.after_mlp };
            if last.after_attention == last.after_mlp {
                last.after_attention = after;
            }
            last.after_mlp = after;
            let residual = made(&self.operators, after.add);
            if let Operator::Norm(norm) = &mut self.operators[norm.0 as usize] {
                norm.input = residual;
            }
            return;
        }
        let (before, rows) = (self.last, made(&self.operators, last.after_mlp.norm));
        self.last = rows;
        for operator in &mut self.operators {
            match operator {
                Operator::Product(product) if product.input == before => product.input = rows,
                _ => {}
            }
        }
    }
}

/// A part of a model under a plan, ready to be lowered.
#[derive(Clone, Debug)]
pub struct Selected {
    /// The description of the part.
    pub spec: ModelSpec,
    /// The plan by which devices compute the part.
    pub plan: Arc<Plan>,
    /// The operators of the part, by the ids of the whole model's.
    pub graph: Arc<OperatorGraph>,
    /// The graph, formats and plan of the whole model, which devices hold.
    whole: (Arc<OperatorGraph>, Formats, Arc<Plan>),
}

impl Selected {
    /// A part of a model in these formats, under a plan of all of it.
    ///
    /// # Errors
    /// When there is no such part, or devices would exchange rows that are not linked under the plan.
    pub fn new(
        spec: &ModelSpec,
        formats: &Formats,
        plan: &Arc<Plan>,
        selection: Selection,
    ) -> Result<Self, LowerError> {
        if let Some(why) = selection.wrong(spec, formats, plan) {
            return Err(LowerError::Selection { why });
        }
        let whole = Arc::new(OperatorGraph::of(spec));
        let part = Arc::new(selection.plan(plan));
        let linked = links(plan);
        if links(&part).iter().any(|link| !linked.contains(link)) {
            let why = "a device would have nothing to do, and its neighbours are not linked";
            return Err(LowerError::Selection { why });
        }
        Ok(Self {
            spec: selection.model(spec),
            plan: part,
            graph: Arc::new(whole.select(spec, selection)),
            whole: (whole, formats.clone(), plan.clone()),
        })
    }

    /// One program for each rank of the plan. Operations name shares of the whole model, by its ids.
    ///
    /// # Errors
    /// As [`lower()`]; when rows are to be cached of fewer heads than devices cache.
    pub fn lower(&self, phase: Phase, shape: &BatchShape) -> Result<Vec<Program>, LowerError> {
        let (whole, formats, held) = &self.whole;
        let heads = |graph: &OperatorGraph| graph.attentions().next().map(|(_, of)| of.heads);
        let kept = shape.segments().iter().any(|segment| segment.cached);
        if kept && heads(whole) != heads(&self.graph) {
            let why = "devices keep keys and values of all their heads: select all heads";
            return Err(LowerError::Selection { why });
        }
        let pieces = |rank: Rank| pieces::of_device(whole, formats, &held.ring[rank.index()]);
        let Self { graph, spec, plan, .. } = self;
        lower::of_graph(Lowering { graph, spec, plan, phase, shape }, &pieces)
    }
}
