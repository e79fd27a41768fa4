#!/usr/bin/env python3
"""What `AutoTokenizer` of `transformers` 5.24 makes of the files of a tokenizer, for the tests.

    scripts/golden-tokenizers.py          -> testdata/golden/tokenizers.json

A small tokenizer of each class, with fields of its files changed one at a time, and some at a time,
drawn by a seed that stands here. `bases` holds files by name, `cases` for each case the base, what
of its files is changed (no field: the file goes), and what comes for the texts: ids, those of a pair
with their types, those of a text that is cut, and the text of ids; nothing where that is what comes
without changes. Cases that transformers refuses are left out.

The results are committed: run this only to add a case, and note what changed.
"""

import json
import random
import shutil
import tempfile
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

OUT = Path(__file__).resolve().parent.parent / "testdata" / "golden" / "tokenizers.json"
SEED = 40
TOGETHER = 12
TEXTS = [
    "Hello Wörld, it's n't 12.5 !",
    "a [SEP] b</s>c <extra> d<mask> e",
    "\u65e5\u672c x  two   spaces ",
    "<extra>NA\u00cfVE\u0301 <|endoftext|>",
]
PAIR = ["a b c", "Hello it's"]
CUT = 6
WORDS = "hello world it s n t a b c d e two spaces na ve naive".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!'[]</>|"


def pieces(special):
    return special + list(dict.fromkeys(list(LETTERS) + ["##" + c for c in LETTERS] + WORDS
                                        + ["Hello", "W\u00f6rld", "w\u00f6rld", "\u65e5", "\u672c", "\u65e5\u672c"]))


def numbered(tokens):
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def byte_pieces(special):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "a"), ("i", "t"), ("\u0120", "it")]
    return numbered(special + alphabet + [a + b for a, b in merges]), merges


def spaced_pieces(special):
    single = ["\u2581"] + list(LETTERS) + list("HWNAVE")
    merges = [("\u2581", "a"), ("i", "t"), ("\u2581", "it")]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    return numbered(special + bytes_ + single + [a + b for a, b in merges]), merges


def unigram():
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokens = ["\u2581"] + list(LETTERS) + ["\u2581a", "\u2581it", "\u2581two", "llo"]
    return [(token, 0.0) for token in special] + [(token, -1.0 - i / 50) for i, token in enumerate(tokens)]


def bases():
    bert = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    mpnet = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    roberta, roberta_merges = byte_pieces(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    gpt2, gpt2_merges = byte_pieces(["<|endoftext|>"])
    llama, llama_merges = spaced_pieces(["<unk>", "<s>", "</s>"])
    plain = Tokenizer(models.WordPiece(numbered(pieces(bert)), unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.decoder = decoders.WordPiece()
    yield "bert", transformers.BertTokenizer(vocab=numbered(pieces(bert)))
    yield "distilbert", transformers.DistilBertTokenizer(vocab=numbered(pieces(bert)), do_lower_case=False)
    yield "mpnet", transformers.MPNetTokenizer(vocab=numbered(pieces(mpnet)))
    yield "roberta", transformers.RobertaTokenizer(vocab=roberta, merges=roberta_merges)
    yield "xlm-roberta", transformers.XLMRobertaTokenizer(vocab=unigram())
    yield "gpt2", transformers.GPT2Tokenizer(vocab=gpt2, merges=gpt2_merges)
    yield "llama", transformers.LlamaTokenizer(vocab=llama, merges=llama_merges)
    yield "qwen3", transformers.Qwen2Tokenizer(vocab=gpt2, merges=gpt2_merges)
    yield "mistral", transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")


def token(content="<extra>", **flags):
    return dict(dict(content=content, lstrip=False, rstrip=False, single_word=False, normalized=False,
                     special=True), **flags)


def changes(family, count):
    """File, field and value of what may be changed."""
    config = [(field, value) for field, values in dict(
        do_lower_case=[True, False, None],
        strip_accents=[True, False, None],
        tokenize_chinese_chars=[False],
        add_prefix_space=[True, False, None],
        truncation_side=["left", "right"],
        model_max_length=[11, 1e30, None],
        add_bos_token=[True, False],
        add_eos_token=[True],
        legacy=[True, False],
        split_special_tokens=[True],
        clean_up_tokenization_spaces=[True, False],
        padding_side=["left"],
        trim_offsets=[False],
        added_tokens_decoder=[
            {str(count): token()}, {str(count): token(special=False, normalized=True)},
            {str(count): token(lstrip=True, rstrip=True), str(count + 1): token("na", special=False)},
            {"6": token("b", single_word=True, special=False)}, {},
        ],
        extra_special_tokens=[["<extra>"], ["na", "<extra>"], {"own_token": "<extra>"}],
        additional_special_tokens=[["<extra>"]],
        own_token=["<extra>"],
        mask_token=["<extra>", token("<extra>", lstrip=True) | {"__type": "AddedToken"}],
        cls_token=["b"],
        sep_token=["c"],
        unk_token=["a"],
        bos_token=["d"],
        model_input_names=[["input_ids"], ["input_ids", "token_type_ids", "attention_mask"]],
        tokenizer_class=["PreTrainedTokenizerFast", "BertTokenizerFast", "RobertaTokenizer", "GPT2TokenizerFast",
                         "LlamaTokenizerFast", "DistilBertTokenizer", "TokenizersBackend", None],
    ).items() for value in values]
    yield from (("tokenizer_config.json", *change) for change in config)
    yield "tokenizer_config.json", None, None
    yield "special_tokens_map.json", "mask_token", token("<extra>", lstrip=True)
    yield "special_tokens_map.json", "additional_special_tokens", ["<extra>"]
    yield "special_tokens_map.json", "unk_token", "a"
    yield "added_tokens.json", "<extra>", count
    yield "added_tokens.json", "<extra>", count + 3
    yield "tokenizer.json", "normalizer", None
    yield "tokenizer.json", "normalizer", {"type": "Lowercase"}
    yield "tokenizer.json", "post_processor", None
    yield "tokenizer.json", "added_tokens", []
    yield "tokenizer.json", "pre_tokenizer", {"type": "Whitespace"}
    yield "tokenizer.json", "decoder", None
    cut = dict(direction="Left", max_length=9, strategy="LongestFirst", stride=0)
    yield "tokenizer.json", "truncation", cut
    if family == "bert":
        yield "config.json", "model_type", "distilbert"
    yield "config.json", "model_type", None


def applied(files, changed):
    files = json.loads(json.dumps(files))
    for name, field, value in changed:
        if field is None:
            files.pop(name, None)
            continue
        fields = files.setdefault(name, {})
        # Of a tokenizer null is a value; of its config, both are tried.
        if value is None and name != "tokenizer.json" and field in ("tokenizer_class", "model_type"):
            fields.pop(field, None)
        else:
            fields[field] = value
    return files


def asked(place):
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(place))
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    pair = tokenizer(*PAIR)
    cut = tokenizer(*PAIR, truncation=True, max_length=CUT + 2)
    length = tokenizer.model_max_length
    return dict(
        ids=ids,
        pair=pair["input_ids"],
        types=pair.get("token_type_ids", [0] * len(pair["input_ids"])),
        cut=tokenizer(TEXTS[0], truncation=True, max_length=CUT)["input_ids"],
        cut_pair=cut["input_ids"],
        text=tokenizer.decode(ids[0], skip_special_tokens=True),
        length=length if length < 1 << 24 else None,
    )


def main():
    transformers.logging.set_verbosity_error()
    generator = random.Random(SEED)
    found, cases, refused = {}, [], 0
    for family, tokenizer in bases():
        with tempfile.TemporaryDirectory() as place:
            tokenizer.save_pretrained(place)
            files = {path.name: json.loads(path.read_text()) for path in Path(place).glob("*.json")}
        files["config.json"] = {"model_type": family}
        found[family] = files
        every = list(changes(family, len(tokenizer)))
        drawn = [[]] + [[change] for change in every]
        drawn += [generator.sample(every, generator.randint(2, 4)) for _ in range(TOGETHER)]
        unchanged = None
        for changed in drawn:
            place = Path(tempfile.mkdtemp())
            for name, content in applied(files, changed).items():
                (place / name).write_text(json.dumps(content))
            try:
                result = asked(place)
                unchanged = unchanged or result
                same = result == unchanged and changed
                cases.append(dict(base=family, changed=changed, **({} if same else dict(result=result))))
            except BaseException as error:  # Panics of the library are no exceptions.
                if isinstance(error, KeyboardInterrupt):
                    raise
                refused += 1
            shutil.rmtree(place)
    value = dict(texts=TEXTS, pair_of=PAIR, cut_to=CUT, bases=found, cases=cases)
    OUT.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(len(cases), "cases,", refused, "refused,", OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
