//! The detectors of Darknet: YOLOv3 (Redmon and Farhadi 2018) and YOLOv4 (Bochkovskiy et al. 2020).

use super::build::{Activation, Builder, Image, window};

/// Channels of a raw map: for three boxes their place and size, whether there is something, and 80 classes.
const BOXES: u64 = 3 * (4 + 1 + 80);
/// By how much the last convolution of a residual block scales, so that many of them add up to little.
const RESIDUAL: f32 = 0.25;

/// A backbone's results at an eighth, a sixteenth and a thirty-second of the image's side.
type Scales = [Image; 3];

/// YOLOv3 on Darknet-53, with raw maps of three scales.
pub(super) fn yolov3(net: &mut Builder) {
    let [fine, middle, coarse] = darknet53(net);
    let coarse = taper(net, &coarse, 512, 5);
    head(net, &coarse, 512);
    let middle = finer(net, &coarse, &middle, 256);
    let middle = taper(net, &middle, 256, 5);
    head(net, &middle, 256);
    let fine = finer(net, &middle, &fine, 128);
    let fine = taper(net, &fine, 128, 5);
    head(net, &fine, 128);
}

fn darknet53(net: &mut Builder) -> Scales {
    let image = net.image();
    let mut last = net.block(&image, window(3), 32, Activation::Leaky);
    let mut scales = Vec::new();
    for (width, depth) in [(64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)] {
        last = net.block(&last, window(3).stride(2), width, Activation::Leaky);
        for _ in 0..depth {
            last = residual(net, &last, width / 2, Activation::Leaky);
        }
        scales.push(last.clone());
    }
    [scales[2].clone(), scales[3].clone(), last]
}

/// A block that adds what two convolutions make, the first of which has `width` channels.
pub(super) fn residual(net: &mut Builder, from: &Image, width: u64, function: Activation) -> Image {
    let made = net.block(from, window(1), width, function);
    let made = net.conv(&made, window(3), from.channels);
    let made = net.norm(&made, RESIDUAL);
    let made = net.activate(&made, function);
    net.add(&made, from)
}

/// Convolutions of 1 by 1 and 3 by 3 in turn, the latter with twice the channels.
fn taper(net: &mut Builder, from: &Image, width: u64, count: usize) -> Image {
    let mut last = from.clone();
    for place in 0..count {
        last = match place % 2 {
            0 => net.block(&last, window(1), width, Activation::Leaky),
            _ => net.block(&last, window(3), 2 * width, Activation::Leaky),
        };
    }
    last
}

/// A raw map of boxes.
fn head(net: &mut Builder, from: &Image, width: u64) {
    let made = net.block(from, window(3), 2 * width, Activation::Leaky);
    let raw = net.conv_bias(&made, window(1), BOXES);
    net.output(&raw);
}

/// A coarse result, made twice as large, with what the backbone has of that size.
fn finer(net: &mut Builder, coarse: &Image, beside: &Image, width: u64) -> Image {
    let narrow = net.block(coarse, window(1), width, Activation::Leaky);
    let large = net.upsample(&narrow);
    net.concat(&[&large, beside])
}

/// YOLOv4 on CSPDarknet-53, with raw maps of three scales.
pub(super) fn yolov4(net: &mut Builder) {
    let [fine, middle, coarse] = csp_darknet53(net);
    let pooled = pyramid(net, &coarse);
    let middle = upward(net, &pooled, &middle, 256);
    let fine = upward(net, &middle, &fine, 128);
    head(net, &fine, 128);
    let middle = downward(net, &fine, &middle, 256);
    head(net, &middle, 256);
    let coarse = downward(net, &middle, &pooled, 512);
    head(net, &coarse, 512);
}

fn csp_darknet53(net: &mut Builder) -> Scales {
    let image = net.image();
    let mut last = net.block(&image, window(3), 32, Activation::Mish);
    let mut scales = Vec::new();
    for (width, depth) in [(64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)] {
        last = net.block(&last, window(3).stride(2), width, Activation::Mish);
        last = match width {
            64 => cross_stage(net, &last, (64, 32), depth),
            _ => cross_stage(net, &last, (width / 2, width / 2), depth),
        };
        scales.push(last.clone());
    }
    [scales[2].clone(), scales[3].clone(), last]
}

/// A stage of residual blocks on some channels, beside which others pass: channels of each of the two, and inside the
/// blocks.
pub(super) fn cross_stage(
    net: &mut Builder,
    from: &Image,
    (width, inside): (u64, u64),
    depth: usize,
) -> Image {
    let beside = net.block(from, window(1), width, Activation::Mish);
    let mut last = net.block(from, window(1), width, Activation::Mish);
    for _ in 0..depth {
        last = residual(net, &last, inside, Activation::Mish);
    }
    let last = net.block(&last, window(1), width, Activation::Mish);
    let joined = net.concat(&[&last, &beside]);
    net.block(&joined, window(1), from.channels, Activation::Mish)
}

/// Spatial pyramid pooling: the largest values of three windows beside the values themselves.
pub(super) fn pooled(net: &mut Builder, from: &Image) -> Image {
    let pools = [13, 9, 5].map(|side| net.max_pool(from, window(side)));
    net.concat(&[&pools[0], &pools[1], &pools[2], from])
}

fn pyramid(net: &mut Builder, from: &Image) -> Image {
    let narrow = taper(net, from, 512, 3);
    let pooled = pooled(net, &narrow);
    taper(net, &pooled, 512, 3)
}

/// What the backbone has of a size, with a coarser result.
fn upward(net: &mut Builder, coarse: &Image, beside: &Image, width: u64) -> Image {
    let narrow = net.block(coarse, window(1), width, Activation::Leaky);
    let large = net.upsample(&narrow);
    let beside = net.block(beside, window(1), width, Activation::Leaky);
    let joined = net.concat(&[&beside, &large]);
    taper(net, &joined, width, 5)
}

/// A finer result, made half as large, with what there is of that size.
fn downward(net: &mut Builder, fine: &Image, beside: &Image, width: u64) -> Image {
    let small = net.block(fine, window(3).stride(2), width, Activation::Leaky);
    let joined = net.concat(&[&small, beside]);
    taper(net, &joined, width, 5)
}
