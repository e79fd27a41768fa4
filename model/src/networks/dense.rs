//! DenseNets (Huang et al. 2017), which concatenate the result of each layer with all before it.

use super::build::{Activation, Builder, Image, window};

/// Channels that each layer adds.
const GROWTH: u64 = 32;

/// DenseNet-121 with scores of 1000 classes.
pub(super) fn densenet_121(net: &mut Builder) {
    densenet(net, [6, 12, 24, 16]);
}

/// DenseNet-201 with scores of 1000 classes.
pub(super) fn densenet_201(net: &mut Builder) {
    densenet(net, [6, 12, 48, 32]);
}

fn densenet(net: &mut Builder, depths: [usize; 4]) {
    let image = net.image();
    let stem = net.block(&image, window(7).stride(2), 64, Activation::Relu);
    let mut last = net.max_pool(&stem, window(3).stride(2));
    for (block, depth) in depths.into_iter().enumerate() {
        if block > 0 {
            let ready = normalised(net, &last);
            let narrow = net.conv(&ready, window(1), last.channels / 2);
            last = net.average_pool(&narrow, window(2).stride(2));
        }
        for _ in 0..depth {
            let ready = normalised(net, &last);
            let narrow = net.block(&ready, window(1), 4 * GROWTH, Activation::Relu);
            let more = net.conv(&narrow, window(3), GROWTH);
            last = net.concat(&[&last, &more]);
        }
    }
    let ready = normalised(net, &last);
    net.classify(&ready, 1000);
}

fn normalised(net: &mut Builder, from: &Image) -> Image {
    let made = net.norm(from, 1.0);
    net.activate(&made, Activation::Relu)
}
