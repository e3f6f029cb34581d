# SPDX-License-Identifier: Apache-2.0
"""Logprobs of taken tokens and of the most likely ones."""

from __future__ import annotations

import torch

from vllm.v1.outputs import LogprobsTensors


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> LogprobsTensors:
    """The logprob and rank of each row's token, then the `num_logprobs` most likely tokens.

    logits: (n, vocab) float32; token_ids: (n,) integers. Returns tensors of (n, 1 + num_logprobs).
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    token_ids = token_ids.long().unsqueeze(-1)
    taken = logprobs.gather(-1, token_ids)
    ranks = (logprobs > taken).sum(-1) + 1
    top = logprobs.topk(num_logprobs, dim=-1)
    return LogprobsTensors(
        logprob_token_ids=torch.cat([token_ids, top.indices], dim=-1).to(torch.int32),
        logprobs=torch.cat([taken, top.values], dim=-1),
        selected_token_ranks=ranks.to(torch.int32),
    )
