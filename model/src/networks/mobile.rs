//! MobileNetV2 (Sandler et al. 2018) and ShuffleNets (Zhang et al. 2018, Ma et al. 2018).

use super::build::{Activation, Builder, Image, window};

/// MobileNetV2: for each stage how much blocks widen, its channels, its depth and its stride.
pub(super) fn mobilenet_v2(net: &mut Builder) {
    const STAGES: [(u64, u64, usize, u64); 7] = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ];
    let image = net.image();
    let mut last = net.block(&image, window(3).stride(2), 32, Activation::Relu6);
    for (widen, channels, depth, stride) in STAGES {
        for place in 0..depth {
            let stride = if place == 0 { stride } else { 1 };
            last = inverted(net, &last, widen, (channels, stride));
        }
    }
    last = net.block(&last, window(1), 1280, Activation::Relu6);
    net.classify(&last, 1000);
}

/// A block that is wider inside than at its ends.
fn inverted(net: &mut Builder, from: &Image, widen: u64, to: (u64, u64)) -> Image {
    let (channels, stride) = to;
    let mut made = from.clone();
    if widen > 1 {
        made = net.block(&made, window(1), widen * from.channels, Activation::Relu6);
    }
    made = depthwise(net, &made, stride);
    made = net.activate(&made, Activation::Relu6);
    made = net.conv(&made, window(1), channels);
    made = net.norm(&made, 0.5);
    match from.channels == channels && stride == 1 {
        true => net.add(from, &made),
        false => made,
    }
}

/// A convolution of 3 by 3 of each channel, and its normalisation.
fn depthwise(net: &mut Builder, from: &Image, stride: u64) -> Image {
    let made = net.depthwise(from, window(3).stride(stride));
    net.norm(&made, 0.7)
}

/// What ShuffleNets begin with.
fn stem(net: &mut Builder) -> Image {
    let image = net.image();
    let made = net.block(&image, window(3).stride(2), 24, Activation::Relu);
    net.max_pool(&made, window(3).stride(2))
}

/// ShuffleNet of eight groups, whose units add a branch to what they read, or in smaller images concatenate it.
pub(super) fn shufflenet_v1(net: &mut Builder) {
    let mut last = stem(net);
    for (depth, channels) in [(4, 384), (8, 768), (4, 1536)] {
        for place in 0..depth {
            let begins = place == 0;
            last = unit_v1(net, &last, channels, begins);
        }
    }
    net.classify(&last, 1000);
}

fn unit_v1(net: &mut Builder, from: &Image, channels: u64, begins: bool) -> Image {
    const GROUPS: u64 = 8;
    let (added, stride) = if begins { (channels - from.channels, 2) } else { (channels, 1) };
    // The few channels of the stem are not in groups.
    let groups = if from.channels == 24 { 1 } else { GROUPS };
    let made = net.grouped(from, window(1), channels / 4, groups);
    let made = net.norm(&made, 1.0);
    let made = net.activate(&made, Activation::Relu);
    let made = net.shuffled(&made, GROUPS);
    let made = depthwise(net, &made, stride);
    let made = net.grouped(&made, window(1), added, GROUPS);
    let made = net.norm(&made, 0.5);
    let joined = match begins {
        true => {
            let pooled = net.average_pool(from, window(3).stride(2));
            net.concat(&[&pooled, &made])
        }
        false => net.add(from, &made),
    };
    net.activate(&joined, Activation::Relu)
}

/// ShuffleNetV2, whose units compute one half of their channels, or in smaller images two branches.
pub(super) fn shufflenet_v2(net: &mut Builder) {
    let mut last = stem(net);
    for (depth, channels) in [(4, 116), (8, 232), (4, 464)] {
        for place in 0..depth {
            let [one, other] = match place {
                0 => {
                    let beside = depthwise(net, &last, 2);
                    let beside = net.block(&beside, window(1), channels / 2, Activation::Relu);
                    [beside, branch_v2(net, &last, channels / 2, 2)]
                }
                _ => {
                    let [kept, read] = net.halves(&last);
                    [kept, branch_v2(net, &read, channels / 2, 1)]
                }
            };
            let joined = net.concat(&[&one, &other]);
            last = net.shuffled(&joined, 2);
        }
    }
    last = net.block(&last, window(1), 1024, Activation::Relu);
    net.classify(&last, 1000);
}

fn branch_v2(net: &mut Builder, from: &Image, channels: u64, stride: u64) -> Image {
    let made = net.block(from, window(1), channels, Activation::Relu);
    let made = depthwise(net, &made, stride);
    net.block(&made, window(1), channels, Activation::Relu)
}
