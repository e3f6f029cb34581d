# SPDX-License-Identifier: Apache-2.0
"""Other engines: which can run here, and one model in the formats that they read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm.benchmarks.peers import PEERS, PeerOptions, make_peers, missing_reason


def test_peers_that_cannot_run_say_why(monkeypatch):
    options = PeerOptions("model-folder", "bfloat16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reasons = {name: missing_reason(name, options) for name in PEERS}
    assert reasons.pop("transformers") is None
    assert "--upstream-python" in reasons.pop("upstream")
    assert all("pip install" in reason for reason in reasons.values())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    assert "GGUF" in missing_reason("llama-cpp", options)
    int4 = PeerOptions("m.gguf", "bfloat16", "int4")
    assert missing_reason("llama-cpp", int4) is None
    for name in ("transformers", "upstream"):  # what no option mends comes first
        assert "has no int4" in missing_reason(name, int4)
    bart = PeerOptions("m", "bfloat16", upstream_python="python", is_encoder_decoder=True)
    assert [name for name in PEERS if missing_reason(name, bart) == "has no BART"] == [
        "llama-cpp", "upstream"
    ]  # fmt: skip


def test_specs_bear_the_names_of_their_peers():
    """A kind of weights that has no name of its own would have another's figures."""
    options = PeerOptions("m.gguf", "bfloat16")
    assert all([spec.name for spec in make_peers(name, options)] == [name] for name in PEERS)
    int4 = make_peers("llama-cpp", PeerOptions("m.gguf", "bfloat16", "int4"))
    assert [(spec.name, spec.kind) for spec in int4] == [
        ("llama-cpp", "Q4_1"), ("llama-cpp-q4_0", "Q4_0")
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no peer 'tgi'"):
        make_peers("tgi", options)


def test_gguf_in_another_kind(tmp_path, monkeypatch):
    """Metadata and values survive; a file that is of the kind already is used as it is."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

    from vllm.benchmarks.peers.model_files import gguf_file

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    source = tmp_path / "m.gguf"
    writer = GGUFWriter(source, "llama")
    writer.add_context_length(77)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(1)
    matrix = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float16)
    writer.add_tensor("a.weight", matrix)
    writer.add_tensor("norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_file(str(source), "F16") == source
    made = gguf_file(str(source), "Q8_0")
    assert made == gguf_file(str(source), "Q8_0") and made != source
    reader = GGUFReader(made)
    assert reader.get_field("llama.context_length").contents() == 77
    assert reader.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert kinds == {
        "a.weight": GGMLQuantizationType.Q8_0, "norm.weight": GGMLQuantizationType.F32
    }  # fmt: skip
