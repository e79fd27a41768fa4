#!/usr/bin/env python3
"""Chats rendered by `transformers`, to hold our rendering of chat templates against.

    scripts/chat.py               our own templates -> testdata/chat/rendered.json
    scripts/chat.py compare DIR   the templates DIR/*.jinja, by transformers and by us

Needs transformers and jinja2. The results of the first form are committed: run it only to add a
case, and note what changed. The second form builds `cli/examples/chat_template.rs`, prints each
template's first chat that differs, and exits with 1 if there is one. Many public templates come inside packages, and
none of them are committed: `pip download --no-binary llama-cpp-python --no-deps llama-cpp-python`
brings those of llama.cpp, under `vendor/llama.cpp/models/templates`.

Each template is rendered with each request of `testdata/chat/conversations.json`.
"""

import datetime
import difflib
import json
import subprocess
import sys
from pathlib import Path

import tokenizers
import transformers
from transformers.utils import chat_template_utils

ROOT = Path(__file__).resolve().parent.parent
CHAT = ROOT / "testdata" / "chat"
TOKENS = dict(
    bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>", image_token="<image>"
)
# Those of our own templates that look into content in parts.
READ_PARTS = {"parts"}
# When our own templates are rendered: a day and an hour of one digit, in a week of another year.
NOW = datetime.datetime(2027, 1, 3, 7, 8, 9, 4321)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def reference(template: str, request: dict) -> dict:
    """What transformers makes of a request."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        chat_template=template,
        **TOKENS,
    )
    arguments = dict(request.get("chat_template_kwargs", {}))
    # A program that sends a chat wants it answered, unless it says otherwise.
    arguments.setdefault("add_generation_prompt", not arguments.get("continue_final_message"))
    try:
        text = tokenizer.apply_chat_template(request["messages"], tokenize=False, **arguments)
        return {"text": text}
    except Exception as error:  # whatever a template raises
        return {"refused": f"{type(error).__name__}: {error}"}


def ours(templates: dict, requests: dict) -> list:
    """What we make of each request, template by template."""
    build = "cargo build --quiet --release --locked -p galaxy-cli --example chat_template"
    subprocess.run(build.split(), cwd=ROOT, check=True)
    lines = [
        json.dumps({"template": template, "tokens": TOKENS, "request": request})
        for template in templates.values()
        for request in requests.values()
    ]
    program = ROOT / "target" / "release" / "examples" / "chat_template"
    done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def eased(request: dict) -> dict:
    """The request with what we change for templates that cannot read it: content in parts becomes
    one text, and arguments of tool calls that are text become what that text says."""
    request = json.loads(json.dumps(request))
    for message in request["messages"]:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls") or []:
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return request


def compare(directory: str, requests: dict) -> int:
    templates = {path.name: path.read_text() for path in sorted(Path(directory).glob("*.jinja"))}
    answers = iter(ours(templates, requests))
    counts = dict.fromkeys(["alike", "both refuse", "alike once eased", "only transformers refuses", "differ"], 0)
    differing = {}
    for name, template in templates.items():
        for kind, request in requests.items():
            want, have = reference(template, request), next(answers)
            if want == have:
                outcome = "alike"
            elif "refused" in want and "refused" in have:
                outcome = "both refuse"
            elif eased(request) != request and reference(template, eased(request)) == have:
                outcome = "alike once eased"
            else:
                outcome = "only transformers refuses" if "refused" in want else "differ"
                kinds = differing.setdefault(name, {}).setdefault(outcome, [])
                kinds.append(kind)
                if len(kinds) == 1:
                    show(name, kind, want, have)
            counts[outcome] += 1
    for name, outcomes in differing.items():
        for outcome, kinds in outcomes.items():
            print(f"{name}: {outcome}: {', '.join(kinds)}")
    same = sum("differ" not in differing.get(name, {}) for name in templates)
    print(f"{same} of {len(templates)} templates are rendered as transformers renders them; chats: {counts}")
    return 1 if counts["differ"] else 0


def show(name: str, kind: str, want: dict, have: dict):
    print(f"--- {name}, {kind}")
    if "refused" in want or "refused" in have:
        print(f"    transformers: {str(want)[:300]}\n    ours:         {str(have)[:300]}")
        return
    lines = (text["text"].splitlines(keepends=True) for text in (want, have))
    for line in list(difflib.unified_diff(*lines, "transformers", "ours", n=0))[2:12]:
        print(f"    {line[:200]!r}")


def golden(requests: dict):
    chat_template_utils.datetime = Clock
    rendered = {}
    for path in sorted(CHAT.glob("*.jinja")):
        chats = rendered[path.stem] = {}
        for kind, request in requests.items():
            chat = reference(path.read_text(), request)
            parts = any(isinstance(message.get("content"), list) for message in request["messages"])
            if "refused" in chat or (parts and path.stem not in READ_PARTS):
                chat = reference(path.read_text(), eased(request))
            # The words of a refusal are the library's.
            chats[kind] = {"refused": True} if "refused" in chat else chat
    (CHAT / "rendered.json").write_text(json.dumps(rendered, indent=1, ensure_ascii=False) + "\n")


def main():
    requests = json.loads((CHAT / "conversations.json").read_text())
    match sys.argv[1:]:
        case []:
            golden(requests)
        case ["compare", directory]:
            sys.exit(compare(directory, requests))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
