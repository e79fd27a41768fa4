//! Charts of results, as SVG and as PNG from the same drawing.
//!
//! Each figure shows how far measurements spread, what the bound is, and what the paper reports. What could
//! not be run has its place too, with the reason.

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

/// A figure with two axes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Chart {
    /// The title above the figure.
    pub title: String,
    /// The lower axis.
    pub x: Axis,
    /// The axis on the left.
    pub y: Axis,
    /// The data of the figure, as bars or as lines.
    pub kind: ChartKind,
}

/// An axis of a figure.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Axis {
    /// The quantity and its unit.
    pub label: String,
    /// Whether the axis is logarithmic: equal steps are equal factors.
    #[serde(default)]
    pub log: bool,
    /// The names that stand on the lower axis of lines instead of numbers; the first is at 0.
    #[serde(default)]
    pub categories: Option<Vec<String>>,
}

/// The data of a chart.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ChartKind {
    /// Groups of bars.
    Bars {
        /// The groups, from left to right.
        groups: Vec<Group>,
        /// The names of the series, each of which has at most one bar in each group.
        series: Vec<String>,
    },
    /// Lines over a shared lower axis.
    Lines {
        /// The lines, each with its name.
        series: Vec<Series>,
    },
}

/// A group of bars that stand next to each other.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Group {
    /// What the bars have in common; the text breaks after `/` and at spaces.
    pub label: String,
    /// The bars, at most one of each series.
    pub bars: Vec<Bar>,
}

/// A bar of a group.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Bar {
    /// The index of its series.
    pub series: usize,
    /// The height of the bar; none where it could not be measured.
    pub value: Option<f64>,
    /// The lowest measurement of the bar.
    pub low: f64,
    /// The highest measurement of the bar.
    pub high: f64,
    /// The bound, drawn as a line across the bar.
    pub mark: Option<f64>,
    /// The paper's figure, drawn as a diamond.
    pub paper: Option<f64>,
    /// The reason why there is no value.
    pub note: Option<String>,
}

/// A line of a chart.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Series {
    /// The line's name.
    pub name: String,
    /// The points, from left to right; where `y` is not a number, the line is broken.
    pub points: Vec<Point>,
    /// Whether the line is dashed and has no signs at its points, as for values that were not measured.
    pub dashed: bool,
}

/// A point of a line.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Point {
    /// The place on the lower axis.
    pub x: f64,
    /// The place on the left axis.
    pub y: f64,
    /// The lowest measurement at this point.
    pub low: f64,
    /// The highest measurement at this point.
    pub high: f64,
}

/// Writes the chart as two files, `.svg` and `.png`.
///
/// # Errors
/// When a file cannot be written.
pub fn draw(chart: &Chart, path_without_extension: &Path) -> Result<()> {
    // A dot in a name is not an extension.
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
        ChartKind::Bars { groups, series } => bars::draw(chart, groups, series, canvas),
        ChartKind::Lines { series } => lines::draw(chart, series, canvas),
    }
}

const WHITE: Color = plotters::style::RGBColor(255, 255, 255);
/// The colour of axes, bounds and most text.
const INK: Color = plotters::style::RGBColor(38, 38, 38);
/// The colour of what matters less.
const GREY: Color = plotters::style::RGBColor(110, 110, 110);
/// The colour of the grid.
const PALE: Color = plotters::style::RGBColor(226, 226, 226);

/// The colours of series, which people tell apart whatever their eyes (Okabe and Ito, 2008), those that stand
/// out least from white at the end; and a brown for a ninth.
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
