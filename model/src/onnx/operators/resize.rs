//! Values of another size, by interpolation. What each entry of the result is made of, along each axis, is worked out
//! when a network is loaded.

use crate::onnx::{
    node::{KnownNode, Made, axes, axis},
    operator::{Operator, Resize, Tap},
};
use std::ops::{Add, Div, Mul, Sub};

/// The most entries of an axis that changes.
const MOST: u64 = 1 << 15;

/// How a place in the result becomes one in what is read.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Coordinates {
    HalfPixel,
    HalfPixelSymmetric,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
    /// The part of what is read from the first number to the second.
    Crop(f64, f64),
}

/// How values between entries are found.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mode {
    Nearest(Nearest),
    Linear,
    Cubic(f64),
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Nearest {
    RoundPreferFloor,
    RoundPreferCeil,
    Floor,
    Ceil,
}

/// How one axis changes.
#[derive(Clone, Copy, Debug)]
struct AxisChange {
    read: u64,
    made: u64,
    scale: f64,
    coordinates: Coordinates,
    mode: Mode,
    antialias: bool,
    exclude_outside: bool,
}

/// A float in which places are computed.
trait Real:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The nearest one.
    fn of(number: f64) -> Self;
}

impl Real for f32 {
    fn of(number: f64) -> Self {
        number as Self
    }
}

impl Real for f64 {
    fn of(number: f64) -> Self {
        number
    }
}

impl AxisChange {
    /// The place in what is read of an entry of the result.
    fn place<F: Real>(&self, entry: u64) -> F {
        let [x, read, scale] = [entry as f64, self.read as f64, self.scale].map(F::of);
        let [half, one] = [0.5, 1.0].map(F::of);
        // The length of the result before it is made whole.
        let made = read * scale;
        match self.coordinates {
            Coordinates::HalfPixel => (x + half) / scale - half,
            Coordinates::HalfPixelSymmetric => {
                let adjusted = F::of(self.made as f64) / made;
                read * half * (one - adjusted) + (x + half) / scale - half
            }
            Coordinates::PytorchHalfPixel if self.made > 1 => (x + half) / scale - half,
            Coordinates::PytorchHalfPixel => F::of(0.0),
            Coordinates::AlignCorners if self.made > 1 => x * (read - one) / (made - one),
            Coordinates::AlignCorners => F::of(0.0),
            Coordinates::Asymmetric => x / scale,
            Coordinates::Crop(start, end) if self.made > 1 => {
                let (start, end) = (F::of(start), F::of(end));
                start * (read - one) + x * (end - start) * (read - one) / (made - one)
            }
            Coordinates::Crop(start, end) => F::of(0.5 * (start + end)) * (read - one),
        }
    }

    /// What an entry of the result is made of; nothing where it lies outside.
    fn taps(&self, entry: u64) -> Vec<Tap> {
        let place: f64 = self.place(entry);
        let last = self.read as f64 - 1.0;
        if matches!(self.coordinates, Coordinates::Crop(..)) && !(0.0..=last).contains(&place) {
            return Vec::new();
        }
        let inside = |index: f64| index.clamp(0.0, last) as u64;
        let weights: Vec<(f64, f64)> = match self.mode {
            Mode::Nearest(nearest) => {
                // Frameworks compute places in 32 bits, which decides where one lies between two entries.
                let place = f64::from(self.place::<f32>(entry));
                let index = match nearest {
                    Nearest::RoundPreferFloor => (place - 0.5).ceil(),
                    Nearest::RoundPreferCeil => (place + 0.5).floor(),
                    Nearest::Floor => place.floor(),
                    Nearest::Ceil => place.ceil(),
                };
                return vec![Tap { index: inside(index), weight: 1.0 }];
            }
            Mode::Linear => self.spread(place, 1.0, |x| (1.0 - x.abs()).max(0.0)),
            Mode::Cubic(a) => self.spread(place, 2.0, |x| cubic(a, x.abs())),
        };
        let is_there = |index: f64| (0.0..=last).contains(&index);
        let counts = |(index, _): &(f64, f64)| !self.exclude_outside || is_there(*index);
        let all: f64 = weights.iter().filter(|tap| counts(tap)).map(|(_, weight)| weight).sum();
        // Weights of a filter that is sampled coarsely do not add up to 1.
        let by = if self.exclude_outside || self.antialias { all } else { 1.0 };
        let mut taps: Vec<Tap> = Vec::new();
        for (index, weight) in weights.into_iter().filter(counts) {
            let (index, weight) = (inside(index), (weight / by) as f32);
            match taps.iter_mut().find(|tap| tap.index == index) {
                Some(tap) => tap.weight += weight,
                None => taps.push(Tap { index, weight }),
            }
        }
        taps
    }

    /// The entries around a place and their weights by a filter of this reach, which is wider where the result is
    /// smaller and antialiased.
    fn spread(&self, place: f64, reach: f64, filter: impl Fn(f64) -> f64) -> Vec<(f64, f64)> {
        let narrow = if self.antialias { self.scale.min(1.0) } else { 1.0 };
        let reach = reach / narrow;
        let (first, last) = ((place - reach).ceil(), (place + reach).floor());
        let count = (last - first).clamp(0.0, MOST as f64) as u64;
        let at = |n: u64| first + n as f64;
        let each = (0..=count).map(|n| (at(n), filter((at(n) - place) * narrow)));
        each.filter(|(_, weight)| *weight != 0.0).collect()
    }

    /// What every entry of the result is made of; `None` where it is what is read.
    fn all(&self) -> Option<Vec<Vec<Tap>>> {
        let taps: Vec<Vec<Tap>> = (0..self.made).map(|entry| self.taps(entry)).collect();
        let same = |(at, taps): (usize, &Vec<Tap>)| matches!(taps.as_slice(), [one] if one.index == at as u64 && one.weight == 1.0);
        let stays = self.made == self.read && taps.iter().enumerate().all(same);
        (!stays).then_some(taps)
    }
}

/// The cubic filter of this coefficient.
fn cubic(a: f64, x: f64) -> f64 {
    match x {
        x if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
        x if x < 2.0 => ((x - 5.0) * x + 8.0) * a * x - 4.0 * a,
        _ => 0.0,
    }
}

fn mode(node: &KnownNode<'_>) -> Result<Mode, String> {
    let coefficient = node.float("cubic_coeff_a", -0.75)?;
    let nearest = match node.text("nearest_mode", "round_prefer_floor")? {
        "round_prefer_floor" => Nearest::RoundPreferFloor,
        "round_prefer_ceil" => Nearest::RoundPreferCeil,
        "floor" => Nearest::Floor,
        "ceil" => Nearest::Ceil,
        other => {
            return Err(format!("its attribute nearest_mode is {other:?}, which is not known"));
        }
    };
    match node.text("mode", "nearest")? {
        "nearest" => Ok(Mode::Nearest(nearest)),
        "linear" | "bilinear" => Ok(Mode::Linear),
        "cubic" => Ok(Mode::Cubic(coefficient.into())),
        other => Err(format!("its attribute mode is {other:?}, which is not known")),
    }
}

/// Reads a change of size of version 10 or later.
pub(super) fn read(node: &KnownNode<'_>) -> Result<Made, String> {
    if node.opset < 11 {
        return upsample(node);
    }
    let dims = node.input(0)?.dims;
    let over = match node.wholes("axes")? {
        Some(given) => {
            // In the order in which scales and sizes are given.
            axes(given, dims.len())?;
            given.iter().map(|n| axis(*n, dims.len())).collect::<Result<Vec<_>, _>>()?
        }
        None => (0..dims.len()).collect(),
    };
    let scales = node.optional_array(2)?.map(|array| array.floats());
    let sizes = node.optional_array(3)?.map(|array| array.list()).transpose()?;
    let roi = node.optional_array(1)?.map(|array| array.floats());
    let name = node.text("coordinate_transformation_mode", "half_pixel")?;
    let coordinates = |at: usize| match name {
        "half_pixel" => Ok(Coordinates::HalfPixel),
        "half_pixel_symmetric" => Ok(Coordinates::HalfPixelSymmetric),
        "pytorch_half_pixel" => Ok(Coordinates::PytorchHalfPixel),
        "align_corners" => Ok(Coordinates::AlignCorners),
        "asymmetric" => Ok(Coordinates::Asymmetric),
        "tf_crop_and_resize" => match &roi {
            Some(roi) if roi.len() == 2 * over.len() => {
                Ok(Coordinates::Crop(roi[at], roi[at + over.len()]))
            }
            _ => Err("its input 1 does not say which part is read".to_owned()),
        },
        other => Err(format!(
            "its attribute coordinate_transformation_mode is {other:?}, which is not known"
        )),
    };
    let (mode, antialias) = (mode(node)?, node.flag("antialias", false)?);
    let exclude_outside = node.flag("exclude_outside", false)?;
    let policy = node.text("keep_aspect_ratio_policy", "stretch")?;
    let changes = match (scales, sizes) {
        (Some(scales), None) if scales.len() == over.len() => by_scales(dims, &over, &scales)?,
        (None, Some(sizes)) if sizes.len() == over.len() => by_sizes(dims, &over, sizes, policy)?,
        _ => return Err(format!("it needs scales or sizes of {} axes", over.len())),
    };
    let mut made = dims.to_vec();
    let mut taps = vec![None; dims.len()];
    for (at, (axis, (side, scale))) in over.iter().zip(changes).enumerate() {
        let coordinates = coordinates(at)?;
        let change = AxisChange {
            read: dims[*axis],
            made: side,
            scale,
            coordinates,
            mode,
            antialias,
            exclude_outside,
        };
        made[*axis] = side;
        taps[*axis] = change.all();
    }
    let outside = node.float("extrapolation_value", 0.0)?;
    Made::of_first(node, Operator::Resize(Resize { axes: taps, outside }), made)
}

/// The side and scale of each axis of a result, by scales.
fn by_scales(dims: &[u64], over: &[usize], scales: &[f64]) -> Result<Vec<(u64, f64)>, String> {
    let change = |(axis, scale): (&usize, &f64)| {
        // As it is in 32 bits, in which files have it.
        let side = (dims[*axis] as f64 * scale).floor();
        let fits = (1.0..=MOST as f64).contains(&side) && (1..=MOST).contains(&dims[*axis]);
        match scale.is_finite() && *scale > 0.0 && fits {
            true => Ok((side as u64, *scale)),
            false => Err(format!("an axis of {} cannot be scaled by {scale}", dims[*axis])),
        }
    };
    over.iter().zip(scales).map(change).collect()
}

/// The side and scale of each axis of a result, by sizes.
fn by_sizes(
    dims: &[u64],
    over: &[usize],
    sizes: &[i64],
    policy: &str,
) -> Result<Vec<(u64, f64)>, String> {
    let scale = |axis: &usize, side: f64| side / dims[*axis] as f64;
    let scales = over.iter().zip(sizes).map(|(axis, size)| scale(axis, *size as f64));
    let same = match policy {
        "stretch" => None,
        "not_larger" => Some(scales.fold(f64::INFINITY, f64::min)),
        "not_smaller" => Some(scales.fold(0.0, f64::max)),
        other => {
            return Err(format!(
                "its attribute keep_aspect_ratio_policy is {other:?}, which is not known"
            ));
        }
    };
    let change = |(axis, size): (&usize, &i64)| {
        let read = dims[*axis] as f64;
        let side = same.map_or(*size as f64, |scale| (scale * read).round());
        match (1.0..=MOST as f64).contains(&side) && (1.0..=MOST as f64).contains(&read) {
            true => Ok((side as u64, same.unwrap_or(side / read))),
            false => Err(format!("an axis of {read} cannot become one of {side}")),
        }
    };
    over.iter().zip(sizes).map(change).collect()
}

/// Reads the form that a change of size had up to version 10.
pub(super) fn upsample(node: &KnownNode<'_>) -> Result<Made, String> {
    let dims = node.input(0)?.dims;
    let scales: Vec<f64> = match node.opset < 9 && node.node.operator == "Upsample" {
        true => {
            let given = node.floats("scales")?.ok_or("its attribute scales is missing")?;
            given.iter().map(|scale| f64::from(*scale)).collect()
        }
        false => node.array(1)?.floats(),
    };
    if scales.len() != dims.len() {
        return Err(format!("{} scales do not fit {} axes", scales.len(), dims.len()));
    }
    let mode = match node.text("mode", "nearest")? {
        "nearest" => Mode::Nearest(Nearest::Floor),
        "linear" | "bilinear" => Mode::Linear,
        other => return Err(format!("its attribute mode is {other:?}, which is not known")),
    };
    let over: Vec<usize> = (0..dims.len()).collect();
    let changes = by_scales(dims, &over, &scales)?;
    let taps = over.iter().zip(&changes).map(|(axis, (made, scale))| {
        let (coordinates, antialias, exclude_outside) = (Coordinates::Asymmetric, false, false);
        AxisChange {
            read: dims[*axis],
            made: *made,
            scale: *scale,
            coordinates,
            mode,
            antialias,
            exclude_outside,
        }
        .all()
    });
    let resize = Resize { axes: taps.collect(), outside: 0.0 };
    let made = changes.iter().map(|(side, _)| *side).collect();
    Made::of_first(node, Operator::Resize(resize), made)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In 64 bits the place is just below 2, since the scale of 32 bits is just above 0.6.
    #[test]
    fn the_nearest_entry_is_chosen_in_32_bits() {
        let change = AxisChange {
            read: 13,
            made: 7,
            scale: f64::from(0.6f32),
            coordinates: Coordinates::HalfPixel,
            mode: Mode::Nearest(Nearest::Floor),
            antialias: false,
            exclude_outside: false,
        };
        assert!(change.place::<f64>(1) < 2.0);
        assert_eq!(change.taps(1), [Tap { index: 2, weight: 1.0 }]);
    }
}
