//! DARTS (Liu et al. 2019): the cells that its second-order search found.

use super::build::{Activation, Builder, Image, window};

/// What a cell computes from one of its states.
#[derive(Clone, Copy)]
enum Choice {
    Separable,
    Dilated,
    Pooled,
    Skip,
}
use Choice::{Dilated, Pooled, Separable, Skip};

/// For each state of a cell what it adds up, from states before it; the first two are the cell's inputs.
type Genotype = [[(Choice, usize); 2]; 4];

const NORMAL: Genotype = [
    [(Separable, 0), (Separable, 1)],
    [(Separable, 0), (Separable, 1)],
    [(Separable, 1), (Skip, 0)],
    [(Skip, 0), (Dilated, 2)],
];
const REDUCTION: Genotype = [
    [(Pooled, 0), (Pooled, 1)],
    [(Skip, 2), (Pooled, 1)],
    [(Pooled, 0), (Skip, 2)],
    [(Skip, 2), (Pooled, 1)],
];

/// The network of 14 cells for images of ImageNet.
pub(super) fn imagenet(net: &mut Builder) {
    let two = small_stem(net, 48);
    build(net, two, (48, 14), 1000);
}

/// The network of 20 cells for images of CIFAR-10.
pub(super) fn cifar(net: &mut Builder) {
    let image = net.image();
    let stem = net.block(&image, window(3), 108, Activation::Linear);
    build(net, [stem.clone(), stem], (36, 20), 10);
}

/// A network of few cells for tests.
pub(super) fn tiny(net: &mut Builder) {
    let two = small_stem(net, 8);
    build(net, two, (8, 5), 10);
}

/// What large images begin with: a quarter of their side, and an eighth.
fn small_stem(net: &mut Builder, width: u64) -> [Image; 2] {
    let image = net.image();
    let half = window(3).stride(2);
    let first = net.block(&image, half, width / 2, Activation::Relu);
    let first = net.block(&first, half, width, Activation::Linear);
    let ready = net.activate(&first, Activation::Relu);
    let second = net.block(&ready, half, width, Activation::Linear);
    [first, second]
}

/// Cells of so many channels in the beginning, on the last two results of a stem.
fn build(net: &mut Builder, two: [Image; 2], (width, cells): (u64, usize), classes: u64) {
    let [mut before, mut last] = two;
    let mut channels = width;
    for cell in 0..cells {
        let reduces = cell == cells / 3 || cell == 2 * cells / 3;
        channels *= if reduces { 2 } else { 1 };
        let made = build_cell(net, [&before, &last], channels, reduces);
        before = last;
        last = made;
    }
    net.classify(&last, classes);
}

fn build_cell(net: &mut Builder, two: [&Image; 2], channels: u64, reduces: bool) -> Image {
    let before = match two[0].side == two[1].side {
        true => squeezed(net, two[0], channels),
        false => halved(net, two[0], channels),
    };
    let mut states = vec![before, squeezed(net, two[1], channels)];
    let genotype = if reduces { REDUCTION } else { NORMAL };
    for pair in genotype {
        let made = pair.map(|(choice, state)| {
            let stride = if reduces && state < 2 { 2 } else { 1 };
            compute(net, choice, &states[state], stride)
        });
        states.push(net.add(&made[0], &made[1]));
    }
    net.concat(&states[2..].iter().collect::<Vec<_>>())
}

fn compute(net: &mut Builder, choice: Choice, from: &Image, stride: u64) -> Image {
    match choice {
        Separable => {
            let made = filtered(net, from, (1, stride), 0.7);
            filtered(net, &made, (1, 1), 0.5)
        }
        Dilated => filtered(net, from, (2, stride), 0.5),
        Pooled => net.max_pool(from, window(3).stride(stride)),
        Skip if stride == 1 => from.clone(),
        Skip => halved(net, from, from.channels),
    }
}

/// A function, a convolution of each channel with a dilation and a stride, one of all channels, and a normalisation.
fn filtered(net: &mut Builder, from: &Image, (dilation, stride): (u64, u64), scale: f32) -> Image {
    let made = net.activate(from, Activation::Relu);
    let made = net.depthwise(&made, window(3).dilated(dilation).stride(stride));
    let made = net.conv(&made, window(1), from.channels);
    net.norm(&made, scale)
}

fn squeezed(net: &mut Builder, from: &Image, channels: u64) -> Image {
    let made = net.activate(from, Activation::Relu);
    net.block(&made, window(1), channels, Activation::Linear)
}

/// An image of half the side, one half of whose channels comes from even rows and columns, the other from odd ones.
fn halved(net: &mut Builder, from: &Image, channels: u64) -> Image {
    let made = net.activate(from, Activation::Relu);
    let each_second = window(1).stride(2);
    let even = net.conv(&made, each_second, channels / 2);
    let odd = net.shifted(&made, false);
    let odd = net.conv(&odd, each_second, channels / 2);
    let joined = net.concat(&[&even, &odd]);
    net.norm(&joined, 1.0)
}
