//! A page to draw on, of 1000 by 560 points; the same for SVG and for PNG.

use anyhow::{Result, anyhow};
use plotters::{
    prelude::{BitMapBackend, DrawingBackend, FontStyle, RGBColor, SVGBackend, ShapeStyle},
    style::{
        FontDesc, FontFamily, FontTransform, TextStyle, register_font,
        text_anchor::{HPos, Pos, VPos},
    },
};
use std::{path::Path, sync::OnceLock};

/// The width of a page, in points.
pub(super) const WIDTH: f64 = 1000.0;
/// The height of a page, in points.
pub(super) const HEIGHT: f64 = 560.0;
/// The units that a point has in the libraries, which take whole numbers only.
const FINE: f64 = 4.0;
/// The names of the font that SVG viewers look for; the first is also the font that PNGs are drawn with.
const FONT: &str = "DejaVu Sans, Verdana, sans-serif";
/// The font: Latin letters and a few signs, so that plots look the same on every machine.
static GLYPHS: &[u8] = include_bytes!("../../fonts/DejaVuSans-subset.ttf");

/// A colour, in red, green and blue.
pub(super) type Color = RGBColor;
/// A place in points, from the upper left corner.
pub(super) type Point = (f64, f64);

/// The side of a text that is at its point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Align {
    Left,
    Center,
    Right,
}

impl From<Align> for HPos {
    fn from(align: Align) -> Self {
        match align {
            Align::Left => Self::Left,
            Align::Center => Self::Center,
            Align::Right => Self::Right,
        }
    }
}

/// How a library measures text; the libraries differ.
struct Letters {
    /// The library's size of a letter of size one.
    size: f64,
    /// The distance from the point of a text to its baseline, in the library's sizes.
    base: f64,
}

/// The measures of PNGs: DejaVu Sans is 1.164 high from the lowest to the highest point.
const BITMAP: Letters = Letters { size: 1.164, base: 0.5 };
const SVG: Letters = Letters { size: 1.24, base: 0.76 / 1.24 };

/// A page while it is drawn.
pub(super) struct Canvas<D> {
    backend: D,
    letters: Letters,
}

fn whole((x, y): Point) -> (i32, i32) {
    ((x * FINE).round() as i32, (y * FINE).round() as i32)
}

fn stroke(color: Color, width: f64) -> ShapeStyle {
    ShapeStyle::from(color).stroke_width((width * FINE).round().max(1.0) as u32)
}

fn font(size: f64) -> FontDesc<'static> {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    REGISTERED.get_or_init(|| {
        let sound = register_font(FONT, FontStyle::Normal, GLYPHS).is_ok();
        assert!(sound, "the font in this program is a font");
    });
    FontDesc::new(FontFamily::Name(FONT), size * FINE, FontStyle::Normal)
}

/// The width of a text of this size, in points.
pub(super) fn width(text: &str, size: f64) -> f64 {
    let measured = font(size * BITMAP.size).layout_box(text);
    measured.map_or(0.0, |((left, _), (right, _))| f64::from(right - left) / FINE)
}

/// As much of a text as fits into `room`, with dots where it was cut.
pub(super) fn cut(text: &str, size: f64, room: f64) -> String {
    if width(text, size) <= room {
        return text.to_owned();
    }
    let mut kept = text.to_owned();
    while kept.pop().is_some() && width(&kept, size) + size > room {}
    kept.truncate(kept.trim_end().len());
    kept.push('\u{2026}');
    kept
}

impl<D: DrawingBackend> Canvas<D> {
    pub(super) fn line(&mut self, points: &[Point], color: Color, width: f64) -> Result<()> {
        let path: Vec<_> = points.iter().copied().map(whole).collect();
        self.backend.draw_path(path, &stroke(color, width)).map_err(|e| anyhow!("a line: {e}"))
    }

    /// Draws a dashed line.
    pub(super) fn dashes(&mut self, points: &[Point], color: Color, width: f64) -> Result<()> {
        const PATTERN: [f64; 2] = [7.0, 4.0];
        let (mut phase, mut left) = (0, PATTERN[0]);
        for pair in points.windows(2) {
            let (mut from, to) = (pair[0], pair[1]);
            loop {
                let (dx, dy) = (to.0 - from.0, to.1 - from.1);
                let length = dx.hypot(dy);
                let step = left.min(length);
                let share = if length > 0.0 { step / length } else { 1.0 };
                let next = (from.0 + dx * share, from.1 + dy * share);
                if phase == 0 {
                    self.line(&[from, next], color, width)?;
                }
                left -= step;
                if step >= length {
                    break;
                }
                from = next;
                phase = 1 - phase;
                left = PATTERN[phase];
            }
        }
        Ok(())
    }

    /// Draws a filled rectangle between two corners.
    pub(super) fn rectangle(&mut self, a: Point, b: Point, color: Color) -> Result<()> {
        let (from, to) = (whole((a.0.min(b.0), a.1.min(b.1))), whole((a.0.max(b.0), a.1.max(b.1))));
        self.backend.draw_rect(from, to, &color, true).map_err(|e| anyhow!("a rectangle: {e}"))
    }

    /// Draws a filled polygon.
    pub(super) fn polygon(&mut self, corners: &[Point], color: Color) -> Result<()> {
        let corners: Vec<_> = corners.iter().copied().map(whole).collect();
        self.backend.fill_polygon(corners, &color).map_err(|e| anyhow!("a shape: {e}"))
    }

    /// Draws a filled circle.
    pub(super) fn circle(&mut self, center: Point, radius: f64, color: Color) -> Result<()> {
        let radius = (radius * FINE).round() as u32;
        let drawn = self.backend.draw_circle(whole(center), radius, &color, true);
        drawn.map_err(|e| anyhow!("a circle: {e}"))
    }

    /// Draws a line of text, whose baseline is at the point.
    pub(super) fn text(
        &mut self,
        text: &str,
        at: Point,
        size: f64,
        color: Color,
        align: Align,
    ) -> Result<()> {
        let down = size * self.letters.size * self.letters.base;
        let style = Style { size, color, align, turn: FontTransform::None };
        self.letters_at(text, (at.0, at.1 - down), style)
    }

    /// Draws a line of text upwards.
    pub(super) fn text_up(
        &mut self,
        text: &str,
        at: Point,
        size: f64,
        color: Color,
        align: Align,
    ) -> Result<()> {
        let down = size * self.letters.size * self.letters.base;
        let style = Style { size, color, align, turn: FontTransform::Rotate270 };
        self.letters_at(text, (at.0 - down, at.1), style)
    }

    fn letters_at(&mut self, text: &str, at: Point, style: Style) -> Result<()> {
        let Style { size, color, align, turn } = style;
        let style = TextStyle::from(font(size * self.letters.size).transform(turn));
        let style = style.color(&color).pos(Pos::new(align.into(), VPos::Top));
        self.backend.draw_text(text, &style, whole(at)).map_err(|e| anyhow!("a text: {e}"))
    }
}

/// How a line of text looks, and which way it runs.
struct Style {
    size: f64,
    color: Color,
    align: Align,
    turn: FontTransform,
}

/// The page as an SVG document.
pub(super) fn svg(draw: impl FnOnce(&mut Canvas<SVGBackend<'_>>) -> Result<()>) -> Result<String> {
    let (width, height) = whole((WIDTH, HEIGHT));
    let mut document = String::new();
    {
        let backend = SVGBackend::with_string(&mut document, (width as u32, height as u32));
        let mut canvas = Canvas { backend, letters: SVG };
        draw(&mut canvas)?;
        canvas.backend.present().map_err(|e| anyhow!("the document: {e}"))?;
    }
    // The size that the page is meant to have, whatever units it is drawn in.
    let (fine, meant) = (
        format!("width=\"{width}\" height=\"{height}\""),
        format!("width=\"{WIDTH}\" height=\"{HEIGHT}\""),
    );
    Ok(document.replacen(&fine, &meant, 1))
}

/// The page as a PNG file, two pixels for a point.
pub(super) fn png(
    path: &Path,
    draw: impl FnOnce(&mut Canvas<BitMapBackend<'_>>) -> Result<()>,
) -> Result<()> {
    let (width, height) = whole((WIDTH, HEIGHT));
    let (width, height) = (width as usize, height as usize);
    let mut fine = vec![255; width * height * 3];
    {
        let backend = BitMapBackend::with_buffer(&mut fine, (width as u32, height as u32));
        let mut canvas = Canvas { backend, letters: BITMAP };
        draw(&mut canvas)?;
        canvas.backend.present().map_err(|e| anyhow!("the picture: {e}"))?;
    }
    // Four pixels become one: edges that the library leaves hard become smooth.
    let mut pixels = Vec::with_capacity(fine.len() / 4);
    for y in (0..height).step_by(2) {
        for x in (0..width).step_by(2) {
            for color in 0..3 {
                let at = |dx, dy| u32::from(fine[((y + dy) * width + x + dx) * 3 + color]);
                pixels.push(((at(0, 0) + at(1, 0) + at(0, 1) + at(1, 1) + 2) / 4) as u8);
            }
        }
    }
    let size = (width as u32 / 2, height as u32 / 2);
    let mut file = BitMapBackend::new(path, size);
    let written = file.blit_bitmap((0, 0), size, &pixels).and_then(|()| file.present());
    written.map_err(|e| anyhow!("{}: {e}", path.display()))
}
