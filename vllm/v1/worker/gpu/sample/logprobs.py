# SPDX-License-Identifier: Apache-2.0
"""Logprobs of taken tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm.v1.outputs import LogprobsTensors


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: int,
    named: Mapping[int, Sequence[int]] | None = None,
    are_logprobs: bool = False,
) -> LogprobsTensors:
    """The logprob and rank of each row's token, then the `num_logprobs` most likely tokens.

    logits: (n, vocab) float32; token_ids: (n,) integers.
    named: row -> tokens that it gets in place of the most likely ones.
    are_logprobs: `logits` are logprobs, to be told as they are.
    Returns tensors of (n, 1 + k), k the most that a row has; what is left of a row is token 0 with
    the logprob -inf.
    """
    logprobs = logits if are_logprobs else logits.log_softmax(dim=-1, dtype=torch.float32)
    token_ids = token_ids.long().unsqueeze(-1)
    taken = logprobs.gather(-1, token_ids)
    ranks = (logprobs > taken).sum(-1) + 1
    ids, values = _others(logprobs, num_logprobs, named or {})
    return LogprobsTensors(
        logprob_token_ids=torch.cat([token_ids, ids], dim=-1).to(torch.int32),
        logprobs=torch.cat([taken, values], dim=-1),
        selected_token_ranks=ranks.to(torch.int32),
    )


def _others(
    logprobs: torch.Tensor, num_logprobs: int, named: Mapping[int, Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and logprobs beside each row's own token."""
    top = logprobs.topk(num_logprobs, dim=-1)
    num_missing = max(map(len, named.values()), default=0) - num_logprobs
    ids, values = top.indices, top.values
    if num_missing > 0:
        ids = torch.nn.functional.pad(ids, (0, num_missing))
        values = torch.nn.functional.pad(values, (0, num_missing), value=-torch.inf)
    for row, tokens in named.items():
        wanted = torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)
        ids[row, : len(tokens)] = wanted
        values[row, : len(tokens)] = logprobs[row, wanted]
    return ids, values
