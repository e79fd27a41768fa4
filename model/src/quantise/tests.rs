use super::*;
use crate::{
    Table,
    shape::Shape,
    testing::{arrived, golden, manifest, rows},
};
use std::{ops::Range, path::Path};

fn write(shape: &Shape) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    shape.write(dir.path(), u64::MAX, &mut |_| {}).expect("a model");
    dir
}

fn open(dir: &Path, to: Option<Quantisation>) -> ModelDir {
    ModelDir::open(dir).and_then(|model| model.quantised_to(to)).expect("a model")
}

/// A small model whose rows have 64 and 256 values.
fn small(family: &'static str) -> Shape {
    let shape = Shape { kv_heads: 2, vocabulary: 300, intermediate: 256, ..Shape::bert(2, 64, 4) };
    match family {
        "bert" => Shape { kv_heads: 4, ..shape },
        "gpt2" => Shape { family, kv_heads: 4, ..shape },
        _ => Shape { family, format: WeightFormat::Bf16, ..shape },
    }
}

/// Compares a part of a rounded matrix with `want`, read in every way.
fn check(
    model: &ModelDir,
    which: Matrix,
    inputs: Range<u32>,
    outputs: Range<u32>,
    want: &[Vec<f32>],
) {
    let source = model.matrix(which).expect("a matrix");
    let (stride, at) = (outputs.len() + 3, 2);
    let mut out = vec![-9.0; inputs.len() * stride];
    source
        .read_f32((inputs.clone(), outputs.clone()), &mut out, stride, at, &mut Vec::new())
        .expect("values");
    for (row, input) in out.chunks(stride).zip(inputs.clone()) {
        assert_eq!((row[0], row[stride - 1]), (-9.0, -9.0), "margins stay");
        for (value, output) in row[at..].iter().zip(outputs.clone()) {
            assert_eq!(*value, want[output as usize][input as usize], "{which:?}");
        }
    }
    let whole = source.whole_blocks(inputs.clone());
    let (mut blocks, mut one) = (Vec::new(), Vec::new());
    source.read_raw_rows(inputs.clone(), outputs.clone(), &mut blocks).expect("blocks");
    let row = source.format().bytes(whole.len() as u64, 1) as usize;
    assert_eq!(blocks.len(), row * outputs.len());
    for (bytes, output) in blocks.chunks(row.max(1)).zip(outputs) {
        let mut values = vec![0.0; whole.len()];
        blocks::decode(source.format(), bytes, &mut values);
        assert_eq!(values, want[output as usize][whole.start as usize..whole.end as usize]);
        one.resize(row, 0);
        source.read_raw_blocks(inputs.clone(), output, &mut one).expect("blocks");
        assert_eq!(one, bytes);
    }
}

#[test]
fn any_slice_of_a_quantised_matrix_equals_the_whole_to_the_bit() {
    for family in ["bert", "gpt2", "llama"] {
        let dir = write(&small(family));
        let plain = open(dir.path(), None);
        for to in Quantisation::ALL {
            let model = open(dir.path(), Some(to));
            for which in Matrix::all(plain.spec()) {
                let mut want = rows(&plain, which);
                let source = model.matrix(which).expect("a matrix");
                assert_eq!(source.format(), model.formats().of(which));
                want.iter_mut().for_each(|row| blocks::round(source.format(), row));
                assert_eq!(rows(&model, which), want, "{family} {to} {which:?}");
                if source.format().block().is_none() {
                    continue;
                }
                let (inputs, outputs) = (source.rows(), source.columns());
                check(&model, which, 0..inputs, 3..outputs, &want);
                check(&model, which, inputs / 2..inputs, 0..17, &want);
                check(&model, which, 5..inputs - 7, 16..16 + outputs / 3, &want);
                check(&model, which, 9..9, 0..2, &want);
            }
        }
    }
}

#[test]
fn quantised_formats_follow_the_row_width() {
    use WeightFormat::{Bf16, Q4_0, Q6K, Q8_0};
    let dir = write(&small("llama"));
    let formats = |to| open(dir.path(), to).formats().clone();
    assert_eq!(formats(None).of(Matrix::Up(0)), Bf16);
    for (to, up, down) in [
        (Quantisation::Q8, Q8_0, Q8_0),
        (Quantisation::Q6, Q8_0, Q6K),
        (Quantisation::Q4, Q4_0, Q4_0),
    ] {
        let formats = formats(Some(to));
        assert_eq!((formats.of(Matrix::Up(0)), formats.of(Matrix::Down(1))), (up, down), "{to}");
        // Its rows have 64 values.
        assert_eq!((formats.of(Matrix::LanguageHead), formats.vectors()), (Q8_0, Bf16));
    }
    let model = open(dir.path(), Some(Quantisation::Q6));
    let said = model.warnings().iter().map(|warning| warning.text.clone()).collect::<String>();
    assert!(said.contains("rounded to q6") && said.contains("lossy"), "{said}");
    assert!(said.contains("model.layers.0.self_attn.q_proj.weight (q8_0)"), "{said}");
    // Two layers of six matrices, and the head.
    assert_eq!(model.not_as_asked().len(), 13);
    let wide = write(&Shape { hidden: 256, ..small("llama") });
    let model = open(wide.path(), Some(Quantisation::Q4));
    assert_eq!(model.formats().of(Matrix::LanguageHead), Q6K);
    assert!(model.not_as_asked().is_empty());
}

#[test]
fn an_embedding_table_is_quantised_only_if_tied_to_the_head() {
    // The language heads of these decoders are tied.
    for (shape, rounded) in [(small("llama"), true), (small("gpt2"), true), (small("bert"), false)]
    {
        let dir = write(&shape);
        let (plain, model) = (open(dir.path(), None), open(dir.path(), Some(Quantisation::Q4)));
        let read = |model: &ModelDir| {
            let mut out = vec![0.0; 3 * 64];
            model.embedding_rows(Table::Word, &[7, 8, 2], &mut out).expect("rows");
            out
        };
        let mut want = read(&plain);
        assert_eq!(read(&model) == want, !rounded, "{}", shape.family);
        if rounded {
            blocks::round(model.formats().of(Matrix::LanguageHead), &mut want);
            assert_eq!(read(&model), want);
            assert_eq!(want[..64], rows(&model, Matrix::LanguageHead)[7]);
        }
    }
}

#[test]
fn the_fingerprint_names_the_quantisation() {
    let dir = write(&small("bert"));
    let plain = open(dir.path(), None);
    assert_eq!(of_fingerprint(plain.fingerprint()), (plain.fingerprint(), None));
    for to in Quantisation::ALL {
        let model = open(dir.path(), Some(to));
        let named = format!("{}-{to}", plain.fingerprint());
        assert_eq!(
            (model.fingerprint(), model.files_fingerprint()),
            (&*named, plain.fingerprint())
        );
        assert_eq!(of_fingerprint(&named), (plain.fingerprint(), Some(to)));
        assert_ne!(model.shape_key(), plain.shape_key());
        assert_eq!(to.name().parse(), Ok(to));
    }
    for other in ["", "-", "abc-q5", "q8", "a-q8-q8"] {
        assert_eq!(of_fingerprint(other), (other, None));
    }
    assert!("q5".parse::<Quantisation>().is_err());
}

#[test]
fn models_that_cannot_be_quantised_are_rejected() {
    let dir = write(&small("bert"));
    let twice = open(dir.path(), Some(Quantisation::Q8)).quantised(Quantisation::Q4);
    assert!(matches!(twice, Err(ModelError::FewBits { .. })), "{twice:?}");
    let mixed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/gguf/mixed.gguf");
    let blocks = ModelDir::open(&mixed).expect("a model").quantised(Quantisation::Q8);
    let said = blocks.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(said.contains("mixed.gguf") && said.contains("already"), "{said}");
    // Its rows have 42 and 50 values.
    let odd = ModelDir::open(&golden("bert")).expect("a model").quantised(Quantisation::Q8);
    assert!(matches!(odd, Err(ModelError::NoneFit { .. })), "{odd:?}");
}

#[test]
fn quantisation_errors_are_reported_by_matrix() {
    let dir = write(&small("llama"));
    let mut before = 0.0;
    for to in Quantisation::ALL {
        let model = open(dir.path(), Some(to));
        let mut told = Vec::new();
        let found = model.rounding(&mut |at, of| told.push((at, of))).expect("it can be read");
        assert_eq!((found.len(), told.len()), (15, 16));
        assert_eq!(told.last(), Some(&(15, 15)));
        let down = found.iter().find(|one| one.matrix == Matrix::Down(0)).expect("a matrix");
        assert_eq!(
            (down.stored, down.format),
            (WeightFormat::Bf16, model.formats().of(down.matrix))
        );
        assert!(down.error > before && down.error < 0.15, "{to}: {}", down.error);
        before = down.error;
    }
    let found = open(dir.path(), None).rounding(&mut |_, _| {}).expect("it can be read");
    assert!(found.iter().all(|one| one.error == 0.0 && one.stored == one.format));
}

#[test]
fn a_model_sent_in_pieces_is_quantised_like_its_directory() {
    // The model is wide enough that a matrix is cut into tiles.
    for shape in [Shape::bert(1, 640, 10), small("gpt2"), small("llama")] {
        let dir = write(&shape);
        let plain = open(dir.path(), None);
        let model = open(dir.path(), Some(Quantisation::Q6));
        assert_eq!(manifest(&model).fingerprint(), plain.fingerprint(), "the files' own");
        let pieces = model.pieces().expect("pieces");
        assert_eq!(pieces.total(), plain.pieces().expect("pieces").total());
        let other = arrived(&model).quantised(Quantisation::Q6).expect("a model");
        assert_eq!((other.fingerprint(), other.formats()), (model.fingerprint(), model.formats()));
        for which in Matrix::all(model.spec()) {
            assert_eq!(rows(&other, which), rows(&model, which), "{which:?}");
        }
        // A part of a block needs the pieces of all of it.
        let of =
            |inputs| model.matrix_pieces(&pieces, Matrix::Down(0), inputs, 0..1).expect("pieces");
        let all = of(0..256);
        assert_eq!((of(0..32), of(200..256), of(64..64).len()), (all.clone(), all, 0));
    }
}
