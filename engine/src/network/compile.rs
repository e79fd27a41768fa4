//! From the nodes of a network to steps: the layout of each value, packed weights, and the kernel of each operator.

use super::{
    NetworkError,
    fuse::{Followers, Readers, Scale, Shuffle},
    single::{self, mapped},
    steps::{Call, Operand, Run, Step, simple},
    values::{Layout, around, constant},
};
use crate::compute::kernels::network::{
    Context,
    arrange::{self, EntryMap},
    elements::{self, Broadcast},
    reduce,
};
use galaxy_model::onnx::{Binary, Network, NetworkNode, OnnxFile, Operator, ValueId};
use std::collections::{HashMap, HashSet};

/// What becomes of the nodes of a network.
pub(super) struct Compiler<'a> {
    pub(super) file: &'a OnnxFile,
    pub(super) network: &'a Network,
    context: &'a Context,
    pub(super) readers: Readers,
    /// Nodes that are computed with others.
    pub(super) done: HashSet<usize>,
    steps: Vec<Step>,
    constants: Vec<Vec<f32>>,
    /// The number of values of each buffer.
    buffers: Vec<usize>,
    /// Where each value lies, in each layout that it is needed in.
    placed: HashMap<(ValueId, Layout), Operand>,
    /// Bytes of packed weights.
    pub(super) packed: u64,
}

impl<'a> Compiler<'a> {
    pub(super) fn new(file: &'a OnnxFile, network: &'a Network, context: &'a Context) -> Self {
        Self {
            file,
            network,
            context,
            readers: Readers::new(network),
            done: HashSet::new(),
            steps: Vec::new(),
            constants: Vec::new(),
            buffers: Vec::new(),
            placed: HashMap::new(),
            packed: 0,
        }
    }

    /// The steps, the constants, the lengths of buffers, and the bytes of packed weights.
    pub(super) fn finish(self) -> (Vec<Step>, Vec<Vec<f32>>, Vec<usize>, u64) {
        (self.steps, self.constants, self.buffers, self.packed)
    }

    /// Makes steps of all nodes.
    pub(super) fn compile(&mut self) -> Result<(), NetworkError> {
        let network = self.network;
        for &id in &network.inputs {
            let values = Layout::Rows.dims(&network.value(id).dims).iter().product();
            self.buffers.push(values);
            self.put(id, Layout::Rows, Operand::Buffer(self.buffers.len() - 1));
        }
        for (at, node) in network.nodes.iter().enumerate() {
            if !self.done.contains(&at) {
                self.node(node)?;
            }
        }
        Ok(())
    }

    /// How many axes a value has.
    fn axes(&self, id: ValueId) -> usize {
        self.network.value(id).dims.len()
    }

    /// Whether a value depends on nothing that is given when the network runs.
    pub(super) fn is_constant(&self, id: ValueId) -> bool {
        let is = |layout| matches!(self.placed.get(&(id, layout)), Some(Operand::Constant(_)));
        self.network.value(id).is_constant() || is(Layout::Rows) || is(Layout::Channels)
    }

    /// The values of a constant, in the order of the file.
    pub(super) fn constant(&mut self, id: ValueId) -> Result<Vec<f32>, NetworkError> {
        // What the file has is read for who packs it, and not kept.
        if self.network.value(id).is_constant() {
            return constant(self.file, self.network.value(id));
        }
        Ok(match self.rows(id)? {
            Operand::Constant(at) => self.constants[at].clone(),
            Operand::Buffer(_) => Vec::new(),
        })
    }

    /// A value in the order of the file.
    pub(super) fn rows(&mut self, id: ValueId) -> Result<Operand, NetworkError> {
        self.operand(id, Layout::Rows)
    }

    /// A value in a layout, which it is brought into if it lies otherwise.
    pub(super) fn operand(&mut self, id: ValueId, layout: Layout) -> Result<Operand, NetworkError> {
        if let Some(operand) = self.placed.get(&(id, layout)) {
            return Ok(*operand);
        }
        let value = self.network.value(id);
        let other = if layout == Layout::Rows { Layout::Channels } else { Layout::Rows };
        let operand = match self.placed.get(&(id, other)).copied() {
            Some(operand) if Layout::is_same(&value.dims) => operand,
            Some(operand) => self.moved(id, operand, other, layout)?,
            None if value.is_constant() && layout == Layout::Rows => {
                self.constants.push(constant(self.file, value)?);
                Operand::Constant(self.constants.len() - 1)
            }
            None if value.is_constant() => {
                self.rows(id)?;
                return self.operand(id, layout);
            }
            None => {
                let why = format!("the value {:?} is read before it is computed", value.name);
                return Err(NetworkError::Operator { node: String::from("a node"), why });
            }
        };
        self.put(id, layout, operand);
        Ok(operand)
    }

    /// A step that brings a value from one layout into another.
    fn moved(
        &mut self,
        id: ValueId,
        from: Operand,
        have: Layout,
        want: Layout,
    ) -> Result<Operand, NetworkError> {
        let value = self.network.value(id);
        let axes = value.dims.len();
        let dims = have.dims(&value.dims);
        let order: Vec<usize> =
            want.order(axes).iter().map(|axis| have.axis(*axis, axes)).collect();
        self.transposed(id, from, dims, order)
    }

    /// A step that brings the axes of a value in memory into another order.
    fn transposed(
        &mut self,
        id: ValueId,
        from: Operand,
        dims: Vec<usize>,
        order: Vec<usize>,
    ) -> Result<Operand, NetworkError> {
        let (shown, values) =
            (format!("layout of {:?}", self.network.value(id).name), dims.iter().product());
        let run = simple(move |context, from, out| {
            arrange::transpose(&context.threads, &dims, &order, from, out);
        });
        self.push(shown, vec![from], values, false, run)
    }

    /// Notes where a value lies.
    pub(super) fn put(&mut self, id: ValueId, layout: Layout, operand: Operand) {
        self.placed.insert((id, layout), operand);
    }

    /// The layout in which a value is computed; that of the file for what is given or constant.
    fn layout(&self, id: ValueId) -> Layout {
        match self.placed.contains_key(&(id, Layout::Channels)) {
            true if !self.placed.contains_key(&(id, Layout::Rows)) => Layout::Channels,
            _ => Layout::Rows,
        }
    }

    /// A step that computes so many values, and where these lie. What depends on constants alone is computed now, and a
    /// constant itself.
    pub(super) fn push(
        &mut self,
        shown: String,
        reads: Vec<Operand>,
        values: usize,
        in_place: bool,
        run: Run,
    ) -> Result<Operand, NetworkError> {
        let fixed = |operand: &Operand| match operand {
            Operand::Constant(at) => Some(Some(self.constants[*at].as_slice())),
            Operand::Buffer(_) => None,
        };
        if let Some(reads) = reads.iter().map(fixed).collect() {
            let mut made = vec![0.0; values];
            let makes = vec![made.as_mut_slice()];
            run(&mut Call { context: self.context, reads, makes })
                .map_err(|why| NetworkError::Operator { node: shown, why })?;
            self.constants.push(made);
            return Ok(Operand::Constant(self.constants.len() - 1));
        }
        self.buffers.push(values);
        let made = self.buffers.len() - 1;
        self.steps.push(Step { shown, reads, makes: vec![made], in_place, run });
        Ok(Operand::Buffer(made))
    }

    /// A step that computes the first value of a node in a layout.
    pub(super) fn step(
        &mut self,
        node: &NetworkNode,
        reads: Vec<Operand>,
        layout: Layout,
        in_place: bool,
        run: Run,
    ) -> Result<(), NetworkError> {
        let id = node.makes[0];
        let values = self.network.value(id).dims.iter().product::<u64>() as usize;
        let made = self.push(node.shown.clone(), reads, values, in_place, run)?;
        self.put(id, layout, made);
        Ok(())
    }

    fn node(&mut self, node: &NetworkNode) -> Result<(), NetworkError> {
        let first = node.reads.first().copied();
        let Some(first) = first else {
            let why = "it reads nothing".to_owned();
            return Err(NetworkError::Operator { node: node.shown.clone(), why });
        };
        match &node.operator {
            Operator::Conv(conv) => return self.conv(node, conv),
            Operator::ConvTranspose(conv) => return self.conv_transposed(node, conv),
            Operator::Pool(pool) => return self.pool(node, pool),
            Operator::MatMul => return self.matmul(node),
            Operator::Gemm(gemm) => return self.gemm(node, *gemm),
            Operator::BatchNorm { epsilon } => return self.batch_norm(node, *epsilon),
            Operator::View | Operator::Cast => return self.view(node),
            Operator::Binary(function) => return self.binary(node, *function),
            Operator::Concat { axis } => return self.concat(node, *axis),
            Operator::Split { axis, parts } => return self.split(node, *axis, parts),
            Operator::Gather { axis } => return self.gather(node, *axis),
            Operator::Transpose { order } => return self.transpose(node, order),
            _ => {}
        }
        let layout = match &node.operator {
            Operator::LocalResponseNorm { .. } => Layout::Channels,
            // Axes before and behind have to stay together.
            Operator::Softmax(softmax) if softmax.end != softmax.first + 1 => Layout::Rows,
            Operator::Expand => Layout::Rows,
            // Without some axes, others are channels.
            Operator::Reduce(_) if self.axes(node.makes[0]) != self.axes(first) => Layout::Rows,
            _ => self.layout(first),
        };
        let dims = layout.dims(&self.network.value(first).dims);
        let made = layout.dims(&self.network.value(node.makes[0]).dims);
        let Some(run) = single::run(&node.operator, layout, &dims, &made) else {
            let why = "it is not computed here".to_owned();
            return Err(NetworkError::Operator { node: node.shown.clone(), why });
        };
        let read = self.operand(first, layout)?;
        let in_place = matches!(node.operator, Operator::Unary(_));
        self.step(node, vec![read], layout, in_place, run)
    }

    /// The entries of an axis that a second value names.
    fn gather(&mut self, node: &NetworkNode, axis: usize) -> Result<(), NetworkError> {
        let dims = Layout::Rows.dims(&self.network.value(node.reads[0]).dims);
        let sides = around(&dims, axis, axis + 1);
        let reads = vec![self.rows(node.reads[0])?, self.rows(node.reads[1])?];
        let run: Run = Box::new(move |call| {
            let (from, indices) = (call.read(0), call.read(1));
            let context = call.context;
            let gathered = arrange::gather(&context.threads, sides, from, indices, call.makes[0]);
            gathered.map_err(|index| {
                format!("index {index} is none of axis {axis}, which has {} entries", sides[1])
            })
        });
        self.step(node, reads, Layout::Rows, false, run)
    }

    /// The same values in another shape: nothing is done where they lie as the file has them.
    fn view(&mut self, node: &NetworkNode) -> Result<(), NetworkError> {
        if self.layout(node.reads[0]) == Layout::Channels
            && let Some(Shuffle { groups, nodes, made }) = self.readers.shuffle(self.network, node)
        {
            let read = self.operand(node.reads[0], Layout::Channels)?;
            let run = simple(move |context, from, out| {
                arrange::shuffle(&context.threads, groups, from, out);
            });
            self.done.extend(nodes);
            let together = NetworkNode { makes: vec![made], ..node.clone() };
            return self.step(&together, vec![read], Layout::Channels, false, run);
        }
        let operand = self.rows(node.reads[0])?;
        let is_whole = |id: ValueId| !self.network.value(id).element.is_float();
        if is_whole(node.makes[0]) && !is_whole(node.reads[0]) {
            let run: Run = Box::new(move |call| {
                let (from, out) = call.one();
                out.iter_mut().zip(from).for_each(|(o, x)| *o = x.trunc());
                Ok(())
            });
            return self.step(node, vec![operand], Layout::Rows, false, run);
        }
        self.put(node.makes[0], Layout::Rows, operand);
        Ok(())
    }

    /// Axes in another order. It may be that only the names of axes change.
    fn transpose(&mut self, node: &NetworkNode, order: &[usize]) -> Result<(), NetworkError> {
        let (id, axes) = (node.reads[0], order.len());
        let have = self.layout(id);
        let read = self.operand(id, have)?;
        let dims = have.dims(&self.network.value(id).dims);
        // Which axis in memory each axis of the result is.
        let in_layout = |layout: Layout| -> Vec<usize> {
            layout.order(axes).iter().map(|axis| have.axis(order[*axis], axes)).collect()
        };
        for layout in [Layout::Rows, Layout::Channels] {
            let long: Vec<usize> =
                in_layout(layout).into_iter().filter(|axis| dims[*axis] != 1).collect();
            if long.is_sorted() {
                self.put(node.makes[0], layout, read);
                return Ok(());
            }
        }
        let moved = in_layout(Layout::Rows);
        let run = simple(move |context, from, out| {
            arrange::transpose(&context.threads, &dims, &moved, from, out);
        });
        self.step(node, vec![read], Layout::Rows, false, run)
    }

    /// A function of two or more values, one after another.
    fn binary(&mut self, node: &NetworkNode, function: Binary) -> Result<(), NetworkError> {
        let made = &self.network.value(node.makes[0]).dims;
        // The layout of the first operand that is as large as the result, and computed.
        let full = |id: &&ValueId| {
            let value = self.network.value(**id);
            value.dims == *made && !self.is_constant(**id)
        };
        let layout = node.reads.iter().find(full).map_or(Layout::Rows, |id| self.layout(*id));
        let dims = layout.dims(made);
        let mut operands = Vec::new();
        for &id in &node.reads {
            operands.push(self.repeated(id, made.len(), layout)?);
        }
        let mut left = operands.remove(0);
        let last = operands.len();
        if operands.is_empty() {
            let run = simple(|_, from, out| out.copy_from_slice(from));
            return self.step(node, vec![left.0], layout, false, run);
        }
        let followers = self.readers.followers(self.network, node.makes[0], false);
        for (at, right) in operands.into_iter().enumerate() {
            // Between, the shape is that of those that there are so far.
            let between: Vec<usize> = match at + 1 == last {
                true => dims.clone(),
                false => left.1.iter().zip(&right.1).map(|(a, b)| (*a).max(*b)).collect(),
            };
            let broadcast = Broadcast::new(&between, &left.1, &right.1);
            let in_place = left.1 == between;
            let activation = followers.activation.filter(|_| at + 1 == last);
            let run: Run = Box::new(move |call| {
                let (a, b) = (call.reads[0], call.read(1));
                elements::binary(
                    &call.context.threads,
                    (function, activation),
                    &broadcast,
                    (a, b),
                    call.makes[0],
                );
                Ok(())
            });
            let (reads, values) = (vec![left.0, right.0], between.iter().product());
            left = (self.push(node.shown.clone(), reads, values, in_place, run)?, between);
        }
        self.done.extend(followers.nodes);
        self.put(followers.made, layout, left.0);
        Ok(())
    }

    /// A value whose axes may be repeated, with as many axes as others have: where it lies, and its shape in memory.
    fn repeated(
        &mut self,
        id: ValueId,
        axes: usize,
        layout: Layout,
    ) -> Result<(Operand, Vec<usize>), NetworkError> {
        let dims = &self.network.value(id).dims;
        let mut all = vec![1; axes - dims.len()];
        all.extend(dims);
        let shape = layout.dims(&all);
        if dims.len() == axes {
            return Ok((self.operand(id, layout)?, shape));
        }
        let from = self.rows(id)?;
        let rows = Layout::Rows.dims(&all);
        let order = layout.order(axes);
        let long: Vec<usize> = order.iter().copied().filter(|axis| rows[*axis] != 1).collect();
        if long.is_sorted() {
            return Ok((from, shape));
        }
        Ok((self.transposed(id, from, rows, order)?, shape))
    }

    fn concat(&mut self, node: &NetworkNode, axis: usize) -> Result<(), NetworkError> {
        let is_computed = |id: &&ValueId| !self.is_constant(**id);
        let layout =
            node.reads.iter().find(is_computed).map_or(Layout::Rows, |id| self.layout(*id));
        let made = layout.dims(&self.network.value(node.makes[0]).dims);
        let axis = layout.axis(axis, made.len());
        let (mut reads, mut widths) = (Vec::new(), Vec::new());
        for &id in &node.reads {
            reads.push(self.operand(id, layout)?);
            let dims = layout.dims(&self.network.value(id).dims);
            widths.push(dims[axis..].iter().product::<usize>());
        }
        let apart = made[axis..].iter().product::<usize>();
        let run: Run = Box::new(move |call| {
            let mut at = 0;
            for (number, width) in widths.iter().enumerate() {
                let from = call.read(number);
                arrange::place(&call.context.threads, from, *width, at, apart, call.makes[0]);
                at += width;
            }
            Ok(())
        });
        self.step(node, reads, layout, false, run)
    }

    fn split(
        &mut self,
        node: &NetworkNode,
        axis: usize,
        parts: &[u64],
    ) -> Result<(), NetworkError> {
        let layout = self.layout(node.reads[0]);
        let dims = layout.dims(&self.network.value(node.reads[0]).dims);
        let read = self.operand(node.reads[0], layout)?;
        let axis = layout.axis(axis, dims.len());
        let mut first = 0;
        for (&id, part) in node.makes.iter().zip(parts) {
            let mut taken: Vec<(usize, i64, usize)> =
                dims.iter().map(|side| (0, 1, *side)).collect();
            taken[axis] = (first, 1, *part as usize);
            first += *part as usize;
            let run = mapped(EntryMap::of_parts(&dims, &taken), 0.0);
            let values = taken.iter().map(|(.., count)| count).product();
            let made = self.push(node.shown.clone(), vec![read], values, false, run)?;
            self.put(id, layout, made);
        }
        Ok(())
    }

    fn batch_norm(&mut self, node: &NetworkNode, epsilon: f32) -> Result<(), NetworkError> {
        let first = Scale::of(self.network, node, node.reads[0]);
        let channels = self.network.value(node.reads[0]).dims[1] as usize;
        let fixed = first.is_some();
        let Followers { made, scales, activation, nodes } =
            self.readers.followers(self.network, node.makes[0], fixed);
        let stored = match &first {
            Some(first) => self.scales(std::iter::once(first).chain(&scales), channels)?,
            None => None,
        };
        let mut reads = vec![self.operand(node.reads[0], Layout::Channels)?];
        if stored.is_none() {
            for id in &node.reads[1..] {
                reads.push(self.rows(*id)?);
            }
        }
        let run: Run = Box::new(move |call| {
            let of = |at| call.read(at);
            let given = match &stored {
                Some(_) => None,
                None => Some(folded(of(1), of(2), of(3), of(4), epsilon)),
            };
            let Some((scale, shift)) = stored.as_ref().or(given.as_ref()) else { return Ok(()) };
            let context = call.context;
            let (from, out) = call.one();
            reduce::scale_channels(&context.threads, from, (scale, shift), activation, out);
            Ok(())
        });
        self.done.extend(nodes);
        let together = NetworkNode { makes: vec![made], ..node.clone() };
        self.step(&together, reads, Layout::Channels, false, run)
    }

    /// What each channel is multiplied by in the end, and what is added; none where nothing changes it.
    pub(super) fn scales<'s>(
        &mut self,
        all: impl Iterator<Item = &'s Scale>,
        channels: usize,
    ) -> Result<Option<ChannelScale>, NetworkError> {
        let mut scales: Option<ChannelScale> = None;
        for scale in all {
            let one = || vec![1.0; channels];
            let mut each = |id: ValueId| -> Result<Vec<f32>, NetworkError> {
                let values = self.constant(id)?;
                Ok((0..channels).map(|channel| values[channel % values.len()]).collect())
            };
            let (by, add) = match scale {
                Scale::Norm(ids, epsilon) => {
                    let [scale, shift, mean, variance] = ids.map(|id| self.constant(id));
                    folded(&scale?, &shift?, &mean?, &variance?, *epsilon)
                }
                Scale::Times(id) => (each(*id)?, vec![0.0; channels]),
                Scale::Plus(id) => (one(), each(*id)?),
            };
            scales = Some(match scales {
                None => (by, add),
                Some((before, shift)) => {
                    let times = |(a, b): (&f32, &f32)| a * b;
                    let shift: Vec<f32> = shift.iter().zip(&by).map(times).collect();
                    let add = shift.iter().zip(&add).map(|(a, b)| a + b).collect();
                    (before.iter().zip(&by).map(times).collect(), add)
                }
            });
        }
        Ok(scales)
    }
}

/// A factor and what is added, of each channel.
type ChannelScale = (Vec<f32>, Vec<f32>);

/// A normalisation as a factor and what is added, of each channel.
fn folded(
    scale: &[f32],
    shift: &[f32],
    mean: &[f32],
    variance: &[f32],
    epsilon: f32,
) -> ChannelScale {
    let by = |(scale, variance): (&f32, &f32)| scale / (variance + epsilon).sqrt();
    let by: Vec<f32> = scale.iter().zip(variance).map(by).collect();
    let add = |((shift, mean), by): ((&f32, &f32), &f32)| shift - mean * by;
    let add = shift.iter().zip(mean).zip(&by).map(add).collect();
    (by, add)
}
