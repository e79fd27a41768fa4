//! NASNet-A (Zoph et al. 2018), whose cells were searched for.

use super::build::{Activation, Builder, Image, window};

/// NASNet-A with four cells of each size, and 1056 channels in the end.
pub(super) fn mobile(net: &mut Builder) {
    const FILTERS: u64 = 1056 / 24;
    const CELLS: usize = 4;
    let image = net.image();
    let made = net.conv(&image, window(3).stride(2).unpadded(), 32);
    let stem = net.norm(&made, 1.0);
    // The last two results.
    let mut two = [stem.clone(), stem];
    reduction(net, &mut two, FILTERS / 4);
    reduction(net, &mut two, FILTERS / 2);
    for size in 0..3 {
        let filters = FILTERS << size;
        if size > 0 {
            reduction(net, &mut two, filters);
        }
        for _ in 0..CELLS {
            normal(net, &mut two, filters);
        }
    }
    let [_, last] = two;
    let last = net.activate(&last, Activation::Relu);
    net.classify(&last, 1000);
}

/// A cell that keeps the size of images.
fn normal(net: &mut Builder, two: &mut [Image; 2], filters: u64) {
    let [before, last] = two.clone();
    let p = fitted(net, &before, &last, filters);
    let h = squeezed(net, &last, filters);
    let one = [separable(net, &h, (5, 1), filters), separable(net, &p, (3, 1), filters)];
    let one = net.add(&one[0], &one[1]);
    let second = [separable(net, &p, (5, 1), filters), separable(net, &p, (3, 1), filters)];
    let second = net.add(&second[0], &second[1]);
    let third = net.average_pool(&h, window(3));
    let third = net.add(&third, &p);
    let fourth = [net.average_pool(&p, window(3)), net.average_pool(&p, window(3))];
    let fourth = net.add(&fourth[0], &fourth[1]);
    let fifth = separable(net, &h, (3, 1), filters);
    let fifth = net.add(&fifth, &h);
    let joined = net.concat(&[&p, &one, &second, &third, &fourth, &fifth]);
    *two = [last, joined];
}

/// A cell that halves the side of images.
fn reduction(net: &mut Builder, two: &mut [Image; 2], filters: u64) {
    let [before, last] = two.clone();
    let p = fitted(net, &before, &last, filters);
    let h = squeezed(net, &last, filters);
    let half = window(3).stride(2);
    let one = [separable(net, &h, (5, 2), filters), separable(net, &p, (7, 2), filters)];
    let one = net.add(&one[0], &one[1]);
    let second = [net.max_pool(&h, half), separable(net, &p, (7, 2), filters)];
    let second = net.add(&second[0], &second[1]);
    let third = [net.average_pool(&h, half), separable(net, &p, (5, 2), filters)];
    let third = net.add(&third[0], &third[1]);
    let fourth = net.average_pool(&one, window(3));
    let fourth = net.add(&second, &fourth);
    let fifth = [separable(net, &one, (3, 1), filters), net.max_pool(&h, half)];
    let fifth = net.add(&fifth[0], &fifth[1]);
    let joined = net.concat(&[&second, &third, &fourth, &fifth]);
    *two = [last, joined];
}

/// The last result with as many channels as a cell has.
fn squeezed(net: &mut Builder, from: &Image, filters: u64) -> Image {
    let made = net.activate(from, Activation::Relu);
    net.block(&made, window(1), filters, Activation::Linear)
}

/// The result before the last one, with the size of the last one and as many channels as a cell has.
fn fitted(net: &mut Builder, before: &Image, last: &Image, filters: u64) -> Image {
    if before.side != last.side {
        let made = net.activate(before, Activation::Relu);
        let each_second = window(1).stride(2);
        let even = net.average_pool(&made, each_second);
        let even = net.conv(&even, window(1), filters / 2);
        let odd = net.shifted(&made, true);
        let odd = net.average_pool(&odd, each_second);
        let odd = net.conv(&odd, window(1), filters / 2);
        let joined = net.concat(&[&even, &odd]);
        return net.norm(&joined, 1.0);
    }
    match before.channels == filters || before == last {
        true => before.clone(),
        false => squeezed(net, before, filters),
    }
}

/// Twice a function, a convolution of each channel and one of all channels; the first with a side and stride.
fn separable(net: &mut Builder, from: &Image, (side, stride): (u64, u64), filters: u64) -> Image {
    let mut last = from.clone();
    for (stride, scale) in [(stride, 0.7), (1, 0.5)] {
        last = net.activate(&last, Activation::Relu);
        last = net.depthwise(&last, window(side).stride(stride));
        last = net.conv(&last, window(1), filters);
        last = net.norm(&last, scale);
    }
    last
}
