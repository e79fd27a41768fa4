//! The operator graph of a transformer, from its description.

use super::{
    Add, AddNorm, Attention, Axes, Axis, ClassOperators, Cut, CutSide, Embed, HeadNorms, Heads,
    LayerOperators, Norm, Operator, OperatorGraph, OperatorId, Product, Rotary, Value, ValueId,
    Weight, WeightId,
};
use galaxy_common::Kernel;
use galaxy_model::{HeadSpec, Matrix, ModelSpec, NormPlace, Positions, Rotation, Vector};
use smallvec::{SmallVec, smallvec};
use std::{collections::HashMap, sync::Arc};

impl OperatorGraph {
    /// The graph of a model of this description.
    pub fn of(spec: &ModelSpec) -> Self {
        Build::new(spec).graph()
    }
}

struct Build<'a> {
    spec: &'a ModelSpec,
    values: Vec<Value>,
    operators: Vec<Operator>,
    weights: Vec<Weight>,
    widths: Vec<u32>,
    ids: HashMap<Weight, WeightId>,
    inputs: Vec<ValueId>,
    /// The layer that is being built.
    layer: u32,
}

/// The values that go from block to block.
#[derive(Clone, Copy)]
struct Carried {
    residual: ValueId,
    /// The rows that a block reads; `norm`: what computes them, if they are not the residual itself.
    rows: ValueId,
    norm: Option<OperatorId>,
}

impl<'a> Build<'a> {
    fn new(spec: &'a ModelSpec) -> Self {
        Self {
            spec,
            values: Vec::new(),
            operators: Vec::new(),
            weights: Vec::new(),
            widths: Vec::new(),
            ids: HashMap::new(),
            inputs: Vec::new(),
            layer: 0,
        }
    }

    fn value(&mut self, name: &'static str, columns: u32) -> ValueId {
        let axes = Axes::Text { columns };
        self.values.push(Value { name, layer: self.layer, axes });
        ValueId(self.values.len() as u32 - 1)
    }

    fn operator(&mut self, operator: Operator) -> OperatorId {
        self.operators.push(operator);
        OperatorId(self.operators.len() as u32 - 1)
    }

    fn makes(&self, operator: OperatorId) -> ValueId {
        self.operators[operator.0 as usize].operate().makes()
    }

    fn weight(&mut self, weight: Weight) -> WeightId {
        let next = WeightId(self.weights.len() as u32);
        let id = *self.ids.entry(weight).or_insert(next);
        if id == next {
            self.weights.push(weight);
            self.widths.push(match weight {
                Weight::Vector(vector) => vector.width(self.spec).unwrap_or(0),
                Weight::Matrix(_) => 0,
            });
        }
        id
    }

    fn vector(&mut self, vector: Vector) -> WeightId {
        self.weight(Weight::Vector(vector))
    }

    /// The id of a vector, where the model has it.
    fn vector_if(&mut self, vector: Vector) -> Option<WeightId> {
        vector.width(self.spec).map(|_| self.vector(vector))
    }

    fn graph(mut self) -> OperatorGraph {
        let spec = self.spec;
        let embed = self.embed();
        let embedded = self.makes(embed);
        let mut carried = Carried { residual: embedded, rows: embedded, norm: None };
        if spec.norm_place == NormPlace::Pre && (spec.first_norm || spec.layers == 0) {
            let vectors = match spec.layers {
                0 => [Vector::FinalNorm, Vector::FinalNormBias],
                _ => [Vector::AttentionNorm(0), Vector::AttentionNormBias(0)],
            };
            (carried.rows, carried.norm) = self.norm(embedded, vectors);
        }
        let rotary = |positions: Option<&Positions>| positions.and_then(Rotary::of).map(Arc::new);
        let usual = rotary(Some(&spec.positions));
        let local = rotary(spec.local_positions.as_ref());
        let mut layers = Vec::with_capacity(spec.layers as usize);
        for layer in 0..spec.layers {
            self.layer = layer;
            let rotary = match spec.kind(layer).rotation {
                Rotation::Usual => usual.as_ref(),
                Rotation::Local => local.as_ref(),
                Rotation::None => None,
            };
            layers.push(self.transformer_layer(layer, &mut carried, rotary));
        }
        self.layer = spec.layers;
        let last = carried.rows;
        let (language, classes) = self.head(last);
        let Self { values, inputs, operators, weights, widths, ids, .. } = self;
        OperatorGraph {
            values,
            inputs,
            operators,
            weights,
            widths,
            layers,
            embed,
            entry: Vec::new(),
            last,
            language,
            classes,
            ids,
        }
    }

    fn embed(&mut self) -> OperatorId {
        let spec = self.spec;
        let patches = spec.patches.map(|patches| {
            let pixels = self.value("image patches", patches.values());
            self.inputs.push(pixels);
            let biases = self.vector_if(Vector::PatchBias).into_iter().collect();
            let product = self.whole(pixels, Matrix::Patch, spec.hidden, biases);
            (patches, product, self.vector(Vector::ClassRow))
        });
        let positions = match spec.positions {
            Positions::Learned { offset, .. } => Some(offset),
            Positions::Rotary { .. } => None,
        };
        let types = self.vector_if(Vector::TokenTypes).map(|table| (table, spec.token_types));
        let output = self.value("embedded rows", spec.hidden);
        let norm = spec.embedding_norm.then(|| {
            let vectors = [Vector::EmbeddingNorm, Vector::EmbeddingNormBias];
            self.norm_of(output, output, vectors)
        });
        let width = spec.hidden;
        let projected = patches.map(|(_, product, _)| self.makes(product));
        let scale = spec.embedding_scale;
        let embed = Embed { projected, output, width, patches, scale, positions, types, norm };
        self.operator(Operator::Embed(embed))
    }

    fn norm_of(&mut self, input: ValueId, output: ValueId, [weight, bias]: [Vector; 2]) -> Norm {
        let (weight, bias) = (self.vector(weight), self.vector_if(bias));
        self.norm_by(input, output, weight, bias)
    }

    fn norm_by(
        &self,
        input: ValueId,
        output: ValueId,
        weight: WeightId,
        bias: Option<WeightId>,
    ) -> Norm {
        let (width, kind, epsilon) = (self.spec.hidden, self.spec.norm, self.spec.norm_epsilon);
        Norm { input, output, width, kind, epsilon, weight, bias }
    }

    fn norm(&mut self, input: ValueId, vectors: [Vector; 2]) -> (ValueId, Option<OperatorId>) {
        let output = self.value("normed rows", self.spec.hidden);
        let norm = self.norm_of(input, output, vectors);
        (output, Some(self.operator(Operator::Norm(norm))))
    }

    /// A layer: both blocks one after the other, or as a parallel residual.
    fn transformer_layer(
        &mut self,
        layer: u32,
        carried: &mut Carried,
        rotary: Option<&Arc<Rotary>>,
    ) -> LayerOperators {
        let spec = self.spec;
        let norm = carried.norm;
        let (qkv, projected) = self.projection(layer, carried.rows, rotary);
        let (attention, context) = self.attention(layer, qkv, projected);
        let rows_of_mlp = carried.rows;
        let output = self.sum(
            (context, Matrix::AttentionOutput(layer)),
            (Axis::Heads, spec.heads),
            Kernel::AttentionOutput,
        );
        let bias = Vector::AttentionOutputBias(layer);
        let after_attention = match spec.parallel {
            true => None,
            false => {
                let norms = (Vector::AttentionSumNorm(layer), self.norm_after_attention(layer));
                Some(self.add_norm(carried, &[(output, bias)], norms))
            }
        };
        let rows_of_mlp = if spec.parallel { rows_of_mlp } else { carried.rows };
        let (up, inner) = self.up(layer, rows_of_mlp);
        let down = self.sum(
            (inner, Matrix::Down(layer)),
            (Axis::Columns, spec.intermediate),
            Kernel::Down,
        );
        let down_bias = (down, Vector::DownBias(layer));
        let after = (Vector::MlpSumNorm(layer), self.norm_after_mlp(layer));
        let after_mlp = match spec.parallel {
            true => self.add_norm(carried, &[(output, bias), down_bias], after),
            false => self.add_norm(carried, &[down_bias], after),
        };
        let after_attention = after_attention.unwrap_or(after_mlp);
        LayerOperators { norm, qkv, attention, output, up, down, after_attention, after_mlp }
    }

    fn norm_after_attention(&self, layer: u32) -> [Vector; 2] {
        match self.spec.norm_place {
            NormPlace::Post => [Vector::AttentionNorm(layer), Vector::AttentionNormBias(layer)],
            NormPlace::Pre => [Vector::MlpNorm(layer), Vector::MlpNormBias(layer)],
        }
    }

    fn norm_after_mlp(&self, layer: u32) -> [Vector; 2] {
        match self.spec.norm_place {
            NormPlace::Post => [Vector::MlpNorm(layer), Vector::MlpNormBias(layer)],
            NormPlace::Pre if layer + 1 < self.spec.layers => {
                [Vector::AttentionNorm(layer + 1), Vector::AttentionNormBias(layer + 1)]
            }
            NormPlace::Pre => [Vector::FinalNorm, Vector::FinalNormBias],
        }
    }

    /// The product that computes queries, keys and values.
    fn projection(
        &mut self,
        layer: u32,
        rows: ValueId,
        rotary: Option<&Arc<Rotary>>,
    ) -> (OperatorId, ValueId) {
        let spec = self.spec;
        let columns = (spec.heads + 2 * spec.kv_heads) * spec.head_width;
        let output = self.value("queries, keys and values", columns);
        let matrices = [Matrix::Query(layer), Matrix::Key(layer), Matrix::Value(layer)];
        let biases = [Vector::QueryBias(layer), Vector::KeyBias(layer), Vector::ValueBias(layer)];
        let query = self.vector_if(Vector::QueryHeadNorm(layer));
        let key = self.vector_if(Vector::KeyHeadNorm(layer));
        let norms = query.zip(key);
        let epsilon = spec.norm_epsilon;
        let heads = Heads {
            group: spec.group(),
            width: spec.head_width,
            norms: norms.map(|(query, key)| HeadNorms { query, key, epsilon }),
            rotary: rotary.cloned(),
        };
        let product = Product {
            input: rows,
            output,
            matrices: matrices.map(|matrix| self.weight(Weight::Matrix(matrix))).into(),
            shape: (spec.hidden, columns),
            biases: biases.into_iter().filter_map(|bias| self.vector_if(bias)).collect(),
            cut: Some(Cut { axis: Axis::Heads, side: CutSide::Outputs, count: spec.heads }),
            gated: false,
            activation: None,
            cap: None,
            heads: Some(heads),
            kernel: Kernel::Qkv,
        };
        (self.operator(Operator::Product(product)), output)
    }

    fn attention(
        &mut self,
        layer: u32,
        projection: OperatorId,
        input: ValueId,
    ) -> (OperatorId, ValueId) {
        let spec = self.spec;
        let output = self.value("context", spec.heads * spec.head_width);
        let table = self.vector_if(Vector::RelativeBias);
        let (behind, ahead) = spec.sees(layer);
        let attention = Attention {
            input,
            output,
            projection,
            layer,
            heads: spec.heads,
            group: spec.group(),
            width: spec.head_width,
            scale: spec.score_scale(layer),
            cap: spec.score_cap,
            window_before: behind,
            window_after: ahead,
            relative_bias: spec.relative_bias.zip(table),
        };
        (self.operator(Operator::Attention(attention)), output)
    }

    /// The first product of an MLP.
    fn up(&mut self, layer: u32, rows: ValueId) -> (OperatorId, ValueId) {
        let spec = self.spec;
        let output = self.value("intermediate rows", spec.intermediate);
        let (gate, up) = (Matrix::Gate(layer), Matrix::Up(layer));
        let matrices = if spec.gated { vec![gate, up] } else { vec![up] };
        let biases = [Vector::GateBias(layer), Vector::UpBias(layer)];
        let outputs = spec.intermediate * matrices.len() as u32;
        let matrices = matrices.into_iter().map(|matrix| self.weight(Weight::Matrix(matrix)));
        let product = Product {
            input: rows,
            output,
            matrices: matrices.collect(),
            shape: (spec.hidden, outputs),
            biases: biases.into_iter().filter_map(|bias| self.vector_if(bias)).collect(),
            cut: Some(Cut {
                axis: Axis::Columns,
                side: CutSide::Outputs,
                count: spec.intermediate,
            }),
            gated: spec.gated,
            activation: Some(spec.activation),
            cap: None,
            heads: None,
            kernel: Kernel::Up,
        };
        (self.operator(Operator::Product(product)), output)
    }

    /// A product that is cut by its inputs, so that devices have terms of its sum.
    fn sum(
        &mut self,
        (input, matrix): (ValueId, Matrix),
        (axis, count): (Axis, u32),
        kernel: Kernel,
    ) -> OperatorId {
        let spec = self.spec;
        let output = self.value("sums", spec.hidden);
        let inputs = self.values[input.0 as usize].columns();
        let product = Product {
            input,
            output,
            matrices: smallvec![self.weight(Weight::Matrix(matrix))],
            shape: (inputs, spec.hidden),
            biases: SmallVec::new(),
            cut: Some(Cut { axis, side: CutSide::Inputs, count }),
            gated: false,
            activation: None,
            cap: None,
            heads: None,
            kernel,
        };
        self.operator(Operator::Product(product))
    }

    /// The residual addition of sums, with the norm of these where there is one, and the norm after it.
    fn add_norm(
        &mut self,
        carried: &mut Carried,
        sums: &[(OperatorId, Vector)],
        (sum_norm, norm): (Vector, [Vector; 2]),
    ) -> AddNorm {
        let output = self.value("residual", self.spec.hidden);
        let product = |id: OperatorId| match &self.operators[id.0 as usize] {
            Operator::Product(product) => (product.output, product.cut),
            _ => unreachable!("sums are of products"),
        };
        let made: SmallVec<[_; 2]> = sums.iter().map(|(id, _)| (*id, product(*id))).collect();
        let shares = |cut: Option<Cut>| cut.map_or(1, |cut| cut.count);
        let sum_norm = self.vector_if(sum_norm);
        let add = Add {
            residual: carried.residual,
            output,
            width: self.spec.hidden,
            sums: made.iter().map(|(id, (_, cut))| (*id, shares(*cut))).collect(),
            terms: made.iter().map(|(_, (value, _))| *value).collect(),
            biases: sums.iter().filter_map(|(_, bias)| self.vector_if(*bias)).collect(),
            norm: sum_norm.map(|weight| self.norm_by(output, output, weight, None)),
        };
        let add = self.operator(Operator::Add(add));
        let (rows, id) = self.norm(output, norm);
        let norm = id.expect("a norm was made");
        *carried = match self.spec.norm_place {
            NormPlace::Pre => Carried { residual: output, rows, norm: Some(norm) },
            NormPlace::Post => Carried { residual: rows, rows, norm: None },
        };
        AddNorm { add, norm }
    }

    /// A product that each device holds whole.
    fn whole(
        &mut self,
        input: ValueId,
        matrix: Matrix,
        outputs: u32,
        biases: SmallVec<[WeightId; 3]>,
    ) -> OperatorId {
        let inputs = self.values[input.0 as usize].columns();
        let output = self.value("rows", outputs);
        let product = Product {
            input,
            output,
            matrices: smallvec![self.weight(Weight::Matrix(matrix))],
            shape: (inputs, outputs),
            biases,
            cut: None,
            gated: false,
            activation: None,
            cap: None,
            heads: None,
            kernel: Kernel::Language,
        };
        self.operator(Operator::Product(product))
    }

    fn head(&mut self, last: ValueId) -> (Option<OperatorId>, Option<ClassOperators>) {
        let spec = self.spec;
        match &spec.head {
            HeadSpec::None => (None, None),
            HeadSpec::Language { .. } => {
                let output = self.value("logits", spec.vocabulary);
                let axis = Axis::Tokens;
                let product = Product {
                    input: last,
                    output,
                    matrices: smallvec![self.weight(Weight::Matrix(Matrix::LanguageHead))],
                    shape: (spec.hidden, spec.vocabulary),
                    biases: self.vector_if(Vector::LanguageBias).into_iter().collect(),
                    cut: Some(Cut { axis, side: CutSide::Outputs, count: spec.vocabulary }),
                    gated: false,
                    activation: None,
                    cap: spec.logit_cap,
                    heads: None,
                    kernel: Kernel::Language,
                };
                (Some(self.operator(Operator::Product(product))), None)
            }
            HeadSpec::Classes(head) => {
                let mut rows = last;
                let dense = head.dense.map(|activation| {
                    let biases = self.vector_if(Vector::ClassDenseBias).into_iter().collect();
                    let id = self.whole(rows, Matrix::ClassDense, spec.hidden, biases);
                    rows = self.makes(id);
                    (id, Some(activation))
                });
                let norm = head
                    .norm
                    .then(|| self.norm_of(rows, rows, [Vector::ClassNorm, Vector::ClassNormBias]));
                let biases = self.vector_if(Vector::ClassOutputBias).into_iter().collect();
                let output = self.whole(rows, Matrix::ClassOutput, head.labels, biases);
                (None, Some(ClassOperators { dense, norm, output, labels: head.labels }))
            }
        }
    }
}
