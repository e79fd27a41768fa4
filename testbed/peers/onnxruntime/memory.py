#!/usr/bin/env python3
"""Memory that the values of a network take: of onnxruntime's arena, and of ours.

    memory.py GALAXY [FILE.onnx...]     [default: the light models of the package onnx]

onnxruntime's arena grows by what is asked for and not by powers of two (`kSameAsRequested`), has all optimisations and one
thread, and keeps weights elsewhere. What counts is what its arena holds after a first run, as its own log says: all values
that operators compute, and the working memory of kernels. Its plan of a second run, for which it lays all of that in one
block, is said beside it. Of ours it is the arena of `galaxy bench network --threads 1`: all values, inputs too. What our
kernels take besides, and how much more of this process is in memory for a run of either, is not in it.
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime

GROWN = re.compile(r"Extended allocation by (\d+) bytes")


@contextlib.contextmanager
def log():
    """What is written to stderr meanwhile, in a list of one text."""
    text, kept = [], os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def grown(session, inputs):
    """By how many bytes the arena grows in a run."""
    with log() as text:
        session.run(None, inputs)
    return sum(int(size) for size in GROWN.findall(text[0]))


def theirs(path):
    """The bytes of the arena after a first run, and those of the plan of a second."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 0
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")
    with log():
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (read,) = session.get_inputs()
    shape = [side if isinstance(side, int) else 1 for side in read.shape]
    values = np.linspace(0, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return grown(session, {read.name: values}), grown(session, {read.name: values})


def ours(galaxy, path):
    line = [galaxy, "bench", "network", str(path), "--threads", "1", "--json"]
    return json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)["arena_bytes"]


def alone(path):
    """What `theirs` says in a process of its own: sessions of one share an arena."""
    line = [sys.executable, __file__, "theirs", str(path)]
    first, plan = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)
    # Where a block of the first run is large enough, the second takes no other.
    return first, plan or first


def main():
    if sys.argv[1] == "theirs":
        onnxruntime.set_default_logger_severity(0)
        kind = onnxruntime.OrtMemoryInfo(
            "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
        )
        with log():
            onnxruntime.create_and_register_allocator(kind, onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1}))
        print(json.dumps(theirs(sys.argv[2])))
        return
    galaxy, *files = sys.argv[1:]
    light = pathlib.Path(onnx.__file__).parent / "backend/test/data/light"
    paths = [pathlib.Path(file) for file in files] or sorted(light.glob("light_*.onnx"))
    print(f"{'network':24} {'ours, KB':>10} {'onnxruntime':>12} {'times':>6} {'its plan':>10} {'times':>6}")
    for path in paths:
        (first, plan), own = alone(path), ours(galaxy, path)
        line = f"{path.stem:24} {own / 1e3:10.0f} {first / 1e3:12.0f} {own / first:6.2f}"
        print(f"{line} {plan / 1e3:10.0f} {own / plan:6.2f}", flush=True)


if __name__ == "__main__":
    main()
