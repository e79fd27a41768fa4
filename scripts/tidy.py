#!/usr/bin/env python3
"""House rules that no compiler checks: layers, import circles, purity, file sizes, long lists of
parameters, doc comments that are fragments, words, unsafe code, sleeps, that the tests, files and
items which the docs name exist, that their links lead somewhere, that the README is short, and that
the locks agree.

    scripts/tidy.py          one line for each violation, and exit code 1 if there is any

Looks at what git tracks or would track. Needs Python 3.8, git and cargo; no packages.
A rule that is wrong is changed here, with a reason, never worked around.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A crate depends only on those before it.
LAYERS = [
    "galaxy-common", "galaxy-proto", "galaxy-model", "galaxy-graph", "galaxy-planner",
    "galaxy-engine", "galaxy-worker", "galaxy-coord", "galaxy-client", "galaxy-cli", "galaxy-testbed",
]
# They meet through proto only.
STRANGERS = ("galaxy-worker", "galaxy-coord")
# Crates from outside that only some of ours may name. A name ends at "-" too: rten-simd is rten.
OUTSIDE = {
    # The testbed plays coordinator and client.
    "tonic": {"galaxy-proto", "galaxy-worker", "galaxy-coord", "galaxy-client", "galaxy-cli", "galaxy-testbed"},
    "rten": {"galaxy-engine"},
    "burn": {"galaxy-engine"},
    "quinn": {"galaxy-worker"},
}
PURE = ["graph/src/", "planner/src/"]
PURE_CRATES = {"galaxy-graph", "galaxy-planner"}
NOT_PURE_CRATES = ["tokio", "burn"]

# What -> (pattern, where it may stand, what to do).
PLACES = {
    "a crate for kernels": (
        r"\b(rten_simd|rten_vecmath|burn)::",
        ("engine/src/compute",),
        "kernels live behind the Engine trait, under engine/src/compute",
    ),
    "a socket": (
        r"\b(quinn|TcpStream|TcpListener|UdpSocket|UnixStream|UnixListener)\b",
        (
            "worker/src/ring", "proto/src/door", "proto/src/channel.rs", "cli/src/serve.rs",
            # Who joins, on both sides.
            "proto/src/join/dial.rs", "coordinator/src/reception.rs",
            # They bind the port that the door then takes.
            "worker/src/serve.rs", "coordinator/src/main.rs", "coordinator/src/api.rs",
            # It measures what loopback carries.
            "cli/src/loopback.rs",
            "testbed/",
        ),
        "links live under worker/src/ring, connections under proto/src/door and channel.rs, HTTP under "
        "cli/src/serve.rs",
    ),
}

MAX_LINES = 700
# Parameters of a function, `self` counted, and how many functions may have more: kernels.
MAX_PARAMETERS = 6
MAX_LONG = 6
# Words of a doc comment: fewer say nothing to who lands on it.
MIN_WORDS = 3
# A newcomer reads it in some minutes.
MAX_README_LINES = 130
UNSAFE_FILES = {
    f"engine/src/compute/kernels/{name}.rs"
    for name in (
        "area", "blocks", "blocks/coding", "blocks/neon", "blocks/place", "blocks/tile", "blocks/vectors",
        "blocks/x86", "instructions", "lines", "micro", "threads",
    )
} | {"engine/src/stream/ring.rs"}
# Tests that may sleep: where the pause is what is tested, not what is waited for.
SLEEP_FILES = {
    "engine/tests/allocations.rs",  # until threads that wait have gone to sleep, which nothing tells
    "testbed/tests/faults_devices.rs",  # it stops a process for 19 parts of 20
    "testbed/tests/simulation/network.rs",  # virtual time: it passes at once
    "testbed/tests/simulation/scenario.rs",
}
BAD_NAMES = {"utils.rs", "util.rs", "helpers.rs", "types.rs", "manager.rs"}
BAD_MACROS = r"\b(todo|unimplemented|dbg)!"
BAD_WORDS = r"\b(FIXME|XXX|HACK)\b"
DATA = ("testdata/", "Cargo.lock", "LICENSE")
THIS = "scripts/tidy.py"

# Comments, strings, characters (not lifetimes).
NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^'\n]+|[^\\'\n])'""", re.S
)

problems = []


def problem(path, line, what, remedy):
    problems.append(f"{path}:{line}: {what}; {remedy}")


def run(*command):
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)} failed; its message is above")
    return done.stdout


def code_of(text):
    """The text with comments and strings blanked, line for line."""
    return NO_CODE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


class Source:
    """A Rust file: its lines, its code without comments, and where its tests begin."""

    def __init__(self, path, text):
        self.path = path
        self.lines = text.splitlines()
        self.code = code_of(text).splitlines()
        self.test_modules = set()  # declared by `#[cfg(test)] mod name;`
        self.tests_from = len(self.code)
        parts = Path(path).parts
        if {"tests", "benches"} & set(parts[:-1]) or parts[-1] == "tests.rs":
            self.tests_from = 0
        for at, line in enumerate(self.code):
            if line.strip() != "#[cfg(test)]":
                continue
            after = [l.strip() for l in self.code[at + 1 :]]
            item = next((l for l in after if l and not l.startswith("#[")), "")
            declared = re.fullmatch(r"(?:pub(?:\(\w+\))? )?mod (\w+);", item)
            if declared:
                self.test_modules.add(declared.group(1))
            elif re.match(r"(?:pub(?:\(\w+\))? )?mod \w+", item):
                self.tests_from = min(self.tests_from, at)

    def module_file(self, name):
        """Where `mod name;` of this file lives."""
        path = Path(self.path)
        folder = path.parent
        if path.name not in ("lib.rs", "main.rs", "mod.rs"):
            folder = folder / path.stem
        return str(folder / f"{name}.rs")

    def find(self, pattern, begin=0, end=None):
        for at, line in enumerate(self.code[begin:end], begin):
            found = re.search(pattern, line)
            if found:
                yield at + 1, found.group()


def check_layers(packages):
    for package in packages.values():
        name = package["name"]
        path = Path(package["manifest_path"]).relative_to(ROOT)
        text = (ROOT / path).read_text().splitlines()

        def line_of(dependency):
            return next((i for i, l in enumerate(text, 1) if l.startswith(dependency)), 1)

        if name not in LAYERS:
            problem(path, 1, f"crate {name} has no layer", f"give it a place in {THIS}")
            continue
        for dependency in {d["name"] for d in package["dependencies"]}:
            line = line_of(dependency)
            if dependency in LAYERS and LAYERS.index(dependency) >= LAYERS.index(name):
                problem(path, line, f"{name} depends on {dependency}, which is not below it",
                        "move what it needs down, or the code up")
            if name in STRANGERS and dependency in STRANGERS:
                problem(path, line, f"{name} depends on {dependency}",
                        "worker and coordinator meet through proto only")
            for outside, allowed in OUTSIDE.items():
                if re.fullmatch(rf"{outside}(-.*)?", dependency) and name not in allowed:
                    problem(path, line, f"{name} depends on {dependency}",
                            f"only {', '.join(sorted(allowed))} may")
            if name in PURE_CRATES and dependency in NOT_PURE_CRATES:
                problem(path, line, f"{name} depends on {dependency}",
                        "it is pure: equal inputs, equal outputs")


def check_source(source, is_test):
    path, size = source.path, source.tests_from
    if is_test:
        source.tests_from = size = 0
    if size > MAX_LINES:
        problem(path, MAX_LINES, f"{size} lines without tests, above {MAX_LINES}",
                "look for the seam and split it")
    if Path(path).name in BAD_NAMES:
        problem(path, 1, "a name that owns nothing", "name the file after the thing that it owns")
    for line, found in source.find(BAD_MACROS):
        problem(path, line, f"`{found}`", "finish it, or return an error that says what is missing")
    for line, _ in source.find(r"\.unwrap\(\)", end=size):
        problem(path, line, "`.unwrap()` outside tests",
                "return an error, or `expect` an invariant that the lines above prove")
    if path.startswith(tuple(PURE)):
        pattern = r"\b(tokio::|burn::|std::fs\b|std::net\b|Instant\b|SystemTime\b|fs::|net::)"
        for line, found in source.find(pattern, end=size):
            problem(path, line, f"`{found}` in a pure crate", "take the value as an argument")
    for what, (pattern, allowed, remedy) in PLACES.items():
        if not path.startswith(allowed):
            for line, found in source.find(pattern, end=size):
                problem(path, line, f"`{found}`: {what} out of place", remedy)
    if path not in SLEEP_FILES:
        for line, _ in source.find(r"\bsleep(_until)?\(", begin=size):
            problem(path, line, "a test that sleeps", "wait for the condition itself")
    check_unsafe(source)
    # lib.rs and main.rs of a crate, not of a module's folder.
    if re.fullmatch(r"\w+/src/(lib|main)\.rs", path) and not "".join(source.lines[:1]).startswith("//!"):
        problem(path, 1, "a crate without its story", "begin with `//!`: what it is, what it is not")


def check_prose(source):
    """A doc comment is a sentence or a full noun phrase, and stands alone. Help texts of clap have no full stop."""
    ends = r"[.:!?`|)]$" if "clap" not in "".join(source.lines[:40]) else r"."
    block = []
    for at, line in enumerate(source.lines + [""], 1):
        found = re.match(r"\s*//[/!](?: (.*))?$", line)
        if found:
            block.append(found.group(1) or "")
            continue
        said, block = [words for words in block if words.strip()], []
        if not said or said[-1].startswith(("```", "    ")):
            continue
        if len(" ".join(said).split()) < MIN_WORDS or re.match(r"[a-z]", said[0]) or not re.search(ends, said[-1]):
            problem(source.path, at - 1, f"a doc comment that is a fragment: {said[0][:40]!r}",
                    "say in a sentence what the item is, without the comments around it")


def parameters(code):
    """The functions of a file: line, name, and how many parameters each has."""
    for found in re.finditer(r"\bfn (\w+)(?:<[^{;(]*>)?\s*\(", code):
        depth = angles = 0
        count, some = 0, False
        for at in range(found.end() - 1, len(code)):
            c = code[at]
            depth += (c in "([{") - (c in ")]}")
            if depth == 0:
                break
            angles += (c == "<") - (c == ">" and code[at - 1] != "-")
            if c == "," and depth == 1 and angles == 0:
                count, some = count + some, False
            elif not c.isspace() and not (depth == 1 and c in "()"):
                some = True
        yield code.count("\n", 0, found.start()) + 1, found.group(1), count + some


def check_parameters(sources):
    long = [
        (source.path, line, name, count)
        for source in sources
        for line, name, count in parameters("\n".join(source.code))
        if count > MAX_PARAMETERS
    ]
    if len(long) > MAX_LONG:
        for path, line, name, count in long:
            problem(path, line, f"`{name}` has {count} parameters, and {len(long)} functions have so many",
                    f"name what belongs together: at most {MAX_LONG} may have more than {MAX_PARAMETERS}")


def paths_of_use(tree):
    """The paths that a `use` tree stands for."""
    tree = tree.strip()
    if "{" not in tree:
        return [re.split(r"\s+as\s+", tree)[0].strip()] if tree else []
    head, inside = tree[: tree.index("{")], tree[tree.index("{") + 1 : tree.rindex("}")]
    paths, depth, part = [], 0, ""
    for c in inside + ",":
        depth += (c == "{") - (c == "}")
        if c == "," and depth == 0:
            paths += [head + path for path in paths_of_use(part)]
            part = ""
        else:
            part += c
    return paths


def module_of(path):
    """The crate and the module path of a source file."""
    crate, rest = path.split("/src/", 1)
    parts = rest[: -len(".rs")].split("/")
    return crate, tuple(parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts)


def imports(source, module, modules):
    """The files of its crate that a file imports from, without tests."""
    crate, own = module
    code = re.sub(r"#\[cfg\(test\)\]\s*(?:pub(?:\(\w+\))? )?(?:mod|use) [^;{]*;", "", "\n".join(source.code[: source.tests_from]))
    uses = r"\buse\s+([^;]+);"
    paths = [p for tree in re.findall(uses, code) for p in paths_of_use(re.sub(r"\s+", " ", tree))]
    code = re.sub(uses, "", code)
    children = {m[-1] for c, m in modules if c == crate and m[:-1] == own and m}
    paths += re.findall(r"\b(?:crate|super|self)(?:::\w+)+", code)
    paths += [p for p in re.findall(r"(?<![:\w])\w+::\w+", code) if p.split("::")[0] in children]
    for path in paths:
        first, *rest = path.replace(" ", "").split("::")
        if first == "crate":
            target = ()
        elif first == "super":
            target = own[:-1]
            while rest and rest[0] == "super":
                target, rest = target[:-1], rest[1:]
        elif first == "self":
            target = own
        elif first in children:
            target, rest = own, [first, *rest]
        else:
            continue
        while rest and (crate, target + (rest[0],)) in modules:
            target, rest = target + (rest[0],), rest[1:]
        file = modules.get((crate, target))
        # A module and what it is made of may know each other.
        if file and target[: len(own)] != own and own[: len(target)] != target:
            yield file


def check_circles(sources, test_files):
    """No file imports from one that imports from it, by however many others."""
    files = [s for s in sources if re.match(r"\w+/src/", s.path) and s.path not in test_files]
    modules = {module_of(s.path): s.path for s in sorted(files, key=lambda s: not s.path.endswith("/main.rs"))}
    edges = {s.path: set(imports(s, module_of(s.path), modules)) - test_files for s in files}
    reached = {}

    def reach(path):
        seen, left = set(), [path]
        while left:
            for other in edges.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    for path in edges:
        reached[path] = reach(path)
    told = set()
    for path in sorted(edges):
        circle = {path} | {other for other in reached[path] if path in reached.get(other, ())}
        if len(circle) > 1 and path not in told:
            told |= circle
            problem(path, 1, f"an import circle of {len(circle)} files: {', '.join(sorted(circle))}",
                    "move what both need to a file of its own")


def check_unsafe(source):
    uses = list(source.find(r"\bunsafe\b"))
    if not uses:
        return
    if source.path not in UNSAFE_FILES:
        problem(source.path, uses[0][0], f"`unsafe`, {len(uses)} times, first here",
                f"keep it to the modules that exist for it (the list is in {THIS})")
    elif not any("#![allow(unsafe_code)]" in line for line in source.code):
        problem(source.path, 1, "unsafe code without `#![allow(unsafe_code)]`", "say so at the top")
    for line, _ in uses:
        before = "\n".join(source.lines[max(0, line - 6) : line])
        if "SAFETY" not in before and "# Safety" not in before:
            problem(source.path, line, "`unsafe` without a SAFETY note",
                    "say right before it why it is sound")


def check_guards(path, text, functions):
    """ARCHITECTURE.md names a test for each law, docs/security.md for each claim: the tests must be there."""
    file = None
    for at, line in enumerate(text.splitlines(), 1):
        if not line.startswith("| **"):
            continue
        for name in re.findall(r"`([^`]+)`", line):
            if name.endswith(".rs"):
                file = name
                if file not in functions:
                    problem(path, at, f"`{file}` is not there", "name the file that guards it")
            elif re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+){2,}", name):
                if name not in functions.get(file, ()):
                    problem(path, at, f"{file} has no test `{name}`", "name the one that guards it")


def section(text, heading):
    """The numbered lines below a heading, up to the next one of its level."""
    found = False
    for at, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            found = line == heading
        elif found:
            yield at, line


def check_entry_points(path, text, items):
    """ARCHITECTURE.md names where to start reading: `file.rs`: `item`, ..."""
    rows = [(at, line) for at, line in section(text, "## Where to start reading") if line.startswith("| ")]
    if not rows:
        problem(path, 1, "no table \"Where to start reading\"", "newcomers begin there")
    for at, line in rows:
        file = None
        for name in re.findall(r"`([^`]+)`", line.split(" | ", 1)[1]):
            if name.endswith(".rs"):
                file = name
                if file not in items:
                    problem(path, at, f"`{file}` is not there", "name the file that it is in now")
            elif name not in items.get(file, ()):
                problem(path, at, f"{file} has no `{name}`", "name the function or type that it is now")


def check_glossary(path, text, known, files):
    """docs/glossary.md says what terms are called in the code: there must be files and names like these."""
    for at, line in enumerate(text.splitlines(), 1):
        cells = line.split(" | ")
        if not line.startswith("| ") or len(cells) != 3:
            continue
        for name in re.findall(r"`([^`]+)`", cells[2]):
            if name not in files and name not in known:
                problem(path, at, f"nothing in the code is called `{name}`", "name what it is called now")


def check_links(path, text, files):
    """Links of a page to files of the repository lead somewhere."""
    folders = {str(parent) for file in files for parent in Path(file).parents}
    for at, line in enumerate(text.splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            target = target.split("#")[0]
            if not target or "://" in target:
                continue
            there = os.path.normpath(os.path.join(os.path.dirname(path), target))
            if there not in files and there not in folders:
                problem(path, at, f"a link to {target}, which is not there", "mend the link")


def check_docs(texts, sources):
    functions = {s.path: set(re.findall(r"\bfn (\w+)", "\n".join(s.code))) for s in sources}
    named = r"\b(?:fn|struct|enum|trait|type|const|static|mod) (\w+)"
    items = {s.path: set(re.findall(named, "\n".join(s.code))) for s in sources}
    for path in ("ARCHITECTURE.md", "docs/security.md"):
        check_guards(path, texts[path], functions)
    check_entry_points("ARCHITECTURE.md", texts["ARCHITECTURE.md"], items)
    words = set().union(*(re.findall(r"\w+", "\n".join(s.code)) for s in sources))
    check_glossary("docs/glossary.md", texts["docs/glossary.md"], words, texts)
    lines = len(texts["README.md"].splitlines())
    if lines > MAX_README_LINES:
        problem("README.md", lines, f"{lines} lines, above {MAX_README_LINES}", "move what is not for a newcomer to docs/")
    for path, text in texts.items():
        if path.endswith(".md") and not path.startswith(DATA):
            check_links(path, text, texts)


def check_locks(packages):
    """fuzz/ is a workspace of its own: its lock must know what our crates depend on, or nothing there
    builds."""
    path = "fuzz/Cargo.lock"
    text = (ROOT / path).read_text()
    for entry in text.split("[[package]]\n"):
        name = re.search(r'^name = "([^"]+)"', entry, re.M)
        package = packages.get(name.group(1)) if name else None
        if package is None:
            continue
        listed = re.search(r"^dependencies = \[(.*?)\]", entry, re.M | re.S)
        # A name that there are several versions of stands before one of them.
        locked = {dep.split(" ")[0] for dep in re.findall(r'"([^"]+)"', listed.group(1) if listed else "")}
        own = [dep for dep in package["dependencies"] if dep["kind"] != "dev"]
        wanted = {dep["name"] for dep in own if not dep["optional"]}
        for dep in sorted((wanted - locked) | (locked - {dep["name"] for dep in own})):
            problem(path, 1, f"{name.group(1)} and {dep}: it is behind",
                    "run: cargo metadata --format-version 1 --manifest-path fuzz/Cargo.toml")


def check_text(path, text):
    if path == THIS or path.startswith(DATA):
        return
    for at, line in enumerate(text.splitlines(), 1):
        found = re.search(BAD_WORDS, line)
        if found:
            problem(path, at, f"`{found.group()}`", "do it, or open an issue and leave the word out")
    first = text.split("\n", 1)[0]
    if path.endswith(".sh") or (first.startswith("#!") and re.search(r"\b(ba)?sh\b", first)):
        if not re.search(r"^set -euo pipefail$", text, re.M):
            problem(path, 1, "a shell script that goes on after errors", "add `set -euo pipefail`")


def main():
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    sources, texts = [], {}
    for path in sorted(set(filter(None, listed.split("\0")))):
        file = ROOT / path
        if not file.is_file():
            continue  # removed, and the removal is not committed yet
        data = file.read_bytes()
        text = "" if b"\0" in data[:8192] else data.decode("utf-8", "replace")
        texts[path] = text
        check_text(path, text)
        if path.endswith(".rs"):
            sources.append(Source(path, text))
    test_files = {s.module_file(name) for s in sources for name in s.test_modules}
    for source in sources:
        check_prose(source)
    check_parameters(sources)
    check_circles(sources, test_files)
    for source in sources:
        check_source(source, source.path in test_files)
    check_docs(texts, sources)
    metadata = json.loads(run("cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"))
    packages = {package["name"]: package for package in metadata["packages"]}
    check_layers(packages)
    check_locks(packages)
    for line in problems:
        print(line)
    if problems:
        sys.exit(f"error: {len(problems)} house rules are broken; see above")
    print(f"tidy: {len(sources)} Rust files follow the house rules")


if __name__ == "__main__":
    main()
