//! Networks of operators from ONNX files on one device.
#![allow(clippy::unwrap_used)]

use galaxy_engine::{
    compute::kernels::instructions::{self, Instructions},
    network::{NetworkEngine, NetworkTensor},
};
use galaxy_model::{
    networks::catalogue,
    onnx::{Fixed, Network, NewAttribute, NewModel, NewNode, NewTensor, OnnxFile},
};
use proptest::prelude::*;
use std::{
    io::Write,
    sync::{PoisonError, RwLock},
};

/// A test that changes the instructions of this process holds it for writing, those that compare to the bit for reading.
static INSTRUCTIONS: RwLock<()> = RwLock::new(());

/// Numbers between -1 and 1 that are always the same.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn loaded(model: &NewModel, threads: u16) -> NetworkEngine {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&model.bytes()).unwrap();
    let file = OnnxFile::open(file.path()).unwrap();
    let network = Network::of(&file, &Fixed::default()).unwrap();
    NetworkEngine::load(&file, &network, threads).unwrap()
}

fn tensor(dims: &[u64], seed: u32) -> NetworkTensor {
    let values = numbers(dims.iter().product::<u64>() as usize, seed);
    NetworkTensor { dims: dims.to_vec(), values }
}

/// The largest difference, as a part of the largest value.
fn difference(got: &[f32], want: &[f32]) -> f32 {
    let most = want.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
    got.iter().zip(want).fold(0f32, |worst, (a, b)| worst.max((a - b).abs())) / most
}

/// A convolution of images, and what it is made of.
#[derive(Clone, Debug)]
struct ConvCase {
    images: usize,
    groups: usize,
    /// Channels of a group that are read, and computed.
    channels: (usize, usize),
    side: [usize; 2],
    kernel: [usize; 2],
    stride: usize,
    dilation: usize,
    pads: [usize; 4],
}

impl ConvCase {
    fn extent(&self, axis: usize) -> usize {
        self.dilation * (self.kernel[axis] - 1) + 1
    }
    fn fits(&self) -> bool {
        (0..2).all(|axis| {
            self.side[axis] + self.pads[axis] + self.pads[axis + 2] >= self.extent(axis)
        })
    }
    fn made(&self) -> [usize; 2] {
        let of = |axis: usize| {
            (self.side[axis] + self.pads[axis] + self.pads[axis + 2] - self.extent(axis))
                / self.stride
                + 1
        };
        [of(0), of(1)]
    }
    fn kernels(&self) -> Vec<f32> {
        let (own, made) = self.channels;
        numbers(self.groups * made * own * self.kernel[0] * self.kernel[1], 7)
    }

    /// The model: a convolution, then a normalisation, then a function; `apart` names the values between as results, so
    /// that each is computed by itself.
    fn model(&self, apart: bool) -> NewModel {
        let (own, made) = self.channels;
        let (inputs, outputs) = ((self.groups * own) as u64, self.groups * made);
        let wholes =
            |values: &[usize]| NewAttribute::Wholes(values.iter().map(|n| *n as i64).collect());
        let kernel = [outputs as u64, own as u64, self.kernel[0] as u64, self.kernel[1] as u64];
        let vector = |name: &str, seed: u32| {
            NewTensor::floats(name, &[outputs as u64], &numbers(outputs, seed))
        };
        let variance: Vec<f32> = numbers(outputs, 12).iter().map(|x| x.abs() + 0.5).collect();
        NewModel {
            opset: 17,
            nodes: vec![
                NewNode::new("Conv", &["x", "w", "b"], "c")
                    .with("group", NewAttribute::Whole(self.groups as i64))
                    .with("strides", wholes(&[self.stride; 2]))
                    .with("dilations", wholes(&[self.dilation; 2]))
                    .with("pads", wholes(&self.pads)),
                NewNode::new(
                    "BatchNormalization",
                    &["c", "scale", "shift", "mean", "variance"],
                    "n",
                ),
                NewNode::new("Relu", &["n"], "y"),
            ],
            tensors: vec![
                NewTensor::floats("w", &kernel, &self.kernels()),
                vector("b", 8),
                vector("scale", 9),
                vector("shift", 10),
                vector("mean", 11),
                NewTensor::floats("variance", &[outputs as u64], &variance),
            ],
            inputs: vec![(
                "x".into(),
                [self.images as u64, inputs, self.side[0] as u64, self.side[1] as u64]
                    .map(Some)
                    .to_vec(),
            )],
            outputs: if apart {
                vec!["y".into(), "c".into(), "n".into()]
            } else {
                vec!["y".into()]
            },
        }
    }

    /// The convolution by its definition, in 64 bits.
    fn reference(&self, x: &[f32]) -> Vec<f32> {
        let (own, made) = self.channels;
        let ([height, width], [rows, columns]) = (self.side, self.made());
        let (kernels, bias) = (self.kernels(), numbers(self.groups * made, 8));
        let mut out = Vec::new();
        for image in 0..self.images {
            for output in 0..self.groups * made {
                for place in 0..rows * columns {
                    let mut sum = f64::from(bias[output]);
                    for channel in 0..own {
                        for element in 0..self.kernel[0] * self.kernel[1] {
                            let (a, b) = (element / self.kernel[1], element % self.kernel[1]);
                            let y = (place / columns * self.stride + a * self.dilation)
                                .checked_sub(self.pads[0]);
                            let x_at = (place % columns * self.stride + b * self.dilation)
                                .checked_sub(self.pads[1]);
                            let (Some(y), Some(x_at)) = (y, x_at) else { continue };
                            if y >= height || x_at >= width {
                                continue;
                            }
                            let read = output / made * own + channel;
                            let pixel =
                                x[((image * self.groups * own + read) * height + y) * width + x_at];
                            let weight =
                                kernels[(output * own + channel) * self.kernel[0] * self.kernel[1]
                                    + element];
                            sum += f64::from(pixel) * f64::from(weight);
                        }
                    }
                    out.push(sum as f32);
                }
            }
        }
        out
    }
}

fn any_conv() -> impl Strategy<Value = ConvCase> {
    let channels = prop_oneof![
        (1usize..50, Just((1usize, 1usize))),
        (1usize..5, (1usize..20, 1usize..40)),
        // Pixels so far apart that copies of them are not side by side.
        (Just(1), (Just(256), 1usize..4)),
    ];
    let sides = (
        (1usize..12, 1usize..34).prop_map(|(height, width)| [height, width]),
        prop::array::uniform2(1usize..4),
        prop::array::uniform4(0usize..3),
    );
    (1usize..3, channels, sides, 1usize..4, 1usize..3)
        .prop_map(|(images, (groups, channels), (side, kernel, pads), stride, dilation)| ConvCase {
            images,
            groups,
            channels,
            side,
            kernel,
            stride,
            dilation,
            pads,
        })
        .prop_filter("its window fits", ConvCase::fits)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]
    #[test]
    fn convolutions_are_those_of_the_definition_alone_and_with_what_follows(
        case in any_conv(),
        set in prop::sample::select(vec!["avx512", "avx2", "neon", "portable"]),
    ) {
        // Whatever of these this processor has: results are right with any.
        let _alone = INSTRUCTIONS.write().unwrap_or_else(PoisonError::into_inner);
        let set: Instructions = set.parse().unwrap();
        if set.available() {
            instructions::limit(set).unwrap();
        }
        let (mut together, mut apart) = (loaded(&case.model(false), 1), loaded(&case.model(true), 3));
        let x = tensor(together.inputs().next().unwrap().1, 3);
        let want = case.reference(&x.values);
        let (fused, each) = (together.run(std::slice::from_ref(&x)).unwrap(), apart.run(&[x]).unwrap());
        prop_assert!(together.order().count() < apart.order().count());
        prop_assert!(difference(&each[1].values, &want) < 1e-5);
        prop_assert!(difference(&fused[0].values, &each[0].values) < 1e-5);
    }
}

/// A network of two branches of unlike size, which join.
fn branches() -> NewModel {
    let conv =
        |input: &str, kernel: &str, output: &str| NewNode::new("Conv", &[input, kernel], output);
    let pointwise = |name: &str, outputs: usize, inputs: usize| {
        NewTensor::floats(
            name,
            &[outputs as u64, inputs as u64, 1, 1],
            &numbers(outputs * inputs, outputs as u32),
        )
    };
    NewModel {
        opset: 17,
        nodes: vec![
            conv("x", "small", "a"),
            conv("x", "large", "b"),
            conv("b", "back", "c"),
            NewNode::new("Add", &["a", "c"], "sum"),
            NewNode::new("GlobalAveragePool", &["sum"], "mean"),
            NewNode::new("Flatten", &["mean"], "flat"),
            NewNode::new("Gemm", &["flat", "matrix", "bias"], "y")
                .with("transB", NewAttribute::Whole(1)),
        ],
        tensors: vec![
            pointwise("small", 8, 4),
            pointwise("large", 64, 4),
            pointwise("back", 8, 64),
            NewTensor::floats("matrix", &[5, 8], &numbers(40, 5)),
            NewTensor::floats("bias", &[5], &numbers(5, 6)),
        ],
        inputs: vec![("x".into(), [1, 4, 9, 7].map(Some).to_vec())],
        outputs: vec!["y".into()],
    }
}

#[test]
fn the_order_of_least_memory_is_chosen_and_results_do_not_depend_on_runs_before() {
    let _unchanged = INSTRUCTIONS.read().unwrap_or_else(PoisonError::into_inner);
    let mut engine = loaded(&branches(), 2);
    let memory = engine.memory();
    assert!(memory.peak < memory.file_order, "{memory:?}");
    assert!(memory.bound <= memory.peak && memory.peak <= memory.arena, "{memory:?}");
    let order: Vec<String> = engine.order().map(str::to_owned).collect();
    let place = |name: &str| order.iter().position(|node| node.contains(name)).unwrap();
    // The large value goes before the small one comes.
    assert!(place("\"c\"") < place("\"a\""), "{order:?}");
    let run =
        |engine: &mut NetworkEngine, seed| engine.run(&[tensor(&[1, 4, 9, 7], seed)]).unwrap();
    let first = run(&mut engine, 1);
    run(&mut engine, 2);
    assert_eq!(run(&mut engine, 1), first);
    assert_eq!(run(&mut loaded(&branches(), 1), 1), first);
}

#[test]
fn inputs_that_do_not_fit_are_refused_by_name() {
    let mut engine = loaded(&branches(), 1);
    let refused = |engine: &mut NetworkEngine, inputs: &[NetworkTensor]| {
        engine.run(inputs).unwrap_err().to_string()
    };
    assert!(refused(&mut engine, &[]).contains("\"x\""));
    assert!(refused(&mut engine, &[tensor(&[1, 4, 7, 9], 1)]).contains("[1, 4, 9, 7] are read"));
    let short = NetworkTensor { dims: vec![1, 4, 9, 7], values: vec![0.0; 3] };
    assert!(refused(&mut engine, &[short]).contains("3 values"));
}

#[test]
fn weights_that_are_given_when_it_runs_give_what_stored_ones_do() {
    let _unchanged = INSTRUCTIONS.read().unwrap_or_else(PoisonError::into_inner);
    let stored = branches();
    let mut given = stored.clone();
    given.tensors.retain(|tensor| !["large", "matrix"].contains(&tensor.name.as_str()));
    given.inputs.push(("large".into(), [64, 4, 1, 1].map(Some).to_vec()));
    given.inputs.push(("matrix".into(), [5, 8].map(Some).to_vec()));
    let x = tensor(&[1, 4, 9, 7], 1);
    let large = NetworkTensor { dims: vec![64, 4, 1, 1], values: numbers(256, 64) };
    let matrix = NetworkTensor { dims: vec![5, 8], values: numbers(40, 5) };
    let got = loaded(&given, 1).run(&[x.clone(), large, matrix]).unwrap();
    assert_eq!(got, loaded(&stored, 1).run(&[x]).unwrap());
}

#[test]
fn negative_indices_count_from_the_end() {
    let model = NewModel {
        opset: 17,
        nodes: vec![NewNode::new("Gather", &["x", "at"], "y")],
        tensors: vec![NewTensor::wholes("at", &[0, -3])],
        inputs: vec![("x".into(), vec![Some(3), Some(2)])],
        outputs: vec!["y".into()],
    };
    let got = loaded(&model, 1).run(&[tensor(&[3, 2], 1)]).unwrap();
    assert_eq!(got[0].values, [&numbers(6, 1)[..2], &numbers(6, 1)[..2]].concat());
}

#[test]
fn what_depends_on_stored_values_alone_is_computed_once_and_packed() {
    let _unchanged = INSTRUCTIONS.read().unwrap_or_else(PoisonError::into_inner);
    // Too large to be worked out as the file is opened.
    let stored = numbers(100 * 60, 4);
    let turned: Vec<f32> = (0..6000).map(|at| stored[at % 100 * 60 + at / 100]).collect();
    let model = |turn: bool| {
        let product = NewNode::new("MatMul", &["x", "w"], "y");
        let (nodes, name, values) = match turn {
            true => (vec![NewNode::new("Transpose", &["v"], "w"), product], "v", &turned),
            false => (vec![product], "w", &stored),
        };
        let dims = if turn { [60, 100] } else { [100, 60] };
        NewModel {
            opset: 17,
            nodes,
            tensors: vec![NewTensor::floats(name, &dims, values)],
            inputs: vec![("x".into(), vec![Some(3), Some(100)])],
            outputs: vec!["y".into()],
        }
    };
    let (mut turned, mut plain) = (loaded(&model(true), 1), loaded(&model(false), 1));
    assert_eq!(turned.order().count(), 1);
    assert_eq!(turned.memory(), plain.memory());
    let x = tensor(&[3, 100], 9);
    assert_eq!(turned.run(std::slice::from_ref(&x)).unwrap(), plain.run(&[x]).unwrap());
}

#[test]
fn networks_with_many_branches_give_finite_values() {
    for name in
        ["tiny-darts", "shufflenet-v1", "shufflenet-v2", "darts", "nasnet-mobile", "randwire-1"]
    {
        let entry = catalogue().iter().find(|entry| entry.name == name).unwrap();
        let dir = tempfile::tempdir().unwrap();
        entry.describe().write(dir.path(), &mut |_| {}).unwrap();
        let file = OnnxFile::open(&dir.path().join(galaxy_model::networks::MODEL)).unwrap();
        let network = Network::of(&file, &Fixed::default()).unwrap();
        let mut engine = NetworkEngine::load(&file, &network, 2).unwrap();
        let results = engine.run(&[tensor(&[1, 3, entry.side, entry.side], 1)]).unwrap();
        let most = results[0].values.iter().fold(0f32, |most, value| most.max(value.abs()));
        assert!(results[0].values.iter().all(|value| value.is_finite()), "{name}");
        assert!((1e-3..1e4).contains(&most), "{name}: values of {most}");
    }
}

/// A convolution behind which channels are scaled in several ways, and then shuffled.
fn scaled_and_shuffled(apart: bool) -> NewModel {
    let view =
        |input: &str, shape: &str, output: &str| NewNode::new("Reshape", &[input, shape], output);
    let order = NewAttribute::Wholes(vec![0, 2, 1, 3, 4]);
    let all = ["c", "m", "p", "s", "y"];
    NewModel {
        opset: 17,
        nodes: vec![
            NewNode::new("Conv", &["x", "w"], "c"),
            NewNode::new("Mul", &["c", "times"], "m"),
            NewNode::new("Add", &["plus", "m"], "p"),
            NewNode::new("Mul", &["p", "half"], "s"),
            view("s", "divided", "d"),
            NewNode::new("Transpose", &["d"], "t").with("perm", order),
            view("t", "whole", "u"),
            NewNode::new("Conv", &["u", "v"], "y"),
        ],
        tensors: vec![
            NewTensor::floats("w", &[12, 3, 1, 1], &numbers(36, 1)),
            NewTensor::floats("v", &[4, 12, 1, 1], &numbers(48, 2)),
            NewTensor::floats("times", &[12, 1, 1], &numbers(12, 3)),
            NewTensor::floats("plus", &[1, 12, 1, 1], &numbers(12, 4)),
            NewTensor::floats("half", &[1], &[0.5]),
            NewTensor::wholes("divided", &[1, 3, 4, 5, 6]),
            NewTensor::wholes("whole", &[1, 12, 5, 6]),
        ],
        inputs: vec![("x".into(), [1, 3, 5, 6].map(Some).to_vec())],
        outputs: all
            .iter()
            .rev()
            .take(if apart { 5 } else { 1 })
            .map(|name| (*name).into())
            .collect(),
    }
}

#[test]
fn channels_that_are_scaled_and_shuffled_are_so_alone_and_together() {
    let (mut together, mut apart) =
        (loaded(&scaled_and_shuffled(false), 1), loaded(&scaled_and_shuffled(true), 2));
    let x = tensor(&[1, 3, 5, 6], 9);
    let (fused, each) = (together.run(std::slice::from_ref(&x)).unwrap(), apart.run(&[x]).unwrap());
    assert!(difference(&fused[0].values, &each[0].values) < 1e-5);
    // Without what is between: two convolutions and a shuffle, and the layouts of what comes and goes.
    let names: Vec<&str> = together.order().collect();
    assert!(names.len() <= 5 && !names.iter().any(|name| name.contains("Mul")), "{names:?}");
    let by = numbers(12, 3);
    let plus = numbers(12, 4);
    let (scaled, convolved) = (&each[1].values, &each[4].values);
    for (at, (s, c)) in scaled.iter().zip(convolved).enumerate() {
        let want = (c * by[at / 30] + plus[at / 30]) * 0.5;
        assert!((s - want).abs() < 1e-5, "{at}: {s} and not {want}");
    }
}
