//! Shows the speedup by more devices.

use super::{
    AUTO_NAME,
    latency::{DEVICES, FLOPS, TOKENS},
    show::{BOUND, Found, Shown, axis, fact, groups, part, percent, shown},
};
use crate::{
    plot::{Chart, ChartKind, Point, Series},
    report::{Table, figure},
};
use galaxy_common::Spread;

/// The variant that runs on one device.
const LOCAL: &str = "local";

impl Found<'_> {
    pub(super) fn scaling(&self) -> Shown {
        let mut table = Table::new(
            "Operations per second, over those of one device",
            &[
                "environment",
                "devices",
                "model",
                "tokens",
                "one device, ms",
                "galaxy, ms",
                "auto, ms",
                "times one device",
                "of linear",
                "bound, times",
                "of the bound",
                "paper",
            ],
        );
        let mut lines: Vec<Series> = Vec::new();
        let mut most = 1.0f64;
        let mut groups = groups(self.record);
        groups.sort_by(|a, b| (&a.1, &a.0).cmp(&(&b.1, &b.0)));
        for (environment, model) in groups {
            let cell = |name: &str| self.cell(&environment, &model, name);
            let (Some(one), Some(auto)) = (cell(LOCAL), cell(AUTO_NAME)) else { continue };
            let devices = fact(auto, DEVICES);
            let work = fact(auto, FLOPS) / fact(one, FLOPS);
            let values =
                |name: &str| cell(name).map(|c| c.values("latency_ms")).unwrap_or_default();
            let ratios = Spread::of_ratio(&values(LOCAL), &values(AUTO_NAME));
            let times = ratios.median * work;
            let bound = part(one, "bound") / part(auto, "bound") * work;
            let paper = (self.experiment.paper)(&environment, &model);
            table.row([
                environment.clone(),
                shown(devices, 0),
                model.clone(),
                shown(fact(auto, TOKENS), 0),
                figure(one, "latency_ms"),
                cell("galaxy").map_or("-".to_owned(), |cell| figure(cell, "latency_ms")),
                figure(auto, "latency_ms"),
                shown(times, 3),
                percent(times / devices),
                shown(bound, 3),
                percent(times / bound),
                paper.map_or("-".to_owned(), |paper| shown(paper, 2)),
            ]);
            if !times.is_finite() {
                continue;
            }
            most = most.max(devices);
            let mut add = |name: String, dashed: bool, point: Point| match lines
                .iter_mut()
                .find(|line| line.name == name)
            {
                Some(line) => line.points.push(point),
                None => {
                    let one = Point { x: 1.0, y: 1.0, low: 1.0, high: 1.0 };
                    lines.push(Series { name, points: vec![one, point], dashed });
                }
            };
            let (low, high) = (ratios.low * work, ratios.high * work);
            add(model.clone(), false, Point { x: devices, y: times, low, high });
            let at = Point { x: devices, y: bound, low: bound, high: bound };
            add(format!("{model}, bound"), true, at);
        }
        let linear = [1.0, most].map(|x| Point { x, y: x, low: x, high: x });
        lines.push(Series { name: "linear".to_owned(), points: linear.to_vec(), dashed: true });
        let chart = Chart {
            title: "Devices together, over one".to_owned(),
            x: axis("devices"),
            y: axis("times one device"),
            kind: ChartKind::Lines { series: lines },
        };
        let notes = vec![
            "*Times one device*: operations per second of all over those of one; where the text is the same, its latency on one device over that on all. *Of linear*: that over the number of devices. Four layers of each model: a whole one has no room on one board, and the paper measured one layer.".to_owned(),
            BOUND.to_owned(),
        ];
        (vec![table, self.spent()], notes, vec![("", chart)])
    }
}
