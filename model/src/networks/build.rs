//! Puts networks together layer by layer, and keeps the shape of each value.

use super::{Description, SEED, WEIGHTS, Weight};
use crate::onnx::{ElementType, NewAttribute, NewData, NewModel, NewNode, NewTensor};

/// The version of the operators.
const OPSET: i64 = 17;

/// A value of a network: square images of some channels.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Image {
    pub(super) name: String,
    pub(super) channels: u64,
    pub(super) side: u64,
}

/// A square window that moves over an image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    side: u64,
    stride: u64,
    dilation: u64,
    pad: u64,
}

/// A window that stands at each value of the image once.
pub(super) fn window(side: u64) -> Window {
    Window { side, stride: 1, dilation: 1, pad: (side - 1) / 2 }
}

impl Window {
    /// The window, moved by so many values at once.
    pub(super) fn stride(self, stride: u64) -> Self {
        Self { stride, ..self }
    }

    /// The window with so many values between its own, and twice the padding for 2.
    pub(super) fn dilated(self, dilation: u64) -> Self {
        Self { dilation, pad: dilation * self.pad, ..self }
    }

    /// The window over the image alone.
    pub(super) fn unpadded(self) -> Self {
        Self { pad: 0, ..self }
    }

    /// How often it stands along an axis.
    fn results(self, side: u64) -> u64 {
        (side + 2 * self.pad - self.dilation * (self.side - 1) - 1) / self.stride + 1
    }

    fn attributes(self, node: NewNode) -> NewNode {
        let wholes = |number: u64, count| NewAttribute::Wholes(vec![number as i64; count]);
        let node = node
            .with("kernel_shape", wholes(self.side, 2))
            .with("strides", wholes(self.stride, 2))
            .with("pads", wholes(self.pad, 4));
        if self.dilation == 1 { node } else { node.with("dilations", wholes(self.dilation, 2)) }
    }
}

/// A function of each value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Activation {
    Linear,
    Relu,
    /// A tenth of what is negative.
    Leaky,
    /// At most 6.
    Relu6,
    Mish,
}

/// A network while it is put together.
pub(super) struct Builder {
    network: String,
    model: NewModel,
    weights: Vec<Weight>,
    /// Bytes of all weights so far.
    offset: u64,
    image: Image,
}

impl Builder {
    /// A network that reads images of three channels and this side.
    pub(super) fn new(network: &str, side: u64) -> Self {
        let image = Image { name: "image".to_owned(), channels: 3, side };
        let dims = [1, 3, side, side].map(Some).to_vec();
        let inputs = vec![(image.name.clone(), dims)];
        let model = NewModel { opset: OPSET, inputs, ..NewModel::default() };
        Self { network: network.to_owned(), model, weights: Vec::new(), offset: 0, image }
    }

    /// The image that the network reads.
    pub(super) fn image(&self) -> Image {
        self.image.clone()
    }

    /// Makes a value a result of the network.
    pub(super) fn output(&mut self, from: &Image) {
        self.model.outputs.push(from.name.clone());
    }

    /// The finished description.
    pub(super) fn finish(self) -> Description {
        Description { model: self.model, weights: self.weights }
    }

    /// The name of the next node of an operator.
    fn next(&self, operator: &str) -> String {
        format!("{}_{}", operator.to_lowercase(), self.model.nodes.len())
    }

    fn node(&mut self, node: NewNode, channels: u64, side: u64) -> Image {
        let name = node.outputs[0].clone();
        self.model.nodes.push(node);
        Image { name, channels, side }
    }

    /// A tensor of random values around `center`; its name.
    fn weight(&mut self, name: String, dims: &[u64], (center, amplitude): (f32, f32)) -> String {
        let values = dims.iter().product();
        let is_trained = !name.ends_with(".mean") && !name.ends_with(".var");
        let key = format!("{SEED} {} {name}", self.network);
        self.weights.push(Weight { key, values, center, amplitude, is_trained });
        self.model.tensors.push(NewTensor {
            name: name.clone(),
            dims: dims.to_vec(),
            element: ElementType::F32,
            data: NewData::External { location: WEIGHTS.to_owned(), offset: self.offset },
        });
        self.offset += 4 * values;
        name
    }

    /// A kernel for sums of so many values, uniform with the deviation of He et al.
    fn kernel(&mut self, node: &str, dims: &[u64]) -> String {
        let adds_up: u64 = dims[1..].iter().product();
        let amplitude = (6.0 / adds_up as f64).sqrt() as f32;
        self.weight(format!("{node}.weight"), dims, (0.0, amplitude))
    }

    /// A list of whole numbers in the file, such as a shape; its name.
    fn wholes(&mut self, name: String, values: &[i64]) -> String {
        self.model.tensors.push(NewTensor::wholes(&name, values));
        name
    }

    /// Numbers in the file; their name.
    fn floats(&mut self, name: &str, dims: &[u64], values: &[f32]) -> String {
        if self.model.tensors.iter().all(|tensor| tensor.name != name) {
            self.model.tensors.push(NewTensor::floats(name, dims, values));
        }
        name.to_owned()
    }

    /// A convolution of groups of channels, with a bias or without.
    fn convolution(&mut self, from: &Image, over: Window, to: (u64, u64), bias: bool) -> Image {
        let (channels, groups) = to;
        let name = self.next("Conv");
        let dims = [channels, from.channels / groups, over.side, over.side];
        let mut inputs = vec![from.name.clone(), self.kernel(&name, &dims)];
        if bias {
            inputs.push(self.weight(format!("{name}.bias"), &[channels], (0.0, 0.01)));
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let mut node = over.attributes(NewNode::new("Conv", &inputs, &name));
        if groups > 1 {
            node = node.with("group", NewAttribute::Whole(groups as i64));
        }
        self.node(node, channels, over.results(from.side))
    }

    /// A convolution without bias.
    pub(super) fn conv(&mut self, from: &Image, over: Window, channels: u64) -> Image {
        self.convolution(from, over, (channels, 1), false)
    }

    /// A convolution with a bias, as networks end with.
    pub(super) fn conv_bias(&mut self, from: &Image, over: Window, channels: u64) -> Image {
        self.convolution(from, over, (channels, 1), true)
    }

    /// A convolution of groups of channels, without bias.
    pub(super) fn grouped(
        &mut self,
        from: &Image,
        over: Window,
        channels: u64,
        groups: u64,
    ) -> Image {
        self.convolution(from, over, (channels, groups), false)
    }

    /// A convolution of each channel by itself, without bias.
    pub(super) fn depthwise(&mut self, from: &Image, over: Window) -> Image {
        self.convolution(from, over, (from.channels, from.channels), false)
    }

    /// A normalisation of each channel, whose results are scaled by about `scale`: less than 1 where they are added to
    /// others layer after layer.
    pub(super) fn norm(&mut self, from: &Image, scale: f32) -> Image {
        let name = self.next("BatchNormalization");
        let parts = [
            ("scale", (scale, 0.05 * scale)),
            ("bias", (0.0, 0.01)),
            ("mean", (0.0, 0.01)),
            ("var", (1.0, 0.05)),
        ];
        let mut inputs = vec![from.name.clone()];
        for (part, fill) in parts {
            inputs.push(self.weight(format!("{name}.{part}"), &[from.channels], fill));
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let node = NewNode::new("BatchNormalization", &inputs, &name);
        self.node(node, from.channels, from.side)
    }

    /// A function of each value.
    pub(super) fn activate(&mut self, from: &Image, function: Activation) -> Image {
        match function {
            Activation::Linear => from.clone(),
            Activation::Relu => self.unary("Relu", from),
            Activation::Leaky => {
                let node = NewNode::new("LeakyRelu", &[&from.name], &self.next("LeakyRelu"));
                let node = node.with("alpha", NewAttribute::Float(0.1));
                self.node(node, from.channels, from.side)
            }
            Activation::Relu6 => {
                let (least, most) =
                    (self.floats("zero", &[], &[0.0]), self.floats("six", &[], &[6.0]));
                let node = NewNode::new("Clip", &[&from.name, &least, &most], &self.next("Clip"));
                self.node(node, from.channels, from.side)
            }
            Activation::Mish => {
                let soft = self.unary("Softplus", from);
                let tanh = self.unary("Tanh", &soft);
                self.binary("Mul", from, &tanh)
            }
        }
    }

    fn unary(&mut self, operator: &str, from: &Image) -> Image {
        let node = NewNode::new(operator, &[&from.name], &self.next(operator));
        self.node(node, from.channels, from.side)
    }

    fn binary(&mut self, operator: &str, one: &Image, other: &Image) -> Image {
        let node = NewNode::new(operator, &[&one.name, &other.name], &self.next(operator));
        self.node(node, one.channels, one.side)
    }

    /// A convolution, its normalisation, and a function.
    pub(super) fn block(
        &mut self,
        from: &Image,
        over: Window,
        channels: u64,
        function: Activation,
    ) -> Image {
        let made = self.conv(from, over, channels);
        let made = self.norm(&made, 1.0);
        self.activate(&made, function)
    }

    /// The sum of two images.
    pub(super) fn add(&mut self, one: &Image, other: &Image) -> Image {
        self.binary("Add", one, other)
    }

    /// An image by a trained factor, which is around `center`.
    pub(super) fn weighted(&mut self, from: &Image, center: f32) -> Image {
        let name = self.next("Mul");
        let factor = self.weight(format!("{name}.weight"), &[1], (center, 0.1 * center));
        let node = NewNode::new("Mul", &[&from.name, &factor], &name);
        self.node(node, from.channels, from.side)
    }

    /// An image by a fixed factor.
    pub(super) fn scaled(&mut self, from: &Image, factor: f32) -> Image {
        let name = self.next("Mul");
        let factor = self.floats(&format!("{name}.factor"), &[], &[factor]);
        let node = NewNode::new("Mul", &[&from.name, &factor], &name);
        self.node(node, from.channels, from.side)
    }

    /// The channels of images behind each other.
    pub(super) fn concat(&mut self, parts: &[&Image]) -> Image {
        let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
        let node = NewNode::new("Concat", &names, &self.next("Concat"));
        let channels = parts.iter().map(|part| part.channels).sum();
        self.node(node.with("axis", NewAttribute::Whole(1)), channels, parts[0].side)
    }

    /// Both halves of an image's channels.
    pub(super) fn halves(&mut self, from: &Image) -> [Image; 2] {
        let name = self.next("Split");
        let half = from.channels / 2;
        let parts = self.wholes(format!("{name}.parts"), &[half as i64; 2]);
        let mut node = NewNode::new("Split", &[&from.name, &parts], &name)
            .with("axis", NewAttribute::Whole(1));
        let second = format!("{name}.second");
        node.outputs.push(second.clone());
        let first = self.node(node, half, from.side);
        let second = Image { name: second, ..first.clone() };
        [first, second]
    }

    /// The largest value of each window.
    pub(super) fn max_pool(&mut self, from: &Image, over: Window) -> Image {
        self.pool("MaxPool", from, over)
    }

    /// The mean of each window, padding not counted.
    pub(super) fn average_pool(&mut self, from: &Image, over: Window) -> Image {
        self.pool("AveragePool", from, over)
    }

    fn pool(&mut self, operator: &str, from: &Image, over: Window) -> Image {
        let node = over.attributes(NewNode::new(operator, &[&from.name], &self.next(operator)));
        self.node(node, from.channels, over.results(from.side))
    }

    /// Each value four times, as a square.
    pub(super) fn upsample(&mut self, from: &Image) -> Image {
        let scales = self.floats("twice", &[4], &[1.0, 1.0, 2.0, 2.0]);
        let text = |text: &str| NewAttribute::Text(text.to_owned());
        let node = NewNode::new("Resize", &[&from.name, "", &scales], &self.next("Resize"))
            .with("mode", text("nearest"))
            .with("nearest_mode", text("floor"))
            .with("coordinate_transformation_mode", text("asymmetric"));
        self.node(node, from.channels, 2 * from.side)
    }

    /// An image without its first row and column; `padded` adds a row and a column of zeros behind.
    pub(super) fn shifted(&mut self, from: &Image, padded: bool) -> Image {
        let mut from = from.clone();
        if padded {
            let pads = self.wholes(self.next("Pad") + ".pads", &[0, 0, 0, 0, 0, 0, 1, 1]);
            let node = NewNode::new("Pad", &[&from.name, &pads], &self.next("Pad"));
            from = self.node(node, from.channels, from.side + 1);
        }
        let name = self.next("Slice");
        let starts = self.wholes(format!("{name}.starts"), &[1, 1]);
        let ends = self.wholes(format!("{name}.ends"), &[i64::MAX; 2]);
        let axes = self.wholes(format!("{name}.axes"), &[2, 3]);
        let node = NewNode::new("Slice", &[&from.name, &starts, &ends, &axes], &name);
        self.node(node, from.channels, from.side - 1)
    }

    /// An image whose channels are dealt to groups in turn.
    pub(super) fn shuffled(&mut self, from: &Image, groups: u64) -> Image {
        let (channels, side) = (from.channels as i64, from.side as i64);
        let groups = groups as i64;
        let apart = [1, groups, channels / groups, side, side];
        let apart = self.reshaped(from, &apart);
        let node = NewNode::new("Transpose", &[&apart.name], &self.next("Transpose"))
            .with("perm", NewAttribute::Wholes(vec![0, 2, 1, 3, 4]));
        let dealt = self.node(node, from.channels, from.side);
        self.reshaped(&dealt, &[1, channels, side, side])
    }

    fn reshaped(&mut self, from: &Image, dims: &[i64]) -> Image {
        let name = self.next("Reshape");
        let shape = self.wholes(format!("{name}.shape"), dims);
        let node = NewNode::new("Reshape", &[&from.name, &shape], &name);
        self.node(node, from.channels, from.side)
    }

    /// The mean of each channel, and the scores of classes as the result of the network.
    pub(super) fn classify(&mut self, from: &Image, classes: u64) {
        let pooled = self.unary("GlobalAveragePool", from);
        let flat = self.unary("Flatten", &pooled);
        let name = self.next("Gemm");
        let kernel = self.kernel(&name, &[classes, from.channels]);
        let bias = self.weight(format!("{name}.bias"), &[classes], (0.0, 0.01));
        let node = NewNode::new("Gemm", &[&flat.name, &kernel, &bias], &name)
            .with("transB", NewAttribute::Whole(1));
        let scores = self.node(node, classes, 1);
        self.output(&scores);
    }
}
