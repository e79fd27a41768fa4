#!/usr/bin/env python3
"""Reference outputs made by `sentence-transformers` 6.2 and `transformers` 5.24, for the tests of texts.

    scripts/golden-sentence.py            all -> testdata/golden/sentence/<name>/
    scripts/golden-sentence.py NAME...    some

Each is a small random model as sentence-transformers saves it, or as older versions did, and an
`expected.json` with what is asked of it and what comes: vectors of `SentenceTransformer.encode`,
scores of `CrossEncoder.rank` in the order of the texts, probabilities of the text-classification
pipeline, in f32 on a CPU. The results are committed: run this only to add a case, and note what
changed.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parent.parent / "testdata" / "golden" / "sentence"
WORDS = "lighthouse at night the beam over sea far away query represent good bad film it is rain wind Night The Beam".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = ["a lighthouse at night", "The Beam over the sea", "rain", "far away it is bad: good!"]
LONG = "rain wind sea " * 20
SIZES = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
SPECIAL = dict(unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]", mask_token="[MASK]")


def randomised(model, seed):
    """Every parameter random: zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "LayerNorm.weight" in name or name.endswith("norm.weight") else 0.0
            parameter.copy_(centre + 0.8 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def word_pieces(cased=False):
    pieces = list(SPECIAL.values()) + list(LETTERS) + [f"##{c}" for c in LETTERS] + list(".,:!?'") + WORDS
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    return transformers.BertTokenizer(vocab=vocab, do_lower_case=not cased)


def bytes_of_words():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] + alphabet
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return transformers.RobertaTokenizer(vocab=vocab, merges=[])


def bert(name, place, seed=1, tokenizer=None, **more):
    tokenizer = tokenizer or word_pieces()
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, **SIZES, **more)
    randomised(getattr(transformers, name)(config), seed).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def sentence(place, *behind, pooling="mean", seed=2, include_prompt=True, model=None, **more):
    """Saves a SentenceTransformer around a BERT; modules behind the pooling are random, too."""
    work = place.with_name("work")
    bert("BertModel", work, **(model or {}))
    transformer = Transformer(str(work), **more.pop("transformer", {}))
    modules = [transformer, Pooling(8, pooling, include_prompt=include_prompt)]
    modules += [randomised(module, seed + i) for i, module in enumerate(behind)]
    saved = SentenceTransformer(modules=modules, device="cpu", **more)
    saved.save(str(place), create_model_card=False)
    shutil.rmtree(work)


def cross(place, model, **more):
    work = place.with_name("work")
    model(work)
    CrossEncoder(str(work), device="cpu", **more).save(str(place), create_model_card=False)
    shutil.rmtree(work)


def embed(place, texts=TEXTS, **asked):
    """What a request for vectors asks, and what comes."""
    model = SentenceTransformer(str(place), device="cpu", local_files_only=True)
    names = dict(dimensions="truncate_dim", normalise="normalize_embeddings")
    vectors = model.encode(texts, **{names.get(key, key): value for key, value in asked.items()})
    return dict(embed=texts, **asked, vectors=vectors.tolist())


def rerank(place, query, texts):
    model = CrossEncoder(str(place), device="cpu", local_files_only=True)
    ranked = {row["corpus_id"]: row["score"] for row in model.rank(query, texts)}
    return dict(rerank=texts, query=query, scores=[ranked[i] for i in range(len(texts))])


def classify(place, texts=TEXTS):
    pipe = transformers.pipeline("text-classification", model=str(place), device="cpu", top_k=None)
    probabilities = []
    for scores in pipe(texts):
        found = {row["label"]: row["score"] for row in scores}
        names = pipe.model.config.id2label
        probabilities.append([found[names[i]] for i in range(len(names))])
    return dict(classify=texts, probabilities=probabilities)


def dense(place):
    sentence(place, Dense(8, 6), Normalize())
    return [embed(place), embed(place, dimensions=3, normalise=True)]


def layers(place):
    gelu = Dense(6, 6, bias=False, activation_function=torch.nn.GELU(), use_residual=True)
    wider = Dense(6, 10, activation_function=torch.nn.Identity(), use_residual=True)
    sentence(place, Normalize(), Dense(8, 6), LayerNorm(6), gelu, wider, pooling="cls")
    return [embed(place)]


def poolings(place):
    modes = ("weightedmean", "max", "lasttoken", "cls", "mean_sqrt_len_tokens")
    sentence(place, pooling=modes)
    return [embed(place)]


def prompts(place):
    prompts = dict(query="query: ", document="represent the film ")
    sentence(place, Normalize(), pooling=("mean", "weightedmean", "cls"), include_prompt=False,
             prompts=prompts, default_prompt_name="document")
    return [embed(place), embed(place, prompt_name="query"), embed(place, prompt="it is: ")]


def truncate_dim(place):
    sentence(place, Normalize(), truncate_dim=4)
    return [embed(place), embed(place, dimensions=6), embed(place, normalise=True)]


def length(place):
    """The length stands in tokenizer_config.json alone, and texts are cut at their beginning."""
    sentence(place, transformer=dict(processor_kwargs=dict(model_max_length=16, truncation_side="left")))
    return [embed(place, TEXTS + [LONG])]


def lower_case(place):
    sentence(place, model=dict(tokenizer=word_pieces(cased=True)))
    # What this version reads, and does not write.
    write(place / "sentence_bert_config.json", dict(max_seq_length=12, do_lower_case=True))
    return [embed(place, TEXTS + [LONG, "The [SEP] Beam"])]


def old_layout(place):
    bert("BertModel", place / "0_Transformer")
    write(place / "0_Transformer" / "sentence_bert_config.json", dict(max_seq_length=12, do_lower_case=False))
    (place / "1_Pooling").mkdir()
    write(place / "1_Pooling" / "config.json", dict(word_embedding_dimension=8, pooling_mode_cls_token=True,
          pooling_mode_mean_tokens=False, pooling_mode_max_tokens=True))
    (place / "2_Normalize").mkdir()
    kinds = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [dict(idx=i, name=str(i), path=path, type=f"sentence_transformers.models.{kind}")
               for i, (path, kind) in enumerate(kinds)]
    write(place / "modules.json", modules)
    expected = [embed(place, TEXTS + [LONG])]
    # Git keeps no empty directory.
    (place / "2_Normalize").rmdir()
    return expected


def cross_bert(place):
    cross(place, lambda work: bert("BertForSequenceClassification", work, num_labels=1))
    ranked = [rerank(place, "a lighthouse", TEXTS), rerank(place, LONG, TEXTS + [LONG, "a" * 30])]
    return ranked + [classify(place)]


def cross_identity(place):
    """As it was saved before version 4, with no modules: the activation stands in config.json."""
    bert("BertForSequenceClassification", place, num_labels=1, seed=5,
         sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    return [rerank(place, "a lighthouse", TEXTS + [LONG])]


def cross_roberta(place):
    tokenizer = bytes_of_words()
    config = transformers.RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=42, type_vocab_size=1,
                                        num_labels=1, pad_token_id=1, bos_token_id=0, eos_token_id=2, **SIZES)

    def model(work):
        randomised(transformers.RobertaForSequenceClassification(config), 6).save_pretrained(work)
        tokenizer.save_pretrained(work)

    cross(place, model, max_length=40, prompts=dict(ask="q "), default_prompt_name="ask")
    return [rerank(place, "a light", TEXTS + [LONG])]


def several_labels(place):
    names = dict(id2label={0: "toxic", 1: "insult", 2: "threat"}, label2id=dict(toxic=0, insult=1, threat=2))
    bert("BertForSequenceClassification", place, problem_type="multi_label_classification", seed=7, **names)
    return [classify(place)]


def regression(place):
    bert("BertForSequenceClassification", place, problem_type="regression", num_labels=1, seed=8)
    return [classify(place)]


def one_of_many(place):
    bert("BertForSequenceClassification", place, num_labels=3, seed=9)
    return [classify(place)]


CASES = [dense, layers, poolings, prompts, truncate_dim, length, lower_case, old_layout, cross_bert,
         cross_identity, cross_roberta, several_labels, regression, one_of_many]


def write(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def main(names):
    torch.set_num_threads(1)
    for case in CASES:
        name = case.__name__.replace("_", "-")
        if names and name not in names:
            continue
        place = ROOT / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        write(place / "expected.json", case(place))
        print(name, sum(file.stat().st_size for file in place.rglob("*") if file.is_file()), "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
