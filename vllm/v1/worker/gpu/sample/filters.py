# SPDX-License-Identifier: Apache-2.0
"""top_k, top_p and min_p: which tokens may be drawn. What is left out becomes -inf."""

from __future__ import annotations

import torch

# Tokens that are looked at before a row's whole vocabulary is sorted: most nuclei are smaller.
_NUCLEUS_GUESS = 1024


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Leaves out tokens less likely than `min_p` times the most likely one, in place.

    logits: (n, vocab) float32; min_p: (n,) float32, 0: nothing.
    """
    bound = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(-1)
    logits.masked_fill_(logits < bound, -torch.inf)


def apply_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keeps the `top_k` most likely tokens, of these the fewest that together have `top_p` of the
    probability, in place.

    logits: (n, vocab) float32; top_k: (n,) int64, 0: all; top_p: (n,) float32, 1: all.
    Tokens as likely as the last one that is kept are kept as well.
    """
    vocab_size = logits.shape[-1]
    top_k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    guess = int(torch.where(top_p < 1, top_k.clamp(max=_NUCLEUS_GUESS), top_k).max())
    bounds, enough = _lowest_kept(logits, top_k, top_p, min(max(guess, 1), vocab_size))
    if not bool(enough.all()):
        rows = (~enough).nonzero().squeeze(-1)
        bounds[rows], _ = _lowest_kept(logits[rows], top_k[rows], top_p[rows], vocab_size)
    logits.masked_fill_(logits < bounds.unsqueeze(-1), -torch.inf)


def _lowest_kept(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest logit that each row keeps, and whether `num_candidates` were enough to tell."""
    values = logits.topk(num_candidates, dim=-1).values
    ranks = torch.arange(num_candidates, device=logits.device)
    in_top_k = ranks < top_k.unsqueeze(-1)
    in_top_k_values = values.masked_fill(~in_top_k, -torch.inf)
    all_mass = torch.where(
        top_k < logits.shape[-1], in_top_k_values.logsumexp(-1), logits.logsumexp(-1)
    )
    mass = (in_top_k_values - all_mass.unsqueeze(-1)).exp()
    mass_before = mass.cumsum(-1) - mass
    # A token is kept while those before it fall short of top_p; top_p 1 keeps all of them.
    keeps_all = (top_p >= 1).unsqueeze(-1)
    kept = in_top_k & ((mass_before < top_p.unsqueeze(-1)) | keeps_all)
    last = kept.sum(-1) - 1
    bounds = values.gather(-1, last.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    bounds = torch.where((top_k == logits.shape[-1]) & (top_p >= 1), -torch.inf, bounds)
    enough = (last + 1 < num_candidates) | (top_k <= num_candidates) | torch.isinf(bounds)
    return bounds, enough
