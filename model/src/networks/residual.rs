//! ResNets of bottlenecks (He et al. 2016), with the stride on the convolution of 3 by 3.

use super::build::{Activation, Builder, Image, window};

/// ResNet-50 with scores of 1000 classes.
pub(super) fn resnet_50(net: &mut Builder) {
    resnet(net, [3, 4, 6, 3]);
}

/// ResNet-152 with scores of 1000 classes.
pub(super) fn resnet_152(net: &mut Builder) {
    resnet(net, [3, 8, 36, 3]);
}

fn resnet(net: &mut Builder, depths: [usize; 4]) {
    let image = net.image();
    let stem = net.block(&image, window(7).stride(2), 64, Activation::Relu);
    let mut last = net.max_pool(&stem, window(3).stride(2));
    for (stage, (depth, width)) in depths.into_iter().zip([64, 128, 256, 512]).enumerate() {
        for place in 0..depth {
            let stride = if stage > 0 && place == 0 { 2 } else { 1 };
            last = bottleneck(net, &last, width, stride);
        }
    }
    net.classify(&last, 1000);
}

fn bottleneck(net: &mut Builder, from: &Image, width: u64, stride: u64) -> Image {
    let made = net.block(from, window(1), width, Activation::Relu);
    let made = net.block(&made, window(3).stride(stride), width, Activation::Relu);
    let made = net.conv(&made, window(1), 4 * width);
    let made = net.norm(&made, 0.25);
    let beside = match from.channels == 4 * width {
        true => from.clone(),
        false => net.block(from, window(1).stride(stride), 4 * width, Activation::Linear),
    };
    let sum = net.add(&made, &beside);
    net.activate(&sum, Activation::Relu)
}
