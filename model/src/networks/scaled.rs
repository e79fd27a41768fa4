//! The largest detector but one of Scaled-YOLOv4 (Wang et al. 2021).

use super::{
    build::{Activation, Builder, Image, window},
    darknet::{cross_stage, pooled},
};

const MISH: Activation = Activation::Mish;
/// Channels of a raw map: for four boxes their place and size, whether there is something, and 80 classes.
const BOXES: u64 = 4 * (4 + 1 + 80);

/// YOLOv4-P6, with raw maps of four scales.
pub(super) fn yolov4_p6(net: &mut Builder) {
    let [p3, p4, p5, p6] = backbone(net);
    let n6 = pyramid(net, &p6);
    let n5 = upward(net, &n6, &p5, 512);
    let n4 = upward(net, &n5, &p4, 256);
    let n3 = upward(net, &n4, &p3, 128);
    head(net, &n3, 256);
    let m4 = downward(net, &n3, &n4, 256);
    head(net, &m4, 512);
    let m5 = downward(net, &m4, &n5, 512);
    head(net, &m5, 1024);
    let m6 = downward(net, &m5, &n6, 512);
    head(net, &m6, 1024);
}

/// Results at an eighth of the image's side, and at three sizes below it.
fn backbone(net: &mut Builder) -> [Image; 4] {
    const STAGES: [(u64, usize); 6] =
        [(64, 1), (128, 3), (256, 15), (512, 15), (1024, 7), (1024, 7)];
    let image = net.image();
    let mut last = net.block(&image, window(3), 32, MISH);
    let stages = STAGES.map(|(width, depth)| {
        last = net.block(&last, window(3).stride(2), width, MISH);
        last = cross_stage(net, &last, (width / 2, width / 2), depth);
        last.clone()
    });
    let [_, _, p3, p4, p5, p6] = stages;
    [p3, p4, p5, p6]
}

/// Spatial pyramid pooling on some channels, beside which others pass.
fn pyramid(net: &mut Builder, from: &Image) -> Image {
    const WIDTH: u64 = 512;
    let beside = net.block(from, window(1), WIDTH, MISH);
    let mut last = net.block(from, window(1), WIDTH, MISH);
    last = net.block(&last, window(3), WIDTH, MISH);
    last = net.block(&last, window(1), WIDTH, MISH);
    last = pooled(net, &last);
    last = net.block(&last, window(1), WIDTH, MISH);
    last = net.block(&last, window(3), WIDTH, MISH);
    let joined = net.concat(&[&last, &beside]);
    net.block(&joined, window(1), WIDTH, MISH)
}

/// Three pairs of convolutions on what one makes, beside which it passes.
fn stage(net: &mut Builder, from: &Image, width: u64) -> Image {
    let narrow = net.block(from, window(1), width, MISH);
    let beside = net.block(&narrow, window(1), width, MISH);
    let mut last = narrow;
    for _ in 0..3 {
        last = net.block(&last, window(1), width, MISH);
        last = net.block(&last, window(3), width, MISH);
    }
    let joined = net.concat(&[&last, &beside]);
    net.block(&joined, window(1), width, MISH)
}

/// What the backbone has of a size, with a coarser result.
fn upward(net: &mut Builder, coarse: &Image, beside: &Image, width: u64) -> Image {
    let narrow = net.block(coarse, window(1), width, MISH);
    let large = net.upsample(&narrow);
    let beside = net.block(beside, window(1), width, MISH);
    let joined = net.concat(&[&beside, &large]);
    stage(net, &joined, width)
}

/// A finer result, made half as large, with what there is of that size.
fn downward(net: &mut Builder, fine: &Image, beside: &Image, width: u64) -> Image {
    let small = net.block(fine, window(3).stride(2), width, MISH);
    let joined = net.concat(&[&small, beside]);
    stage(net, &joined, width)
}

/// A raw map of boxes.
fn head(net: &mut Builder, from: &Image, width: u64) {
    let made = net.block(from, window(3), width, MISH);
    let raw = net.conv_bias(&made, window(1), BOXES);
    net.output(&raw);
}
