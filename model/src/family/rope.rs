//! Rotary positions of a config: every rule by which `transformers` scales their frequencies.

use super::config::{MAX_POSITIONS, MAX_WIDTH};
use crate::{
    config::{Fields, short},
    error::ModelError,
    spec::{LongFrequencies, Pairs, Positions},
};
use std::f64::consts::TAU;

/// What rotary positions are made of, besides what the config says of them.
#[derive(Clone, Copy)]
pub(super) struct Turns {
    /// Rows of a text where the config does not say how many.
    pub limit: u32,
    /// The kind of layers whose they are, where kinds have their own.
    pub layers: Option<&'static str>,
    /// The field of the base of frequencies, and what it is where there is none.
    pub theta: (&'static str, f64),
    /// Whether the one scaling of an older file is that of every kind of layers, and not only of those that see all.
    pub scaled_alike: bool,
    /// Whether the first columns of a head may be rotated alone.
    pub partly: bool,
}

impl Turns {
    /// Those of all layers, as Llama has them.
    pub(super) fn new(limit: u32) -> Self {
        let theta = ("rope_theta", 10_000.0);
        Self { limit, layers: None, theta, scaled_alike: false, partly: false }
    }
}

const KINDS: &str = "default, linear, dynamic, llama3, yarn, longrope, proportional";
/// Names of layers that parameters may stand under, each kind of layer with its own.
const LAYERS: [&str; 2] = ["full_attention", "sliding_attention"];

/// Rotary positions of a config, for heads of so many columns.
pub(super) fn rotary(
    config: &Fields<'_>,
    mut head_width: u32,
    turns: Turns,
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
        // Up to the limit, beyond which no text goes, dynamic frequencies are those of the theory.
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
    // No text is long where those of the model's training were as long as any.
    let long = long.filter(|long| long.above < limit);
    let inverse_frequencies = rule.finite(frequencies)?;
    let scale = scale as f32;
    if !scale.is_finite() {
        let problem = format!("makes cosines and sines {scale} times as large");
        return Err(config.wrong("attention_factor", problem));
    }
    Ok(Positions::Rotary { inverse_frequencies, long, scale, pairs: Pairs::Halves, limit })
}

/// The object that says how positions are rotated: `rope_parameters` of `transformers` 5, or
/// `rope_scaling` from before, which counts where a config has both.
fn parameters<'a>(config: &Fields<'a>, turns: Turns) -> Result<Option<Fields<'a>>, ModelError> {
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

/// The parameters of one kind of layers, of a config that has them by kinds. In older files there is but one
/// scaling: whether it is theirs, if it is that.
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

/// Columns of a head that are rotated.
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

/// What the rules are made of.
struct Rule<'a> {
    config: &'a Fields<'a>,
    /// The parameters of the rule.
    fields: Fields<'a>,
    theta: f64,
    head_width: u32,
    /// Rows that the model is for, scaled.
    limit: u32,
}

impl Rule<'_> {
    /// Frequencies as they are without any scaling.
    fn plain(&self) -> Vec<f64> {
        let width = f64::from(self.head_width);
        (0..self.head_width / 2).map(|i| self.theta.powf(-f64::from(2 * i) / width)).collect()
    }

    /// Rows that the model was trained with, before it was scaled.
    fn original(&self) -> Result<f64, ModelError> {
        let name = &["original_max_position_embeddings"];
        if let Some(rows) = self.config.count_or_none(name, MAX_POSITIONS)? {
            return Ok(f64::from(rows));
        }
        Ok(f64::from(self.fields.count_or_none(name, MAX_POSITIONS)?.unwrap_or(self.limit)))
    }

    /// By what texts are longer than those that the model was trained with.
    fn factor(&self) -> Result<f64, ModelError> {
        match self.fields.positive_or_none(&["factor"])? {
            Some(factor) => Ok(factor),
            None => Ok(f64::from(self.limit) / self.original()?),
        }
    }

    /// Some of the pairs stand still, and the others are as they would be of the whole head.
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

    /// Slow pairs are made slower by the factor, fast ones stay, and between the two it is mixed.
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
            // Turns within the original context decide: many stay, few are slowed down.
            let turns = original * f / TAU;
            let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 - keep) * f / factor + keep * f
        };
        Ok(self.plain().into_iter().map(scale).collect())
    }

    /// As llama3, but mixed over the numbers of the pairs; and what cosines and sines are multiplied by.
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

    /// Each pair has a factor of its own.
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

    /// What longrope multiplies cosines and sines by.
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

/// GPT-J turns `rotary_dim` columns of each head, without any scaling.
pub(super) fn neighbours(
    config: &Fields<'_>,
    head_width: u32,
    hidden: u32,
    limit: u32,
) -> Result<Positions, ModelError> {
    // The reference makes angles for whole rows where the field is null, which fit no head.
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
