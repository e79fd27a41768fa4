//! The surroundings of the data: title, legend, axes, grid.

use super::{
    Chart, GREY, INK, PALE, WHITE,
    canvas::{Align, Canvas, Color, HEIGHT, Point, WIDTH, cut, width},
    scale::Scale,
};
use anyhow::Result;
use plotters::prelude::DrawingBackend;

/// The size of the title.
const TITLE: f64 = 17.0;
/// The size of the axes' labels, and of the legend.
pub(super) const LABEL: f64 = 13.0;
/// The size of the labels at ticks.
pub(super) const TICK: f64 = 12.0;
/// The distance between two lines of text, in sizes.
const LEADING: f64 = 1.25;
const MARGIN: f64 = 18.0;

/// A sign of the legend.
pub(super) enum Sign {
    /// The sign of a series of bars.
    Box(Color),
    /// The sign of a line, with the index of the sign at its points.
    Line(Color, usize),
    /// The sign of a dashed line.
    Dashes(Color),
    /// The sign of a bound on a bar.
    Bound,
    /// The sign of the paper's figure.
    Diamond,
}

/// The lower axis, by names or by numbers.
pub(super) enum Below {
    /// The names of equally wide slots.
    Names(Vec<String>),
    /// A scale of numbers, and the labels of some.
    Numbers(Scale, Vec<(f64, String)>),
}

/// The area of the data, in points of the page.
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
    y: Scale,
    below: Below,
}

impl Frame {
    pub(super) fn y(&self, value: f64) -> f64 {
        let place = self.y.place(value).clamp(0.0, 1.0);
        self.bottom - place * (self.bottom - self.top)
    }

    /// The place at which bars begin.
    pub(super) fn base(&self) -> f64 {
        self.y(self.y.low.max(0.0).min(self.y.high))
    }

    /// The place of a number, or of the middle of a slot by its index.
    pub(super) fn x(&self, value: f64) -> f64 {
        let width = self.right - self.left;
        match &self.below {
            Below::Names(names) => {
                let place = (value + 0.5) / names.len().max(1) as f64;
                self.left + place.clamp(0.0, 1.0) * width
            }
            // Some room, so that no sign stands on the axis.
            Below::Numbers(scale, _) => self.left + (0.03 + 0.94 * scale.place(value)) * width,
        }
    }

    /// Draws the surroundings, and returns the area of the data.
    pub(super) fn draw<D: DrawingBackend>(
        chart: &Chart,
        legend: &[(Sign, String)],
        y: Scale,
        below: Below,
        canvas: &mut Canvas<D>,
    ) -> Result<Self> {
        let ticks = y.ticks();
        let widest = ticks.iter().map(|t| width(&t.1, TICK)).fold(0.0, f64::max);
        let left = MARGIN + if chart.y.label.is_empty() { 0.0 } else { 24.0 } + widest + 8.0;
        let right = WIDTH - MARGIN;
        let size =
            (TITLE * (right - left) / width(&chart.title, TITLE).max(1.0)).clamp(LABEL, TITLE);
        let title = cut(&chart.title, size, right - left);
        canvas.text(&title, (left, MARGIN + 14.0), size, INK, Align::Left)?;
        let top = draw_legend(legend, left, right, MARGIN + 40.0, canvas)?;
        let mut bottom = HEIGHT - MARGIN;
        if !chart.x.label.is_empty() {
            let at = ((left + right) / 2.0, bottom - 1.0);
            canvas.text(&chart.x.label, at, LABEL, INK, Align::Center)?;
            bottom -= 24.0;
        }
        let labels = match &below {
            Below::Names(names) => Labels::fit(names, (right - left) / names.len().max(1) as f64),
            Below::Numbers(..) => Labels { size: TICK, lines: vec![], up: false },
        };
        bottom -= labels.height() + 8.0;
        let frame = Self { left, right, top, bottom, y, below };
        if !chart.y.label.is_empty() {
            let at = (MARGIN + 10.0, (top + bottom) / 2.0);
            let label = cut(&chart.y.label, LABEL, bottom - top);
            canvas.text_up(&label, at, LABEL, INK, Align::Center)?;
        }
        for (value, label) in &ticks {
            let at = frame.y(*value);
            canvas.line(&[(left, at), (right, at)], PALE, 1.0)?;
            canvas.text(label, (left - 8.0, at + TICK * 0.36), TICK, INK, Align::Right)?;
        }
        match &frame.below {
            Below::Names(_) => labels.draw(&frame, canvas)?,
            Below::Numbers(_, ticks) => {
                for (value, label) in ticks {
                    let at = frame.x(*value);
                    canvas.line(&[(at, bottom), (at, bottom + 5.0)], INK, 1.0)?;
                    canvas.text(label, (at, bottom + 8.0 + TICK), TICK, INK, Align::Center)?;
                }
            }
        }
        Ok(frame)
    }

    /// Draws the lower axis, above what stands on it.
    pub(super) fn axis<D: DrawingBackend>(&self, canvas: &mut Canvas<D>) -> Result<()> {
        let at = self.base();
        canvas.line(&[(self.left, at), (self.right, at)], INK, 1.0)
    }
}

/// Draws a thin line from the lowest to the highest measurement.
pub(super) fn spread<D: DrawingBackend>(
    at: f64,
    ends: (f64, f64),
    half: f64,
    color: Color,
    canvas: &mut Canvas<D>,
) -> Result<()> {
    canvas.line(&[(at, ends.0), (at, ends.1)], color, 1.25)?;
    for end in [ends.0, ends.1] {
        canvas.line(&[(at - half, end), (at + half, end)], color, 1.25)?;
    }
    Ok(())
}

/// Draws a hollow diamond.
pub(super) fn diamond<D: DrawingBackend>(at: Point, canvas: &mut Canvas<D>) -> Result<()> {
    for (radius, color) in [(6.5, INK), (4.25, WHITE)] {
        canvas.polygon(&sign_corners(at, radius, 3), color)?;
    }
    Ok(())
}

/// Draws the sign at a point of a line: another one for each line, for those who see no colours.
pub(super) fn sign<D: DrawingBackend>(
    at: Point,
    which: usize,
    color: Color,
    canvas: &mut Canvas<D>,
) -> Result<()> {
    // White around the sign, so that it stands out where lines cross.
    for (radius, color) in [(6.0, WHITE), (4.75, color)] {
        match which % 5 {
            0 => canvas.circle(at, radius, color)?,
            which => canvas.polygon(&sign_corners(at, radius, which), color)?,
        }
    }
    Ok(())
}

fn sign_corners((x, y): Point, radius: f64, which: usize) -> Vec<Point> {
    let (s, r, t) = (radius * 0.88, radius * 1.15, radius * 1.1);
    match which {
        1 => vec![(x - s, y - s), (x + s, y - s), (x + s, y + s), (x - s, y + s)],
        2 => vec![(x, y - r), (x + t, y + s * 0.8), (x - t, y + s * 0.8)],
        3 => vec![(x, y - r), (x + r, y), (x, y + r), (x - r, y)],
        _ => vec![(x, y + r), (x + t, y - s * 0.8), (x - t, y - s * 0.8)],
    }
}

/// Draws the legend from `top` on, and returns where it ends.
fn draw_legend<D: DrawingBackend>(
    legend: &[(Sign, String)],
    left: f64,
    right: f64,
    top: f64,
    canvas: &mut Canvas<D>,
) -> Result<f64> {
    const ROW: f64 = 21.0;
    const GAP: f64 = 22.0;
    if legend.is_empty() {
        return Ok(top);
    }
    let (mut x, mut y) = (left, top);
    for (sign_of, name) in legend {
        let room = match sign_of {
            Sign::Line(..) | Sign::Dashes(_) => 34.0,
            _ => 20.0,
        };
        let wide = room + width(name, LABEL);
        if x > left && x + wide > right {
            (x, y) = (left, y + ROW);
        }
        let middle = y - LABEL * 0.36;
        let line = [(x, middle), (x + 28.0, middle)];
        match *sign_of {
            Sign::Box(color) => {
                canvas.rectangle((x, middle - 6.5), (x + 13.0, middle + 6.5), color)?;
            }
            Sign::Line(color, which) => {
                canvas.line(&line, color, 2.25)?;
                sign((x + 14.0, middle), which, color, canvas)?;
            }
            Sign::Dashes(color) => canvas.dashes(&line, color, 2.25)?,
            Sign::Bound => canvas.line(&[(x, middle), (x + 14.0, middle)], INK, 2.5)?,
            Sign::Diamond => diamond((x + 7.0, middle), canvas)?,
        }
        canvas.text(name, (x + room, y), LABEL, INK, Align::Left)?;
        x += wide + GAP;
    }
    Ok(y + 16.0)
}

/// The names below slots.
struct Labels {
    size: f64,
    /// The lines of each name.
    lines: Vec<Vec<String>>,
    /// Whether the names stand upwards, since they are too long even in small letters.
    up: bool,
}

impl Labels {
    fn fit(names: &[String], slot: f64) -> Self {
        for size in [TICK, TICK - 1.0, TICK - 2.0] {
            let lines: Vec<_> = names.iter().map(|name| wrap(name, size, slot - 8.0)).collect();
            let fits = |line: &String| width(line, size) <= slot - 4.0;
            if lines.iter().all(|name| name.len() <= 3 && name.iter().all(fits)) {
                return Self { size, lines, up: false };
            }
        }
        let lines = names.iter().map(|name| vec![name.clone()]).collect();
        Self { size: (slot * 0.8).clamp(6.0, TICK - 1.0), lines, up: true }
    }

    fn height(&self) -> f64 {
        if self.up {
            let all = self.lines.iter().flatten().map(|line| width(line, self.size));
            return all.fold(0.0, f64::max).min(HEIGHT / 3.0);
        }
        self.lines.iter().map(Vec::len).max().unwrap_or(1).max(1) as f64 * self.size * LEADING
    }

    fn draw<D: DrawingBackend>(&self, frame: &Frame, canvas: &mut Canvas<D>) -> Result<()> {
        for (slot, lines) in self.lines.iter().enumerate() {
            let x = frame.x(slot as f64);
            for (i, line) in lines.iter().enumerate() {
                if self.up {
                    let at = (x + self.size * 0.36, frame.bottom + 6.0);
                    let line = cut(line, self.size, self.height());
                    canvas.text_up(&line, at, self.size, INK, Align::Right)?;
                } else {
                    let y = frame.bottom + 5.0 + self.size * (1.0 + LEADING * i as f64);
                    canvas.text(line, (x, y), self.size, INK, Align::Center)?;
                }
            }
        }
        Ok(())
    }
}

/// Breaks a text after `/` and at spaces, so that its lines fit where they can.
fn wrap(text: &str, size: f64, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_inclusive(['/', ' ']) {
        match lines.last_mut() {
            Some(line) if width(&format!("{line}{}", word.trim_end()), size) <= room => {
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

/// Draws a remark where data should be: upwards from `at`, as far as `top`.
pub(super) fn note<D: DrawingBackend>(
    text: &str,
    at: Point,
    top: f64,
    size: f64,
    canvas: &mut Canvas<D>,
) -> Result<()> {
    canvas.text_up(&cut(text, size, at.1 - top), at, size, GREY, Align::Left)
}
