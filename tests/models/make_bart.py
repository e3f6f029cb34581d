# SPDX-License-Identifier: Apache-2.0
"""Trains the BART in `tests/models/bart`: `python -m tests.models.make_bart [folder]`.

It turns dates in words and in many formats into ISO dates. About five minutes on one CPU core; the
weights differ in their last bits between machines, so that what is committed is the model.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from tests.models.bart_dates import examples

FOLDER = Path(__file__).parent / "bart"
_VOCAB_SIZE, _NUM_STEPS, _BATCH = 512, 1500, 64
_BOS, _PAD, _EOS, _UNK = range(4)
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_MAX_LENGTH = 16  # of the output: start, BOS, ten characters, EOS


def make_tokenizer():
    """Byte-level BPE whose digits stand alone, with BART's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for text, _ in examples(20000, 1, False)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", _BOS), ("</s>", _EOS)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=256,
    )


def make_model():
    """A BART of 1.2 million parameters, untrained."""
    from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig

    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=_VOCAB_SIZE,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=256,
        dropout=0.0,
        pad_token_id=_PAD,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        decoder_start_token_id=_EOS,
        forced_eos_token_id=_EOS,
    )
    model = BartForConditionalGeneration(config)
    # As the published summarisation models have it.
    model.generation_config = GenerationConfig(
        bos_token_id=_BOS,
        pad_token_id=_PAD,
        eos_token_id=_EOS,
        decoder_start_token_id=_EOS,
        forced_bos_token_id=_BOS,
        forced_eos_token_id=_EOS,
        max_length=_MAX_LENGTH,
        num_beams=4,
        early_stopping=True,
    )
    return model


def train(model, tokenizer) -> None:
    """Teacher forcing with a learning rate that falls to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=_NUM_STEPS, pct_start=0.1
    )
    began = time.monotonic()
    model.train()
    for step in range(_NUM_STEPS):
        texts, dates = zip(*examples(_BATCH, 1000 + step, False))
        inputs = tokenizer(list(texts), padding=True, return_tensors="pt")
        labels = tokenizer(list(dates), padding=True, return_tensors="pt")["input_ids"]
        labels = labels.masked_fill(labels == _PAD, -100)
        loss = model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step + 1 == _NUM_STEPS:
            print(f"step {step}: loss {loss:.4f}, {time.monotonic() - began:.0f} s", flush=True)
    model.eval()


@torch.inference_mode()
def accuracy(model, tokenizer, count: int = 500) -> float:
    """Share of held-out examples that it gets right, greedily."""
    right = 0
    pairs = examples(count, 2, True)
    for first in range(0, count, 100):
        texts, dates = zip(*pairs[first : first + 100])
        inputs = tokenizer(list(texts), padding=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, num_beams=1)
        answers = tokenizer.batch_decode(output, skip_special_tokens=True)
        right += sum(answer == date for answer, date in zip(answers, dates))
    return right / count


def main(folder: Path = FOLDER) -> None:
    """Trains and saves."""
    tokenizer, model = make_tokenizer(), make_model()
    train(model, tokenizer)
    model = model.half().float()  # as it will be read
    print(f"held-out accuracy {accuracy(model, tokenizer):.3f}")
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
