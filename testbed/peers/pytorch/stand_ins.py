#!/usr/bin/env python3
"""Empty stand-ins for the libraries of GPUs that a PyTorch is linked against and that are not there.

    stand_ins.py DIRECTORY

DIRECTORY holds PyTorch's own libraries. The package index has PyTorch for Linux only as built for GPUs:
it does not start without 2.5 GB of libraries that do nothing on a machine that has none, and that would
take memory of devices that have little. Each stand-in has the names that are looked for; a function in it
says that there is no device. What PyTorch does on the processor calls none of them. Needs `cc` and
`readelf`.
"""

import ctypes
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

# What all of these libraries' functions mean by it: not a success (CUDA's own word for "no device").
NO_DEVICE = 100


def reads(library):
    """The libraries that one names, the names that it looks for, each with its version and the library that
    this is of, and the names that it has itself."""
    command = ["readelf", "-W", "--dynamic", "--dyn-syms", "--version-info", str(library)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    libraries, wanted, defined = [], set(), set()
    of, file = {}, None
    for line in said.splitlines():
        if "(NEEDED)" in line:
            libraries.append(line[line.index("[") + 1:line.index("]")])
        fields = line.split()
        if "File:" in fields:
            file = fields[fields.index("File:") + 1]
        elif "Name:" in fields and "Flags:" in fields and file:
            of[fields[fields.index("Name:") + 1]] = file
        # Num: Value Size Type Bind Vis Ndx Name
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        bind, place, (name, _, version) = fields[4], fields[6], fields[7].partition("@")
        if place != "UND":
            defined.add(name)
        elif bind == "GLOBAL":
            wanted.add((name, version))
    return libraries, {(name, version, of.get(version)) for name, version in wanted}, defined


def there(name, directory):
    if (directory / name).exists():
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def build(path, names):
    """A library with functions of these names, `{version: [name]}`."""
    lines = [f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for all in names.values() for name in all]
    versions = [
        f"{version} {{ global: {'; '.join(all)}; }};\n" for version, all in names.items() if version and all]
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work) / "stand_in.c", Path(work) / "stand_in.map"
        source.write_text("".join(lines) or "typedef int nothing;\n")
        script.write_text("".join(versions))
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", "-o", str(path), str(source)]
        command += [f"-Wl,-soname,{path.name}"]
        command += [f"-Wl,--version-script,{script}"] if versions else []
        subprocess.run(command, check=True)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    missing, wanted, defined = {}, set(), set()
    for library in sorted(directory.glob("*.so*")):
        needs, looks_for, has = reads(library)
        wanted |= looks_for
        defined |= has
        for name in needs:
            missing.setdefault(name, not there(name, directory))
    missing = sorted(name for name, lacks in missing.items() if lacks)
    if not missing:
        return
    names = {library: defaultdict(list) for library in missing}
    for name, version, library in sorted(wanted, key=str):
        if library in names:
            names[library][version].append(name)
        elif not version and name not in defined and not name.startswith(("Py", "_Py")):
            # Whose it is does not matter: all are loaded, and names are looked for in all.
            names[missing[0]][""].append(name)
    for library in missing:
        build(directory / library, names[library])
    print(f"{len(missing)} libraries of GPUs have stand-ins: {', '.join(missing)}", file=sys.stderr)


if __name__ == "__main__":
    main()
