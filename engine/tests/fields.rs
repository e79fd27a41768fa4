//! Configs with one field changed, against what `transformers` computes by them (`scripts/fields.py`): each
//! change is carried out, or refused by the field's name. None is passed over in silence.
#![allow(clippy::unwrap_used, missing_docs)]

use galaxy_common::{BatchShape, Bytes, Cache, DeviceName, Segment, Strategy, Wanted, WireType};
use galaxy_engine::{compute::Inputs, local::LocalCluster};
use galaxy_graph::share::{self, Member, PlanOptions};
use galaxy_model::{HeadSpec, ModelDir};
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The largest difference from `transformers` that passes, relative to the largest value.
const TOLERANCE: f32 = 1e-4;
const LEAST_CHANGES: usize = 200;
const LEAST_OF_A_FAMILY: usize = 12;
/// One of so many changes that move the output may be refused.
const MOST_REFUSED: usize = 5;

/// Hidden states of some rows, and logits of the last one or of the classes.
type Outputs = [Vec<f32>; 2];

struct Golden {
    value: Value,
    ids: Vec<u32>,
    rows: Vec<usize>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden")
}

impl Golden {
    fn read() -> Self {
        let text = fs::read(folder().join("fields.json")).unwrap();
        let value: Value = serde_json::from_slice(&text).unwrap();
        let numbers =
            |name: &str| value[name].as_array().unwrap().iter().map(|n| n.as_u64().unwrap());
        let ids = numbers("ids").map(|id| id as u32).collect();
        let rows = numbers("rows").map(|row| row as usize).collect();
        Self { value, ids, rows }
    }

    fn list(&self, name: &str) -> &[Value] {
        self.value[name].as_array().unwrap()
    }

    /// The outputs of a checkpoint with this config, or why there are none.
    fn outputs(&self, checkpoint: &str, config: &Map<String, Value>) -> Result<Outputs, String> {
        let directory = tempfile::tempdir().unwrap();
        let golden = folder().join(checkpoint);
        for entry in fs::read_dir(&golden).unwrap() {
            let name = entry.unwrap().file_name();
            if name.to_str().unwrap().starts_with("model") {
                symlink(golden.join(&name), directory.path().join(&name)).unwrap();
            }
        }
        let text = serde_json::to_vec(config).unwrap();
        fs::write(directory.path().join("config.json"), text).unwrap();
        let model = ModelDir::open(directory.path()).map_err(|error| error.to_string())?;
        let spec = model.spec().clone();
        let of_head = match spec.head {
            HeadSpec::Classes(_) => Wanted::Classes,
            _ => Wanted::LastLogits,
        };
        let (mut segments, mut tokens) = (Vec::new(), Vec::<u32>::new());
        for (slot, wanted) in [(0, Wanted::Hidden), (1, of_head)] {
            let count = spec.readable(&self.ids, wanted)?;
            let rows = spec.patches.map_or(count as u32, |patches| patches.rows());
            segments.push(Segment { slot, context_len: 0, cached: false, rows, wanted });
            tokens.extend(&self.ids[..count]);
        }
        let shape = BatchShape::new(segments).unwrap();
        let terms = PlanOptions {
            model: model.name(),
            fingerprint: model.fingerprint(),
            formats: model.formats(),
            strategy: Strategy::Local,
            wire: WireType::F32,
            tiles: 1,
            max_rows: shape.rows(),
            cache: Cache::NONE,
        };
        let name = DeviceName::new("d0").unwrap();
        let member = Member { name, budget: Bytes(1 << 30), threads: 1, share: 1.0 };
        let plan = share::plan(&spec, &terms, &[member]).map_err(|error| error.to_string())?;
        let inputs: Inputs = match spec.patches {
            Some(patches) => {
                let values = patches.cut(&pixels(&golden)).repeat(2);
                Inputs::Patches { first: 0, values: values.into() }
            }
            None => tokens.into(),
        };
        let cluster =
            LocalCluster::open(Arc::new(model), plan).map_err(|error| error.to_string())?;
        let merged = cluster.run(&shape, inputs).map_err(|error| error.to_string())?;
        let hidden = spec.hidden as usize;
        let kept = self.rows.iter().map(|row| &merged[0].values()[row * hidden..][..hidden]);
        Ok([kept.collect::<Vec<_>>().concat(), merged[1].values().to_vec()])
    }
}

fn pixels(golden: &Path) -> Vec<f32> {
    let bytes = fs::read(golden.join("expected.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = file.tensor("pixels").unwrap().data().as_chunks().0.to_vec();
    words.into_iter().map(f32::from_le_bytes).collect()
}

/// The outputs of `transformers`.
fn expected(of: &Value) -> Outputs {
    let numbers = |name: &str| {
        of[name].as_array().unwrap().iter().map(|n| n.as_f64().unwrap() as f32).collect()
    };
    [numbers("hidden"), numbers("logits")]
}

/// The larger of both relative differences: max|a-b| / max|b|.
fn apart(got: &Outputs, want: &Outputs) -> f32 {
    let of = |(got, want): (&Vec<f32>, &Vec<f32>)| {
        if got.len() != want.len() || got.iter().any(|value| !value.is_finite()) {
            return f32::INFINITY;
        }
        let largest = want.iter().fold(f32::MIN_POSITIVE, |m, v| m.max(v.abs()));
        got.iter().zip(want).fold(0.0, |m: f32, (a, b)| m.max((a - b).abs())) / largest
    };
    got.iter().zip(want).map(of).fold(0.0, f32::max)
}

/// The base's config with what is laid over it; null leaves a field out.
fn laid_over(base: &Value) -> Map<String, Value> {
    let path = folder().join(base["checkpoint"].as_str().unwrap()).join("config.json");
    let mut config: Map<_, _> = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for (name, value) in base["over"].as_object().unwrap() {
        match value {
            Value::Null => config.remove(name),
            value => config.insert(name.clone(), value.clone()),
        };
    }
    config
}

/// Whether a message says which field it is about: the field, one inside it, or, of a text that it makes
/// unreadable, what the field is about.
fn names(message: &str, field: &str, value: &Value) -> bool {
    let about = [
        ("window", "window"),
        ("pad_token_id", "padding"),
        ("max_position_embeddings", "table of positions"),
    ];
    if about.iter().any(|(of, word)| field.contains(of) && message.contains(word)) {
        return true;
    }
    let mut inner = value.as_object().into_iter().flat_map(|fields| fields.keys());
    message.contains(field) || inner.any(|name| message.contains(name.as_str()))
}

#[derive(Default)]
struct Count {
    moved: usize,
    moved_refused: usize,
    still: usize,
    still_refused: usize,
}

#[test]
fn a_changed_config_field_takes_effect_or_is_refused_by_name() {
    let golden = Golden::read();
    let (mut wrong, mut counts) = (Vec::new(), BTreeMap::<_, Count>::new());
    for base in golden.list("bases") {
        let checkpoint = base["checkpoint"].as_str().unwrap();
        let off =
            golden.outputs(checkpoint, &laid_over(base)).map(|got| apart(&got, &expected(base)));
        if !matches!(off, Ok(off) if off <= TOLERANCE) {
            wrong.push(format!("{checkpoint} with {}: {off:?}", base["over"]));
        }
    }
    for change in golden.list("changes") {
        let base = &golden.list("bases")[change["base"].as_u64().unwrap() as usize];
        let family = base["family"].as_str().unwrap();
        let (field, value) = (change["field"].as_str().unwrap(), &change["value"]);
        let mut config = laid_over(base);
        config.remove(field);
        if change.get("value").is_some() {
            config.insert(field.to_owned(), value.clone());
        }
        let moves = change.get("hidden").is_some();
        let want = expected(if moves { change } else { base });
        let count = counts.entry(family).or_default();
        let refused = match golden.outputs(base["checkpoint"].as_str().unwrap(), &config) {
            Ok(got) => {
                let off = apart(&got, &want);
                if off > TOLERANCE {
                    wrong.push(format!("{family}: {field} = {value} is {off:e} off"));
                }
                0
            }
            Err(message) => {
                if !names(&message, field, value) {
                    wrong.push(format!("{family}: {field} = {value} is refused as {message:?}"));
                }
                if std::env::var_os("TELL").is_some() {
                    eprintln!("{family} {moves}: {field} = {value} is refused: {message}");
                }
                1
            }
        };
        if moves {
            (count.moved, count.moved_refused) = (count.moved + 1, count.moved_refused + refused);
        } else {
            (count.still, count.still_refused) = (count.still + 1, count.still_refused + refused);
        }
    }
    for (family, count) in &counts {
        let Count { moved, moved_refused, still, still_refused } = count;
        eprintln!(
            "{family}: {moved} move the output, {moved_refused} of them refused; {still} do not, \
             {still_refused} of them refused"
        );
        assert!(*moved >= LEAST_OF_A_FAMILY, "{family} has {moved} changes");
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
    let all: usize = counts.values().map(|count| count.moved).sum();
    let refused: usize = counts.values().map(|count| count.moved_refused).sum();
    assert!(all >= LEAST_CHANGES && refused * MOST_REFUSED <= all, "{refused} of {all} refused");
}
