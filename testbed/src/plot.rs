//! Charts of results, as SVG and as PNG from the same drawing.
//!
//! What a figure of ours always says: how far measurements spread, what the bound is, and what the
//! paper reports. What could not be run has its place too, with the reason.

mod bars;
mod canvas;
mod frame;
mod lines;
mod scale;

use anyhow::{Context, Result};
use canvas::{Canvas, Color};
use plotters::prelude::DrawingBackend;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A figure.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Chart {
    /// What stands above it.
    pub title: String,
    /// The lower axis.
    pub x: Axis,
    /// The axis on the left.
    pub y: Axis,
    /// What it shows.
    pub kind: Kind,
}

/// An axis.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Axis {
    /// What it measures, with the unit.
    pub label: String,
    /// Whether equal steps are equal factors.
    #[serde(default)]
    pub log: bool,
    /// Names instead of numbers, on the lower axis of lines: the first stands at 0.
    #[serde(default)]
    pub categories: Option<Vec<String>>,
}

/// What a chart shows.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Kind {
    /// Groups of bars.
    Bars {
        /// The groups, from left to right.
        groups: Vec<Group>,
        /// The names of what has a bar in each group.
        series: Vec<String>,
    },
    /// Lines.
    Lines {
        /// The lines.
        series: Vec<Series>,
    },
}

/// Bars beside each other.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Group {
    /// What they have in common; breaks after `/` and at spaces.
    pub label: String,
    /// The bars, at most one of each series.
    pub bars: Vec<Bar>,
}

/// A bar.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Bar {
    /// Which of the series.
    pub series: usize,
    /// How high; nothing where it could not be measured.
    pub value: Option<f64>,
    /// The lowest measurement.
    pub low: f64,
    /// The highest.
    pub high: f64,
    /// The bound: a line across the bar.
    pub mark: Option<f64>,
    /// What the paper reports: a diamond.
    pub paper: Option<f64>,
    /// Why there is no value.
    pub note: Option<String>,
}

/// A line.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// Its points, from left to right; where `y` is not a number, the line is broken.
    pub points: Vec<Point>,
    /// Whether it is dashed and has no signs at its points, as what was not measured.
    pub dashed: bool,
}

/// A point of a line.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Point {
    /// On the lower axis.
    pub x: f64,
    /// On the left axis.
    pub y: f64,
    /// The lowest measurement.
    pub low: f64,
    /// The highest.
    pub high: f64,
}

/// Writes the chart beside each other as `.svg` and `.png`.
///
/// # Errors
/// When a file cannot be written.
pub fn draw(chart: &Chart, path_without_extension: &Path) -> Result<()> {
    // A name may have a dot in it, which is no extension.
    let with = |extension: &str| {
        let mut path = path_without_extension.as_os_str().to_owned();
        path.push(extension);
        std::path::PathBuf::from(path)
    };
    if let Some(folder) = path_without_extension.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let (svg, png) = (with(".svg"), with(".png"));
    let document = canvas::svg(|canvas| page(chart, canvas))?;
    std::fs::write(&svg, document).with_context(|| svg.display().to_string())?;
    canvas::png(&png, |canvas| page(chart, canvas))
}

fn page<D: DrawingBackend>(chart: &Chart, canvas: &mut Canvas<D>) -> Result<()> {
    canvas.rectangle((0.0, 0.0), (canvas::WIDTH, canvas::HEIGHT), WHITE)?;
    match &chart.kind {
        Kind::Bars { groups, series } => bars::draw(chart, groups, series, canvas),
        Kind::Lines { series } => lines::draw(chart, series, canvas),
    }
}

const WHITE: Color = plotters::style::RGBColor(255, 255, 255);
/// Of axes, bounds and most text.
const INK: Color = plotters::style::RGBColor(38, 38, 38);
/// Of what matters less.
const GREY: Color = plotters::style::RGBColor(110, 110, 110);
/// Of the grid.
const PALE: Color = plotters::style::RGBColor(226, 226, 226);

/// Colours that people tell apart whatever their eyes (Okabe and Ito, 2008), those that stand out
/// least from white at the end; and a brown for a ninth.
const PALETTE: [Color; 9] = [
    plotters::style::RGBColor(0x00, 0x72, 0xb2),
    plotters::style::RGBColor(0xe6, 0x9f, 0x00),
    plotters::style::RGBColor(0x00, 0x9e, 0x73),
    plotters::style::RGBColor(0xd5, 0x5e, 0x00),
    plotters::style::RGBColor(0x56, 0xb4, 0xe9),
    plotters::style::RGBColor(0xcc, 0x79, 0xa7),
    plotters::style::RGBColor(0x4d, 0x4d, 0x4d),
    plotters::style::RGBColor(0xf0, 0xe4, 0x42),
    plotters::style::RGBColor(0x7a, 0x3e, 0x1d),
];

fn color(series: usize) -> Color {
    PALETTE[series % PALETTE.len()]
}

#[cfg(test)]
mod tests;
