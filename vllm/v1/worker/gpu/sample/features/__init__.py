# SPDX-License-Identifier: Apache-2.0
"""What is built in, in the order it is applied: what forbids tokens, what shifts them, (logits
processors that are not built in,) the penalties, what forces a token."""

from vllm.v1.worker.gpu.sample.features.allowed_token_ids import AllowedTokenIds
from vllm.v1.worker.gpu.sample.features.bad_words import BadWords
from vllm.v1.worker.gpu.sample.features.base import LogitsFeature
from vllm.v1.worker.gpu.sample.features.forced_eos import ForcedEos
from vllm.v1.worker.gpu.sample.features.logit_bias import LogitBias
from vllm.v1.worker.gpu.sample.features.min_tokens import MinTokens
from vllm.v1.worker.gpu.sample.features.no_repeat_ngram import NoRepeatNgram
from vllm.v1.worker.gpu.sample.features.penalties import Penalties


def make_features() -> list[LogitsFeature]:
    """New ones, for a sampler; `Penalties` and `ForcedEos` come after them."""
    return [AllowedTokenIds(), NoRepeatNgram(), BadWords(), MinTokens(), LogitBias()]


__all__ = ["ForcedEos", "LogitsFeature", "Penalties", "make_features"]
