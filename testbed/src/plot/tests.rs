#![allow(clippy::unwrap_used)]

use super::*;

fn bar(series: usize, value: f64) -> Bar {
    let (low, high) = (value * 0.96, value * 1.05);
    Bar { series, value: Some(value), low, high, ..Bar::default() }
}

fn table() -> Chart {
    let missing = |series| Bar { series, note: Some("out of memory".into()), ..Bar::default() };
    let group = |label: &str, values: [Option<f64>; 4], paper: f64| Group {
        label: label.into(),
        bars: (0..4)
            .map(|i| match values[i] {
                Some(value) => Bar {
                    mark: (i > 0).then_some(value * 0.93),
                    paper: (i == 3).then_some(paper),
                    ..bar(i, value)
                },
                None => missing(i),
            })
            .collect(),
    };
    Chart {
        title: "Latency of one request, environment A (two like devices, 125 Mbit/s)".into(),
        x: Axis::default(),
        y: Axis { label: "latency, ms".into(), ..Axis::default() },
        kind: ChartKind::Bars {
            series: ["local", "megatron", "sequence", "galaxy"].map(String::from).into(),
            groups: vec![
                group(
                    "DistilBERT/66 M",
                    [Some(412.0), Some(345.6), Some(331.2), Some(289.1)],
                    272.0,
                ),
                group("BERT-Large/335 M", [None, Some(1523.0), None, Some(1190.0)], 1210.0),
                group("GPT2-Large/774 M", [None, Some(3212.0), None, Some(2477.0)], 2390.0),
                group("OPT-1.3B/1.3 G", [None, None, None, None], 4000.0),
            ],
        },
    }
}

fn curves() -> Chart {
    let tiles = [1.0, 2.0, 4.0, 8.0, 16.0];
    let line = |name: &str, values: [f64; 5], dashed: bool| Series {
        name: name.into(),
        points: tiles
            .iter()
            .zip(values)
            .map(|(&x, y)| {
                let spread = if dashed { 0.0 } else { y * 0.03 };
                Point { x, y, low: y - spread, high: y + spread }
            })
            .collect(),
        dashed,
    };
    Chart {
        title: "Hidden communication by tiles \u{2265} 1 \u{d7} 2 devices".into(),
        x: Axis { label: "tiles".into(), log: true, categories: None },
        y: Axis { label: "communication hidden, %".into(), ..Axis::default() },
        kind: ChartKind::Lines {
            series: vec![
                line("galaxy, TLS", [0.0, 44.0, 71.0, 82.0, 79.0], false),
                line("galaxy, plain", [0.0, 46.0, 74.0, f64::NAN, 88.0], false),
                line("bound", [0.0, 50.0, 75.0, 87.5, 93.75], true),
            ],
        },
    }
}

/// Draws both files, and returns the text in the SVG. The PNG must be a picture that is not empty. With
/// `KEEP_PLOTS=FOLDER` both are kept there, to be looked at.
fn drawn(chart: &Chart, name: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    draw(chart, &dir.path().join(name)).unwrap();
    let file = |extension: &str| dir.path().join(format!("{name}.{extension}"));
    let png = png::Decoder::new(std::fs::File::open(file("png")).unwrap());
    let mut reader = png.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size()];
    let info = reader.next_frame(&mut pixels).unwrap();
    assert_eq!((info.width, info.height), (2000, 1120));
    let inked = pixels.iter().filter(|&&p| p < 200).count();
    assert!(inked > 10_000, "{inked} dark values of {}", pixels.len());
    if let Some(keep) = std::env::var_os("KEEP_PLOTS") {
        for extension in ["svg", "png"] {
            std::fs::copy(file(extension), Path::new(&keep).join(format!("{name}.{extension}")))
                .unwrap();
        }
    }
    let svg = std::fs::read_to_string(file("svg")).unwrap();
    assert!(svg.contains(r#"width="1000" height="560""#), "{}", &svg[..200]);
    svg
}

#[test]
fn bar_charts_contain_their_labels_and_values() {
    let svg = drawn(&table(), "bars");
    for label in [
        "Latency of one request",
        "DistilBERT/",
        "megatron",
        "latency, ms",
        "bound",
        "in the paper",
    ] {
        assert!(svg.contains(label), "no {label:?}");
    }
    assert_eq!(svg.matches("out of memory").count(), 8);
    assert!(svg.contains("1523"), "no value above its bar");
}

#[test]
fn line_charts_contain_their_labels() {
    let svg = drawn(&curves(), "lines");
    for label in ["galaxy, TLS", "tiles", "communication hidden, %", "16", "\u{2265} 1 \u{d7} 2"] {
        assert!(svg.contains(label), "no {label:?}");
    }
}

#[test]
fn charts_with_extreme_or_missing_values_are_drawn() {
    let mut many = table();
    many.y.log = true;
    if let ChartKind::Bars { groups, .. } = &mut many.kind {
        let more: Vec<Group> = (0..3).flat_map(|_| groups.clone()).collect();
        *groups = more;
        groups[0].bars[0].value = Some(f64::NAN);
        groups[0].bars[1].value = Some(-3.0);
        groups[1].bars[0].note = Some("needs 1.31 GB, grants 1.20 GB ".repeat(5));
    }
    assert!(drawn(&many, "many").contains('\u{2026}'), "a note that is cut says so");
    let mut named = curves();
    named.x = Axis { label: "environment".into(), log: false, categories: None };
    named.y.log = true;
    named.title = "A title that is longer than the page is wide ".repeat(4);
    named.x.categories = Some((0..17).map(|i| format!("a long name/number {i}")).collect());
    assert!(drawn(&named, "named").contains("number"));
    let empty = [
        ChartKind::Bars { groups: vec![], series: vec![] },
        ChartKind::Lines { series: vec![] },
        ChartKind::Lines {
            series: vec![Series {
                name: "one".into(),
                points: vec![Point::default()],
                dashed: true,
            }],
        },
    ];
    for kind in empty {
        drawn(&Chart { title: "nothing, nothing & <nothing>".into(), kind, ..curves() }, "v0.1");
    }
}
