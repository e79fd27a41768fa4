//! Models and devices for tests.
#![allow(clippy::unwrap_used)]

use crate::{
    Allowed, Offer, Request, Workload,
    split::{CostCurve, DeviceCurves, Problem},
    synthetic::{SyntheticDevice, profile},
};
use galaxy_common::{
    Bytes, ClusterProfile, DeviceName, LinkType, Strategy, Wanted, WeightFormat, WireType,
};
use galaxy_model::{
    Activation, Formats, HeadSpec, ModelSpec, NormKind, NormPlace, Pairs, Positions, ScoreScale,
};

/// A BERT of this many layers and this hidden size.
pub fn bert(layers: u32, hidden: u32) -> ModelSpec {
    ModelSpec {
        family: "bert".into(),
        hidden,
        layers,
        heads: hidden / 64,
        kv_heads: hidden / 64,
        head_width: 64,
        intermediate: 4 * hidden,
        vocabulary: 30_522,
        patches: None,
        norm: NormKind::Layer,
        norm_place: NormPlace::Post,
        norm_epsilon: 1e-12,
        norm_bias: true,
        norms_from_one: false,
        first_norm: true,
        sum_norms: false,
        activation: Activation::Gelu,
        gated: false,
        parallel: false,
        causal: false,
        kinds: Vec::new(),
        scores: ScoreScale { over_root: Some(8.0), by_layer: false },
        score_cap: None,
        logit_cap: None,
        embedding_scale: 1.0,
        unplaced: None,
        positions: Positions::Learned { rows: 512, offset: 0 },
        local_positions: None,
        relative_bias: None,
        token_types: 2,
        embedding_norm: true,
        head_norm: false,
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        head: HeadSpec::None,
        headless: None,
    }
}

/// A Llama of this many layers, hidden size, heads and key-value heads.
pub fn llama(layers: u32, hidden: u32, heads: u32, kv_heads: u32) -> ModelSpec {
    ModelSpec {
        family: "llama".into(),
        heads,
        kv_heads,
        head_width: hidden / heads,
        intermediate: hidden * 7 / 2,
        vocabulary: 32_000,
        norm: NormKind::Rms,
        norm_place: NormPlace::Pre,
        activation: Activation::Silu,
        gated: true,
        causal: true,
        positions: Positions::Rotary {
            inverse_frequencies: vec![1.0; (hidden / heads / 2) as usize],
            long: None,
            scale: 1.0,
            pairs: Pairs::Halves,
            limit: 2048,
        },
        token_types: 0,
        embedding_norm: false,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        head: HeadSpec::Language { tied: true, bias: false },
        ..bert(layers, hidden)
    }
}

/// Devices `d0`, `d1`, ... that grant much, each a little slower than the one before.
pub fn devices(count: usize, gflops: f64, link_rate: f64) -> Vec<SyntheticDevice> {
    let device = |i: usize| SyntheticDevice {
        name: DeviceName::new(format!("d{i}")).unwrap(),
        gflops: gflops / (1.0 + 0.4 * i as f64),
        memory_rate: 10.0,
        memory: Bytes(64_000_000_000),
        threads: 1,
        link_rate,
        latency: 50_000.0,
    };
    (0..count).map(device).collect()
}

/// Numbers that look random, the same everywhere (SplitMix64).
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A whole number from `low` to `high`.
    pub fn whole(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }
    /// A number from `low` to `high`.
    pub fn real(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A small problem: 1 to 4 devices, up to 8 heads and 16 groups of columns, budgets that may
    /// not do.
    pub fn problem(&mut self) -> Problem {
        let devices = self.whole(1, 4) as usize;
        let few = devices == 4;
        let heads = self.whole(1, 8) as usize;
        let columns = self.whole(1, 16) as usize;
        let rows = self.whole(1, if few { 4 } else { 8 }) as usize;
        let (head_bytes, column_bytes) = (self.whole(20, 60), self.whole(5, 40));
        let all = heads as u64 * head_bytes + columns as u64 * column_bytes;
        // From too little to plenty.
        let plenty = self.real(0.8, 2.2);
        let sequence = self.whole(0, 2) == 0;
        let mut curves = Vec::new();
        for _ in 0..devices {
            let speed = self.real(1.0, 5.0);
            let mut grow = |count: usize, each: f64| -> Vec<f64> {
                let call = self.real(0.0, 2.0 * each);
                let mut sum = 0.0;
                (0..=count)
                    .map(|n| {
                        // Not in proportion, but never less for more.
                        sum += if n == 0 { 0.0 } else { speed * each * self.real(0.3, 1.7) };
                        if n == 0 { 0.0 } else { call + sum }
                    })
                    .collect()
            };
            let (head_times, column_times) = (grow(heads, 100.0), grow(columns, 50.0));
            let row_times = grow(rows, if sequence { 200.0 } else { 10.0 });
            let slow = self.real(1.0, 200.0);
            let wire = (0..=rows).map(|r| slow * (rows - r) as f64).collect();
            let bytes = |count: usize, each: u64| (0..=count as u64).map(|n| n * each).collect();
            let share = self.real(0.4, 1.6);
            curves.push(DeviceCurves {
                heads: CostCurve { nanos: head_times, bytes: bytes(heads, head_bytes) },
                columns: CostCurve { nanos: column_times, bytes: bytes(columns, column_bytes) },
                vocabulary: CostCurve { nanos: vec![0.0], bytes: vec![0] },
                rows: row_times,
                wire,
                owner: self.whole(0, 9) > 0,
                room: (all as f64 * plenty * share / devices as f64) as u64,
            });
        }
        curves[0].owner = true;
        Problem {
            parallel_residual: false,
            devices: curves,
            heads,
            columns,
            vocabulary: 0,
            rows,
            attention: self.whole(0, 4) as f64,
            mlp: self.whole(0, 4) as f64,
            carried: if sequence { self.real(0.0, 2.0) } else { 0.0 },
            fixed: self.real(0.0, 10.0),
            tiles: [1.0, 2.0, 4.0, 8.0][self.whole(0, 3) as usize],
        }
    }
}

/// A request with all that it refers to.
pub struct Question {
    pub spec: ModelSpec,
    pub formats: Formats,
    pub offers: Vec<Offer>,
    pub profile: ClusterProfile,
    pub workload: Workload,
    pub allowed: Allowed,
}

impl Question {
    /// Texts of 128 tokens, everything exact allowed, matrices of 32 bits.
    pub fn new(spec: &ModelSpec, devices: Vec<SyntheticDevice>) -> Self {
        let offer = |d: &SyntheticDevice| Offer {
            name: d.name.clone(),
            budget: d.memory,
            threads: d.threads,
        };
        Self {
            offers: devices.iter().map(offer).collect(),
            profile: profile(spec, "shape", WeightFormat::F32, &devices),
            spec: spec.clone(),
            formats: Formats::default(),
            workload: Workload {
                generated: 0,
                texts: 1,
                lengths: vec![(128, 1.0)],
                wanted: Wanted::Hidden,
            },
            allowed: Allowed {
                strategy: Strategy::Auto,
                wires: vec![WireType::F32],
                links: vec![LinkType::Tls],
                tiles: None,
                exchange: None,
                max_rows: 256,
                cache: galaxy_common::Cache::NONE,
                reading: galaxy_common::Reading::Preload,
            },
        }
    }

    pub fn request(&self) -> Request<'_> {
        Request {
            spec: &self.spec,
            formats: &self.formats,
            model: "model",
            fingerprint: "fingerprint",
            shape: "shape",
            offers: &self.offers,
            profile: &self.profile,
            workload: &self.workload,
            allowed: &self.allowed,
        }
    }
}
