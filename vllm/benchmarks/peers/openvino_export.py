# SPDX-License-Identifier: Apache-2.0
"""Models in OpenVINO's format, exported by optimum-intel: in this environment or, since it lags
behind Transformers' releases, in another's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from vllm.benchmarks.peers import PeerOptions
from vllm.benchmarks.peers.model_files import cached, hf_folder

_SCRIPT = """
import sys
from optimum import intel
name, folder, path, as_int8 = sys.argv[1:]
model = getattr(intel, name).from_pretrained(
    folder, export=True, compile=False, load_in_8bit=as_int8 == "1"
)
model.save_pretrained(path)
"""


def exported(options: PeerOptions) -> Path:
    """The folder that `options` name, or else the model's own, exported once.

    Raises:
        RuntimeError: optimum-intel is not to be had, or cannot export the model.
    """
    if options.openvino_model is not None and not options.is_encoder_decoder:
        return Path(options.openvino_model)
    python = options.exporter_python
    if python is None and not importlib.util.find_spec("optimum"):
        raise RuntimeError(
            "needs optimum-intel to convert a model: pip install optimum-intel, or "
            "--exporter-python, an environment that has it"
        )
    precision = "bf16" if options.is_encoder_decoder else options.precision
    return cached(
        options.model,
        f"openvino-{precision}",
        lambda path: _export(options, precision, python or sys.executable, path),
    )


def _export(options: PeerOptions, precision: str, python: str, path: Path) -> None:
    name = "OVModelForSeq2SeqLM" if options.is_encoder_decoder else "OVModelForCausalLM"
    folder = str(hf_folder(options.model, options.dtype))
    environment = {**os.environ}
    environment.pop("PYTHONPATH", None)  # its packages, not ours
    done = subprocess.run(
        [python, "-c", _SCRIPT, name, folder, str(path), str(int(precision == "int8"))],
        capture_output=True,
        text=True,
        env=environment,
        cwd="/",
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"optimum-intel cannot export the model: {lines[-1]}")
