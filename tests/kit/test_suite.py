# SPDX-License-Identifier: Apache-2.0
"""The suite as authors run it: sessions of pytest with `--vllm-platform`, and without."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

BROKEN = "tests.kit.broken.platforms"
MINIMAL = "vllm_minimal_platform.platform.MinimalPlatform"
ROCM = "vllm_emulated_rocm.platform.EmulatedRocmPlatform"
CLASS_ONLY = ("-m", "not vllm_kit_engine")


def checks(output: str) -> dict[str, str]:
    """Name -> the word for its outcome and, of a skipped one, the reason."""
    lines = output.partition("checks:\n")[2].splitlines()
    words = ("  right", "  WRONG", "  skipped")
    rows = [line.split(None, 1) for line in lines if line.startswith(words)]
    return {row[1].partition(": ")[0] + ": " + row[1].split(": ")[1]: row[0] for row in rows}


def test_the_minimal_platform_passes(kit_site, tmp_path):
    """All but block sizes in engines, and what was not looked at says why. The report is one file with
    drawings."""
    html = tmp_path / "report.html"
    done = kit_site.run(
        MINIMAL, tmp_path, "--vllm-kit-html", str(html), "-k", "not test_block_sizes or declared",
        packages=("vllm_minimal_platform",),
    )  # fmt: skip
    assert done.returncode == 0 and "0 wrong" in done.stdout, done.stdout[-6000:]
    found = checks(done.stdout)
    for model in ("decoder", "hybrid"):
        for check in ("tokens", "caches", "stale bytes"):
            assert found[f"models: {check} [{model}]"] == "right"
    assert "skipped models: tokens [encoder-decoder]: refused: Multiple attention" in done.stdout
    assert "check_runner_kv_caches_multi_layer: default: encoder-decoder models" in done.stdout
    page = html.read_text()
    ElementTree.fromstring(page.partition("\n")[2].replace('<meta charset="utf-8">', ""))
    assert page.count("<svg") >= 4 and "src=" not in page and "<script" not in page


@pytest.mark.slow
def test_block_sizes_of_the_minimal_platform(kit_site, tmp_path):
    """Each is right or clearly refused, and was run."""
    done = kit_site.run(
        MINIMAL, tmp_path, "-k", "test_block_sizes", packages=("vllm_minimal_platform",)
    )
    assert done.returncode == 0 and "0 wrong, 0 skipped" in done.stdout, done.stdout[-6000:]
    assert "block sizes: block size [8]" in done.stdout


@pytest.mark.slow
def test_the_emulated_rocm_platform_passes(kit_site, tmp_path):
    """Two backends that share allocations, and all three models. In Triton's interpreter."""
    pytest.importorskip("triton")
    done = kit_site.run(
        ROCM, tmp_path, "-k", "not block_size and not registration",
        packages=("vllm_emulated_rocm",), TRITON_INTERPRET="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert ", 0 wrong, 0 skipped; 0 findings" in done.stdout
    found = checks(done.stdout)
    assert found["alignment: pair [ROCM_ATTN+TRITON_ATTN-HND]"] == "right"
    assert found["models: caches [encoder-decoder]"] == "right"


def test_a_fault_fails_the_session(kit_site, tmp_path):
    """With its name and what to do, in the text and in the page."""
    html = tmp_path / "report.html"
    done = kit_site.run(
        f"{BROKEN}.Misspelt", tmp_path, "--vllm-kit-html", str(html), *CLASS_ONLY
    )
    assert done.returncode == 1 and "1 wrong" in done.stdout and "1 finding" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("  HOOK_UNKNOWN"))
    assert "Misspelt.check_runner_kv_cache_multi_layer" in line and "To do: rename it" in line
    assert "<code>HOOK_UNKNOWN</code>" in html.read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{BROKEN}.Missing", "Missing"),
        ("vllm.config.VllmConfig", "subclass of vllm.platforms.Platform"),
        ("no_such_package.MyPlatform", "No module named 'no_such_package'"),
    ],
)
def test_what_is_no_platform_is_refused(kit_site, tmp_path, name, words):
    """At once, as an error of usage: a suite that passes on nothing is worse than none."""
    done = kit_site.run(name, tmp_path, *CLASS_ONLY)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert words in done.stdout + done.stderr


def test_other_sessions_are_left_as_they_are(kit_site, tmp_path):
    """Without the option the folder's own tests run, and nothing of vLLM is imported."""
    test = "import sys\ndef test_own():\n    assert 'vllm' not in sys.modules\n"
    (tmp_path / "test_own.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    environment = kit_site.environment()
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    done = subprocess.run(
        [*command, "--vllm-kit-html", "x.html"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--vllm-kit-html needs --vllm-platform" in done.stderr
