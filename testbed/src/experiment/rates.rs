//! Shows strategies over the rates of links.

use super::{
    AUTO_NAME,
    latency::RATE,
    show::{BOUND, Found, Shown, axis, fact, groups, percent, shown},
};
use crate::{
    plot::{Axis, Chart, ChartKind, Point, Series},
    record::Cell,
    report::{Table, figure},
};
use galaxy_common::Spread;

/// The variants that `auto` is compared with, one here and one below.
const GALAXY: &str = "galaxy";
const LOCAL: &str = "local";

/// A place of measurement: devices on links of one rate, and a model.
struct RateGroup {
    /// The name of the environment without its rate.
    base: String,
    environment: String,
    model: String,
    rate: f64,
}

impl Found<'_> {
    fn places(&self) -> Vec<RateGroup> {
        let place = |(environment, model): (String, String)| {
            let auto = self.cell(&environment, &model, AUTO_NAME)?;
            let base = environment.split('-').next().unwrap_or_default().to_owned();
            Some(RateGroup { base, rate: fact(auto, RATE), environment, model })
        };
        let mut places: Vec<RateGroup> =
            groups(self.record).into_iter().filter_map(place).collect();
        places.sort_by(|a, b| {
            (&a.base, &a.model).cmp(&(&b.base, &b.model)).then(a.rate.total_cmp(&b.rate))
        });
        places
    }

    pub(super) fn rates(&self) -> Shown {
        let names: Vec<&str> = self.experiment.variants.iter().map(|v| v.name).collect();
        let mut columns = vec!["environment", "model", "Mbit/s"];
        let latencies: Vec<String> = names.iter().map(|n| format!("{n}, ms")).collect();
        columns.extend(latencies.iter().map(String::as_str));
        let mut latency = Table::new("Latency: median (range)", &columns);
        let mut against = Table::new(
            "auto against galaxy and the best single device",
            &[
                "environment",
                "model",
                "Mbit/s",
                "galaxy over auto",
                "auto over one device, less one",
                "auto over the best other, less one",
                "predicted over measured, less one",
                "the plan of auto",
            ],
        );
        let (mut over_galaxy, mut over_local) = (Vec::new(), Vec::new());
        let places = self.places();
        for places in places.chunk_by(|a, b| (&a.base, &a.model) == (&b.base, &b.model)) {
            let (mut galaxies, mut locals) = (Vec::new(), Vec::new());
            for place in places {
                let cell = |name: &str| self.cell(&place.environment, &place.model, name);
                let begin =
                    [place.base.clone(), place.model.clone(), shown(place.rate, 0)].into_iter();
                let figures = names
                    .iter()
                    .map(|name| cell(name).map_or("-".to_owned(), |c| figure(c, "latency_ms")));
                latency.row(begin.clone().chain(figures));
                let Some(auto) = cell(AUTO_NAME) else { continue };
                let ratio = |name: &str| {
                    Spread::of_ratio(&cell(name).map(values).unwrap_or_default(), &values(auto))
                };
                let (galaxy, local) = (ratio(GALAXY), ratio(LOCAL));
                let others = names.iter().filter(|name| **name != AUTO_NAME);
                let best = others.map(|name| ratio(name).median).fold(f64::NAN, f64::min);
                let predicted = fact(auto, crate::record::PREDICTED);
                against.row(begin.chain([
                    format!("{galaxy:.3}"),
                    percent(1.0 / local.median - 1.0),
                    percent(1.0 / best - 1.0),
                    percent(predicted / auto.spread("latency_ms").median - 1.0),
                    auto.labels.get("plan").cloned().unwrap_or_default(),
                ]));
                let point =
                    |s: Spread| Point { x: place.rate, y: s.median, low: s.low, high: s.high };
                galaxies.push(point(galaxy));
                locals.push(point(local));
            }
            let Some(RateGroup { base, model, .. }) = places.first() else { continue };
            let line = |points| Series { name: format!("{base}/{model}"), points, dashed: false };
            over_galaxy.push(line(galaxies));
            over_local.push(line(locals));
        }
        let chart = |title: &str, series| Chart {
            title: title.to_owned(),
            x: Axis { log: true, ..axis("Mbit/s") },
            y: axis("times"),
            kind: ChartKind::Lines { series },
        };
        let charts = vec![
            ("", chart("How much faster than galaxy auto is, over the rate of links", over_galaxy)),
            ("-local", chart("How much faster than one device auto is", over_local)),
        ];
        let notes = vec![
            "Rates are those of the boards' links; all devices have memory for all of the model."
                .to_owned(),
            BOUND.to_owned(),
        ];
        (vec![against, latency, self.spent()], notes, charts)
    }
}

fn values(cell: &Cell) -> Vec<f64> {
    cell.values("latency_ms")
}
