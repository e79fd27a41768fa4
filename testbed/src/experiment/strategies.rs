//! Shows the latencies of strategies, and how much faster than others `auto` is.

use super::{
    AUTO_NAME, EQUAL,
    show::{BOUND, Found, Shown, axis, groups, latency_bar, part, percent, shown},
};
use crate::{
    plot::{Bar, Chart, ChartKind, Group},
    record::Cell,
    report::{Table, figure},
};
use galaxy_common::Spread;

impl Found<'_> {
    /// The cell that `auto` is compared with, the fastest of those that fit: of the variants in equal parts
    /// where those are measured, as the paper has them, else `megatron`.
    fn rival(&self, environment: &str, model: &str) -> Option<&Cell> {
        let measured = |name: &str| {
            let cell = self.cell(environment, model, name)?;
            cell.spread("latency_ms").median.is_finite().then_some(cell)
        };
        let equal = self.experiment.variants.iter().any(|v| EQUAL.contains(&v.name));
        let names: &[&str] = if equal { &EQUAL } else { &["megatron"] };
        let median = |cell: &&Cell| cell.spread("latency_ms").median;
        let found = names.iter().filter_map(|name| measured(name));
        found.min_by(|a, b| median(a).total_cmp(&median(b)))
    }

    pub(super) fn strategies(&self) -> Shown {
        let names: Vec<&str> = self.experiment.variants.iter().map(|v| v.name).collect();
        let mut columns = vec!["environment", "model"];
        let latencies: Vec<String> = names.iter().map(|n| format!("{n}, ms")).collect();
        columns.extend(latencies.iter().map(String::as_str));
        let mut latency = Table::new("Latency: median (range)", &columns);
        let mut ratio = Table::new(
            "How much faster auto is",
            &[
                "environment",
                "model",
                "than",
                "measured",
                "bound",
                "of the bound",
                "schedule",
                "of the schedule",
                "paper",
            ],
        );
        let others: Vec<&str> = names.iter().copied().filter(|name| *name != AUTO_NAME).collect();
        let mut columns = vec!["environment", "model", "the plan of auto"];
        columns.extend(&others);
        let mut over = Table::new("Latency of others over that of auto", &columns);
        let (mut bars, mut ratios) = (Vec::new(), Vec::new());
        for (environment, model) in groups(self.record) {
            let cells: Vec<Option<&Cell>> =
                names.iter().map(|name| self.cell(&environment, &model, name)).collect();
            let figures =
                cells.iter().map(|c| c.map_or("-".to_owned(), |c| figure(c, "latency_ms")));
            latency.row([environment.clone(), model.clone()].into_iter().chain(figures));
            let label = format!("{environment}/{model}");
            let bar = |(i, cell): (usize, &Option<&Cell>)| cell.map(|cell| latency_bar(i, cell));
            let group: Vec<Bar> = cells.iter().enumerate().filter_map(bar).collect();
            if group.iter().any(|bar| bar.value.is_some()) {
                bars.push(Group { label: label.clone(), bars: group });
            }
            let Some(auto) = self.cell(&environment, &model, AUTO_NAME) else { continue };
            let values = |cell: &Cell| cell.values("latency_ms");
            let against = |cell: &Cell| Spread::of_ratio(&values(cell), &values(auto));
            let each = others.iter().map(|name| {
                self.cell(&environment, &model, name)
                    .map(|cell| format!("{:.3}", against(cell)))
                    .unwrap_or_default()
            });
            let plan = auto.labels.get("plan").cloned().unwrap_or_default();
            over.row([environment.clone(), model.clone(), plan].into_iter().chain(each));
            let Some(rival) = self.rival(&environment, &model) else { continue };
            let measured = against(rival);
            if measured.n == 0 {
                continue;
            }
            let of = |name| part(rival, name) / part(auto, name);
            let paper = (self.experiment.paper)(&environment, &model);
            ratio.row([
                environment.clone(),
                model.clone(),
                rival.labels.get("variant").cloned().unwrap_or_default(),
                format!("{measured:.3}"),
                shown(of("bound"), 3),
                percent(measured.median / of("bound")),
                shown(of("schedule_ms"), 3),
                percent(measured.median / of("schedule_ms")),
                paper.map_or("-".to_owned(), |paper| shown(paper, 2)),
            ]);
            ratios.push(Group {
                label,
                bars: vec![Bar {
                    series: 0,
                    value: Some(measured.median),
                    low: measured.low,
                    high: measured.high,
                    mark: Some(of("bound")).filter(|v| v.is_finite()),
                    paper,
                    note: None,
                }],
            });
        }
        let mut notes = vec![format!(
            "{BOUND} *Schedule*: the same programs in the simulator, every operation at its measured cost, links at their rate, nothing lost between operations."
        )];
        notes.push("Weights stay in memory: the disk here is no board's, so what has no room is out of memory and not read from it.".to_owned());
        if names.iter().any(|name| EQUAL.contains(name)) {
            notes.push("`-equal`: the same part for every device, as systems for equal accelerators have it and as the paper measured them; `auto` is compared with the faster of the two that fit. Those without the word are split by the planner, from what devices measure of themselves.".to_owned());
        }
        let series = names.iter().map(|&n| n.to_owned()).collect();
        let charts = vec![
            (
                "",
                Chart {
                    title: "Latency, and its bound".to_owned(),
                    x: axis("environment/model"),
                    y: axis("ms"),
                    kind: ChartKind::Bars { groups: bars, series },
                },
            ),
            (
                "-ratio",
                Chart {
                    title: "How much faster auto is: measured, bound, paper".to_owned(),
                    x: axis("environment/model"),
                    y: axis("times"),
                    kind: ChartKind::Bars { groups: ratios, series: vec!["over auto".to_owned()] },
                },
            ),
        ];
        (vec![latency, ratio, over, self.spent()], notes, charts)
    }
}
