//! Charts of groups of bars.

use super::{
    Bar, Chart, Group, INK,
    canvas::{Align, Canvas, width},
    color,
    frame::{self, Below, Frame, Sign},
    scale::{Scale, short},
};
use anyhow::Result;
use plotters::prelude::DrawingBackend;

/// The width of the widest bar, in points.
const WIDEST: f64 = 56.0;
/// The size of the values above bars.
const VALUE: f64 = 11.0;
/// The most bars that have their values above them.
const MOST_VALUES: usize = 48;

pub(super) fn draw<D: DrawingBackend>(
    chart: &Chart,
    groups: &[Group],
    series: &[String],
    canvas: &mut Canvas<D>,
) -> Result<()> {
    let bars = || groups.iter().flat_map(|group| &group.bars);
    let log = chart.y.log;
    let shown = |value: &f64| value.is_finite() && (!log || *value > 0.0);
    let mut legend: Vec<(Sign, String)> = Vec::new();
    if series.len() > 1 {
        let boxes = series.iter().enumerate().map(|(i, name)| (Sign::Box(color(i)), name.clone()));
        legend.extend(boxes);
    }
    if bars().any(|bar| bar.mark.is_some()) {
        legend.push((Sign::Bound, "bound".to_owned()));
    }
    if bars().any(|bar| bar.paper.is_some()) {
        legend.push((Sign::Diamond, "in the paper".to_owned()));
    }
    let values = bars().flat_map(|bar| {
        let measured = bar.value.map(|value| [value, bar.low, bar.high]);
        measured.into_iter().flatten().chain(bar.mark).chain(bar.paper)
    });
    // Room for the numbers above the highest.
    let values = values.map(|value| if log { value * 1.15 } else { value * 1.06 });
    let scale = Scale::around(values, log, true);
    let names = groups.iter().map(|group| group.label.clone()).collect();
    let frame = Frame::draw(chart, &legend, scale, Below::Names(names), canvas)?;

    let slot = (frame.right - frame.left) / groups.len().max(1) as f64;
    let count = bars().map(|bar| bar.series + 1).max().unwrap_or(1).max(series.len()).max(1);
    let pitch = (slot * 0.82 / count as f64).min(WIDEST + 4.0);
    let half = pitch * if count == 1 { 0.5 } else { 0.45 };
    let place = |group: usize, bar: &Bar| {
        frame.x(group as f64) + (bar.series as f64 - (count as f64 - 1.0) / 2.0) * pitch
    };
    let with_value = |bar: &&Bar| bar.value.is_some_and(|v| shown(&v));
    let fits = |bar: &Bar| width(&short(bar.value.unwrap_or(0.0)), VALUE) < pitch - 1.0;
    let level = bars().filter(with_value).all(fits);
    let numbers = bars().count() <= MOST_VALUES && (level || pitch > VALUE);
    for (group, bar) in
        groups.iter().enumerate().flat_map(|(i, g)| g.bars.iter().map(move |b| (i, b)))
    {
        let x = place(group, bar);
        let mut above = frame.base();
        let reached = |above: &mut f64, y: f64| *above = above.min(y);
        match bar.value.filter(shown) {
            Some(value) => {
                let top = frame.y(value);
                canvas.rectangle((x - half, frame.base()), (x + half, top), color(bar.series))?;
                reached(&mut above, top);
                if bar.high > bar.low {
                    let ends = (frame.y(bar.low), frame.y(bar.high));
                    frame::spread(x, ends, (half * 0.5).min(6.0), INK, canvas)?;
                    reached(&mut above, ends.1);
                }
            }
            None => {
                let text = bar.note.as_deref().unwrap_or("not measured");
                let size = VALUE.min(pitch * 0.9);
                let at = (x + size * 0.36, frame.base() - 6.0);
                frame::note(text, at, frame.top, size, canvas)?;
            }
        }
        if let Some(mark) = bar.mark.filter(shown) {
            let y = frame.y(mark);
            canvas.line(&[(x - half - 2.0, y), (x + half + 2.0, y)], INK, 2.5)?;
            reached(&mut above, y - 1.0);
        }
        if let Some(paper) = bar.paper.filter(shown) {
            let y = frame.y(paper);
            frame::diamond((x, y), canvas)?;
            reached(&mut above, y - 6.0);
        }
        if let Some(value) = bar.value.filter(|v| shown(v) && numbers) {
            let text = short(value);
            if level {
                canvas.text(&text, (x, above - 4.0), VALUE, INK, Align::Center)?;
            } else {
                let at = (x + VALUE * 0.36, above - 6.0);
                canvas.text_up(&text, at, VALUE, INK, Align::Left)?;
            }
        }
    }
    frame.axis(canvas)
}
