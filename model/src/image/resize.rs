//! Resizes images as Pillow does: to which size, with which weights, and the pixels themselves.

use image::RgbImage;

/// How an image is brought to another size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resizing {
    /// It is not.
    Keep,
    /// To this width and height, whatever its proportions are.
    Stretch {
        /// The width in pixels.
        width: u32,
        /// The height in pixels.
        height: u32,
    },
    /// In its proportions, so that the shorter side has so many pixels; the centre is then cut out of it.
    Centre {
        /// The pixels of the shorter side.
        shorter: u32,
    },
}

impl Resizing {
    /// The width and height to which an image of this width and height is resized, with the rounding of torchvision.
    pub(super) fn size(self, (width, height): (u32, u32)) -> (u32, u32) {
        let longer = |shorter: u32, short: u32, long: u32| {
            let longer = u64::from(shorter) * u64::from(long) / u64::from(short.max(1));
            u32::try_from(longer).unwrap_or(u32::MAX)
        };
        match self {
            Self::Keep => (width, height),
            Self::Stretch { width, height } => (width, height),
            Self::Centre { shorter } if width <= height => {
                (shorter, longer(shorter, width, height))
            }
            Self::Centre { shorter } => (longer(shorter, height, width), shorter),
        }
    }
}

/// How pixels are interpolated when an image is resized. The numbers are Pillow's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filter {
    /// A windowed sinc over six pixels.
    Lanczos = 1,
    /// A line between two pixels.
    Bilinear = 2,
    /// A cubic curve over four pixels.
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
pub(super) fn resize(image: &RgbImage, width: u32, height: u32, filter: Filter) -> RgbImage {
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

/// Cuts the centre out of an image that is at least as large. What is odd goes where torchvision has it: half of it
/// is rounded to an even number.
pub(super) fn cut_centre(image: &RgbImage, (width, height): (u32, u32)) -> RgbImage {
    let before = |have: u32, want: u32| {
        let rest = have.saturating_sub(want);
        rest / 2 + u32::from(rest % 4 == 3)
    };
    let (left, top) = (before(image.width(), width), before(image.height(), height));
    image::imageops::crop_imm(image, left, top, width, height).to_image()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_side_is_resized_and_the_centre_is_cut_out() {
        let centre = Resizing::Centre { shorter: 256 };
        // As torchvision has them.
        assert_eq!(centre.size((640, 427)), (383, 256));
        assert_eq!(centre.size((427, 640)), (256, 383));
        assert_eq!(centre.size((300, 300)), (256, 256));
        assert_eq!(centre.size((1, u32::MAX)), (256, u32::MAX));
        let image = RgbImage::from_fn(7, 6, |x, y| image::Rgb([x as u8, y as u8, 0]));
        for (width, first) in [(7, 0), (6, 0), (5, 1), (4, 2), (3, 2), (2, 2), (1, 3)] {
            let cut = cut_centre(&image, (width, 2));
            assert_eq!(cut.dimensions(), (width, 2));
            assert_eq!(cut.get_pixel(0, 0).0, [first, 2, 0]);
        }
    }
}
