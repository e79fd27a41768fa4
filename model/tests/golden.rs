//! Every golden checkpoint opens as the model that it is, and its tensors read as with another
//! reader.
#![allow(clippy::unwrap_used)]

use galaxy_common::WeightFormat;
use galaxy_model::{
    Activation, ClassActivation, ClassRow, HeadSpec, Matrix, ModelDir, NormKind, NormPlace, Pairs,
    Positions, Table, Vector,
};
use safetensors::SafeTensors;
use std::{collections::HashMap, fs, path::PathBuf};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden").join(name)
}

/// All tensors of a checkpoint as f32, read by the `safetensors` crate.
struct Reference(HashMap<String, (Vec<usize>, Vec<f32>)>);

impl Reference {
    fn open(name: &str) -> Self {
        let mut tensors = HashMap::new();
        for entry in fs::read_dir(path(name)).unwrap() {
            let file = entry.unwrap().path();
            let base = file.file_name().unwrap().to_string_lossy().into_owned();
            if !base.starts_with("model") || !base.ends_with(".safetensors") {
                continue;
            }
            let bytes = fs::read(file).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
                let half = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
                let values = match view.dtype() {
                    safetensors::Dtype::F32 => view
                        .data()
                        .chunks(4)
                        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                        .collect(),
                    safetensors::Dtype::F16 => view
                        .data()
                        .chunks(2)
                        .map(|b| half::f16::from_bits(half(b)).to_f32())
                        .collect(),
                    safetensors::Dtype::BF16 => view
                        .data()
                        .chunks(2)
                        .map(|b| half::bf16::from_bits(half(b)).to_f32())
                        .collect(),
                    other => panic!("{name} is {other:?}"),
                };
                tensors.insert(name.to_owned(), (view.shape().to_vec(), values));
            }
        }
        Self(tensors)
    }

    /// The weight of input `i` for output `o`; with `by_output`, the tensor is stored as
    /// `nn.Linear` does.
    fn at(&self, name: &str, by_output: bool, i: usize, o: usize) -> f32 {
        let (shape, values) = &self.0[name];
        values[if by_output { o * shape[1] + i } else { i * shape[1] + o }]
    }
}

/// Compares a matrix, the whole of it and a window, with the tensor `name` from output `first` on.
fn check(model: &ModelDir, which: Matrix, name: &str, by_output: bool, first: usize) {
    let reference = Reference::open(model.name());
    let source = model.matrix(which).unwrap();
    assert_eq!(source.name(), name);
    let (rows, columns) = (source.rows(), source.columns());
    let mut scratch = Vec::new();
    for (i, o) in [(0..rows, 0..columns), (1..rows / 2, columns / 3..columns - 1)] {
        let mut out = vec![0.0; i.len() * o.len()];
        let width = o.len();
        source.read_f32((i.clone(), o.clone()), &mut out, width, 0, &mut scratch).unwrap();
        let want: Vec<f32> = i
            .flat_map(|i| o.clone().map(move |o| (i as usize, o as usize)))
            .map(|(i, o)| reference.at(name, by_output, i, first + o))
            .collect();
        assert!(out == want, "{which:?} of {}", model.name());
    }
}

fn check_vector(model: &ModelDir, which: Vector, name: &str, first: usize) {
    let reference = Reference::open(model.name());
    let have = model.vector(which).unwrap();
    assert_eq!(have, reference.0[name].1[first..first + have.len()], "{which:?}");
}

#[test]
fn bert_spec_and_weights_match_the_checkpoint() {
    for (name, format) in [("bert", WeightFormat::F32), ("bert-f16", WeightFormat::F16)] {
        let model = ModelDir::open(&path(name)).unwrap();
        let spec = model.spec();
        assert_eq!(model.format(), format);
        assert_eq!((spec.hidden, spec.layers, spec.heads, spec.head_width), (42, 3, 6, 7));
        assert_eq!((spec.intermediate, spec.vocabulary, spec.position_limit()), (50, 97, 160));
        assert_eq!((spec.norm, spec.norm_place), (NormKind::Layer, NormPlace::Post));
        let HeadSpec::Classes(head) = &spec.head else { panic!("classes") };
        assert_eq!((head.row, head.dense), (ClassRow::First, Some(ClassActivation::Tanh)));
        assert_eq!((head.labels, head.bias), (3, true));
        let layer = "bert.encoder.layer.2";
        let linear = |m, n: &str| check(&model, m, &format!("{layer}.{n}.weight"), true, 0);
        linear(Matrix::Query(2), "attention.self.query");
        linear(Matrix::Key(2), "attention.self.key");
        linear(Matrix::Value(2), "attention.self.value");
        linear(Matrix::AttentionOutput(2), "attention.output.dense");
        linear(Matrix::Up(2), "intermediate.dense");
        linear(Matrix::Down(2), "output.dense");
        check(&model, Matrix::ClassDense, "bert.pooler.dense.weight", true, 0);
        check(&model, Matrix::ClassOutput, "classifier.weight", true, 0);
        let vector = |v, n: &str| check_vector(&model, v, &format!("{layer}.{n}"), 0);
        vector(Vector::ValueBias(2), "attention.self.value.bias");
        vector(Vector::AttentionNorm(2), "attention.output.LayerNorm.weight");
        vector(Vector::MlpNormBias(2), "output.LayerNorm.bias");
        check_vector(&model, Vector::TokenTypes, "bert.embeddings.token_type_embeddings.weight", 0);
        check_vector(&model, Vector::ClassDenseBias, "bert.pooler.dense.bias", 0);
        check_vector(&model, Vector::ClassOutputBias, "classifier.bias", 0);
    }
}

#[test]
fn distilbert_spec_and_weights_match_the_checkpoint() {
    let model = ModelDir::open(&path("distilbert")).unwrap();
    let spec = model.spec();
    assert_eq!(
        (spec.hidden, spec.heads, spec.intermediate, spec.position_limit()),
        (40, 5, 54, 140)
    );
    assert!(spec.token_types == 0 && spec.embedding_norm);
    let HeadSpec::Classes(head) = &spec.head else { panic!("classes") };
    assert_eq!((head.dense, head.labels), (Some(ClassActivation::Relu), 4));
    let layer = "distilbert.transformer.layer.1";
    check(&model, Matrix::Key(1), &format!("{layer}.attention.k_lin.weight"), true, 0);
    check(
        &model,
        Matrix::AttentionOutput(1),
        &format!("{layer}.attention.out_lin.weight"),
        true,
        0,
    );
    check(&model, Matrix::Down(1), &format!("{layer}.ffn.lin2.weight"), true, 0);
    check(&model, Matrix::ClassDense, "pre_classifier.weight", true, 0);
    check_vector(&model, Vector::AttentionNorm(1), &format!("{layer}.sa_layer_norm.weight"), 0);
    check_vector(&model, Vector::MlpNorm(1), &format!("{layer}.output_layer_norm.weight"), 0);
}

#[test]
fn gpt2_splits_its_fused_attention_tensor() {
    let model = ModelDir::open(&path("gpt2")).unwrap();
    let spec = model.spec();
    assert_eq!((spec.hidden, spec.heads, spec.intermediate), (40, 5, 54));
    assert_eq!((spec.activation, spec.norm_place), (Activation::GeluTanh, NormPlace::Pre));
    assert_eq!(spec.head, HeadSpec::Language { tied: true, bias: false });
    let fused = "transformer.h.1.attn.c_attn";
    for (third, m, v) in [
        (0, Matrix::Query(1), Vector::QueryBias(1)),
        (1, Matrix::Key(1), Vector::KeyBias(1)),
        (2, Matrix::Value(1), Vector::ValueBias(1)),
    ] {
        check(&model, m, &format!("{fused}.weight"), false, third * 40);
        check_vector(&model, v, &format!("{fused}.bias"), third * 40);
    }
    check(&model, Matrix::Up(1), "transformer.h.1.mlp.c_fc.weight", false, 0);
    check(&model, Matrix::Down(1), "transformer.h.1.mlp.c_proj.weight", false, 0);
    check(&model, Matrix::LanguageHead, "transformer.wte.weight", true, 0);
    check_vector(&model, Vector::FinalNormBias, "transformer.ln_f.bias", 0);

    let model = ModelDir::open(&path("gpt2-classes")).unwrap();
    assert_eq!((model.spec().intermediate, model.spec().hidden), (96, 24));
    let HeadSpec::Classes(head) = &model.spec().head else { panic!("classes") };
    assert_eq!((head.row, head.dense, head.labels, head.bias), (ClassRow::Last, None, 2, false));
    check(&model, Matrix::ClassOutput, "score.weight", true, 0);
}

#[test]
fn llama_spec_and_weights_match_the_checkpoint() {
    let model = ModelDir::open(&path("llama")).unwrap();
    let spec = model.spec();
    assert_eq!((spec.heads, spec.kv_heads, spec.head_width, spec.hidden), (6, 2, 10, 48));
    assert_eq!((spec.norm, spec.gated), (NormKind::Rms, true));
    assert_eq!(spec.head, HeadSpec::Language { tied: false, bias: false });
    let Positions::Rotary { inverse_frequencies, limit, .. } = &spec.positions else {
        panic!("rotary")
    };
    assert_eq!((inverse_frequencies.len(), *limit), (5, 512));
    check(&model, Matrix::Key(2), "model.layers.2.self_attn.k_proj.weight", true, 0);
    check(&model, Matrix::AttentionOutput(2), "model.layers.2.self_attn.o_proj.weight", true, 0);
    check(&model, Matrix::Gate(0), "model.layers.0.mlp.gate_proj.weight", true, 0);
    check(&model, Matrix::LanguageHead, "lm_head.weight", true, 0);
    let norm = "model.layers.1.post_attention_layernorm.weight";
    check_vector(&model, Vector::MlpNorm(1), norm, 0);
    check_vector(&model, Vector::FinalNorm, "model.norm.weight", 0);
}

#[test]
fn llama_in_two_weight_files_matches_the_checkpoint() {
    let model = ModelDir::open(&path("llama-tied-bf16")).unwrap();
    let spec = model.spec();
    assert_eq!(model.format(), WeightFormat::Bf16);
    assert_eq!((spec.heads, spec.kv_heads), (4, 1));
    assert!(spec.qkv_bias && spec.attention_output_bias && spec.mlp_bias);
    for layer in 0..3 {
        let name = |n: &str| format!("model.layers.{layer}.{n}");
        check(&model, Matrix::Up(layer), &name("mlp.up_proj.weight"), true, 0);
        check_vector(&model, Vector::GateBias(layer), &name("mlp.gate_proj.bias"), 0);
        check_vector(&model, Vector::AttentionOutputBias(layer), &name("self_attn.o_proj.bias"), 0);
    }
    check(&model, Matrix::LanguageHead, "model.embed_tokens.weight", true, 0);
    assert_eq!(spec.head, HeadSpec::Language { tied: true, bias: false });
}

#[test]
fn specs_of_related_families_match_their_checkpoints() {
    let open = |name| ModelDir::open(&path(name)).unwrap();
    let roberta = open("roberta");
    let learned = |rows, offset| Positions::Learned { rows, offset };
    assert_eq!(roberta.spec().positions, learned(150, 2));
    let HeadSpec::Classes(head) = &roberta.spec().head else { panic!("classes") };
    assert_eq!((head.dense, head.row), (Some(ClassActivation::Tanh), ClassRow::First));
    check(&roberta, Matrix::ClassDense, "classifier.dense.weight", true, 0);

    let mpnet = open("mpnet");
    let distances = mpnet.spec().relative_bias.unwrap();
    assert_eq!((distances.buckets, distances.most), (32, 128));
    assert!(mpnet.spec().token_types == 0);
    check(&mpnet, Matrix::Value(1), "mpnet.encoder.layer.1.attention.attn.v.weight", true, 0);
    check_vector(&mpnet, Vector::RelativeBias, "mpnet.encoder.relative_attention_bias.weight", 0);

    let opt = open("opt");
    assert_eq!((&opt.spec().positions, opt.format()), (&learned(162, 2), WeightFormat::F16));
    assert_eq!(opt.spec().activation, Activation::Relu);
    check(&opt, Matrix::Up(2), "model.decoder.layers.2.fc1.weight", true, 0);
    check_vector(&opt, Vector::FinalNorm, "model.decoder.final_layer_norm.weight", 0);

    let gptj = open("gptj");
    assert!(gptj.spec().parallel && !gptj.spec().qkv_bias && gptj.spec().mlp_bias);
    assert_eq!(gptj.spec().head, HeadSpec::Language { tied: false, bias: true });
    let Positions::Rotary { inverse_frequencies, pairs, .. } = &gptj.spec().positions else {
        panic!("rotary")
    };
    assert_eq!((inverse_frequencies.len(), *pairs), (3, Pairs::Neighbours));
    check_vector(&gptj, Vector::LanguageBias, "lm_head.bias", 0);
    assert!(gptj.vector(Vector::MlpNorm(0)).is_err());

    let qwen2 = open("qwen2");
    assert!(qwen2.spec().qkv_bias && !qwen2.spec().attention_output_bias);
    let qwen3 = open("qwen3");
    assert!(qwen3.spec().head_norm && qwen3.spec().head_width == 14);
    let name = "model.layers.2.self_attn.k_norm.weight";
    check_vector(&qwen3, Vector::KeyHeadNorm(2), name, 0);
    assert_eq!(open("mistral").spec().position_limit(), 512);
}

#[test]
fn embedding_tables_are_read_by_row() {
    for (name, word, position) in [
        ("bert", "bert.embeddings.word_embeddings", Some("bert.embeddings.position_embeddings")),
        ("gpt2", "transformer.wte", Some("transformer.wpe")),
        ("llama-tied-bf16", "model.embed_tokens", None),
    ] {
        let model = ModelDir::open(&path(name)).unwrap();
        let reference = Reference::open(name);
        let hidden = model.spec().hidden as usize;
        let mut out = vec![0.0; 3 * hidden];
        let tables = [(Table::Word, Some(word)), (Table::Position, position)];
        for (table, tensor) in tables.into_iter().filter_map(|(t, n)| Some((t, n?))) {
            model.embedding_rows(table, &[3, 96, 0], &mut out).unwrap();
            let values = &reference.0[&format!("{tensor}.weight")].1;
            for (row, id) in out.chunks(hidden).zip([3, 96, 0]) {
                assert_eq!(row, &values[id * hidden..][..hidden]);
            }
        }
    }
}

/// The references that conformance tests of other crates rely on are there, in the shapes that they
/// expect.
#[test]
fn golden_references_are_complete_and_have_the_expected_shapes() {
    for name in [
        "bert",
        "bert-f16",
        "distilbert",
        "gpt2",
        "gpt2-classes",
        "llama",
        "llama-tied-bf16",
        "roberta",
        "mpnet",
        "opt",
        "gptj",
        "qwen2",
        "qwen3",
        "mistral",
        "gpt2-scales",
        "llama-yarn",
        "mistral-longrope",
        "opt-post",
        "qwen2-both-ways",
        "mistral-window",
        "qwen2-window",
        "smollm3",
        "phi3",
        "gemma2",
        "gemma3",
        "gemma3-both-ways",
        "modernbert",
        "modernbert-biases",
    ] {
        let model = ModelDir::open(&path(name)).unwrap();
        let bytes = fs::read(path(name).join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        for length in [1, 2, 7, 64, 129] {
            let shape =
                |what: &str| expected.tensor(&format!("{what}.{length}")).unwrap().shape().to_vec();
            assert_eq!(shape("ids"), [length]);
            assert_eq!(shape("hidden"), [length, model.spec().hidden as usize]);
            match &model.spec().head {
                HeadSpec::Classes(head) => assert_eq!(shape("logits"), [head.labels as usize]),
                HeadSpec::Language { .. } => {
                    assert_eq!(shape("logits"), [length, model.spec().vocabulary as usize]);
                }
                HeadSpec::None => panic!("{name} has no head"),
            }
        }
    }
}
