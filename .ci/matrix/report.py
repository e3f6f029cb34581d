# SPDX-License-Identifier: Apache-2.0
"""The matrix as JSON and as a page of docs/. Needs nothing but Python."""

import collections
import json
import re
import time

SILENT, WARNED = "silently wrong", "wrong, with a warning"
VERDICTS = ("right", "refused", "crashed", SILENT, WARNED)
# What comes before the tables, and between.
INTRO = """# Which layouts go together, by release

Written by `make matrix` (*CPU wheels, {date}*): one cell is two layers over one allocation, self-attention with one
backend beside cross-attention with another, times KV heads 1, 2, 8, `NHD` and `HND`, and 1 or 4 kernel blocks a page
(r). Each release's own code groups, allocates, shapes, aligns and binds the caches (`init_kv_cache` of its V2 runner),
and its own NIXL connector registers them, on CPU tensors. Nothing is computed from what this project thinks of layouts:
the matrix writes each page through each layer's view and looks which bytes changed. Of this project's connector a whole
worker reads each page from itself, and NIXL alone is replaced.

* **right**: no page changes another's bytes, and what the connector reads for a page is that page.
* **refused**: an error that speaks of the layers, backends or layout.
* **crashed**: any other error, such as an assertion without words.
* **silently wrong**: no error, no warning, and one request's text becomes another's garbage: two pages share bytes, or
  other bytes are sent for a page than it holds. It shows only under load, or on the receiving machine.
* **wrong, with a warning**: the same, but the release logs a warning while it lays the caches out. It starts and serves
  all the same, and the warning comes once a process, however many layers are meant; the matrix lets it be logged anew
  for each cell.

What the cells are not:

* The machine that ran them has no Triton, and without it upstream's engine takes its V1 runner, as it says
  (`Model Runner V2 requires Triton; using the V1 model runner instead`). The cells are what its V2 runner does on
  devices; none was there (*emulated*).
* Only pairs whose kernels run on one device are there: of those for ROCm, of those for CUDA (and XPU), and `CPU_ATTN`
  beside itself; `FLASH_ATTN` counts as CUDA's. `ROCM_ATTN` beside `HPC_ATTN` or `CPU_ATTN`, say, no model can have.
* {cross}

With r = 4 both backends are told that their kernels take blocks of one size alone, a quarter of a page; some are so
by themselves (HPC_ATTN; ROCM_AITER_FA with pages of 128 tokens).
What is wrong in the views is not registered. Scripts that show each kind: `examples/silent_corruption/`.
"""


# Found by asking `get_attn_backend_cls` of each release's platform classes, with a pretended device.
CROSS = """\
Cross-attention stands for any second group of one page size. Upstream's own platforms, those of 0.24 to 0.32 asked
  with a pretended device, take `ROCM_ATTN`, `FLEX_ATTENTION`, `HPC_ATTN` and `ROCM_AITER_FA` for decoder layers at most
  and refuse them for cross-attention. Pairs that have one of these second come about with a platform of one's own, or
  with decoder layers in two groups: a sliding-window group in the place of cross-attention met the same fate in each
  cell tried (0.25.0 and 0.28.0, `NHD` and `HND`, 2 and 8 heads, r = 1: TRITON_ATTN and ROCM_AITER_UNIFIED_ATTN beside
  ROCM_ATTN; ROCM_ATTN beside TRITON_ATTN and FLEX_ATTENTION)."""
CHAPTERS = {
    "Silently wrong": (SILENT,),
    "Wrong, with a warning": (WARNED,),
    "Refused and crashed": ("refused", "crashed"),
}


def as_json(found, missing):
    """Every cell: release -> pair -> `LAYOUT rN` -> a verdict for each number of heads."""
    reasons = sorted({why for one in found.values() for c in one["cells"] for why in whys(c)})
    number = {why: str(index) for index, why in enumerate(reasons)}
    releases = {}
    for name, one in found.items():
        pairs = collections.defaultdict(lambda: collections.defaultdict(dict))
        for cell in one["cells"]:
            key = f"{cell['layout']} r{cell['r']}"
            pairs[" + ".join(cell["pair"])][key][str(cell["heads"])] = said(cell, number)
        backends = {"backends": one["backends"], "missing": one["missing"]}
        releases[name] = {**backends, "cells": pairs}
    what = "views[, connector][, warned], each with the number of its reason"
    text = {"cell": what, "not run": missing, "reasons": reasons, "releases": releases}
    # A line a row of heads: a change shows where it is.
    lines = json.dumps(text, indent=1)
    return re.sub(r"\{\s+(\"1\": [^{}]*?)\s+\}", lambda m: join_lines(m[1]), lines) + "\n"


def join_lines(text):
    return "{" + re.sub(r"\s*\n\s*", " ", text) + "}"


def whys(cell):
    return [why for why in (cell["why"], cell["connector_why"], cell["warning"]) if why]


def said(cell, number):
    parts = [(cell["views"], cell["why"]), (cell["connector"], cell["connector_why"])]
    parts += [("warned", cell["warning"])] if cell["warning"] else []
    return ", ".join(f"{v} {number[why]}" if why else v for v, why in parts if v)


def as_markdown(found, missing):
    parts = [INTRO.format(date=time.strftime("%Y-%m"), cross=CROSS), summary(found, missing)]
    for title, verdicts in CHAPTERS.items():
        parts.append(f"## {title}\n")
        for names, rows in merged(found, *verdicts).items():
            parts += [f"### {names}\n", rows]
    parts += ["## What could not be imported\n", absent(found)]
    return "\n".join(parts)


def summary(found, missing):
    """A row for each release; those that were not run say why."""
    columns = "right | refused | crashed | **silently wrong** | wrong, with a warning |"
    lines = [
        f"| Release | Cells | Views: {columns} Connector: {columns}",
        "| --- |" + " --- |" * 11,
    ]
    for name, one in found.items():
        counts = []
        for part in ("views", "connector"):
            counted = collections.Counter(cell[part] for cell in one["cells"])
            counts += [str(counted[verdict]) for verdict in VERDICTS]
        lines.append(f"| {name} | {len(one['cells'])} | {' | '.join(counts)} |")
    for name, why in missing.items():
        lines.append(f"| {name} | not run: {why} |" + " |" * 10)
    return "\n".join(lines) + "\n"


def merged(found, *verdicts):
    """Names of releases that are alike -> their table; those without such a cell are left out."""
    tables = collections.defaultdict(list)
    for name, one in found.items():
        table = details(one["cells"], verdicts)
        if table:
            tables[table].append(name)
    return {", ".join(names): table for table, names in tables.items()}


def details(cells, verdicts):
    """A row for the pairs that meet one fate in the same cells; empty if there is none."""
    fates = collections.defaultdict(lambda: collections.defaultdict(set))
    for cell in cells:
        for part, why in (("views", "why"), ("connector", "connector_why")):
            if cell[part] in verdicts:
                warning = f"; warned: {kind(cell['warning'])}" if cell["warning"] else ""
                fate = (part, cell[part], kind(cell[why]) + warning)
                place = (cell["layout"], cell["heads"], cell["r"])
                fates[fate][tuple(cell["pair"])].add(place)
    lines = []
    for fate, pairs in sorted(fates.items()):
        alike = collections.defaultdict(list)
        for pair, places in pairs.items():
            for part in products(places):
                alike[tuple(sorted(part))].append(pair)
        for places, alike_pairs in sorted(alike.items()):
            columns = [", ".join(map(str, sorted(set(column)))) for column in zip(*places)]
            lines.append(
                f"| {fate[0]} | {fate[1]} | {beside(alike_pairs)} | {' | '.join(columns)} "
                f"| {len(places) * len(alike_pairs)} | {fate[2]} |"
            )
    head = "| Where | What | Backends | Layout | Heads | r | Cells | Said or found |\n"
    return head + "| --- " * 8 + "|\n" + "\n".join(lines) + "\n" if lines else ""


def products(places):
    """The places, parted so that each part is all combinations of its layouts, heads and ratios."""
    sizes = [len(set(column)) for column in zip(*places)]
    if len(places) == sizes[0] * sizes[1] * sizes[2]:
        return [places]
    column = next(index for index, size in enumerate(sizes) if size > 1)
    values = sorted({place[column] for place in places})
    parts = [{place for place in places if place[column] == value} for value in values]
    return [part for one in parts for part in products(one)]


def beside(pairs):
    """`A beside B, C; D beside B`."""
    seconds = collections.defaultdict(list)
    for first, second in pairs:
        seconds[first].append(second)
    alike = collections.defaultdict(list)
    for first, others in seconds.items():
        alike[tuple(others)].append(first)
    return "; ".join(f"{', '.join(a)} beside {', '.join(b)}" for b, a in alike.items())


def kind(why):
    """A reason without the numbers of one cell."""
    why = re.sub(r"\bmodel\.layers\.(\d)\S*?attn\b", r"layer \1", why)
    why = re.sub(r"\d+(, \d+)+,?", "..", why)
    why = re.sub(r"\b\d+ bytes", "bytes", re.sub(r"page \d+", "a page", why))
    why = re.sub(r"is bytes and should be \d+", "has not its size", why)
    why = re.sub(r"=\d+", "=..", why)
    return re.sub(r"\b\d+ of (its bytes|others)", r"some of \1", why).replace("|", "\\|")[:160]


def absent(found):
    lines = []
    for name, one in found.items():
        rows = [f"{backend} ({why})" for backend, why in one["missing"].items()]
        lines.append(f"* {name}: {', '.join(one['backends'])}" + absent_text(rows))
    return "\n".join(lines) + "\n"


def absent_text(rows):
    return f"; not {'; '.join(rows)}" if rows else ""
