//! The fields and tensors of a GGUF file that say where a model's rows are: rotary positions and sliding windows.

use super::{
    super::{DIVISORS, STRETCHES},
    architecture::{Architecture, Divisors, Windows},
    header::Field,
    unwritten,
};
use crate::{
    ModelDir, Positions,
    error::ModelError,
    spec::{ModelSpec, Rotation, SlidingWindow},
};
use serde_json::Value as Json;

/// The names that configs have for kinds of layers with rotary positions of their own.
const WHOLE: &str = "full_attention";
const LOCAL: &str = "sliding_attention";
/// The base of rotary frequencies in layers with windows, where a config gives none.
const LOCAL_THETA: f64 = 10_000.0;
/// The layers of SmolLM3 that have no positions: each one of so many. No field says it.
const WITHOUT_POSITIONS: u32 = 4;

impl Architecture {
    /// Puts the fields of rotary positions; none for other positions.
    pub(super) fn put_rotary(
        &self,
        model: &ModelDir,
        put: &mut impl FnMut(&str, Field),
    ) -> Result<(), ModelError> {
        let Positions::Rotary { limit, inverse_frequencies, scale, .. } = &model.spec().positions
        else {
            return Ok(());
        };
        put("rope.dimension_count", Field::Whole(2 * inverse_frequencies.len() as u32));
        put("rope.freq_base", Field::Float(self.theta() as f32));
        if !self.layout.local_theta.is_empty() {
            put("rope.freq_base_swa", Field::Float(self.local_theta() as f32));
        }
        let Some((kind, by)) = self.stretched() else { return Ok(()) };
        let factor = || Field::Float(by["factor"].as_f64().unwrap_or(1.0) as f32);
        let original = || {
            let field = "original_max_position_embeddings";
            let rows = self.config[field].as_u64().or_else(|| by[field].as_u64());
            Field::Whole(rows.and_then(|rows| u32::try_from(rows).ok()).unwrap_or(*limit))
        };
        match kind {
            "llama3" | "default" => {}
            "linear" => {
                put("rope.scaling.type", Field::Text("linear".to_owned()));
                put("rope.scaling.factor", factor());
            }
            "yarn" => {
                put("rope.scaling.type", Field::Text("yarn".to_owned()));
                put("rope.scaling.factor", factor());
                put("rope.scaling.original_context_length", original());
            }
            "longrope" => {
                if self.layout.divisors == Divisors::Any {
                    put("rope.scaling.type", Field::Text("longrope".to_owned()));
                }
                put("rope.scaling.attn_factor", Field::Float(*scale));
                put("rope.scaling.original_context_length", original());
            }
            other => {
                let why = format!("its positions are stretched by {other:?}, which no field says");
                return Err(unwritten(model, why));
            }
        }
        Ok(())
    }

    /// The divisors of rotary frequencies that fields do not express, each list by the name of its tensor.
    ///
    /// # Errors
    /// When there are some, and readers of this architecture do not apply them.
    pub(super) fn divisors(
        &self,
        model: &ModelDir,
    ) -> Result<Vec<(&'static str, Vec<f32>)>, ModelError> {
        let Positions::Rotary { inverse_frequencies, .. } = &model.spec().positions else {
            return Ok(Vec::new());
        };
        let applied = |which: bool, of: Vec<(&'static str, Vec<f32>)>| match which {
            true => Ok(of),
            false => {
                let name = self.layout.name;
                let why =
                    format!("files of {name} do not divide frequencies of positions like this");
                Err(unwritten(model, why))
            }
        };
        match self.stretched() {
            Some(("linear" | "yarn", _)) => return Ok(Vec::new()),
            Some(("longrope", by)) => {
                let list = |field: &str| {
                    let all = by[field].as_array().into_iter().flatten();
                    all.map(|by| by.as_f64().unwrap_or(1.0) as f32).collect()
                };
                let both = STRETCHES.into_iter().zip(["short_factor", "long_factor"].map(list));
                return applied(self.layout.divisors != Divisors::None, both.collect());
            }
            _ => {}
        }
        let (theta, columns) = (self.theta(), 2.0 * inverse_frequencies.len() as f64);
        let divisor = |(at, inverse): (usize, &f32)| {
            (theta.powf(-2.0 * at as f64 / columns) / f64::from(*inverse)) as f32
        };
        let divisors: Vec<f32> = inverse_frequencies.iter().enumerate().map(divisor).collect();
        if divisors.iter().all(|divisor| (divisor - 1.0).abs() < 1e-5) {
            return Ok(Vec::new());
        }
        applied(self.layout.divisors == Divisors::Any, vec![(DIVISORS, divisors)])
    }

    /// Puts the sliding window, and which layers have it.
    ///
    /// # Errors
    /// When layers differ in a way that readers of this architecture do not know.
    pub(super) fn put_windows(
        &self,
        model: &ModelDir,
        put: &mut impl FnMut(&str, Field),
    ) -> Result<(), ModelError> {
        let (spec, name) = (model.spec(), self.layout.name);
        let window = (0..spec.layers).find_map(|layer| spec.kind(layer).window);
        let refused = |why: String| Err(unwritten(model, why));
        let without = |layer: u32| spec.kind(layer).rotation == Rotation::None;
        let expected =
            |layer: u32| name == "smollm3" && (layer + 1).is_multiple_of(WITHOUT_POSITIONS);
        if (0..spec.layers).any(|layer| without(layer) != expected(layer)) {
            return refused(format!(
                "its layers without positions are others than each fourth one, which no field of {name} says"
            ));
        }
        let rows = window.map(|window| rows(spec, window));
        match self.layout.windows {
            Windows::None if rows.is_some() => refused(format!(
                "it has layers with a sliding window, which llama.cpp does not compute in files of {name}"
            )),
            Windows::None => Ok(()),
            Windows::All => {
                // As converters do: a file without a window says so.
                put("attention.sliding_window", Field::Whole(rows.unwrap_or(0)));
                Ok(())
            }
            Windows::Some { every, first } => {
                let local = spec.local_positions.is_some();
                let slides = |layer: u32| match local {
                    true => spec.kind(layer).rotation == Rotation::Local,
                    false => spec.kind(layer).window.is_some(),
                };
                let sliding: Vec<bool> = (0..spec.layers).map(slides).collect();
                if rows.is_none() && sliding.contains(&true) {
                    return refused(format!(
                        "it has layers with positions of their own and no window, which no field of {name} says"
                    ));
                }
                // EmbeddingGemma must have the field.
                let rows = rows.or((name == "gemma-embedding").then_some(0));
                if let Some(rows) = rows {
                    put("attention.sliding_window", Field::Whole(rows));
                }
                if let Some(pattern) = pattern(&sliding, every, first) {
                    put("attention.sliding_window_pattern", pattern);
                }
                Ok(())
            }
        }
    }

    /// The base of the rotary frequencies, for layers with full attention where each kind of layers has its own.
    fn theta(&self) -> f64 {
        let inside = self.rule().and_then(|by| by["rope_theta"].as_f64());
        let plain = || self.config["rope_parameters"]["rope_theta"].as_f64();
        let own =
            || ["rope_theta", "global_rope_theta"].iter().find_map(|f| self.config[*f].as_f64());
        inside.or_else(plain).or_else(own).unwrap_or(self.layout.theta)
    }

    /// The base of the rotary frequencies of layers with windows.
    fn local_theta(&self) -> f64 {
        let inside = self.rules().and_then(|by| by[LOCAL]["rope_theta"].as_f64());
        inside.or_else(|| self.config[self.layout.local_theta].as_f64()).unwrap_or(LOCAL_THETA)
    }

    /// The object of the config that says how positions are rotated, in layers of all kinds.
    fn rules(&self) -> Option<&Json> {
        let all = ["rope_scaling", "rope_parameters"].map(|name| &self.config[name]);
        all.into_iter().find(|by| by.as_object().is_some_and(|by| !by.is_empty()))
    }

    /// The same for layers with full attention.
    fn rule(&self) -> Option<&Json> {
        self.rules().map(|all| all.get(WHOLE).unwrap_or(all))
    }

    /// The scaling rule of rotary positions, and the object that holds its parameters.
    fn stretched(&self) -> Option<(&str, &Json)> {
        let found = self.rule()?;
        let kind = found["rope_type"].as_str().or_else(|| found["type"].as_str());
        Some((kind.unwrap_or("default"), found))
    }
}

/// The rows of a sliding window as files count them: a row and those before it, or those of both sides together.
fn rows(spec: &ModelSpec, window: SlidingWindow) -> u32 {
    match spec.causal {
        true => window.before.saturating_add(1),
        false => window.before.saturating_mul(2),
    }
}

/// The field that says which layers have a window: each but every so many-th, or a list. `None` where the architecture
/// has the same layers without a field.
fn pattern(sliding: &[bool], usual: u32, first: bool) -> Option<Field> {
    let is = |every: u32| {
        let whole = |layer: u32| (layer + u32::from(!first)).is_multiple_of(every);
        (0..).zip(sliding).all(|(layer, slides)| *slides != whole(layer))
    };
    if is(usual) {
        return None;
    }
    let every = (1..=sliding.len() as u32 + 1).find(|every| is(*every));
    Some(every.map_or_else(|| Field::Flags(sliding.to_vec()), Field::Whole))
}
