//! `galaxy plan` as a person or a script meets it: the program itself, over files.
#![allow(clippy::unwrap_used)]

use galaxy_common::{Bytes, ClusterProfile, DeviceName};
use galaxy_coord::profile::Store;
use galaxy_model::ModelDir;
use galaxy_planner::synthetic::{self, SyntheticDevice};
use serde_json::Value;
use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const STRATEGIES: [&str; 6] = ["auto", "local", "megatron", "galaxy", "sequence", "pipeline"];

/// What the program printed, and how it ended.
struct ProgramOutput {
    out: String,
    error: String,
    code: i32,
}

impl ProgramOutput {
    /// What it printed, if all went well.
    fn good(self) -> String {
        assert_eq!(self.code, 0, "{}", self.error);
        assert_eq!(self.error, "");
        self.out
    }

    /// What it printed to stderr, after it failed.
    fn bad(self) -> String {
        assert_ne!(self.code, 0, "{}", self.out);
        assert_eq!(self.out, "");
        assert!(self.error.starts_with("error: "), "{}", self.error);
        self.error
    }
}

fn galaxy(arguments: &[&str]) -> ProgramOutput {
    galaxy_in(Path::new("."), arguments)
}

/// Runs the program in a directory.
fn galaxy_in(directory: &Path, arguments: &[&str]) -> ProgramOutput {
    let mut program = Command::new(env!("CARGO_BIN_EXE_galaxy"));
    let output = program.args(arguments).current_dir(directory).output().unwrap();
    ProgramOutput {
        out: String::from_utf8(output.stdout).unwrap(),
        error: String::from_utf8(output.stderr).unwrap(),
        code: output.status.code().unwrap(),
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/bert")
}

/// A directory with a cluster file and profiles.
struct ClusterDir {
    dir: tempfile::TempDir,
    file: PathBuf,
    store: Store,
    shape: String,
    profile: ClusterProfile,
}

impl ClusterDir {
    /// Devices that exist in profiles only, each half as fast as the one before.
    fn new(names: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cluster.toml");
        let model = ModelDir::open(&golden()).unwrap();
        let (shape, store) = (model.shape_key(), Store::new(dir.path().join("profiles")));
        let mut text = format!("[cluster]\nmodel = {:?}\nidentity = \"k\"\n", golden());
        let mut devices = Vec::new();
        for (i, name) in names.iter().enumerate() {
            let address = format!("10.0.0.{}:7100", i + 1);
            write!(text, "[[device]]\nname = {name:?}\naddress = {address:?}\nmemory = \"1GB\"\n")
                .unwrap();
            devices.push(SyntheticDevice {
                name: DeviceName::new(*name).unwrap(),
                gflops: 0.1 / (1 << i) as f64,
                memory_rate: 1.0,
                memory: Bytes(0),
                threads: 1,
                link_rate: 1e8,
                latency: 1e4,
            });
        }
        fs::write(&file, text).unwrap();
        let profile = synthetic::profile(model.spec(), &shape, model.format(), &devices);
        Self { dir, file, store, shape, profile }
    }

    /// The same with its profiles stored.
    fn measured(names: &[&str]) -> Self {
        let place = Self::new(names);
        place.save();
        place
    }

    fn save(&self) {
        self.profile.devices.iter().for_each(|device| self.store.save_device(device).unwrap());
        self.store.save_links(&self.profile.links).unwrap();
    }

    fn plan(&self, more: &[&str]) -> ProgramOutput {
        galaxy(&[&["plan", "--cluster", self.file.to_str().unwrap()], more].concat())
    }

    /// Writes a file for `--simulate` and plans for it.
    fn simulate(&self, text: &str, more: &[&str]) -> ProgramOutput {
        let file = self.dir.path().join("imagined.toml");
        fs::write(&file, text).unwrap();
        galaxy(&[&["plan", "--simulate", file.to_str().unwrap()], more].concat())
    }

    /// Changes the stored profile of the first device.
    fn damage(&self, from: &str, to: &str) {
        let path = self
            .store
            .dir()
            .join(format!("{}.{}.t1.json", self.profile.devices[0].device, self.shape));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
    }
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Where the cells begin in the head of the table whose first cell is `first`, and the rows below
/// it.
fn table<'a>(text: &'a str, first: &str) -> (Vec<usize>, Vec<&'a str>) {
    let mut lines = text.lines().skip_while(|line| !line.trim_start().starts_with(first));
    let head = lines.next().unwrap();
    let begins = head.char_indices().filter(|(i, c)| {
        // Cells are two blanks apart.
        *c != ' ' && (*i < 2 || &head[i - 2..*i] == "  ")
    });
    (begins.map(|(i, _)| i).collect(), lines.take_while(|line| line.starts_with("  ")).collect())
}

const IMAGINED: &str = "shape = \"bert-large\"\nlengths = [128]\n";

fn imagined(devices: &[(&str, u32, f64, &str)]) -> String {
    devices.iter().fold(IMAGINED.to_owned(), |text, (name, count, gflops, memory)| {
        format!(
            "{text}[[device]]\nname = {name:?}\ncount = {count}\ngflops = {gflops}\nmemory_bandwidth = 5\nmemory = {memory:?}\nrate = \"1Gbit/s\"\nlatency = \"0.1ms\"\n"
        )
    })
}

#[test]
fn the_plan_of_a_measured_cluster_shows_devices_and_runner_up() {
    let place = ClusterDir::measured(&["pi-1", "pi-2"]);
    let text = place.plan(&[]).good();
    let (columns, rows) = table(&text, "device");
    assert_eq!(rows.len(), 2, "{text}");
    for row in &rows {
        for &at in &columns {
            let edge = &row[at - 2..=at];
            assert!(edge.starts_with("  ") && !edge.ends_with(' '), "{at}: {row}\n{text}");
        }
    }
    for word in ["pi-1", "pi-2", " ms", " GB", "runner-up: ", "search: "] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let json = parsed(&place.plan(&["--json"]).good());
    assert_eq!(json["devices"].as_array().unwrap().len(), 2, "{json}");
    assert!(json["predicted_ms"].as_f64().unwrap() > 0.0);
    let device = &json["devices"][0];
    assert!(device["needed_bytes"].as_u64() <= device["budget_bytes"].as_u64(), "{device}");
    // The same question has the same answer.
    assert_eq!(place.plan(&[]).good(), text);
}

#[test]
fn the_cluster_file_of_the_directory_is_the_default() {
    let place = ClusterDir::measured(&["pi-1", "pi-2"]);
    let named = place.plan(&[]).good();
    assert_eq!(galaxy_in(place.dir.path(), &["plan"]).good(), named);
    let empty = tempfile::tempdir().unwrap();
    let error = galaxy_in(empty.path(), &["plan"]).bad();
    for word in ["there is no cluster.toml in this directory", "--cluster FILE", "--simulate FILE"]
    {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn every_strategy_is_compared() {
    let place = ClusterDir::measured(&["pi-1", "pi-2"]);
    let text = place.plan(&["--compare"]).good();
    let (columns, rows) = table(&text, "strategy");
    assert_eq!((columns.len(), rows.len()), (4, STRATEGIES.len()), "{text}");
    let json = parsed(&place.plan(&["--compare", "--json"]).good());
    for name in STRATEGIES {
        assert!(rows.iter().any(|row| row.trim_start().starts_with(name)), "{name}: {text}");
        let found = json.as_array().unwrap().iter().find(|one| one["strategy"] == name);
        assert!(found.unwrap()["predicted_ms"].as_f64().unwrap() > 0.0, "{json}");
    }
    // bert-large takes 1.3 GB, and no device has room for all of it: who needs all reads from disk.
    let devices = imagined(&[("board", 4, 10.0, "700MB")]);
    let text = place.simulate(&devices, &["--compare"]).good();
    let (_, rows) = table(&text, "strategy");
    let of = |name: &str| *rows.iter().find(|row| row.trim_start().starts_with(name)).unwrap();
    for name in ["local", "sequence"] {
        assert!(of(name).contains("weights from disk on board-1"), "{text}");
    }
    for name in ["auto", "galaxy", "megatron", "pipeline"] {
        assert!(of(name).contains(" ms") && !of(name).contains("disk"), "{text}");
    }
    // And what has no room for a piece and what it works in has no plan.
    let devices = imagined(&[("board", 2, 10.0, "40MB")]);
    let text = place.simulate(&devices, &["--compare"]).good();
    assert!(text.contains("missing"), "{text}");
    let json = parsed(&place.simulate(&devices, &["--compare", "--json"]).good());
    let local = json.as_array().unwrap().iter().find(|one| one["strategy"] == "local").unwrap();
    assert!(local["why_not"].as_str().unwrap().contains("missing"), "{json}");
}

/// The plan shows what each device reads from disk.
#[test]
fn weight_streaming_is_shown_in_the_plan() {
    let place = ClusterDir::new(&["unused"]);
    let devices = imagined(&[("board", 2, 10.0, "300MB")]);
    let text = place.simulate(&devices, &[]).good();
    let (columns, rows) = table(&text, "device");
    assert!(!columns.is_empty() && !rows.is_empty());
    for word in ["weights from disk on board-1", "weights that stay", "loaders", "stalls"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let json = parsed(&place.simulate(&devices, &["--json"]).good());
    for device in json["devices"].as_array().unwrap() {
        assert!(device["stalled_ms"].as_f64().unwrap() > 0.0, "{json}");
        assert!(device["streaming"]["buffer_bytes"].as_u64().unwrap() > 0, "{json}");
        let (needed, budget) = (device["needed_bytes"].as_u64(), device["budget_bytes"].as_u64());
        assert!(needed <= budget, "{json}");
    }
}

#[test]
fn imagined_devices_get_a_plan() {
    let place = ClusterDir::new(&["unused"]);
    let devices = imagined(&[("mini-pc", 1, 100.0, "4GB"), ("board", 3, 10.0, "1GB")]);
    let text = place.simulate(&devices, &[]).good();
    for word in ["mini-pc-1", "board-1", "board-3", "tokens"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let json = parsed(&place.simulate(&devices, &["--json"]).good());
    let taken = json["devices"].as_array().unwrap().len();
    assert_eq!(taken + json["left_out"].as_array().unwrap().len(), 4, "{json}");
    let many = devices.replace("lengths = [128]", "lengths = [128]\ntexts = 4");
    let text = place.simulate(&many, &[]).good();
    assert!(text.contains("4 texts of 128 tokens at once") && text.contains("texts/s"), "{text}");
}

#[test]
fn a_hundred_devices_have_a_plan() {
    let place = ClusterDir::new(&["unused"]);
    let devices = imagined(&[("mini-pc", 1, 100.0, "150MB"), ("board", 99, 10.0, "150MB")])
        .replace("bert-large", "distilbert")
        .replace("lengths", "tiles = 4\nlengths");
    let json = parsed(&place.simulate(&devices, &["--json"]).good());
    let taken = json["devices"].as_array().unwrap().len();
    assert!(taken > 1, "{json}");
    assert_eq!(taken + json["left_out"].as_array().unwrap().len(), 100, "{json}");
    assert!(json["search"]["gap"].as_f64().unwrap() >= 0.0);
}

#[test]
fn what_if_changes_the_cluster_before_planning() {
    let place = ClusterDir::measured(&["pi-1", "pi-2"]);
    let latency = |more: &[&str]| {
        let json = parsed(&place.plan(&[&["--json"], more].concat()).good());
        (json["predicted_ms"].as_f64().unwrap(), json["devices"].as_array().unwrap().len())
    };
    let (before, _) = latency(&[]);
    let (faster, _) = latency(&["--what-if", "pi-1.speed=x2", "--what-if", "pi-2.speed=x2"]);
    assert!(faster < 0.6 * before, "{faster} {before}");
    let (alone, devices) = latency(&["--what-if", "-pi-1"]);
    assert!(alone > before && devices == 1, "{alone} {before}");
    let error = place.plan(&["--what-if", "pi-1.memory=1MB", "--what-if", "-pi-2"]).bad();
    assert!(error.contains("missing") && error.contains("pi-1"), "{error}");
    for (change, word) in [
        ("pi-3.memory=2GB", "there is no device pi-3: there are pi-1, pi-2"),
        ("-pi-3", "there is no device pi-3"),
        ("pi-1.memory=much", "not a size"),
        ("pi-1", "write DEVICE.memory=2GB"),
    ] {
        let said = place.plan(&["--what-if", change]);
        assert_eq!(said.code, 2, "{change}");
        let error = said.bad();
        assert!(error.contains(word) && error.contains("--what-if"), "{change}: {error}");
    }
}

#[test]
fn missing_profiles_and_links_are_named_with_a_remedy() {
    let place = ClusterDir::new(&["pi-1", "pi-2"]);
    let error = place.plan(&[]).bad();
    for word in ["no profile of pi-1, pi-2", &place.shape, "galaxy profile --cluster"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    // One of them, and of another model.
    place.store.save_device(&place.profile.devices[0]).unwrap();
    let mut other = place.profile.devices[1].clone();
    other.shape = "gpt2-l12-h768x12-i3072-f32-00000000".into();
    place.store.save_device(&other).unwrap();
    let error = place.plan(&[]).bad();
    assert!(error.contains("no profile of pi-2 "), "{error}");

    place.save();
    let (from, to) = (&place.profile.devices[0].device, &place.profile.devices[1].device);
    let mut links = place.profile.links.clone();
    links.retain(|link| link.from != *to || link.to != *from);
    fs::remove_file(place.store.dir().join("links.json")).unwrap();
    place.store.save_links(&links).unwrap();
    // Two devices without a way back make no ring: one does it all, and the link is named.
    let json = parsed(&place.plan(&["--json"]).good());
    assert_eq!(json["devices"].as_array().unwrap().len(), 1, "{json}");
    assert_eq!(json["left_out"].as_array().unwrap().len(), 1, "{json}");
    let missing = serde_json::json!([{"from": "pi-2", "to": "pi-1"}]);
    assert_eq!(json["links_not_measured"], missing);
    let text = place.plan(&[]).good();
    assert!(text.contains("not measured: the link from pi-2 to pi-1"), "{text}");
    let error = galaxy(&["plan", "--cluster", "no/such.toml"]).bad();
    assert!(error.contains("no/such.toml cannot be read"), "{error}");
}

#[test]
fn a_plan_uses_only_the_threads_that_the_profile_measured() {
    let place = ClusterDir::measured(&["pi-1"]);
    let text = fs::read_to_string(&place.file).unwrap();
    fs::write(&place.file, text + "threads = 8\n").unwrap();
    let json = parsed(&place.plan(&["--json"]).good());
    assert_eq!(json["plan"]["ring"][0]["threads"], 1, "{json}");
}

#[test]
fn a_cluster_of_one_device_gets_a_plan() {
    let place = ClusterDir::measured(&["pi-1"]);
    let text = place.plan(&[]).good();
    assert!(text.contains("pi-1"), "{text}");
    let text = place.plan(&["--compare"]).good();
    assert_eq!(table(&text, "strategy").1.len(), STRATEGIES.len(), "{text}");
}

#[test]
fn damaged_or_mismatched_profiles_are_refused() {
    let json =
        serde_json::to_string_pretty(&ClusterDir::new(&["pi-1"]).profile.devices[0]).unwrap();
    let times = json.split("\"nanos\": [").nth(1).unwrap();
    let value = times.split(',').next().unwrap().trim();
    for (to, word) in [
        ("0.0", "a time that no operation takes"),
        ("-5.0", "a time that no operation takes"),
        ("NaN", "is damaged"),
        ("null", "is damaged"),
        ("1e999", "is damaged"),
    ] {
        let place = ClusterDir::measured(&["pi-1", "pi-2"]);
        place.damage(value, to);
        let error = place.plan(&[]).bad();
        for word in [word, "pi-1", ".t1.json", "galaxy profile"] {
            assert!(error.contains(word), "{to}: {word}: {error}");
        }
    }
    for (from, to, word) in [
        ("\"version\":", "\"version\": 7, \"old\":", "of version 7"),
        ("\"shape\":", "\"shape\": \"another\", \"old\":", "of shape another"),
    ] {
        let place = ClusterDir::measured(&["pi-1", "pi-2"]);
        place.damage(from, to);
        let error = place.plan(&[]).bad();
        assert!(error.contains(word) && error.contains("pi-1"), "{error}");
    }
}

#[test]
fn invalid_imagined_devices_are_refused() {
    let place = ClusterDir::new(&["unused"]);
    let good = imagined(&[("board", 2, 10.0, "1GB")]);
    for (from, to, word) in [
        ("gflops = 10", "gflops = 0", "gflops: 0 is no number above zero"),
        ("gflops = 10", "gflops = -1", "gflops: -1 is no number above zero"),
        ("gflops = 10", "gflops = nan", "gflops: NaN is no number above zero"),
        ("memory_bandwidth = 5\n", "", "memory_bandwidth"),
        ("1GB", "1", "not a size"),
        ("1Gbit/s", "fast", "not a link rate"),
        ("0.1ms", "soon", "not a time"),
        ("count = 2", "count = 0", "count"),
        ("count = 2", "count = 1000", "at most"),
        ("bert-large", "bert-x", "known are"),
        ("[128]", "[0]", "out of range"),
        ("[128]", "[128]\ntexts = 0", "texts = 0 is out of range: 1 to 65536"),
        ("\"board\"", "\"The Board\"", "is not a name"),
        ("lengths", "length", "unknown field `length`"),
    ] {
        let text = good.replace(from, to);
        assert_ne!(text, good, "{from}");
        let error = place.simulate(&text, &[]).bad();
        assert!(error.contains(word) && error.contains("imagined.toml"), "{to}: {error}");
    }
    let twice = format!("{good}{}", &good[IMAGINED.len()..]);
    let error = place.simulate(&twice, &[]).bad();
    assert!(error.contains("board-1") && error.contains("twice"), "{error}");
    let error = place.simulate(IMAGINED, &[]).bad();
    assert!(error.contains("device"), "{error}");
}
