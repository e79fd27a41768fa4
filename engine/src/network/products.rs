//! Convolutions, pooling and matrix products as steps: their weights are packed once, where they do not change.

use super::{
    NetworkError,
    compile::Compiler,
    fuse::Followers,
    steps::{Call, Operand, Run, simple},
    values::Layout,
};
use crate::{
    compute::kernels::{
        area::{Area, AreaMut, Extent},
        dense::{self, Epilogue},
        lines::NoMemory,
        network::{
            Context,
            conv::{Convolution, Kernels},
            elements::{self, Broadcast},
            geometry::Geometry,
            pool,
        },
        windows::Axis,
    },
    weights::ShardMatrix,
};
use galaxy_common::Bytes;
use galaxy_model::onnx::{Binary, Conv, ConvTranspose, Gemm, NetworkNode, Pool, ValueId, Window};
use std::sync::Mutex;

/// The shape of kernels in a file, and how they are grouped.
#[derive(Clone, Debug)]
struct KernelShape {
    groups: usize,
    /// Elements of a window.
    window: usize,
    /// Channels that are read, and those of the result.
    channels: (usize, usize),
    transposed: bool,
}

impl KernelShape {
    /// Packs kernels; each output is multiplied by its `scale`.
    fn pack(&self, values: &[f32], scale: Option<&[f32]>) -> Result<Kernels, NoMemory> {
        let Self { groups, window, channels: (channels, outputs), transposed } = *self;
        let (own, made) = (channels / groups, outputs / groups);
        let by = |output: usize| scale.map_or(1.0, |scale| scale[output]);
        if own == 1 && made == 1 && !transposed {
            let kernel =
                |at: usize| values[at % channels * window + at / channels] * by(at % channels);
            return Ok(Kernels::EachChannel((0..window * channels).map(kernel).collect()));
        }
        let group = |group: usize| match transposed {
            true => ShardMatrix::of(own, window * made, |channel, column| {
                let (element, output) = (column / made, column % made);
                values[((group * own + channel) * made + output) * window + element]
                    * by(group * made + output)
            }),
            false => ShardMatrix::of(window * own, made, |input, output| {
                let (element, channel) = (input / own, input % own);
                values[((group * made + output) * own + channel) * window + element]
                    * by(group * made + output)
            }),
        };
        Ok(Kernels::Groups((0..groups).map(group).collect::<Result<_, _>>()?))
    }
}

fn bytes(kernels: &Kernels) -> u64 {
    match kernels {
        Kernels::EachChannel(values) => 4 * values.len() as u64,
        Kernels::Groups(groups) => groups.iter().map(|matrix| matrix.bytes().0).sum(),
    }
}

impl Compiler<'_> {
    fn wrong(node: &NetworkNode, why: String) -> NetworkError {
        NetworkError::Operator { node: node.shown.clone(), why }
    }

    /// Images of a value, and how windows slide over them.
    fn geometry(
        &self,
        node: &NetworkNode,
        (read, made): (ValueId, ValueId),
        windows: &[Window],
    ) -> Result<Geometry, NetworkError> {
        if windows.len() > Geometry::MOST {
            let why = format!(
                "windows of {} axes are not computed: {} are the most",
                windows.len(),
                Geometry::MOST
            );
            return Err(Self::wrong(node, why));
        }
        let (read, made) = (&self.network.value(read).dims, &self.network.value(made).dims);
        let sides = windows.iter().zip(&read[2..]).zip(&made[2..]);
        let sides: Vec<Axis> = sides
            .map(|((window, read), made)| Axis::new(*read as usize, *made as usize, window))
            .collect();
        Ok(Geometry::new(read[0] as usize, &sides))
    }

    /// Makes a step of pooling.
    pub(super) fn pool(&mut self, node: &NetworkNode, of: &Pool) -> Result<(), NetworkError> {
        let (read, made) = (node.reads[0], node.makes[0]);
        let geometry = self.geometry(node, (read, made), &of.windows)?;
        let (kind, channels) = (of.kind, self.network.value(read).dims[1] as usize);
        let read = self.operand(read, Layout::Channels)?;
        let run = simple(move |context, from, out| {
            pool::pool(&context.threads, kind, &geometry, channels, from, out);
        });
        self.step(node, vec![read], Layout::Channels, false, run)
    }

    /// A convolution, with the normalisation and activation function behind it.
    pub(super) fn conv(&mut self, node: &NetworkNode, of: &Conv) -> Result<(), NetworkError> {
        let geometry = self.geometry(node, (node.reads[0], node.makes[0]), &of.windows)?;
        self.convolution(node, geometry, (of.groups, of.bias), false)
    }

    /// A transposed convolution, with the normalisation and activation function behind it.
    pub(super) fn conv_transposed(
        &mut self,
        node: &NetworkNode,
        of: &ConvTranspose,
    ) -> Result<(), NetworkError> {
        // Each input is the result of the window of outputs that it adds to.
        let geometry = self.geometry(node, (node.makes[0], node.reads[0]), &of.windows)?;
        self.convolution(node, geometry, (of.groups, of.bias), true)
    }

    fn convolution(
        &mut self,
        node: &NetworkNode,
        geometry: Geometry,
        (groups, has_bias): (u64, bool),
        transposed: bool,
    ) -> Result<(), NetworkError> {
        let channels = |id: ValueId| self.network.value(id).dims[1] as usize;
        let channels = (channels(node.reads[0]), channels(node.makes[0]));
        let shape = KernelShape {
            groups: groups as usize,
            window: geometry.kernel(),
            channels,
            transposed,
        };
        let fixed = node.reads[1..].iter().all(|id| self.is_constant(*id));
        let followers = self.readers.followers(self.network, node.makes[0], fixed);
        let Followers { made, scales, activation, nodes } = followers;
        let scale = self.scales(scales.iter(), channels.1)?;
        let read = self.operand(node.reads[0], Layout::Channels)?;
        let mut reads = vec![read];
        let bias = match (has_bias && fixed).then(|| self.constant(node.reads[2])).transpose()? {
            Some(bias) => Some(match &scale {
                None => bias,
                Some((by, add)) => {
                    bias.iter().zip(by).zip(add).map(|((x, by), add)| x * by + add).collect()
                }
            }),
            None => scale.as_ref().map(|(_, add)| add.clone()),
        };
        let by = scale.as_ref().map(|(by, _)| by.as_slice());
        let run: Run = match fixed {
            true => {
                let wanted =
                    Bytes(4 * self.network.value(node.reads[1]).dims.iter().product::<u64>());
                let kernels = shape
                    .pack(&self.constant(node.reads[1])?, by)
                    .map_err(|_| NetworkError::Memory { wanted })?;
                self.packed += bytes(&kernels);
                let of = Convolution {
                    geometry,
                    channels,
                    kernels,
                    bias,
                    activation,
                    copied: Mutex::default(),
                };
                simple(move |context, from, out| match transposed {
                    true => of.run_transposed(context, from, out),
                    false => of.run(context, from, out),
                })
            }
            false => {
                for id in &node.reads[1..] {
                    reads.push(self.rows(*id)?);
                }
                Box::new(move |call| {
                    let kernels = shape.pack(call.read(1), None).map_err(no_memory)?;
                    let bias = has_bias.then(|| call.read(2).to_vec());
                    let geometry = geometry.clone();
                    let of = Convolution {
                        geometry,
                        channels,
                        kernels,
                        bias,
                        activation,
                        copied: Mutex::default(),
                    };
                    let context = call.context;
                    let (from, out) = call.one();
                    match transposed {
                        true => of.run_transposed(context, from, out),
                        false => of.run(context, from, out),
                    }
                    Ok(())
                })
            }
        };
        self.done.extend(nodes);
        let together = NetworkNode { makes: vec![made], ..node.clone() };
        self.step(&together, reads, Layout::Channels, false, run)
    }

    /// A product of matrices with scales, transposed operands and a bias.
    pub(super) fn gemm(&mut self, node: &NetworkNode, of: Gemm) -> Result<(), NetworkError> {
        let made = Layout::Rows.dims(&self.network.value(node.makes[0]).dims);
        let (rows, columns) = (made[0], made[1]);
        let a = &self.network.value(node.reads[0]).dims;
        let inputs = if of.transposed[0] { a[0] } else { a[1] } as usize;
        let right = Right { inputs, columns, transposed: of.transposed[1], by: of.alpha };
        let (held, mut reads) = self.right(node, &right)?;
        let bias = match node.reads.get(2) {
            None => None,
            Some(id) => {
                reads.push(self.rows(*id)?);
                let dims = Layout::Rows.dims(&self.network.value(*id).dims);
                Some((reads.len() - 1, Broadcast::new(&made, &made, &dims)))
            }
        };
        let run: Run = Box::new(move |call| {
            let context = call.context;
            let from = call.read(0);
            let turned: Vec<f32> = match of.transposed[0] {
                true => {
                    (0..rows * inputs).map(|at| from[at % inputs * rows + at / inputs]).collect()
                }
                false => Vec::new(),
            };
            let left = if of.transposed[0] { turned.as_slice() } else { from };
            right.multiply(call, held.as_ref(), left, rows)?;
            if let Some((at, broadcast)) = &bias {
                let more: Vec<f32> = call.read(*at).iter().map(|x| x * of.beta).collect();
                elements::binary(
                    &context.threads,
                    (Binary::Add, None),
                    broadcast,
                    (None, &more),
                    call.makes[0],
                );
            }
            Ok(())
        });
        self.step(node, reads, Layout::Rows, false, run)
    }

    /// The right-hand matrix of a product, packed if it does not change, and what the step reads.
    fn right(
        &mut self,
        node: &NetworkNode,
        right: &Right,
    ) -> Result<(Option<ShardMatrix>, Vec<Operand>), NetworkError> {
        let mut reads = vec![self.rows(node.reads[0])?];
        let id = node.reads[1];
        let held = match self.is_constant(id) {
            true => {
                let matrix = right.pack(&self.constant(id)?);
                let wanted = Bytes(4 * (right.inputs * right.columns) as u64);
                let matrix = matrix.map_err(|_| NetworkError::Memory { wanted })?;
                self.packed += matrix.bytes().0;
                Some(matrix)
            }
            false => {
                reads.push(self.rows(id)?);
                None
            }
        };
        Ok((held, reads))
    }

    /// A product of all matrices of two batches.
    pub(super) fn matmul(&mut self, node: &NetworkNode) -> Result<(), NetworkError> {
        let mut left = Layout::Rows.dims(&self.network.value(node.reads[0]).dims);
        let mut right = Layout::Rows.dims(&self.network.value(node.reads[1]).dims);
        if left.len() == 1 {
            left.insert(0, 1);
        }
        if right.len() == 1 {
            right.push(1);
        }
        let (inputs, columns) = (right[right.len() - 2], right[right.len() - 1]);
        let of = Right { inputs, columns, transposed: false, by: 1.0 };
        if right.len() == 2 {
            let rows = left[..left.len() - 1].iter().product();
            let (held, reads) = self.right(node, &of)?;
            let run: Run = Box::new(move |call| {
                let from = call.read(0);
                of.multiply(call, held.as_ref(), from, rows)
            });
            return self.step(node, reads, Layout::Rows, false, run);
        }
        let rows = left[left.len() - 2];
        let pairs = pairs(&left[..left.len() - 2], &right[..right.len() - 2]);
        let reads = vec![self.rows(node.reads[0])?, self.rows(node.reads[1])?];
        let run: Run = Box::new(move |call| {
            for (at, (a, b)) in pairs.iter().enumerate() {
                let matrix = of
                    .pack(&call.read(1)[b * inputs * columns..][..inputs * columns])
                    .map_err(no_memory)?;
                let from = &call.read(0)[a * rows * inputs..][..rows * inputs];
                let out = &mut call.makes[0][at * rows * columns..][..rows * columns];
                product(call.context, from, (rows, inputs, columns), &matrix, out);
            }
            Ok(())
        });
        self.step(node, reads, Layout::Rows, false, run)
    }
}

/// The error of a step that has no memory for a matrix.
fn no_memory(_: NoMemory) -> String {
    "there is no memory for its weights".to_owned()
}

/// The right-hand matrix of a product, as a file has it.
#[derive(Clone, Copy)]
struct Right {
    inputs: usize,
    columns: usize,
    transposed: bool,
    /// What it is multiplied by.
    by: f32,
}

impl Right {
    fn pack(&self, values: &[f32]) -> Result<ShardMatrix, NoMemory> {
        let Self { inputs, columns, transposed, by } = *self;
        ShardMatrix::of(inputs, columns, |input, column| {
            by * values[if transposed { column * inputs + input } else { input * columns + column }]
        })
    }

    /// Multiplies rows with the matrix that is held, or with the second value that a step reads.
    fn multiply(
        &self,
        call: &mut Call<'_>,
        held: Option<&ShardMatrix>,
        left: &[f32],
        rows: usize,
    ) -> Result<(), String> {
        let packed = match held {
            Some(_) => None,
            None => Some(self.pack(call.read(1)).map_err(no_memory)?),
        };
        if let Some(matrix) = held.or(packed.as_ref()) {
            product(call.context, left, (rows, self.inputs, self.columns), matrix, call.makes[0]);
        }
        Ok(())
    }
}

/// The numbers of the left and right matrices of each product of two batches of these shapes.
fn pairs(left: &[usize], right: &[usize]) -> Vec<(usize, usize)> {
    let axes = left.len().max(right.len());
    let side =
        |of: &[usize], axis: usize| (axis + of.len()).checked_sub(axes).map_or(1, |at| of[at]);
    let mut pairs = vec![(0, 0)];
    for axis in 0..axes {
        let (a, b) = (side(left, axis), side(right, axis));
        let next = |(x, y): (usize, usize)| {
            (0..a.max(b)).map(move |at| {
                (x * a + if a == 1 { 0 } else { at }, y * b + if b == 1 { 0 } else { at })
            })
        };
        // A batch of none has no products.
        pairs = if a.min(b) == 0 { Vec::new() } else { pairs.into_iter().flat_map(next).collect() };
    }
    pairs
}

/// `out = left x matrix`.
fn product(
    context: &Context,
    left: &[f32],
    (rows, inputs, columns): (usize, usize, usize),
    matrix: &ShardMatrix,
    out: &mut [f32],
) {
    let left = Area::new(left, Extent { start: 0, rows, columns: inputs, stride: inputs });
    let out = AreaMut::new(out, Extent { start: 0, rows, columns, stride: columns });
    if let (Some(left), Some(out)) = (left, out) {
        dense::product(&context.threads, &context.scratch, left, matrix, out, Epilogue::default());
    }
}
