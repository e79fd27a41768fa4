//! Charts of lines.

use super::{
    Chart, Point, Series,
    canvas::{self, Canvas, width},
    color,
    frame::{self, Below, Frame, Sign, TICK},
    scale::{Scale, short},
};
use anyhow::Result;
use plotters::prelude::DrawingBackend;

/// The most points at whose places the ticks stand.
const MOST_TICKS: usize = 12;

pub(super) fn draw<D: DrawingBackend>(
    chart: &Chart,
    series: &[Series],
    canvas: &mut Canvas<D>,
) -> Result<()> {
    let all = || series.iter().flat_map(|line| &line.points);
    let sign =
        |i: usize| if series[i].dashed { Sign::Dashes(color(i)) } else { Sign::Line(color(i), i) };
    let legend: Vec<_> =
        series.iter().enumerate().map(|(i, line)| (sign(i), line.name.clone())).collect();
    let values = || all().flat_map(|p| [p.y, p.low, p.high]).filter(|v| v.is_finite());
    let (low, high) =
        values().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    // An axis that does not begin at zero makes differences look larger than they are: only where
    // nothing could be seen otherwise.
    let from_zero = low < high * 0.8;
    let y = Scale::around(values(), chart.y.log, from_zero);
    let below = match &chart.x.categories {
        Some(names) => Below::Names(names.clone()),
        None => numbers(chart, all().map(|p| p.x)),
    };
    let frame = Frame::draw(chart, &legend, y, below, canvas)?;
    frame.axis(canvas)?;

    let shown = |p: &&Point| {
        p.y.is_finite()
            && p.x.is_finite()
            && (!chart.y.log || p.y > 0.0)
            && (!chart.x.log || p.x > 0.0)
    };
    for (i, line) in series.iter().enumerate() {
        let mut piece: Vec<canvas::Point> = Vec::new();
        let mut pieces = Vec::new();
        for point in &line.points {
            if shown(&point) {
                piece.push((frame.x(point.x), frame.y(point.y)));
            } else {
                pieces.push(std::mem::take(&mut piece));
            }
        }
        pieces.push(piece);
        for piece in pieces.iter().filter(|piece| piece.len() > 1) {
            if line.dashed {
                canvas.dashes(piece, color(i), 2.25)?;
            } else {
                canvas.line(piece, color(i), 2.25)?;
            }
        }
    }
    // Above all lines, so that none hides a measurement.
    for (i, line) in series.iter().enumerate() {
        for point in line.points.iter().filter(shown) {
            let x = frame.x(point.x);
            if point.high > point.low {
                let ends = (frame.y(point.low), frame.y(point.high));
                frame::spread(x, ends, 4.5, color(i), canvas)?;
            }
            if !line.dashed {
                frame::sign((x, frame.y(point.y)), i, color(i), canvas)?;
            }
        }
    }
    Ok(())
}

/// An axis of numbers, with ticks at the points themselves where they are few and far enough from each other.
fn numbers(chart: &Chart, values: impl Iterator<Item = f64> + Clone) -> Below {
    let scale = Scale::tight(values.clone(), chart.x.log);
    let mut places: Vec<f64> = values.filter(|v| v.is_finite()).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let at = |value: f64| 0.94 * canvas::WIDTH * 0.9 * scale.place(value);
    let apart = |pair: &[f64]| {
        at(pair[1]) - at(pair[0])
            > (width(&short(pair[0]), TICK) + width(&short(pair[1]), TICK)) / 2.0 + 6.0
    };
    if places.len() <= MOST_TICKS && places.windows(2).all(apart) {
        let ticks = places.into_iter().map(|v| (v, short(v))).collect();
        return Below::Numbers(scale, ticks);
    }
    let ticks = scale.ticks().into_iter().filter(|(v, _)| (scale.low..=scale.high).contains(v));
    Below::Numbers(scale, ticks.collect())
}
