//! Turns image files into the pixel values that a model reads, as `preprocessor_config.json` describes.
//!
//! Steps and rounding are those of `transformers` on Pillow, which resizes rows before columns: the values are the same
//! for the same pixels. (Pillow 13 resizes the columns of some tall images first, which changes some values by 1 in
//! 255.) PNG is decoded exactly; JPEG decoders differ from one another by steps of that size.

mod resize;

pub use resize::{Filter, Resizing};

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
use resize::{cut_centre, resize};
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

/// How images become the values that a model reads.
#[derive(Clone, PartialEq, Debug)]
pub struct Preparation {
    /// The width and height that the model reads, in pixels.
    pub size: (u32, u32),
    /// How images are brought to it.
    pub resize: Resizing,
    /// How pixels are interpolated for that.
    pub filter: Filter,
    /// What each value, from 0 to 255, is multiplied by.
    pub scale: f64,
    /// The mean that is then subtracted from each channel, in the order in which the model reads them.
    pub mean: [f32; 3],
    /// The deviation that each channel is divided by at last.
    pub deviation: [f32; 3],
    /// Whether the model reads blue first and red last, and not the other way round.
    pub blue_first: bool,
}

/// Turns images into the values that a model reads.
#[derive(Clone, PartialEq, Debug)]
pub struct ImageProcessor {
    how: Preparation,
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
            false => Resizing::Keep,
            // Old files have a single number.
            true => match config.inner(&["size"]) {
                Ok(Some(size)) => Resizing::Stretch {
                    width: size.count(&["width"], MAX_SIZE)?,
                    height: size.count(&["height"], MAX_SIZE)?,
                },
                _ => {
                    let [height, width] = config.two("size", MAX_SIZE)?.unwrap_or([224, 224]);
                    Resizing::Stretch { width, height }
                }
            },
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
        let scale = match config.flag("do_rescale", true)? {
            true => config.positive_or_none(&["rescale_factor"])?.unwrap_or(1.0 / 255.0),
            false => 1.0,
        };
        let (mean, deviation) = match config.flag("do_normalize", true)? {
            true => (three(config, "image_mean", 0.0)?, three(config, "image_std", 1e-6)?),
            false => ([0.0; 3], [1.0; 3]),
        };
        let size = (patches.width, patches.height);
        let how = Preparation { size, resize, filter, scale, mean, deviation, blue_first: false };
        Ok(Self { how })
    }

    /// A processor that prepares images so.
    ///
    /// # Errors
    /// When the size is too large, or larger than what is cut out of; or a number is not one to compute with.
    pub fn new(how: Preparation) -> Result<Self, ImageError> {
        let wrong = |why: String| Err(ImageError::Preparation { why });
        let (width, height) = how.size;
        let sides = match how.resize {
            Resizing::Keep => [width, height, 1],
            Resizing::Stretch { width: to_width, height: to_height } => {
                [width.max(to_width), height.max(to_height), 1]
            }
            Resizing::Centre { shorter } => [width, height, shorter],
        };
        if sides.iter().any(|side| !(1..=MAX_SIZE).contains(side)) {
            return wrong(format!("sides of {sides:?} pixels are not from 1 to {MAX_SIZE}"));
        }
        let all = how.mean.iter().chain(&how.deviation);
        if !(how.scale.is_finite() && all.clone().all(|value| value.is_finite())) {
            return wrong("a number of it is not finite".to_owned());
        }
        match how.deviation.iter().all(|value| *value > 0.0) {
            true => Ok(Self { how }),
            false => wrong("a deviation is not above zero".to_owned()),
        }
    }

    /// The most memory in bytes that [`ImageProcessor::pixels`] takes, judged by the first bytes of an image.
    ///
    /// # Errors
    /// As for [`ImageProcessor::pixels`].
    pub fn needs(&self, encoded: &[u8]) -> Result<u64, ImageError> {
        let decoder = decoder(encoded)?;
        let (width, height) = decoder.dimensions();
        let pixels = u64::from(width) * u64::from(height);
        let (to_width, to_height) = self.resized((width, height))?;
        // Rows are resized first.
        let resized = u64::from(to_width) * (u64::from(height) + u64::from(to_height));
        let values = u64::from(to_width) * u64::from(to_height) * 4;
        // The image is turned upright and converted to three colours, one after the other.
        Ok(decoder.total_bytes() * 2 + 3 * (pixels + resized + values))
    }

    /// The width and height to which an image of this width and height is resized.
    fn resized(&self, have: (u32, u32)) -> Result<(u32, u32), ImageError> {
        let to = self.how.resize.size(have);
        match to != have && to.0.max(to.1) > MAX_SIZE {
            true => Err(ImageError::Long { have, to, limit: MAX_SIZE }),
            false => Ok(to),
        }
    }

    /// Decodes an image, resizes and normalises it.
    ///
    /// # Shapes
    /// The result is `[channels, height, width]`, of the size that the model reads.
    ///
    /// # Errors
    /// When the image is of an unknown kind, damaged or too large, or has another size than the model reads and is not
    /// resized, or a smaller one than is cut out of it.
    pub fn pixels(&self, encoded: &[u8]) -> Result<Vec<f32>, ImageError> {
        let how = &self.how;
        let mut image = decode(encoded)?;
        let (width, height) = self.resized(image.dimensions())?;
        if image.dimensions() != (width, height) {
            image = resize(&image, width, height, how.filter);
        }
        let is_cut = matches!(how.resize, Resizing::Centre { .. });
        if is_cut && image.width() >= how.size.0 && image.height() >= how.size.1 {
            image = cut_centre(&image, how.size);
        }
        let (have, want) = (image.dimensions(), how.size);
        if have != want {
            return Err(ImageError::Size { have, want });
        }
        let count = image.width() as usize * image.height() as usize;
        let mut values = Vec::with_capacity(3 * count);
        for channel in 0..3 {
            let from = if how.blue_first { 2 - channel } else { channel };
            let scaled = image.pixels().map(|pixel| {
                let value = (f64::from(pixel.0[from]) * how.scale) as f32;
                (value - how.mean[channel]) / how.deviation[channel]
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
    /// The image is so long that it would be too large once it is resized.
    #[error(
        "it has {} x {} pixels, which would be resized to {} x {}, and a side has {limit} at most: cut it first", have.0, have.1, to.0, to.1
    )]
    Long {
        /// The image's width and height in pixels.
        have: (u32, u32),
        /// The width and height to which it would be resized.
        to: (u32, u32),
        /// The most pixels that a side may have.
        limit: u32,
    },
    /// Images cannot be prepared as was asked for.
    #[error("images cannot be prepared so: {why}")]
    Preparation {
        /// What is wrong, for people.
        why: String,
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
        let stretch = Resizing::Stretch { width: 4, height: 4 };
        assert_eq!((old.how.resize, old.how.filter), (stretch, Filter::Bilinear));
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

    /// A picture of 4 x 2 pixels: the first row has 10, 20, 30, 40 of red, and all of blue is 200.
    #[test]
    fn images_are_prepared_as_is_said() {
        let image = RgbImage::from_fn(4, 2, |x, y| image::Rgb([10 * (x + 1) as u8, y as u8, 200]));
        let mut png = Vec::new();
        image.write_with_encoder(image::codecs::png::PngEncoder::new(&mut png)).unwrap();
        let how = Preparation {
            size: (2, 2),
            resize: Resizing::Centre { shorter: 2 },
            filter: Filter::Bilinear,
            scale: 0.5,
            mean: [1.0, 2.0, 3.0],
            deviation: [2.0, 1.0, 0.5],
            blue_first: false,
        };
        let pixels = |how: &Preparation| ImageProcessor::new(how.clone()).unwrap().pixels(&png);
        let red = [4.5, 7.0, 4.5, 7.0];
        let rest = [-2.0, -2.0, -1.5, -1.5, 194.0, 194.0, 194.0, 194.0];
        assert_eq!(pixels(&how).unwrap(), [&red[..], &rest].concat());
        let blue_first = pixels(&Preparation { blue_first: true, ..how.clone() }).unwrap();
        assert_eq!((blue_first[0], blue_first[8]), (49.5, 14.0));
        let stretch = Resizing::Stretch { width: 2, height: 2 };
        assert!(pixels(&Preparation { resize: stretch, ..how.clone() }).is_ok());
        let wide = Preparation { size: (2, 3), ..how.clone() };
        assert!(matches!(pixels(&wide), Err(ImageError::Size { have: (4, 2), .. })));
        let long = Preparation { resize: Resizing::Centre { shorter: MAX_SIZE }, ..how.clone() };
        assert!(matches!(pixels(&long), Err(ImageError::Long { to: (16_384, 8_192), .. })));
        for wrong in [
            Preparation { resize: Resizing::Centre { shorter: MAX_SIZE + 1 }, ..how.clone() },
            Preparation { size: (0, 2), ..how.clone() },
            Preparation { deviation: [1.0, 0.0, 1.0], ..how.clone() },
            Preparation { scale: f64::NAN, ..how },
        ] {
            assert!(matches!(ImageProcessor::new(wrong), Err(ImageError::Preparation { .. })));
        }
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
