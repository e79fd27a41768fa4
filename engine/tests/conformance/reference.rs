//! Every operation in f64, by plain loops, from what `OpKind` documents and straight from the files of a
//! model: it shares no code with the engines and their shards.

mod attention;

use galaxy_common::{BatchShape, DevicePlan, Kernel, Row, Span, WireType};
use galaxy_engine::compute::{Binding, Inputs};
use galaxy_graph::{
    lower::kv_span,
    operators::{OperatorGraph, OperatorId, Weight, WeightId},
    program::{Memory, OpKind, Operation, OutputKind, Program, Reduce, Region, TensorId},
};
use galaxy_model::{
    Activation, ClassActivation, HeadSpec, LAPLACE_DEVIATION, LAPLACE_MEAN, Matrix, ModelDir,
    ModelSpec, NormKind, Positions, Table, Vector,
};
use std::{collections::HashMap, ops::Range, sync::Arc};

/// Rows of values, one behind another.
#[derive(Clone, Debug)]
pub struct Rows {
    pub columns: usize,
    pub values: Vec<f64>,
}

impl Rows {
    fn iter(&self) -> impl Iterator<Item = &[f64]> {
        self.values.chunks_exact(self.columns)
    }
    fn count(&self) -> usize {
        self.values.len() / self.columns
    }
}

/// The values that an operation gives away, before they are rounded.
#[derive(Default)]
pub struct Given {
    /// The values that it exports or emits; none where it writes to the device.
    pub values: Vec<f64>,
    /// The measure of its errors: the largest sum of the sizes of the terms that a value is the sum of.
    pub scale: f64,
}

/// The weights that a device holds, and the values that it has computed.
pub struct Reference {
    dir: Arc<ModelDir>,
    graph: OperatorGraph,
    device: DevicePlan,
    matrices: HashMap<Matrix, Vec<f64>>,
    vectors: HashMap<Vector, Vec<f64>>,
    tensors: HashMap<TensorId, Vec<f64>>,
    scale: f64,
}

fn at<'a>(
    program: &Program,
    region: &'a Region,
) -> (usize, impl Iterator<Item = Range<usize>> + use<'a>) {
    let tensor = program.tensor(region.tensor);
    assert!(tensor.rows.contains(region.rows) && region.columns.end() <= tensor.width);
    let (first, width) = (tensor.rows.start(), tensor.width as usize);
    let ranges = region.rows.iter().map(move |row| {
        let start = (row - first) as usize * width;
        start + region.columns.start() as usize..start + region.columns.end() as usize
    });
    (tensor.rows.len() as usize * width, ranges)
}

fn positions(shape: &BatchShape, rows: Span<Row>) -> Vec<u32> {
    let of = |row: u32| {
        let (own, segment) = shape.placed().find(|(own, _)| own.has(row)).unwrap();
        segment.context_len + row - own.start()
    };
    rows.iter().map(of).collect()
}

/// The error function, by its series, or by the continued fraction of erfc where that converges faster.
fn erf(x: f64) -> f64 {
    if x.abs() < 2.5 {
        let (mut term, mut sum) = (x, x);
        for n in 1..60 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let z = x.abs();
    let fraction = (1..60).rev().fold(z, |f, n| z + f64::from(n) / 2.0 / f);
    (1.0 - (-z * z).exp() / (fraction * std::f64::consts::PI.sqrt())).copysign(x)
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt())),
        Activation::GeluTanh => {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            0.5 * x * (1.0 + (root * (x + 0.044715 * x * x * x)).tanh())
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Relu => x.max(0.0),
        Activation::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
        Activation::ClippedGelu => activate(Activation::Gelu, x).min(10.0),
        Activation::SquaredRelu => x.max(0.0).powi(2),
        Activation::Relu6 => x.clamp(0.0, 6.0),
        Activation::LeakyRelu => x.max(0.01 * x),
        Activation::HardSwish => x * (x + 3.0).clamp(0.0, 6.0) / 6.0,
        Activation::Mish => x * x.exp().ln_1p().tanh(),
        Activation::Laplace => {
            let x = (x - f64::from(LAPLACE_MEAN)) / f64::from(LAPLACE_DEVIATION);
            0.5 * (1.0 + erf(x / 2.0_f64.sqrt()))
        }
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Linear => x,
    }
}

impl Reference {
    pub fn new(dir: &Arc<ModelDir>, device: &DevicePlan) -> Self {
        let spec = dir.spec();
        let mut matrices = HashMap::new();
        for which in Matrix::all(spec) {
            let source = dir.matrix(which).unwrap();
            let (rows, columns) = (source.rows(), source.columns());
            let mut values = vec![0.0; rows as usize * columns as usize];
            source
                .read_f32((0..rows, 0..columns), &mut values, columns as usize, 0, &mut Vec::new())
                .unwrap();
            matrices.insert(which, values.into_iter().map(f64::from).collect());
        }
        let mut vectors = HashMap::new();
        for which in Vector::all(spec) {
            let values = dir.vector(which).unwrap();
            vectors.insert(which, values.into_iter().map(f64::from).collect());
        }
        Self {
            dir: dir.clone(),
            graph: OperatorGraph::of(spec),
            device: device.clone(),
            matrices,
            vectors,
            tensors: HashMap::new(),
            scale: 0.0,
        }
    }

    fn spec(&self) -> &ModelSpec {
        self.dir.spec()
    }

    /// Forgets what was computed.
    pub fn clear(&mut self) {
        self.tensors.clear();
    }

    /// The values of a region of a device tensor; not a number where nothing was written.
    pub fn read(&self, program: &Program, region: &Region) -> Rows {
        let (_, ranges) = at(program, region);
        let tensor = &self.tensors[&region.tensor];
        let values = ranges.flat_map(|range| &tensor[range]).copied().collect();
        Rows { columns: region.columns.len() as usize, values }
    }

    /// Writes a region of a device tensor: the engine's values, too, so that the error of one operation is no
    /// error of the next.
    pub fn write(
        &mut self,
        program: &Program,
        region: &Region,
        values: impl IntoIterator<Item = f64>,
    ) {
        let (size, ranges) = at(program, region);
        let tensor = self.tensors.entry(region.tensor).or_insert_with(|| vec![f64::NAN; size]);
        let mut values = values.into_iter();
        for range in ranges {
            tensor[range].fill_with(|| values.next().expect("enough values"));
        }
        assert!(values.next().is_none(), "too many values");
    }

    /// Runs an operation of the compute lane; `staged` is the tile that it reads.
    pub fn run(
        &mut self,
        program: &Program,
        operation: &Operation,
        binding: &Binding,
        staged: Option<&[u8]>,
    ) -> Given {
        self.scale = 0.0;
        let rows = |this: &Self, at: usize| this.read(program, &operation.reads[at]);
        let staged_columns = || {
            let staged = |r: &&Region| program.tensor(r.tensor).memory == Memory::Staging;
            operation.reads.iter().find(staged).expect("a staged tile").columns.len() as usize
        };
        let tile = || decode(program.wire, staged_columns(), staged.expect("a staged tile"));
        let mut values = Vec::new();
        let mut written = Vec::new();
        match operation.kind {
            OpKind::Embed(_) => written.push(self.embed(binding, operation.writes[0].rows)),
            OpKind::Rows(which) => {
                let rows = rows(self, 0);
                written.push(self.norm(which, &rows, &rows.values.clone()));
            }
            OpKind::Product { kernel, .. } => {
                let rows = rows(self, 0);
                let layer = operation.layer;
                let mut made = self.product(binding, operation, layer, kernel, &rows);
                if let Some(more) = operation.reads.get(1) {
                    let more = self.read(program, more).values;
                    assert_eq!(made.len(), more.len());
                    let most = more.iter().fold(0.0_f64, |most, v| most.max(v.abs()));
                    self.scale += most;
                    made.iter_mut().zip(more).for_each(|(made, more)| *made += more);
                }
                written.push(made);
            }
            OpKind::AppendKv { .. }
            | OpKind::TopK { .. }
            | OpKind::GatherCandidates
            | OpKind::Sample => {
                panic!("no text of these programs goes on")
            }
            OpKind::Attend { heads, kv_heads, .. } => {
                let layer = operation.layer;
                let part = self.device.prefill.block(layer);
                assert_eq!((heads, kv_heads), (part.heads, kv_span(self.spec(), part.heads)));
                written.push(self.attend(program, operation, binding, layer));
            }
            OpKind::AddNorm { add, norm, post, partial, staged: adds } => {
                let layer = operation.layer;
                let of = self.graph.layers[layer as usize];
                let (bias, sum_norm) = match add == of.after_mlp.add {
                    true => (Vector::DownBias(layer), Vector::MlpSumNorm(layer)),
                    false => (Vector::AttentionOutputBias(layer), Vector::AttentionSumNorm(layer)),
                };
                let residual = rows(self, 0);
                let normed = self.spec().sum_norms;
                let mut sum = rows(self, 0);
                if normed {
                    sum.values.fill(0.0);
                }
                let mut sizes: Vec<f64> = sum.values.iter().map(|v| v.abs()).collect();
                let mut add = |sum: &mut Rows, values: &[f64]| {
                    assert_eq!(sum.values.len() % values.len(), 0);
                    let columns = sum.values.iter_mut().zip(&mut sizes);
                    for ((sum, size), value) in columns.zip(values.iter().cycle()) {
                        *sum += value;
                        *size += value.abs();
                    }
                };
                if let Some(bias) = self.vectors.get(&bias) {
                    add(&mut sum, bias);
                }
                if partial {
                    add(&mut sum, &rows(self, 1).values);
                }
                if adds {
                    add(&mut sum, &tile());
                }
                if normed {
                    let none = Vector::AttentionNormBias(u32::MAX);
                    sum.values = self.norm_by(sum_norm, none, &sum, &sizes);
                    for ((sum, size), value) in
                        sum.values.iter_mut().zip(&mut sizes).zip(&residual.values)
                    {
                        *size = sum.abs() + value.abs();
                        *sum += value;
                    }
                }
                self.scale = sizes.iter().copied().fold(0.0, f64::max);
                let normed = self.norm(norm, &sum, &sizes);
                if !post {
                    written.push(sum.values);
                }
                written.push(normed);
            }
            OpKind::Export { staged: adds } => {
                values = rows(self, 0).values;
                let mut sizes: Vec<f64> = values.iter().map(|v| v.abs()).collect();
                if adds {
                    let tile = tile();
                    assert_eq!(tile.len(), values.len());
                    for ((value, size), add) in values.iter_mut().zip(&mut sizes).zip(tile) {
                        *value += add;
                        *size += add.abs();
                    }
                }
                self.scale = sizes.into_iter().fold(0.0, f64::max);
            }
            OpKind::Import => {
                let tile = tile();
                self.measure(&tile);
                written.push(tile);
            }
            OpKind::Add => {
                let (mut sum, tile) = (rows(self, 0).values, tile());
                assert_eq!(tile.len(), sum.len());
                let sizes = sum.iter().zip(&tile).map(|(a, b)| a.abs() + b.abs());
                self.scale = sizes.fold(0.0, f64::max);
                sum.iter_mut().zip(tile).for_each(|(sum, add)| *sum += add);
                written.push(sum);
            }
            OpKind::Select => {
                let rows = rows(self, 0);
                self.measure(&rows.values);
                written.push(rows.values);
            }
            OpKind::Emit { output } => {
                values = self.emit(program.outputs[output as usize].kind, rows(self, 0));
            }
            OpKind::Send { .. } | OpKind::Receive { .. } | OpKind::Load { .. } => {
                panic!("not of the compute lane")
            }
        }
        for (region, values) in operation.writes.iter().zip(written) {
            self.write(program, region, values);
        }
        Given { values, scale: self.scale }
    }

    fn measure(&mut self, values: &[f64]) {
        self.scale = values.iter().fold(self.scale, |a, b| a.max(b.abs()));
    }

    /// The sum of products, and the sum of their sizes.
    fn dot(terms: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
        terms.fold((0.0, 0.0), |(sum, size), (a, b)| (sum + a * b, size + (a * b).abs()))
    }

    fn embed(&mut self, binding: &Binding, rows: Span<Row>) -> Vec<f64> {
        let hidden = self.spec().hidden as usize;
        let read = |table, id| -> Vec<f64> {
            let mut row = vec![0.0; hidden];
            self.dir.embedding_rows(table, &[id], &mut row).unwrap();
            row.into_iter().map(f64::from).collect()
        };
        let (mut sums, mut sizes) = (Vec::new(), Vec::new());
        for (row, position) in rows.iter().zip(positions(&binding.shape, rows)) {
            let mut terms = match &binding.inputs {
                Inputs::Tokens(tokens) | Inputs::Typed { tokens, .. } => {
                    let by = f64::from(self.spec().embedding_scale);
                    let words = read(Table::Word, tokens[row as usize]);
                    vec![words.into_iter().map(|value| value * by).collect()]
                }
                Inputs::Patches { .. } if position == 0 => {
                    vec![self.vectors[&Vector::ClassRow].clone()]
                }
                Inputs::Patches { first, values } => {
                    let width = self.spec().patches.unwrap().values() as usize;
                    let square = &values[(row - first) as usize * width..][..width];
                    let matrix = &self.matrices[&Matrix::Patch];
                    let term = |(i, value): (usize, &f32)| -> Vec<f64> {
                        let weights = &matrix[i * hidden..][..hidden];
                        weights.iter().map(|weight| weight * f64::from(*value)).collect()
                    };
                    let mut terms: Vec<Vec<f64>> = square.iter().enumerate().map(term).collect();
                    terms.push(self.vectors[&Vector::PatchBias].clone());
                    terms
                }
            };
            if let Positions::Learned { offset, .. } = self.spec().positions {
                terms.push(read(Table::Position, position + offset));
            }
            let kind = match &binding.inputs {
                Inputs::Typed { types, .. } => usize::from(types[row as usize]),
                _ => 0,
            };
            let table = self.vectors.get(&Vector::TokenTypes);
            terms.extend(table.map(|table| table[kind * hidden..][..hidden].to_vec()));
            let column = |i: usize| terms.iter().map(move |term| term[i]);
            sums.extend((0..hidden).map(|i| column(i).sum::<f64>()));
            sizes.extend((0..hidden).map(|i| column(i).map(f64::abs).sum::<f64>()));
        }
        self.scale = sizes.iter().copied().fold(0.0, f64::max);
        if !self.spec().embedding_norm {
            return sums;
        }
        let rows = Rows { columns: hidden, values: sums };
        self.norm_by(Vector::EmbeddingNorm, Vector::EmbeddingNormBias, &rows, &sizes)
    }

    fn norm(&mut self, which: OperatorId, rows: &Rows, sizes: &[f64]) -> Vec<f64> {
        let norm = *self.graph.norm(which).expect("a norm");
        let named = |id: WeightId| match self.graph.weights[id.0 as usize] {
            Weight::Vector(vector) => vector,
            Weight::Matrix(matrix) => panic!("{matrix:?} is no vector"),
        };
        // Of a norm without a bias, anything that is not there.
        let none = Vector::AttentionNormBias(u32::MAX);
        let (weight, bias) = (named(norm.weight), norm.bias.map_or(none, named));
        self.norm_by(weight, bias, rows, sizes)
    }

    /// `sizes` are those of the terms that the values were summed from.
    fn norm_by(&mut self, weight: Vector, bias: Vector, rows: &Rows, sizes: &[f64]) -> Vec<f64> {
        let (kind, epsilon) = (self.spec().norm, f64::from(self.spec().norm_epsilon));
        let (weight, bias) = (self.vectors[&weight].clone(), self.vectors.get(&bias).cloned());
        let mut out = Vec::new();
        for (row, sizes) in rows.iter().zip(sizes.chunks_exact(rows.columns)) {
            let width = row.len() as f64;
            let mean = match kind {
                NormKind::Layer => row.iter().sum::<f64>() / width,
                NormKind::Rms => 0.0,
            };
            let square = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / width;
            let by = 1.0 / (square + epsilon).sqrt();
            for (i, value) in row.iter().enumerate() {
                let bias = bias.as_ref().map_or(0.0, |bias| bias[i]);
                out.push((value - mean) * by * weight[i] + bias);
                let size = (sizes[i] + mean.abs()) * by * weight[i].abs() + bias.abs();
                self.scale = self.scale.max(size);
            }
        }
        out
    }

    /// The product `rows x matrix[inputs, outputs] + bias[outputs]`, and the size of each value's
    /// terms.
    fn multiply(
        &self,
        rows: &Rows,
        which: Matrix,
        inputs: Range<usize>,
        outputs: Range<usize>,
        bias: Option<Vector>,
    ) -> Vec<(f64, f64)> {
        let (_, width) = which.shape(self.spec()).unwrap();
        let matrix = &self.matrices[&which];
        let bias = bias.and_then(|bias| self.vectors.get(&bias));
        assert_eq!(rows.columns, inputs.len());
        let mut out = Vec::with_capacity(rows.count() * outputs.len());
        for row in rows.iter() {
            let begun = out.len();
            out.resize(begun + outputs.len(), (0.0, 0.0));
            for (input, &value) in inputs.clone().zip(row) {
                let weights = &matrix[input * width as usize..][outputs.clone()];
                for ((sum, size), weight) in out[begun..].iter_mut().zip(weights) {
                    let term = value * weight;
                    *sum += term;
                    *size += term.abs();
                }
            }
            let biases = bias.into_iter().flat_map(|bias| &bias[outputs.clone()]);
            for ((sum, size), bias) in out[begun..].iter_mut().zip(biases) {
                *sum += bias;
                *size += bias.abs();
            }
        }
        out
    }

    fn product(
        &mut self,
        binding: &Binding,
        operation: &Operation,
        layer: u32,
        kernel: Kernel,
        rows: &Rows,
    ) -> Vec<f64> {
        let part = self.device.prefill.block(layer);
        let spec = self.spec().clone();
        let (hidden, width) = (0..spec.hidden as usize, spec.head_width as usize);
        let kv = kv_span(&spec, part.heads);
        let of = |heads: Range<usize>| heads.start * width..heads.end * width;
        let columns = part.columns.range();
        let sized = match kernel {
            Kernel::Qkv => {
                let parts = [
                    (Matrix::Query(layer), of(part.heads.range()), Vector::QueryBias(layer)),
                    (Matrix::Key(layer), of(kv.range()), Vector::KeyBias(layer)),
                    (Matrix::Value(layer), of(kv.range()), Vector::ValueBias(layer)),
                ];
                let parts = parts.map(|(matrix, outputs, bias)| {
                    let values =
                        self.multiply(rows, matrix, hidden.clone(), outputs.clone(), Some(bias));
                    (values, outputs.len())
                });
                let mut sized = Vec::new();
                for row in 0..rows.count() {
                    for (values, width) in &parts {
                        sized.extend_from_slice(&values[row * width..][..*width]);
                    }
                }
                let heads = (part.heads.len() + kv.len()) as usize;
                let of_queries = part.heads.len() as usize;
                self.norm_heads(layer, of_queries, heads, rows.count(), &mut sized);
                let written = operation.writes[0];
                self.rotate(layer, binding, written.rows, heads, &mut sized);
                // Queries alone, or what follows them.
                let all = sized.len() / rows.count();
                let made = |row: &[(f64, f64)]| row[written.columns.range()].to_vec();
                sized.chunks_exact(all).flat_map(made).collect()
            }
            Kernel::AttentionOutput => {
                let inputs = of(part.heads.range());
                self.multiply(rows, Matrix::AttentionOutput(layer), inputs, hidden, None)
            }
            Kernel::Up => {
                let up = Matrix::Up(layer);
                let bias = Some(Vector::UpBias(layer));
                let up = self.multiply(rows, up, hidden.clone(), columns.clone(), bias);
                let act = |(value, size): (f64, f64)| (activate(spec.activation, value), size);
                if spec.gated {
                    let (gate, bias) = (Matrix::Gate(layer), Some(Vector::GateBias(layer)));
                    let gate = self.multiply(rows, gate, hidden, columns, bias);
                    let both = gate.into_iter().map(act).zip(up);
                    both.map(|((gate, a), (up, b))| (gate * up, a * b)).collect()
                } else {
                    up.into_iter().map(act).collect()
                }
            }
            Kernel::Down => self.multiply(rows, Matrix::Down(layer), columns, hidden, None),
            Kernel::Language => {
                let outputs = self.device.prefill.vocabulary.range();
                let bias = Some(Vector::LanguageBias);
                let mut sized = self.multiply(rows, Matrix::LanguageHead, hidden, outputs, bias);
                if let Some(most) = spec.logit_cap.map(f64::from) {
                    sized.iter_mut().for_each(|(value, _)| *value = most * (*value / most).tanh());
                }
                sized
            }
            other => panic!("{other:?} is no product"),
        };
        self.scale = sized.iter().map(|(_, size)| *size).fold(self.scale, f64::max);
        sized.into_iter().map(|(value, _)| value).collect()
    }

    fn emit(&mut self, kind: OutputKind, rows: Rows) -> Vec<f64> {
        match kind {
            OutputKind::Token => panic!("no text of these programs goes on"),
            OutputKind::Hidden { .. }
            | OutputKind::Logits { .. }
            | OutputKind::Pooled { reduce: Reduce::Row, .. } => {
                self.measure(&rows.values);
                rows.values
            }
            OutputKind::Pooled { reduce, .. } => {
                let column = |i: usize| rows.iter().map(move |row| row[i]);
                let sizes = (0..rows.columns).map(|i| column(i).map(f64::abs).sum::<f64>());
                self.scale = sizes.fold(0.0, f64::max);
                let reduced = |i| match reduce {
                    Reduce::Max => column(i).fold(f64::MIN, f64::max),
                    _ => column(i).sum::<f64>(),
                };
                (0..rows.columns).map(reduced).collect()
            }
            OutputKind::Classes => {
                let spec = self.spec().clone();
                let HeadSpec::Classes(head) = &spec.head else { panic!("no classes") };
                let mut rows = rows;
                let hidden = 0..spec.hidden as usize;
                if let Some(activation) = head.dense {
                    let bias = Some(Vector::ClassDenseBias);
                    let dense = Matrix::ClassDense;
                    let sized = self.multiply(&rows, dense, hidden.clone(), hidden.clone(), bias);
                    let act = |(value, _): &(f64, f64)| match activation {
                        ClassActivation::Tanh => value.tanh(),
                        ClassActivation::Relu => value.max(0.0),
                        ClassActivation::Gelu => activate(Activation::Gelu, *value),
                    };
                    rows.values = sized.iter().map(act).collect();
                    self.scale = sized.iter().map(|s| s.1).fold(self.scale, f64::max);
                }
                if head.norm {
                    let (weight, bias) = (Vector::ClassNorm, Vector::ClassNormBias);
                    let sizes: Vec<f64> = rows.values.iter().map(|v| v.abs()).collect();
                    rows.values = self.norm_by(weight, bias, &rows, &sizes);
                }
                let (labels, bias) = (0..head.labels as usize, Some(Vector::ClassOutputBias));
                let sized = self.multiply(&rows, Matrix::ClassOutput, hidden, labels, bias);
                self.scale = sized.iter().map(|s| s.1).fold(self.scale, f64::max);
                sized.into_iter().map(|(value, _)| value).collect()
            }
        }
    }
}

/// The values of a tile in wire format.
pub fn decode(wire: WireType, columns: usize, bytes: &[u8]) -> Vec<f64> {
    match wire {
        WireType::F32 => bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect(),
        WireType::F16 => bytes
            .chunks_exact(2)
            .map(|b| half::f16::from_le_bytes(b.try_into().unwrap()).to_f64())
            .collect(),
        // Of each row the scales of 32 values each, then these.
        WireType::Q8 => {
            let row = |row: &[u8]| -> Vec<f64> {
                let (scales, values) = row.split_at(4 * columns.div_ceil(32));
                let scale = |at: usize| {
                    f64::from(f32::from_le_bytes(scales[4 * at..][..4].try_into().unwrap()))
                };
                let value = |at: usize| f64::from(values[at] as i8) * scale(at / 32);
                (0..columns).map(value).collect()
            };
            bytes.chunks_exact(wire.row(columns as u64) as usize).flat_map(row).collect()
        }
    }
}
