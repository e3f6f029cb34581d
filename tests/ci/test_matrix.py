# SPDX-License-Identifier: Apache-2.0
"""What the compatibility matrix calls right, wrong and refused, and that its report is whole."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES, HALF = 3, 16  # Bytes of K, and of V, in a page.


def load(name: str):
    """A module of .ci/matrix, which is no package: it runs beside releases of upstream."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / "matrix" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


judge, report = load("judge"), load("report")


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
    assert judge.find_wrong_transfer(layers, PAGES, whole, right) is None
    wrong = runs(lambda p: [(base + 2 * HALF * p, 2 * HALF)])
    assert "of others" in judge.find_wrong_transfer(layers, PAGES, whole, wrong)
    part = [(base, half)]
    assert "not registered" in judge.find_wrong_transfer(layers, PAGES, part, right)
    one = {key: run for key, run in right.items() if key[0] == 0}
    assert "not all pages" in judge.find_wrong_transfer(layers, PAGES, whole, one)


def test_report_counts_every_cell_and_merges_like_releases():
    """Guards against cells that are lost between the probe and the page."""
    cells = [
        {"pair": ["A", "B"], "heads": heads, "layout": "NHD", "r": 1, "views": "right", "why": "",
         "connector": "silently wrong" if heads == 2 else "right",
         "connector_why": "for page 0 of x 8 of its bytes are not sent" if heads == 2 else ""}
        for heads in (1, 2, 8)
    ]  # fmt: skip
    one = {"backends": ["A", "B"], "missing": {}, "cells": cells}
    found = {"1.0": one, "1.1": one}
    page = report.as_markdown(found, {"1.2": "no such release"})
    assert "| 1.0 | 3 | 3 | 0 | 0 | 0 | 2 | 0 | 0 | 1 |" in page
    assert "### 1.0, 1.1\n" in page and "A beside B | NHD | 2 | 1 | 1 |" in page
    kept = json.loads(report.as_json(found, {}))["releases"]["1.1"]["cells"]["A + B"]["NHD r1"]
    assert kept == {"1": "right, right", "2": "right, silently wrong 0", "8": "right, right"}


def test_a_row_of_the_report_claims_no_cell_that_was_not_so():
    """Layouts, heads and ratios of a row are all combinations; others are rows of their own."""
    places = {("NHD", 1, 1), ("NHD", 2, 1), ("NHD", 2, 4), ("HND", 8, 1), ("HND", 8, 4)}
    parts = report.products(places)
    assert sorted(place for part in parts for place in part) == sorted(places)
    for part in parts:
        columns = [set(column) for column in zip(*part, strict=True)]
        assert len(part) == len(columns[0]) * len(columns[1]) * len(columns[2])


def test_what_is_written_says_that_nothing_here_is_wrong():
    """The page in docs/ is of this project's code as it was when the matrix last ran."""
    releases = json.loads((ROOT / "docs" / "compatibility.json").read_text())["releases"]
    ours = json.dumps(releases["this project"]["cells"])
    assert "silently wrong" not in ours and "right, right" in ours
    wrong = [name for name, one in releases.items() if "silently wrong" in json.dumps(one["cells"])]
    assert {"0.25.0", "0.26.0", "0.27.0", "0.28.0"} & set(releases) <= set(wrong)
    assert "0.25.0" in wrong
