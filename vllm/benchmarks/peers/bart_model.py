# SPDX-License-Identifier: Apache-2.0
"""A BART of the base model's shape with random weights: an encoder-decoder model that every engine
can be measured with, made here because none is small enough to ship."""

from __future__ import annotations

import shutil
from pathlib import Path

import vllm.envs as envs

# Another name for another content: folders of older versions are not used again.
_NAME = "bart-base-random-1"
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
VOCAB_SIZE, NUM_SPECIAL_IDS = 50265, len(_SPECIAL)
_SEED = 0


def random_bart() -> Path:
    """Folder of the checkpoint in VLLM_CACHE_ROOT/bench, in Hugging Face's format; float32."""
    path = Path(envs.VLLM_CACHE_ROOT) / "bench" / _NAME / "hf"
    if path.exists():
        return path
    partial = path.with_name("hf.partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    _save_model(partial)
    _save_tokenizer(partial)
    partial.rename(path)
    return path


def _save_model(folder: Path) -> None:
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(_SEED)
    config = BartConfig(
        vocab_size=VOCAB_SIZE,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        max_position_embeddings=1024,
        # As published checkpoints say; CTranslate2's converter asks for them.
        normalize_before=False,
        normalize_embedding=True,
    )
    BartForConditionalGeneration(config).save_pretrained(folder)


def _save_tokenizer(folder: Path) -> None:
    """A word for each id: some engines take tokens, not ids, and look them up in a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = (*_SPECIAL, *(f"w{i}" for i in range(len(_SPECIAL), VOCAB_SIZE)))
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    special = dict(zip(names, _SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
