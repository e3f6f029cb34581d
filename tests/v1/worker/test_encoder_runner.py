# SPDX-License-Identifier: Apache-2.0
"""The encoder gets inputs of one shape together, and its outputs reach their requests."""

from __future__ import annotations

import pytest
import torch

from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.v1.worker.gpu.encoder_runner import EncoderRunner


class Doubler:
    """An encoder that doubles its input, a column a token."""

    supports_ragged_encoder_inputs = False

    def __init__(self, too_short: int = 0) -> None:
        self.calls: list[int] = []
        self.too_short = too_short

    def embed_multimodal(self, **kwargs) -> list[torch.Tensor]:
        values = list(kwargs["values"])
        self.calls.append(len(values))
        if not self.supports_ragged_encoder_inputs:
            assert isinstance(kwargs["values"], torch.Tensor)
        return [2 * value[self.too_short :, None] for value in values]


class Ragged(Doubler):
    supports_ragged_encoder_inputs = True


def make_features(*lengths: int) -> list[MultiModalFeatureSpec]:
    values = [torch.full((n,), float(i)) for i, n in enumerate(lengths)]
    config = {"values": MultiModalFieldConfig.batched("text")}
    items = MultiModalKwargsItems.from_hf_inputs({"values": values}, config)["text"]
    return [
        MultiModalFeatureSpec(item, "text", f"x{i}", PlaceholderRange(0, n), None)
        for i, (item, n) in enumerate(zip(items, lengths))
    ]


@pytest.mark.parametrize(("model", "calls"), [(Doubler(), [2, 1, 2]), (Ragged(), [5])])
def test_outputs_in_order(model, calls):
    """Mixed lengths, put together by shape or not: each output is that of its own input."""
    outputs = EncoderRunner(model, torch.device("cpu")).run(make_features(3, 5, 3, 1, 1))
    assert [len(output) for output in outputs] == [3, 5, 3, 1, 1]
    assert [float(output[0]) for output in outputs] == [0, 2, 4, 6, 8]
    assert sorted(model.calls) == sorted(calls)


def test_nothing_to_encode():
    model = Doubler()
    assert EncoderRunner(model, torch.device("cpu")).run([]) == [] and not model.calls


def test_another_length_than_announced():
    """Pages and slots are for the announced length: fewer or more rows would be misplaced."""
    runner = EncoderRunner(Doubler(too_short=1), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"Doubler.*\(2,\)\].*text inputs of \[\(3,\)\]"):
        runner.run(make_features(3))
