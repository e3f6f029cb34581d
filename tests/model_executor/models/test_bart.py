# SPDX-License-Identifier: Apache-2.0
"""BART and mBART against Transformers: the encoder over several texts at once, the decoder over one
sequence with attention that keeps no pages, and checkpoints in all their shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.model_executor.models.conftest import PlainAttention

TEXTS = [[5, 9, 33, 7, 2], [8], [0, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 2]]


class PlainCrossAttention(PlainAttention):
    """Every query sees all keys."""

    def __init__(self, *args, **kwargs) -> None:
        kwargs.pop("attn_type")
        super().__init__(*args, **kwargs)

    def forward(self, query, key, value):
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0], self.num_heads, self.head_size).transpose(0, 1)[None]

        output = F.scaled_dot_product_attention(
            heads(query), heads(key), heads(value), scale=self.scale
        )
        return output[0].transpose(0, 1).reshape(query.shape[0], -1)


@pytest.fixture(autouse=True)
def plain_attention(monkeypatch) -> None:
    monkeypatch.setattr("vllm.model_executor.models.bart.Attention", PlainAttention)
    monkeypatch.setattr("vllm.model_executor.models.bart.CrossAttention", PlainCrossAttention)


def make(tmp_path, model_type: str, **changes) -> nn.Module:
    """Transformers' random model, saved to `tmp_path`."""
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

    fields = dict(
        vocab_size=131,
        d_model=48,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=3,
        encoder_ffn_dim=80,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        init_std=0.3,
    )
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**fields, **changes})
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which hide faults
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            nn.init.normal_(parameter, mean=mean, std=0.2)
    nn.init.normal_(model.final_logits_bias)
    model.save_pretrained(tmp_path)
    return model


def rename(tmp_path, change) -> None:
    """Rewrites the checkpoint: `change` takes and gives a dict of its weights."""
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@torch.inference_mode()
def check_equal(ours: nn.Module, theirs: nn.Module) -> None:
    """The encoder's output of every text, and the logits after a decoder prompt."""
    outputs = ours.embed_multimodal(encoder_input_ids=[torch.tensor(t) for t in TEXTS])
    for text, output in zip(TEXTS, outputs, strict=True):
        expected = theirs.model.encoder(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
    decoder_ids = torch.tensor([2, 0, 44, 17, 3])
    hidden = ours(decoder_ids, torch.arange(5), encoder_outputs=outputs[2:])
    expected = theirs(input_ids=torch.tensor([TEXTS[2]]), decoder_input_ids=decoder_ids[None])
    torch.testing.assert_close(ours.compute_logits(hidden), expected.logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["bart", "mbart"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(scale_embedding=True),
        dict(tie_word_embeddings=False),
        dict(activation_function="relu"),
    ],
    ids=lambda c: next(iter(c), "plain"),
)
def test_equals_transformers(tmp_path, load, model_type, changes):
    """Several texts in one pass, of one token too, see nothing of each other."""
    theirs = make(tmp_path, model_type, **changes)
    check_equal(load(tmp_path), theirs)


def test_texts_of_one_length_come_as_one_tensor(tmp_path, load):
    """As the runner hands in items of equal shape."""
    make(tmp_path, "bart")
    model = load(tmp_path)
    texts = torch.tensor([TEXTS[0], TEXTS[0][::-1]])
    with torch.inference_mode():
        together = model.embed_multimodal(encoder_input_ids=texts)
        for text, output in zip(texts, together, strict=True):
            (alone,) = model.embed_multimodal(encoder_input_ids=text[None])
            torch.testing.assert_close(output, alone)


@pytest.mark.parametrize(
    "name",
    [
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_old_names_and_the_tied_table_under_each_of_its_names(tmp_path, load, name):
    """Older checkpoints lack the leading `model.`, and which name of a tied table survives depends
    on who wrote them."""
    theirs = make(tmp_path, "bart")

    def old(weights):
        weights[f"model.{name}" if name != "lm_head.weight" else name] = weights.pop(
            "model.shared.weight"
        )
        old = {key.removeprefix("model."): value for key, value in weights.items()}
        return {**old, "encoder.version": torch.zeros(1), "decoder.version": torch.zeros(1)}

    rename(tmp_path, old)
    check_equal(load(tmp_path), theirs)


def test_a_checkpoint_without_the_logits_bias(tmp_path, load):
    """It is zero then."""
    theirs = make(tmp_path, "bart")
    rename(tmp_path, lambda w: {k: v for k, v in w.items() if k != "final_logits_bias"})
    theirs.final_logits_bias.zero_()
    check_equal(load(tmp_path), theirs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.decoder.layers.1.encoder_attn.v_proj.bias", r"kv_proj.bias \(shard v\)"),
        ("model.encoder.layers.0.self_attn.q_proj.weight", r"qkv_proj.weight \(shard q\)"),
        ("model.shared.weight", r"model.shared.weight"),
    ],
)
def test_a_missing_weight_is_named(tmp_path, load, name, message):
    """Guards against a fused weight that is filled in part."""
    make(tmp_path, "bart")
    rename(tmp_path, lambda w: {k: v for k, v in w.items() if k != name})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("model_type", ["bart", "mbart"])
def test_float16_overflow_is_clamped(tmp_path, load, model_type):
    """An encoder's activations beyond float16's range stay finite, as Transformers keeps them.
    Guards against infinities (post-norm), and NaN for the whole text behind them (pre-norm)."""
    theirs = make(tmp_path, model_type, encoder_layers=1)
    layer = theirs.model.encoder.layers[0]
    if model_type == "bart":
        layer.final_layer_norm.weight.data.fill_(4e4)
    else:
        layer.self_attn.out_proj.bias.data.fill_(4e4)
        layer.fc2.bias.data.fill_(4e4)
    theirs.half().save_pretrained(tmp_path)
    with torch.inference_mode():
        (ours,) = load(tmp_path, "float16").embed_multimodal(encoder_input_ids=[torch.tensor([5])])
        expected = theirs.model.encoder(torch.tensor([[5]])).last_hidden_state[0]
    assert ours.isfinite().all()
    if model_type == "bart":
        assert ours.abs().max() == torch.finfo(torch.float16).max - 1000
        torch.testing.assert_close(ours, expected, atol=8.0, rtol=0.05)
