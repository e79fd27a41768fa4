//! Turns image files into the pixel values that a model reads, as `preprocessor_config.json` describes.
//!
//! Steps and rounding are those of `transformers` on Pillow, which resizes rows before columns: the values are the same
//! for the same pixels. (Pillow 13 resizes the columns of some tall images first, which changes some values by 1 in
//! 255.) PNG is decoded exactly; JPEG decoders differ from one another by steps of that size.

use crate::{
    config::{self, Fields},
    error::ModelError,
    fields::{
        Table,
        Treatment::{Ignored, Inside, Only, Read, Warned},
        check,
    },
    recognise,
    small_file::{MAX_JSON_BYTES, read_bounded},
    spec::Patches,
};
use image::{DynamicImage, ImageDecoder, ImageReader, Limits, RgbImage};
use std::{io::Cursor, path::Path};

/// The most pixels that a side of a decoded image may have.
const MAX_SIDE: u32 = 1 << 14;
/// The most bytes that a decoded image may have: 22 million pixels of three colours.
const MAX_DECODED: u64 = 64 << 20;
/// The most bytes that decoding may take besides the pixels.
const MAX_BYTES: u64 = 128 << 20;
/// The most pixels that a side of a resized image may have.
const MAX_SIZE: u32 = 1 << 13;

/// The fields of `preprocessor_config.json` that ViT's image processor reads, and those that others have.
pub(crate) const FIELDS: Table = &[
    ("do_resize", Read),
    ("size", Inside(&[SIZE])),
    ("resample", Read),
    ("do_rescale", Read),
    ("rescale_factor", Read),
    ("do_normalize", Read),
    ("image_mean", Read),
    ("image_std", Read),
    ("do_center_crop", Read),
    ("image_processor_type", Only(PROCESSORS, "only ViTImageProcessor is run")),
    ("feature_extractor_type", Only(PROCESSORS, "only ViTImageProcessor is run")),
    ("default_to_square", Only(&["true"], "write size as height and width")),
    ("do_pad", Only(&["false"], "only images of the model's size are read")),
    ("do_reduce_labels", Ignored),
    ("auto_map", Warned("names code of the model's own, which is not run")),
    // What these ask for is done in any case, or only together with do_center_crop and do_pad.
    ("crop_size", Ignored),
    ("pad_size", Ignored),
    ("do_convert_rgb", Ignored),
    ("data_format", Ignored),
    ("input_data_format", Ignored),
    ("device", Ignored),
    ("return_tensors", Ignored),
    ("disable_grouping", Ignored),
    ("image_seq_length", Ignored),
    ("processor_class", Ignored),
    ("_processor_class", Ignored),
    ("_valid_processor_keys", Ignored),
];
const SIZE: Table = &[("width", Read), ("height", Read)];
const PROCESSORS: &[&str] = &[
    "\"ViTImageProcessor\"",
    "\"ViTImageProcessorFast\"",
    "\"ViTImageProcessorPil\"",
    "\"ViTFeatureExtractor\"",
];

/// Turns images into the values that a model reads.
#[derive(Clone, PartialEq, Debug)]
pub struct ImageProcessor {
    patches: Patches,
    /// Width and height to which images are resized, if they are.
    resize: Option<(u32, u32)>,
    filter: Filter,
    /// What each value, from 0 to 255, is multiplied by.
    rescale: f64,
    /// The mean that is subtracted from each channel, and the deviation that it is then divided by.
    normalise: Option<([f32; 3], [f32; 3])>,
}

/// How pixels are interpolated when an image is resized. The numbers are Pillow's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Filter {
    Lanczos = 1,
    Bilinear = 2,
    Bicubic = 3,
}

impl Filter {
    /// How far from its place a pixel has weight, in pixels.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let x = x.abs();
        let sinc = |x: f64| match x {
            0.0 => 1.0,
            x => (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI),
        };
        match self {
            Self::Bilinear if x < 1.0 => 1.0 - x,
            Self::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Self::Bicubic if x < 2.0 => ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0,
            Self::Lanczos if x < 3.0 => sinc(x) * sinc(x / 3.0),
            _ => 0.0,
        }
    }
}

impl ImageProcessor {
    /// Reads the `preprocessor_config.json` of a model directory.
    ///
    /// # Errors
    /// When the file is missing, or describes something that is not supported.
    pub fn open(directory: &Path, patches: Patches) -> Result<Self, ModelError> {
        let path = directory.join("preprocessor_config.json");
        if !path.is_file() {
            let wanted = "preprocessor_config.json".to_owned();
            return Err(ModelError::NotThere { path: directory.to_owned(), wanted });
        }
        let bytes = read_bounded(&path, MAX_JSON_BYTES)?;
        let value = config::parse(&path, &bytes)?;
        Self::read(&Fields::new(&path, &value)?, patches)
    }

    fn read(config: &Fields<'_>, patches: Patches) -> Result<Self, ModelError> {
        if patches.channels != 3 {
            let problem = format!("is {}: images have 3", patches.channels);
            return Err(config.wrong("num_channels", problem));
        }
        check(config, &[FIELDS])?;
        config.must_be("do_center_crop", false, "only whole images are read")?;
        let resize = match config.flag("do_resize", true)? {
            false => None,
            // Old files have a single number.
            true => Some(match config.inner(&["size"]) {
                Ok(Some(size)) => {
                    (size.count(&["width"], MAX_SIZE)?, size.count(&["height"], MAX_SIZE)?)
                }
                _ => {
                    let [height, width] = config.two("size", MAX_SIZE)?.unwrap_or([224, 224]);
                    (width, height)
                }
            }),
        };
        let filter = match config.count_or_none(&["resample"], 5)?.unwrap_or(2) {
            1 => Filter::Lanczos,
            2 => Filter::Bilinear,
            3 => Filter::Bicubic,
            other => {
                let known = "1 (Lanczos), 2 (bilinear), 3 (bicubic)";
                return Err(config.unknown("resample", &other.to_string(), known));
            }
        };
        let rescale = match config.flag("do_rescale", true)? {
            true => config.positive_or_none(&["rescale_factor"])?.unwrap_or(1.0 / 255.0),
            false => 1.0,
        };
        let normalise = match config.flag("do_normalize", true)? {
            true => Some((three(config, "image_mean", 0.0)?, three(config, "image_std", 1e-6)?)),
            false => None,
        };
        Ok(Self { patches, resize, filter, rescale, normalise })
    }

    /// The most memory in bytes that [`ImageProcessor::pixels`] takes, judged by the first bytes of an image.
    ///
    /// # Errors
    /// As for [`ImageProcessor::pixels`].
    pub fn needs(&self, encoded: &[u8]) -> Result<u64, ImageError> {
        let decoder = decoder(encoded)?;
        let (width, height) = decoder.dimensions();
        let pixels = u64::from(width) * u64::from(height);
        let (to_width, to_height) = self.resize.unwrap_or((width, height));
        // Rows are resized first.
        let resized = u64::from(to_width) * (u64::from(height) + u64::from(to_height));
        let values = u64::from(to_width) * u64::from(to_height) * 4;
        // The image is turned upright and converted to three colours, one after the other.
        Ok(decoder.total_bytes() * 2 + 3 * (pixels + resized + values))
    }

    /// Decodes an image, resizes and normalises it.
    ///
    /// # Shapes
    /// The result is `[channels, height, width]`, of the size that the model reads.
    ///
    /// # Errors
    /// When the image is of an unknown kind, damaged or too large, or has another size than the model reads and is not
    /// resized.
    pub fn pixels(&self, encoded: &[u8]) -> Result<Vec<f32>, ImageError> {
        let mut image = decode(encoded)?;
        if let Some((width, height)) = self.resize {
            image = resize(&image, width, height, self.filter);
        }
        let (have, want) = (image.dimensions(), (self.patches.width, self.patches.height));
        if have != want {
            return Err(ImageError::Size { have, want });
        }
        let count = image.width() as usize * image.height() as usize;
        let mut values = Vec::with_capacity(3 * count);
        for channel in 0..3 {
            let scaled = image.pixels().map(|pixel| {
                let value = (f64::from(pixel.0[channel]) * self.rescale) as f32;
                match &self.normalise {
                    Some((mean, deviation)) => (value - mean[channel]) / deviation[channel],
                    None => value,
                }
            });
            values.extend(scaled);
        }
        Ok(values)
    }
}

/// Reads a field of three numbers, or of one for all three channels: each is at least `least`.
fn three(config: &Fields<'_>, field: &'static str, least: f64) -> Result<[f32; 3], ModelError> {
    let Some((_, value)) = config.get(&[field]) else { return Ok([0.5; 3]) };
    let list = value.as_array().cloned().unwrap_or_else(|| vec![value.clone(); 3]);
    let number = |value: &serde_json::Value| {
        value.as_f64().filter(|n| n.is_finite() && *n >= least && *n <= 1e6).map(|n| n as f32)
    };
    let numbers: Option<Vec<f32>> = list.iter().map(number).collect();
    let three = numbers.and_then(|numbers| <[f32; 3]>::try_from(numbers).ok());
    three.ok_or_else(|| config.wrong(field, "must be one number or three"))
}

/// Why an image cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The bytes are no image that can be decoded.
    #[error("it is no image that can be read ({why}): give PNG or JPEG")]
    Decode {
        /// What is wrong, for people.
        why: String,
    },
    /// The image is damaged or cut short.
    #[error("the image is damaged ({why}): fetch it again")]
    Damaged {
        /// What is wrong, for people.
        why: String,
    },
    /// The image has more pixels than are decoded.
    #[error(
        "it has {width} x {height} pixels, which take {bytes} bytes, and {limit} are decoded: make it smaller"
    )]
    Large {
        /// The image's width in pixels.
        width: u32,
        /// The image's height in pixels.
        height: u32,
        /// The bytes that the decoded pixels would take.
        bytes: u64,
        /// The most bytes of pixels that are decoded.
        limit: u64,
    },
    /// The image has another size than the model reads.
    #[error("it has {} x {} pixels, and the model reads {} x {}", have.0, have.1, want.0, want.1)]
    Size {
        /// The image's width and height in pixels.
        have: (u32, u32),
        /// The width and height that the model reads.
        want: (u32, u32),
    },
}

fn wrong(error: image::ImageError) -> ImageError {
    match error {
        image::ImageError::Decoding(why) => ImageError::Damaged { why: why.to_string() },
        image::ImageError::IoError(why) => ImageError::Damaged { why: why.to_string() },
        other => ImageError::Decode { why: other.to_string() },
    }
}

/// Decodes a file to pixels of three colours, upright and without transparency.
fn decode(encoded: &[u8]) -> Result<RgbImage, ImageError> {
    let mut decoder = decoder(encoded)?;
    let upright = decoder.orientation().map_err(wrong)?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(wrong)?;
    image.apply_orientation(upright);
    Ok(image.into_rgb8())
}

/// The decoder of a file, after its first bytes showed that the image is not too large.
fn decoder(encoded: &[u8]) -> Result<impl ImageDecoder + '_, ImageError> {
    if let Err(ModelError::Another { found, .. }) = recognise::stand_in(Path::new(""), encoded) {
        return Err(ImageError::Decode { why: format!("it is {found}") });
    }
    // The JPEG decoder invents what is missing.
    if encoded.starts_with(b"\xff\xd8") && !jpeg_ends(encoded) {
        let why = format!("JPEG without its end: it is cut short at byte {}", encoded.len());
        return Err(ImageError::Damaged { why });
    }
    let mut reader = ImageReader::new(Cursor::new(encoded));
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE);
    limits.max_image_height = Some(MAX_SIDE);
    limits.max_alloc = Some(MAX_BYTES);
    reader.limits(limits);
    let guessed = reader.with_guessed_format();
    let reader = guessed.map_err(|error| ImageError::Decode { why: error.to_string() })?;
    let decoder = reader.into_decoder().map_err(wrong)?;
    let ((width, height), bytes) = (decoder.dimensions(), decoder.total_bytes());
    match bytes > MAX_DECODED {
        true => Err(ImageError::Large { width, height, bytes, limit: MAX_DECODED }),
        false => Ok(decoder),
    }
}

/// Whether the segments of a JPEG, and the data between them, lead to the marker of its end.
fn jpeg_ends(bytes: &[u8]) -> bool {
    let mut at = 2;
    loop {
        // In data, 0xff is followed by 0 or by the number of a restart marker.
        let Some(skip) = bytes.get(at..).and_then(|rest| rest.iter().position(|&b| b == 0xff))
        else {
            return false;
        };
        at += skip + 1;
        match bytes.get(at) {
            None => return false,
            Some(0xd9) => return true,
            Some(0 | 1 | 0xd0..=0xd8) => at += 1,
            // Padding before a marker.
            Some(0xff) => {}
            Some(_) => match bytes.get(at + 1..at + 3) {
                Some(length) => at += 1 + usize::from(u16::from_be_bytes([length[0], length[1]])),
                None => return false,
            },
        }
    }
}

/// How many fractional bits the fixed-point weights have.
const BITS: u32 = 22;

/// For each of `to` pixels to which a side of `from` pixels is resized: the first pixel that has weight, and the
/// weights of that one and of those after it.
fn weights(from: u32, to: u32, filter: Filter) -> Vec<(usize, Vec<i64>)> {
    let scale = f64::from(from) / f64::from(to);
    let wide = scale.max(1.0);
    let support = filter.support() * wide;
    let of = |at: u32| {
        let centre = (f64::from(at) + 0.5) * scale;
        let first = ((centre - support + 0.5).max(0.0)) as usize;
        let end = ((centre + support + 0.5) as usize).min(from as usize);
        let weight = |pixel: usize| filter.weight((pixel as f64 - centre + 0.5) / wide);
        let all: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = all.iter().sum();
        let fixed = |weight: &f64| {
            let share = if sum == 0.0 { *weight } else { weight / sum };
            (share * f64::from(1u32 << BITS)).round() as i64
        };
        (first, all.iter().map(fixed).collect())
    };
    (0..to).map(of).collect()
}

/// Resizes an image in two passes, each rounded to 8 bits.
fn resize(image: &RgbImage, width: u32, height: u32, filter: Filter) -> RgbImage {
    let mixed = |values: &mut dyn Iterator<Item = (u8, i64)>| {
        let sum: i64 = values.map(|(value, weight)| i64::from(value) * weight).sum();
        ((sum + (1 << (BITS - 1))) >> BITS).clamp(0, 255) as u8
    };
    let mut image = image.clone();
    if image.width() != width {
        let columns = weights(image.width(), width, filter);
        image = RgbImage::from_fn(width, image.height(), |x, y| {
            let (first, weights) = &columns[x as usize];
            image::Rgb([0, 1, 2].map(|channel| {
                let pixel = |at: usize| image.get_pixel((first + at) as u32, y).0[channel];
                mixed(&mut weights.iter().enumerate().map(|(at, weight)| (pixel(at), *weight)))
            }))
        });
    }
    if image.height() != height {
        let lines = weights(image.height(), height, filter);
        image = RgbImage::from_fn(image.width(), height, |x, y| {
            let (first, weights) = &lines[y as usize];
            image::Rgb([0, 1, 2].map(|channel| {
                let pixel = |at: usize| image.get_pixel(x, (first + at) as u32).0[channel];
                mixed(&mut weights.iter().enumerate().map(|(at, weight)| (pixel(at), *weight)))
            }))
        });
    }
    image
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::ModelDir;
    use proptest::prelude::*;
    use serde_json::json;

    fn golden() -> (ModelDir, ImageProcessor) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/vit");
        let model = ModelDir::open(&path).unwrap();
        let processor = ImageProcessor::open(&path, model.spec().patches.unwrap()).unwrap();
        (model, processor)
    }

    /// The golden image is larger than the model's in one direction, and smaller in the other.
    #[test]
    fn pixels_match_transformers() {
        let (model, processor) = golden();
        let pixels = processor.pixels(&std::fs::read(model.path().join("image.png")).unwrap());
        let bytes = std::fs::read(model.path().join("expected.safetensors")).unwrap();
        let expected = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let words = expected.tensor("pixels").unwrap().data().as_chunks().0.to_vec();
        let expected: Vec<f32> = words.into_iter().map(f32::from_le_bytes).collect();
        let pixels = pixels.unwrap();
        assert_eq!(pixels.len(), expected.len());
        let apart = pixels.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        assert!(apart.fold(0.0, f32::max) < 1e-6);
    }

    #[test]
    fn image_patches_are_cut_row_by_row() {
        let patches = Patches { channels: 2, height: 2, width: 4, size: 2 };
        let pixels: Vec<f32> = (0..16).map(|i| i as f32).collect();
        let zeros = [0.0; 8];
        let first = [0.0, 1.0, 4.0, 5.0, 8.0, 9.0, 12.0, 13.0];
        let second = [2.0, 3.0, 6.0, 7.0, 10.0, 11.0, 14.0, 15.0];
        assert_eq!(patches.cut(&pixels), [zeros, first, second].concat());
    }

    #[test]
    fn unsupported_preprocessor_settings_are_rejected_by_name() {
        let patches = Patches { channels: 3, height: 4, width: 4, size: 2 };
        let read = |config: serde_json::Value| {
            let fields = Fields::new(Path::new("preprocessor_config.json"), &config)?;
            ImageProcessor::read(&fields, patches)
        };
        let old = read(json!({ "size": 4 })).unwrap();
        assert_eq!((old.resize, old.filter), (Some((4, 4)), Filter::Bilinear));
        for (config, want) in [
            (json!({ "do_center_crop": true }), "do_center_crop"),
            (json!({ "resample": 0 }), "resample"),
            (json!({ "resample": 5 }), "Lanczos"),
            (json!({ "size": { "shortest_edge": 4 } }), "width"),
            (json!({ "size": { "width": 1, "height": 0 } }), "height"),
            (json!({ "image_std": [0.5, 0.0, 0.5] }), "image_std"),
            (json!({ "image_mean": [0.5, 0.5] }), "image_mean"),
            (json!({ "rescale_factor": -1 }), "rescale_factor"),
        ] {
            let error = read(config).unwrap_err().to_string();
            assert!(error.contains(want), "{error}\nlacks {want}");
        }
        let unlike = read(json!({ "do_resize": false })).unwrap();
        let (model, _) = golden();
        let image = std::fs::read(model.path().join("image.png")).unwrap();
        assert!(matches!(unlike.pixels(&image), Err(ImageError::Size { want: (4, 4), .. })));
    }

    #[test]
    fn another_image_processor_is_rejected_and_unknown_fields_give_warnings() {
        let (model, _) = golden();
        let directory = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(model.path().join(name), directory.path().join(name)).unwrap();
        }
        let opened = |text: &str| {
            std::fs::write(directory.path().join("preprocessor_config.json"), text).unwrap();
            let model = ModelDir::open(directory.path()).unwrap();
            let patches = model.spec().patches.unwrap();
            let processor = ImageProcessor::open(directory.path(), patches);
            (processor.map_err(|error| error.to_string()), model.warnings().to_vec())
        };
        let (fine, warnings) = opened(r#"{"feature_extractor_type": "ViTFeatureExtractor"}"#);
        assert!(fine.is_ok() && warnings.is_empty(), "{fine:?} {warnings:?}");
        for (text, want) in [
            (r#"{"image_processor_type": "CLIPImageProcessor"}"#, "image_processor_type"),
            (r#"{"size": 4, "default_to_square": false}"#, "default_to_square"),
            (r#"{"do_pad": true}"#, "do_pad"),
            ("{\"image_mean\": NaN}", "no NaN"),
        ] {
            let error = opened(text).0.unwrap_err();
            assert!(error.contains(want) && error.contains("preprocessor_config"), "{error}");
        }
        let (fine, warnings) =
            opened(r#"{"do_flip": true, "size": {"width": 4, "height": 4, "d": 1}}"#);
        assert!(fine.is_ok());
        assert!(warnings[0].to_string().contains("\"do_flip\""), "{warnings:?}");
    }

    /// A small file that claims pixels of a gigabyte is refused by its first bytes.
    #[test]
    fn an_image_with_too_many_pixels_is_rejected_before_decoding() {
        let (model, processor) = golden();
        let mut png = std::fs::read(model.path().join("image.png")).unwrap();
        let needs = processor.needs(&png).unwrap();
        assert!((1_000..10_000_000).contains(&needs), "{needs}");
        // The header: its type, width and height, and the rest that the checksum covers.
        png[16..20].copy_from_slice(&16_384_u32.to_be_bytes());
        png[20..24].copy_from_slice(&16_384_u32.to_be_bytes());
        let sum = png[12..29].iter().fold(u32::MAX, |sum, byte| {
            (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
                (sum >> 1) ^ if sum & 1 == 1 { 0xedb8_8320 } else { 0 }
            })
        });
        png[29..33].copy_from_slice(&(!sum).to_be_bytes());
        for error in [processor.needs(&png).unwrap_err(), processor.pixels(&png).unwrap_err()] {
            assert!(matches!(error, ImageError::Large { width: 16_384, .. }), "{error}");
        }
    }

    #[test]
    fn truncated_or_unknown_image_files_are_rejected_with_their_cause() {
        let (model, processor) = golden();
        let png = std::fs::read(model.path().join("image.png")).unwrap();
        let image = image::load_from_memory(&png).unwrap().into_rgb8();
        let mut jpeg = Vec::new();
        let encoder = image::codecs::jpeg::JpegEncoder::new(&mut jpeg);
        image.write_with_encoder(encoder).unwrap();
        for whole in [png, jpeg] {
            assert!(processor.pixels(&whole).is_ok());
            // Bytes after the end are ignored.
            assert!(processor.pixels(&[&whole[..], b"\xff\xff\0"].concat()).is_ok());
            for cut in [whole.len() - 13, whole.len() / 2, 40] {
                let error = processor.pixels(&whole[..cut]).unwrap_err();
                assert!(matches!(error, ImageError::Damaged { .. }), "{cut}: {error}");
            }
        }
        for (bytes, want) in [
            (&b""[..], "empty"),
            (b"version https://git-lfs.github.com/spec/v1\nsize 5\n", "git-lfs"),
            (b"<!doctype html>", "HTML"),
            (b"GIF89a..........", "Gif"),
            (b"text", "format"),
        ] {
            let error = processor.pixels(bytes).unwrap_err().to_string();
            assert!(error.contains(want) && error.contains("PNG or JPEG"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_image_bytes_decode_without_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200), png: bool,
            at: prop::sample::Index, value: u8,
        ) {
            let (model, processor) = golden();
            if png {
                bytes = std::fs::read(model.path().join("image.png")).unwrap();
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            drop(processor.pixels(&bytes));
        }
    }
}
