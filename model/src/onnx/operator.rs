//! The operators of a network with their attributes.

/// An operator with its attributes. Axes of values are in the order of the file: for images, images of a batch,
/// channels, and then rows and pixels of a row.
#[derive(Clone, PartialEq, Debug)]
pub enum Operator {
    /// A convolution of images.
    Conv(Conv),
    /// A transposed convolution.
    ConvTranspose(ConvTranspose),
    /// A matrix product, of all matrices of a batch.
    MatMul,
    /// A matrix product with scales, transposed operands and a bias.
    Gemm(Gemm),
    /// A normalisation of channels by stored means and variances; `epsilon` is added to these.
    BatchNorm {
        /// What is added to each variance.
        epsilon: f32,
    },
    /// A normalisation of each value by those of neighbouring channels.
    LocalResponseNorm {
        /// How many channels are neighbours.
        size: u64,
        /// What their mean square is multiplied by.
        alpha: f32,
        /// The power of the sum.
        beta: f32,
        /// What is added to it.
        bias: f32,
    },
    /// A function of each value.
    Unary(Unary),
    /// A function of two values, of which the axes of one may be repeated.
    Binary(Binary),
    /// The softmax along axes.
    Softmax(Softmax),
    /// The largest or mean value of each window.
    Pool(Pool),
    /// The sum, mean or largest value along axes.
    Reduce(Reduce),
    /// Values one behind another along an axis.
    Concat {
        /// The axis along which they follow one another.
        axis: usize,
    },
    /// Parts of a value along an axis.
    Split {
        /// The axis that is cut.
        axis: usize,
        /// The length of each part.
        parts: Vec<u64>,
    },
    /// A part of a value.
    Slice {
        /// What is taken along each axis.
        axes: Vec<SliceAxis>,
    },
    /// The entries of an axis that a second value names.
    Gather {
        /// The axis of the entries.
        axis: usize,
    },
    /// The axes in another order: axis i of the result is axis `order[i]` of what is read.
    Transpose {
        /// The axis of what is read that each one of the result is.
        order: Vec<usize>,
    },
    /// A value with a border around it, or with less at its edges.
    Pad {
        /// What stands in the border.
        mode: PadMode,
        /// The width of the border before each axis; negative where something is cut off.
        before: Vec<i64>,
        /// The width of the border after each axis.
        after: Vec<i64>,
    },
    /// A value of another size, by interpolation.
    Resize(Resize),
    /// A value repeated along axes of length 1.
    Expand,
    /// The same values in another shape.
    View,
    /// The same values in another type.
    Cast,
}

impl Operator {
    /// Whether it only moves values, whatever they are.
    pub(super) fn only_moves(&self) -> bool {
        matches!(
            self,
            Self::Concat { .. }
                | Self::Split { .. }
                | Self::Slice { .. }
                | Self::Gather { .. }
                | Self::Transpose { .. }
                | Self::Expand
                | Self::View
                | Self::Cast
        )
    }
}

/// A window along one axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    /// How many elements it sees.
    pub kernel: u64,
    /// How far apart these are; 1 for next to each other.
    pub dilation: u64,
    /// How far it moves from one result to the next.
    pub stride: u64,
    /// Padding before the axis.
    pub before: u64,
    /// Padding after the axis.
    pub after: u64,
}

/// A convolution over the axes behind channels. Reads the input `[images, channels, ...]`, then the kernels
/// `[outputs, channels / groups, ...]`, then a bias `[outputs]` if it has one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conv {
    /// Channels are in so many groups; those of an output are computed from those of one.
    pub groups: u64,
    /// The window along each axis behind channels.
    pub windows: Vec<Window>,
    /// Whether a bias is added.
    pub bias: bool,
}

/// A transposed convolution. Reads the input `[images, channels, ...]`, then the kernels
/// `[channels, outputs / groups, ...]`, then a bias `[outputs]` if it has one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConvTranspose {
    /// Channels are in so many groups.
    pub groups: u64,
    /// The window along each axis behind channels, of which each input adds to all elements: padding is what is cut
    /// off the result.
    pub windows: Vec<Window>,
    /// Whether a bias is added.
    pub bias: bool,
}

/// What pooling makes of the values of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolKind {
    /// The largest value.
    Max,
    /// The mean of its values.
    Average {
        /// Whether padding counts as zeros. What lies behind the padding never counts.
        with_padding: bool,
    },
}

/// Pooling over the axes behind channels. Reads `[images, channels, ...]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    /// What it makes of the values of a window.
    pub kind: PoolKind,
    /// The window along each axis behind channels. The last one may end behind the padding.
    pub windows: Vec<Window>,
}

/// The product alpha A B + beta C. Reads A, then B, then C if it has one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Gemm {
    /// What the product is multiplied by.
    pub alpha: f32,
    /// What is added is multiplied by this.
    pub beta: f32,
    /// Whether A and B are read transposed.
    pub transposed: [bool; 2],
}

/// A function of each value x.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Unary {
    /// The distance from 0.
    Abs,
    /// The next whole number above.
    Ceil,
    /// The nearest value between two.
    Clip {
        /// The least value.
        least: f32,
        /// The largest value.
        most: f32,
    },
    /// Gives x, and alpha (e^x - 1) below 0.
    Elu {
        /// The factor alpha.
        alpha: f32,
    },
    /// The error function.
    Erf,
    /// The exponential e^x.
    Exp,
    /// The next whole number below.
    Floor,
    /// Gives alpha x + beta, cut to between 0 and 1.
    HardSigmoid {
        /// The factor alpha.
        alpha: f32,
        /// What is added.
        beta: f32,
    },
    /// Gives x times x / 6 + 1 / 2, which is cut to between 0 and 1.
    HardSwish,
    /// Gives x, and alpha x below 0.
    LeakyRelu {
        /// The factor alpha.
        alpha: f32,
    },
    /// The natural logarithm.
    Log,
    /// Gives x tanh(ln(1 + e^x)).
    Mish,
    /// The negative value -x.
    Neg,
    /// The reciprocal 1 / x.
    Reciprocal,
    /// Gives x, and 0 below 0.
    Relu,
    /// The logistic function 1 / (1 + e^-x).
    Sigmoid,
    /// The logarithm ln(1 + e^x).
    Softplus,
    /// The square root.
    Sqrt,
    /// The hyperbolic tangent.
    Tanh,
}

/// A function of two values, a and b.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Binary {
    /// The sum a + b.
    Add,
    /// The difference a - b.
    Sub,
    /// The product a b.
    Mul,
    /// The quotient a / b.
    Div,
    /// The power of a with the exponent b.
    Pow,
    /// The larger one.
    Max,
    /// The smaller one.
    Min,
    /// Gives a, and a b where a is below 0.
    PRelu,
}

/// A softmax over some axes together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Softmax {
    /// The first axis.
    pub first: usize,
    /// The axis behind the last one.
    pub end: usize,
    /// Whether the logarithm of the result is computed.
    pub log: bool,
}

/// What becomes of the values along axes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReduceKind {
    /// The sum of the values.
    Sum,
    /// The mean of the values.
    Mean,
    /// The largest of the values.
    Max,
    /// The smallest value.
    Min,
}

/// A reduction along axes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reduce {
    /// What becomes of the values.
    pub kind: ReduceKind,
    /// The axes, in ascending order. In the result they are of length 1, or not there.
    pub axes: Vec<usize>,
}

/// An entry of what is read, and its weight in the result.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tap {
    /// The entry of what is read.
    pub index: u64,
    /// The weight of that entry.
    pub weight: f32,
}

/// A change of size by interpolation along one axis after another.
#[derive(Clone, PartialEq, Debug)]
pub struct Resize {
    /// Along each axis, what each entry of the result is made of: `None` of an axis that stays as it is.
    pub axes: Vec<Option<Vec<Vec<Tap>>>>,
    /// What stands where nothing is read: an entry without taps along some axis.
    pub outside: f32,
}

/// What a slice takes along an axis: `count` entries from `start` on, `step` apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SliceAxis {
    /// The first entry.
    pub start: u64,
    /// How far apart they are; negative where the order is reversed.
    pub step: i64,
    /// How many there are.
    pub count: u64,
}

/// What stands in a border.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum PadMode {
    /// The border is this value everywhere.
    Constant(f32),
    /// The values behind the edge, mirrored at it.
    Reflect,
    /// The value at the edge.
    Edge,
    /// The values at the other edge.
    Wrap,
}

impl Window {
    /// From its first element to its last.
    pub fn extent(&self) -> u64 {
        self.dilation * (self.kernel - 1) + 1
    }
}
