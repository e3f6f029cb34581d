# SPDX-License-Identifier: Apache-2.0
"""RADIO under a checkpoint's names, against Transformers' own reading of them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from tests.models.nemotron_parse.names import to_checkpoint
from transformers import RadioConfig, RadioModel

from vllm.model_executor.models.radio import RadioEncoder
from vllm.model_executor.utils import set_default_torch_dtype

PREFIX = "encoder.model_encoder."
FIELDS = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    mlp_ratio=2.0,
    max_img_size=64,
    summary_idxs=[0, 1, 2],
    num_cls_tokens=3,
    num_registers=5,
)


@pytest.fixture
def theirs() -> RadioModel:
    torch.manual_seed(0)
    model = RadioModel(RadioConfig(**FIELDS)).eval()
    for name, parameter in model.named_parameters():
        if "layer_scale" not in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.input_conditioner.norm_mean.copy_(torch.tensor([0.3, 0.5, 0.7]).view(3, 1, 1))
    return model


def checkpoint(model: RadioModel) -> dict[str, torch.Tensor]:
    named = to_checkpoint({PREFIX + name: tensor for name, tensor in model.state_dict().items()})
    return {name.removeprefix(PREFIX): tensor for name, tensor in named.items()}


def load(weights: dict[str, torch.Tensor], **changed) -> RadioEncoder:
    encoder = RadioEncoder({**FIELDS, **changed}).eval()
    loaded = encoder.load_weights(weights.items())
    assert not {name for name, _ in encoder.named_parameters()} - loaded
    return encoder


def images(*size: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)


@pytest.mark.parametrize("size", [(32, 64), (64, 32), (48, 48)])
@torch.inference_mode()
def test_equals_transformers(theirs, size):
    """Guards against swapped weights, lost normalisation and transposed patches."""
    pixels = images(*size)
    summary, features = load(checkpoint(theirs))(pixels)
    expected = theirs(pixels.float() / 255)
    torch.testing.assert_close(summary, expected.summary)
    torch.testing.assert_close(features, expected.features)


@torch.inference_mode()
def test_the_names_are_those_that_transformers_reads(theirs, tmp_path):
    """Transformers has a table of the published names of its own: the checkpoint that is loaded
    here must be one there too."""
    theirs.config.save_pretrained(tmp_path)
    save_file(checkpoint(theirs), tmp_path / "model.safetensors", metadata={"format": "pt"})
    read, info = RadioModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name


@torch.inference_mode()
def test_prefix_tokens_and_positions_are_as_many_as_the_checkpoint_has(theirs):
    """No published config says how many registers there are."""
    pixels = images(32, 64)
    encoder = load(checkpoint(theirs), num_registers=1, max_img_size=256)
    torch.testing.assert_close(encoder(pixels)[1], theirs(pixels.float() / 255).features)


@torch.inference_mode()
def test_many_images_go_through_in_parts(theirs, monkeypatch):
    """Splitting a batch must not change or reorder its outputs."""
    encoder, pixels = load(checkpoint(theirs)), images(32, 64).repeat(2, 1, 1, 1)
    whole = encoder(pixels)
    monkeypatch.setattr("vllm.model_executor.models.radio._MAX_PATCHES_PER_PASS", 20)
    for part, expected in zip(encoder(pixels), whole, strict=True):
        torch.testing.assert_close(part, expected)


@torch.inference_mode()
def test_normalisation_is_float32(theirs):
    """A mean rounded to bfloat16 would shift every pixel."""
    with set_default_torch_dtype(torch.bfloat16):
        encoder = load(checkpoint(theirs))
    conditioner = encoder.input_conditioner
    assert torch.equal(conditioner.norm_mean, theirs.input_conditioner.norm_mean)
    assert torch.equal(conditioner.norm_std, theirs.input_conditioner.norm_std)
    assert {p.dtype for p in encoder.parameters()} == {torch.bfloat16}
    summary, features = encoder(images(32, 64))
    assert summary.dtype == features.dtype == torch.bfloat16 and features.isfinite().all()


def test_layer_scales(theirs):
    """Identities are left out; anything else would be ignored silently, and is refused."""
    weights = checkpoint(theirs)
    name = "radio_model.model.blocks.1.ls2.gamma"
    load({**weights, name: torch.ones(32)})
    with pytest.raises(ValueError, match=r"ls2\.gamma scales a layer"):
        load({**weights, name: torch.full((32,), 0.5)})


def test_an_unknown_weight_is_refused(theirs):
    with pytest.raises(ValueError, match="other"):
        load({**checkpoint(theirs), "radio_model.other.weight": torch.ones(1)})
