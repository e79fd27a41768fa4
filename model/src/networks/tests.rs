#![allow(clippy::unwrap_used)]

use super::*;
use crate::onnx::{Fixed, Network, OnnxFile};

fn find(name: &str) -> &'static Entry {
    catalogue().iter().find(|entry| entry.name == name).unwrap()
}

/// The network as it is read, without values.
fn read(description: &Description) -> Network {
    let dir = tempfile::tempdir().unwrap();
    let path = description.write_structure(dir.path()).unwrap();
    Network::of(&OnnxFile::open(&path).unwrap(), &Fixed::default()).unwrap()
}

#[test]
fn parameters_and_convolutions_are_those_of_the_published_networks() {
    // torchvision's figures; Keras' of NASNet; those that DARTS' and Scaled-YOLOv4's programs print. Convolutions of
    // the searched cells are counted from their descriptions.
    for (name, parameters, convolutions) in [
        ("resnet-50", 25_557_032, 53),
        ("resnet-152", 60_192_808, 155),
        ("resnet-152-608", 60_192_808, 155),
        ("densenet-121", 7_978_856, 120),
        ("densenet-201", 20_013_928, 200),
        ("mobilenet-v2", 3_504_872, 52),
        ("yolov3-608", 61_949_149, 75),
        ("yolov4-416", 64_363_101, 110),
        ("yolov4-p6", 127_585_200, 205),
        ("shufflenet-v2", 2_278_604, 56),
        ("nasnet-mobile", 5_289_978, 356),
        ("darts", 4_718_752, 298),
        ("darts-cifar", 3_349_342, 439),
    ] {
        let description = find(name).describe();
        let found = (description.parameters(), description.count("Conv"));
        assert_eq!(found, (parameters, convolutions), "{name}");
    }
    // The paper says 5.6 million in the mean of its graphs, give or take 0.1.
    for seed in 1..=3 {
        let parameters = find(&format!("randwire-{seed}")).describe().parameters();
        assert!((5_500_000..5_700_000).contains(&parameters), "randwire-{seed}: {parameters}");
    }
}

#[test]
fn weights_are_those_of_the_published_files() {
    // Numbers in the files of Darknet, which hold means and variances, too.
    for (name, values) in [("yolov3-416", 62_001_757), ("yolov4-608", 64_429_405)] {
        assert_eq!(find(name).describe().bytes().0, 4 * values, "{name}");
    }
    // Table I of Demand Layering, in units of 2^20 bytes.
    let megabytes = |name| find(name).describe().bytes().0 as f64 / f64::from(1 << 20);
    assert!((megabytes("yolov4-p6") - 487.2).abs() < 0.05);
    assert!((megabytes("yolov4-416") - 245.8).abs() < 0.05);
}

#[test]
fn networks_are_read_with_the_shapes_of_their_results() {
    for entry in catalogue() {
        let network = read(&entry.describe());
        let dims: Vec<&[u64]> =
            network.outputs.iter().map(|id| network.value(*id).dims.as_slice()).collect();
        let maps = |channels, sides: &[u64]| {
            sides.iter().map(|&side| vec![1, channels, side, side]).collect::<Vec<_>>()
        };
        let expected = match entry.name {
            "yolov3-416" => maps(255, &[13, 26, 52]),
            "yolov3-608" => maps(255, &[19, 38, 76]),
            "yolov4-416" => maps(255, &[52, 26, 13]),
            "yolov4-608" => maps(255, &[76, 38, 19]),
            "yolov4-p6" => maps(340, &[80, 40, 20, 10]),
            "darts-cifar" | "tiny-darts" => vec![vec![1, 10]],
            _ => vec![vec![1, 1000]],
        };
        assert_eq!(dims, expected, "{}", entry.name);
        let input = &network.value(network.inputs[0]).dims;
        assert_eq!(*input, [1, 3, entry.side, entry.side], "{}", entry.name);
    }
}

#[test]
fn names_are_there_once_and_wires_depend_on_the_seed() {
    let names: std::collections::BTreeSet<&str> = catalogue().iter().map(|own| own.name).collect();
    assert_eq!(names.len(), catalogue().len());
    let reads = |name| {
        let nodes = find(name).describe().model.nodes;
        nodes.into_iter().map(|node| node.inputs).collect::<Vec<_>>()
    };
    assert_ne!(reads("randwire-1"), reads("randwire-2"));
}

#[test]
fn a_seed_gives_the_same_bytes_of_weights_scaled_by_what_they_add_up() {
    let entry = find("tiny-darts");
    let written = || {
        let dir = tempfile::tempdir().unwrap();
        let mut progress = 0;
        entry.describe().write(dir.path(), &mut |bytes| progress += bytes).unwrap();
        let weights = std::fs::read(dir.path().join(WEIGHTS)).unwrap();
        assert_eq!(progress, weights.len() as u64);
        (std::fs::read(dir.path().join(MODEL)).unwrap(), weights)
    };
    let (model, weights) = written();
    assert_eq!(written(), (model, weights.clone()));
    // They stay what they are: a change would make other networks of the same names.
    let digest = blake3::hash(&weights).to_hex();
    assert_eq!(&digest[..16], "fe58633b46ca8477");
    let values: Vec<f32> =
        weights.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let description = entry.describe();
    let first = &description.weights[0];
    let kernel = &values[..first.values as usize];
    let square = kernel.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
    let deviation = (square / kernel.len() as f64).sqrt();
    // The first convolution adds up 3 channels of 3 by 3.
    assert!((deviation / (2f64 / 27.0).sqrt() - 1.0).abs() < 0.1, "{deviation}");
}
