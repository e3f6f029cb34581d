# SPDX-License-Identifier: Apache-2.0
"""Nemotron Parse's config.json, read without the code that comes with the model.

The published file keeps the encoder's config under `encoder` (a RADIO config, most of it in
`encoder.args`), the decoder's under `decoder`, and the page's size in `image_size`. Here the
decoder's fields become the config's own, under the names of mBART and of text models, and the
encoder's sizes become `radio`. Imports no torch.
"""

from __future__ import annotations

import re
from typing import Any

MODEL_TYPE = "nemotron_parse"
PATCH_SIZE = 16
# The neck joins so many patches of a row.
PATCHES_PER_TOKEN = 4

# Transformers' defaults of mBART.
_DECODER_DEFAULTS: dict[str, Any] = dict(
    activation_function="gelu",
    bos_token_id=0,
    d_model=1024,
    decoder_attention_heads=16,
    decoder_layers=12,
    decoder_start_token_id=2,
    eos_token_id=2,
    max_position_embeddings=1024,
    pad_token_id=1,
    scale_embedding=False,
    vocab_size=50265,
)
# Of the ViT in `encoder.args.model`: (width, layers, heads).
_VIT_SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
_VIT_NAME = re.compile(r"vit_([a-z]+)_patch16")
_RADIO_DEFAULTS: dict[str, Any] = dict(
    mlp_ratio=4.0, num_cls_tokens=3, num_registers=7, summary_idxs=[0, 1, 2], max_img_size=2048
)


def complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields that models and engine read; done twice, it is the same.

    Raises:
        ValueError: a size that is missing, unknown or does not fit the patches.
    """
    decoder = {**_DECODER_DEFAULTS, **(config.get("decoder") or {})}
    fields = {name: config.get(name, decoder[name]) for name in _DECODER_DEFAULTS}
    fields["decoder_ffn_dim"] = (
        decoder.get("decoder_ffn_dim") or decoder.get("encoder_ffn_dim") or 4096
    )
    # The decoder has no positions: what it was trained for is the limit.
    fields["max_position_embeddings"] = (
        config.get("max_sequence_length")
        or decoder.get("max_sequence_length")
        or fields["max_position_embeddings"]
    )
    return {
        **config,
        **fields,
        "model_type": MODEL_TYPE,
        "is_encoder_decoder": True,
        "tie_word_embeddings": False,
        "hidden_size": fields["d_model"],
        "num_attention_heads": fields["decoder_attention_heads"],
        "num_hidden_layers": fields["decoder_layers"],
        "dtype": config.get("dtype") or config.get("torch_dtype") or decoder.get("dtype"),
        "image_size": _image_size(config),
        "radio": _radio_fields(config.get("encoder") or {}),
    }


def num_encoder_tokens(image_size: tuple[int, int] | list[int]) -> int:
    """Tokens that the decoder attends to for a page of (height, width) pixels."""
    height, width = image_size
    return (height // PATCH_SIZE) * (width // PATCH_SIZE // PATCHES_PER_TOKEN) + 1


def _image_size(config: dict[str, Any]) -> list[int]:
    size = config.get("image_size")
    if (
        not isinstance(size, (list, tuple))
        or len(size) != 2
        or any(not isinstance(side, int) or side < 1 or side % PATCH_SIZE for side in size)
        or size[1] < PATCH_SIZE * PATCHES_PER_TOKEN
    ):
        raise ValueError(
            f"image_size in the model's config must be [height, width], multiples of {PATCH_SIZE} "
            f"and at least {PATCH_SIZE * PATCHES_PER_TOKEN} wide, not {size!r}"
        )
    return list(size)


def _radio_fields(encoder: dict[str, Any]) -> dict[str, Any]:
    """Arguments of Transformers' RadioConfig. Fields of `encoder` itself come before what its
    `args` say."""
    args = encoder.get("args") or {}
    patch_size = encoder.get("patch_size", PATCH_SIZE)
    if patch_size != PATCH_SIZE:
        raise ValueError(
            f"encoder.patch_size in the model's config is {patch_size}; supported: {PATCH_SIZE}"
        )
    sizes = dict(_RADIO_DEFAULTS, patch_size=PATCH_SIZE)
    if args.get("cpe_max_size"):
        sizes["max_img_size"] = args["cpe_max_size"]
    sizes.update({name: encoder[name] for name in _RADIO_DEFAULTS if name in encoder})
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    if all(name in encoder for name in names):
        return {**sizes, **{name: encoder[name] for name in names}}
    vit = _VIT_NAME.match(str(args.get("model")))
    if vit is None or vit[1] not in _VIT_SIZES:
        raise ValueError(
            f"encoder.args.model in the model's config is {args.get('model')!r}; supported: "
            f"{', '.join(f'vit_{size}_patch16_224' for size in _VIT_SIZES)}, or {', '.join(names)} "
            "in encoder"
        )
    given = zip(names, _VIT_SIZES[vit[1]], strict=True)
    return {**sizes, **{name: encoder.get(name, size) for name, size in given}}
