//! Reads rotary positions from a config, with every rule by which `transformers` scales their frequencies.

use super::limits::{MAX_POSITIONS, MAX_WIDTH};
use crate::{
    config::{Fields, short},
    error::ModelError,
    spec::{LongFrequencies, Pairs, Positions},
};
use std::f64::consts::TAU;

/// What a family settles about rotary positions, besides what its configs say.
#[derive(Clone, Copy)]
pub(super) struct RotaryFields {
    /// The longest sequence, in rows, where the config does not give it.
    pub limit: u32,
    /// The kind of layers that the positions are for, where each kind has its own.
    pub layers: Option<&'static str>,
    /// The field that holds the base of the frequencies, and the base where it is absent.
    pub theta: (&'static str, f64),
    /// Whether the one scaling rule of an older file holds for every kind of layers, and not only for full attention.
    pub scaled_alike: bool,
    /// Whether a config may have only the first columns of a head rotated.
    pub partly: bool,
}

impl RotaryFields {
    /// The positions of all layers, as Llama has them.
    pub(super) fn new(limit: u32) -> Self {
        let theta = ("rope_theta", 10_000.0);
        Self { limit, layers: None, theta, scaled_alike: false, partly: false }
    }
}

const KINDS: &str = "default, linear, dynamic, llama3, yarn, longrope, proportional";
/// The kinds of layers that may have parameters of their own, by their names in configs.
const LAYERS: [&str; 2] = ["full_attention", "sliding_attention"];

/// Reads the rotary positions of a config, for heads of `head_width` columns.
pub(super) fn rotary(
    config: &Fields<'_>,
    mut head_width: u32,
    turns: RotaryFields,
) -> Result<Positions, ModelError> {
    let limit = turns.limit;
    if head_width % 2 == 1 {
        let problem = format!("is {head_width}: rotary positions need an even width");
        return Err(config.wrong("head_dim", problem));
    }
    let limit = config.count_or_none(&["max_position_embeddings"], MAX_POSITIONS)?.unwrap_or(limit);
    let parameters = parameters(config, turns)?;
    let named = match parameters {
        Some(fields) => fields.positive_or_none(&["rope_theta"])?,
        None => None,
    };
    let (field, usual) = turns.theta;
    let theta = match named {
        Some(theta) => theta,
        None => config.positive_or_none(&[field])?.unwrap_or(usual),
    };
    let kind = match parameters {
        Some(fields) => fields.text(&["rope_type", "type"])?.unwrap_or("default"),
        None => "default",
    };
    if kind != "proportional" {
        let whole = head_width;
        for fields in [Some(*config), parameters].into_iter().flatten() {
            head_width = head_width.min(rotated(&fields, turns.partly, whole)?);
        }
    }
    let rule = Rule { config, fields: parameters.unwrap_or(*config), theta, head_width, limit };
    let (frequencies, scale) = match kind {
        // Up to the limit, which no text exceeds, dynamic frequencies are unscaled.
        "default" | "dynamic" => (rule.plain(), 1.0),
        "linear" => {
            let factor = rule.fields.positive(&["factor"])?;
            (rule.plain().into_iter().map(|f| f / factor).collect(), 1.0)
        }
        "proportional" => (rule.proportional()?, 1.0),
        "llama3" => (rule.llama3()?, 1.0),
        "yarn" => rule.yarn()?,
        "longrope" => (rule.stretched("short_factor")?, rule.long_scale()?),
        other => return Err(config.unknown("rope_type", other, KINDS)),
    };
    let long = match kind {
        "longrope" => Some(LongFrequencies {
            above: rule.original()? as u32,
            inverse_frequencies: rule.finite(rule.stretched("long_factor")?)?,
        }),
        _ => None,
    };
    // No text counts as long where the original context length is the limit.
    let long = long.filter(|long| long.above < limit);
    let inverse_frequencies = rule.finite(frequencies)?;
    let scale = scale as f32;
    if !scale.is_finite() {
        let problem = format!("makes cosines and sines {scale} times as large");
        return Err(config.wrong("attention_factor", problem));
    }
    Ok(Positions::Rotary { inverse_frequencies, long, scale, pairs: Pairs::Halves, limit })
}

/// The object that says how positions are rotated: `rope_parameters` of `transformers` 5, or the older `rope_scaling`,
/// which counts where a config has both.
fn parameters<'a>(
    config: &Fields<'a>,
    turns: RotaryFields,
) -> Result<Option<Fields<'a>>, ModelError> {
    let scaling =
        config.inner(&["rope_scaling"])?.filter(|fields| fields.entries().next().is_some());
    let Some(fields) = (match scaling {
        Some(scaling) => Some(scaling),
        None => config.inner(&["rope_parameters"])?,
    }) else {
        return Ok(None);
    };
    if let Some(layers) = turns.layers {
        let whole = turns.scaled_alike || layers == LAYERS[0];
        return of_layers(config, fields, layers, scaling.map(|_| whole));
    }
    let mut of_layers = Vec::new();
    for name in LAYERS {
        of_layers.extend(fields.get(&[name]).map(|(_, value)| value));
    }
    match of_layers[..] {
        [] => Ok(Some(fields)),
        [first, ..] if of_layers.iter().all(|one| *one == first) => fields.inner(&LAYERS),
        _ => Err(config.wrong(
            "rope_parameters",
            "has other values for each kind of layer: only one rule for all layers is run",
        )),
    }
}

/// The parameters of one kind of layers. Older files have a single `rope_scaling`: `scaling` says whether this is such
/// a file, and whether its rule holds for these layers.
fn of_layers<'a>(
    config: &Fields<'_>,
    fields: Fields<'a>,
    layers: &'static str,
    scaling: Option<bool>,
) -> Result<Option<Fields<'a>>, ModelError> {
    let by_kinds = LAYERS.iter().any(|name| fields.get(&[name]).is_some());
    match (by_kinds, scaling) {
        (true, _) => fields.inner(&[layers]),
        (false, Some(theirs)) => Ok(theirs.then_some(fields)),
        (false, None) if fields.entries().next().is_none() => Ok(None),
        (false, None) => Err(config.wrong(
            "rope_parameters",
            "must have the parameters of full_attention and of sliding_attention",
        )),
    }
}

/// The number of a head's columns that are rotated.
fn rotated(fields: &Fields<'_>, partly: bool, width: u32) -> Result<u32, ModelError> {
    match fields.positive_or_none(&["partial_rotary_factor"])?.filter(|&part| part != 1.0) {
        None => Ok(width),
        Some(part) if partly && part < 1.0 => {
            let columns = (f64::from(width) * part) as u32;
            match columns >= 2 && columns.is_multiple_of(2) {
                true => Ok(columns),
                false => {
                    let problem = format!("is {part}: of heads of {width} that is no even number");
                    Err(fields.wrong("partial_rotary_factor", problem))
                }
            }
        }
        Some(part) => Err(ModelError::Unsupported {
            path: fields.path.to_owned(),
            field: "partial_rotary_factor",
            value: part.to_string(),
            remedy: "only whole heads are rotated in this family",
        }),
    }
}

/// The inputs of the scaling rules.
struct Rule<'a> {
    config: &'a Fields<'a>,
    /// The parameters of the scaling rule.
    fields: Fields<'a>,
    theta: f64,
    head_width: u32,
    /// The longest sequence that the model is for, scaled, in rows.
    limit: u32,
}

impl Rule<'_> {
    /// The inverse frequencies without any scaling.
    fn plain(&self) -> Vec<f64> {
        let width = f64::from(self.head_width);
        (0..self.head_width / 2).map(|i| self.theta.powf(-f64::from(2 * i) / width)).collect()
    }

    /// The longest sequence of the model's training, in rows, before positions were scaled.
    fn original(&self) -> Result<f64, ModelError> {
        let name = &["original_max_position_embeddings"];
        if let Some(rows) = self.config.count_or_none(name, MAX_POSITIONS)? {
            return Ok(f64::from(rows));
        }
        Ok(f64::from(self.fields.count_or_none(name, MAX_POSITIONS)?.unwrap_or(self.limit)))
    }

    /// How many times longer sequences may be than those of the model's training.
    fn factor(&self) -> Result<f64, ModelError> {
        match self.fields.positive_or_none(&["factor"])? {
            Some(factor) => Ok(factor),
            None => Ok(f64::from(self.limit) / self.original()?),
        }
    }

    /// The rule "proportional": some pairs are not rotated, and the others have the frequencies of the whole head.
    fn proportional(&self) -> Result<Vec<f64>, ModelError> {
        let name = &["partial_rotary_factor"];
        let part = match self.fields.positive_or_none(name)? {
            Some(part) => part,
            None => self.config.positive_or_none(name)?.unwrap_or(1.0),
        };
        if part > 1.0 {
            return Err(self.config.wrong(name[0], format!("is {part}: at most 1 makes sense")));
        }
        let factor = self.fields.positive_or_none(&["factor"])?.unwrap_or(1.0);
        let turned = (part * f64::from(self.head_width) / 2.0).floor() as usize;
        let scaled = |(i, f): (usize, f64)| if i < turned { f / factor } else { 0.0 };
        Ok(self.plain().into_iter().enumerate().map(scaled).collect())
    }

    /// The rule "llama3": low frequencies are divided by the factor, high ones stay, and those between are
    /// interpolated.
    fn llama3(&self) -> Result<Vec<f64>, ModelError> {
        let factor = self.fields.positive(&["factor"])?;
        let low = self.fields.positive(&["low_freq_factor"])?;
        let high = self.fields.positive(&["high_freq_factor"])?;
        if low >= high {
            let problem = format!("is {low}: it must be below high_freq_factor = {high}");
            return Err(self.config.wrong("low_freq_factor", problem));
        }
        let original = self.original()?;
        let scale = |f: f64| {
            // The number of full turns within the original context decides: many stay, few are slowed down.
            let turns = original * f / TAU;
            let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 - keep) * f / factor + keep * f
        };
        Ok(self.plain().into_iter().map(scale).collect())
    }

    /// The rule "yarn": like llama3, but interpolated over the index of the pairs. Also returns the scale of cosines
    /// and sines.
    fn yarn(&self) -> Result<(Vec<f64>, f64), ModelError> {
        let fields = &self.fields;
        let (original, factor, width) =
            (self.original()?, self.factor()?, f64::from(self.head_width));
        let or = |name: &'static str, default: f64| -> Result<f64, ModelError> {
            let value = fields.number_or_none(&[name])?.filter(|&value| value != 0.0);
            Ok(value.unwrap_or(default))
        };
        let (fast, slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
        let pair_of =
            |turns: f64| width * (original / (turns * TAU)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (pair_of(fast), pair_of(slow));
        if fields.flag("truncate", true)? {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(width - 1.0));
        if low == high {
            high += 0.001;
        }
        let scale = |(i, f): (usize, f64)| {
            let slowed = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / factor * slowed + f * (1.0 - slowed)
        };
        let frequencies = self.plain().into_iter().enumerate().map(scale).collect();
        let growth = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
        let (mscale, all) = (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?);
        let given = fields.number_or_none(&["attention_factor"])?;
        let scale = match given {
            Some(given) => given,
            None if mscale != 0.0 && all != 0.0 => growth(mscale) / growth(all),
            None => growth(1.0),
        };
        Ok((frequencies, scale))
    }

    /// The rule "longrope": each pair is divided by a factor of its own.
    fn stretched(&self, name: &'static str) -> Result<Vec<f64>, ModelError> {
        let pairs = self.head_width / 2;
        let Some((_, value)) = self.fields.get(&[name]) else {
            return Err(self.config.wrong(name, "is missing"));
        };
        let number = |value: &serde_json::Value| value.as_f64().filter(|f| *f > 0.0);
        let factors: Option<Vec<f64>> =
            value.as_array().and_then(|list| list.iter().map(number).collect());
        let factors = factors.filter(|list| list.len() == pairs as usize).ok_or_else(|| {
            let problem = format!("is {}: {pairs} positive numbers are wanted", short(value));
            self.config.wrong(name, problem)
        })?;
        Ok(self.plain().into_iter().zip(factors).map(|(f, factor)| f / factor).collect())
    }

    /// The scale of cosines and sines under the rule "longrope".
    fn long_scale(&self) -> Result<f64, ModelError> {
        if let Some(given) = self.fields.number_or_none(&["attention_factor"])? {
            return Ok(given);
        }
        let (factor, original) = (self.factor()?, self.original()?);
        let growth = (1.0 + factor.ln() / original.ln()).sqrt();
        Ok(if factor <= 1.0 { 1.0 } else { growth })
    }

    fn finite(&self, frequencies: Vec<f64>) -> Result<Vec<f32>, ModelError> {
        let frequencies: Vec<f32> = frequencies.into_iter().map(|f| f as f32).collect();
        match frequencies.iter().find(|f| !f.is_finite()) {
            None => Ok(frequencies),
            Some(wrong) => {
                let theta = self.theta;
                let problem =
                    format!("is {theta}: with its scaling it gives the frequency {wrong}");
                Err(self.config.wrong("rope_theta", problem))
            }
        }
    }
}

/// Rotary positions of GPT-J: `rotary_dim` columns of each head are rotated, in neighbouring pairs and without scaling.
pub(super) fn neighbours(
    config: &Fields<'_>,
    head_width: u32,
    hidden: u32,
    limit: u32,
) -> Result<Positions, ModelError> {
    // Where the field is null the reference computes angles for whole rows, which fit no head.
    let rotated = match config.entries().find(|(name, _)| *name == "rotary_dim") {
        None => 64,
        Some(_) => config.count_or_none(&["rotary_dim"], MAX_WIDTH)?.unwrap_or(hidden),
    };
    if rotated > head_width || rotated % 2 == 1 {
        let problem =
            format!("is {rotated}: an even number up to the {head_width} columns of a head");
        return Err(config.wrong("rotary_dim", problem));
    }
    let inverse = |i: u32| 10_000f64.powf(-f64::from(2 * i) / f64::from(rotated)) as f32;
    Ok(Positions::Rotary {
        inverse_frequencies: (0..rotated / 2).map(inverse).collect(),
        long: None,
        scale: 1.0,
        pairs: Pairs::Neighbours,
        limit,
    })
}
