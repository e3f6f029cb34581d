# SPDX-License-Identifier: Apache-2.0
"""What the runner remembers of each request between steps.

A request keeps its row from the step that brings it to the step that ends it; rows are never
moved. Truth is on the host, in numpy, so that a whole batch is prepared by indexing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class RequestState:
    """Rows of all requests.

    all_token_ids: (max_num_reqs, max_model_len + 1) int32, prompt and output
    prompt_len, total_len: (max_num_reqs,) int32, tokens known of the prompt and in all
    num_computed_tokens: (max_num_reqs,) int32, tokens whose K and V are in the cache
    encoder_len: (max_num_reqs,) int32, tokens of the encoder's output, 0 without an encoder
    """

    def __init__(self, max_num_reqs: int, max_model_len: int) -> None:
        self.max_num_reqs = max_num_reqs
        self.req_id_to_index: dict[str, int] = {}
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))
        # A column more: a request that is full ends with a token behind.
        self.all_token_ids = np.zeros((max_num_reqs, max_model_len + 1), dtype=np.int32)
        self.prompt_len = np.zeros(max_num_reqs, dtype=np.int32)
        self.total_len = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_computed_tokens = np.zeros(max_num_reqs, dtype=np.int32)
        self.encoder_len = np.zeros(max_num_reqs, dtype=np.int32)

    @property
    def num_reqs(self) -> int:
        """Requests that have a row."""
        return len(self.req_id_to_index)

    def add_request(
        self,
        req_id: str,
        prompt_len: int,
        all_token_ids: Sequence[int],
        num_computed_tokens: int,
        encoder_len: int = 0,
    ) -> int:
        """Gives the request a row and returns it.

        Raises:
            RuntimeError: the request has one, or all are taken; the scheduler keeps to both.
        """
        if req_id in self.req_id_to_index or not self._free_rows:
            raise RuntimeError(f"no row for request {req_id}: {self.num_reqs} are in use")
        row = self._free_rows.pop()
        self.req_id_to_index[req_id] = row
        self.all_token_ids[row, : len(all_token_ids)] = all_token_ids
        self.prompt_len[row] = prompt_len
        self.total_len[row] = len(all_token_ids)
        self.num_computed_tokens[row] = num_computed_tokens
        self.encoder_len[row] = encoder_len
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Frees the request's row and returns it; None if it has none."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            self._free_rows.append(row)
        return row

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Adds a sampled token to each of `rows`; one past the model's length is a request's last."""
        self.all_token_ids[rows, self.total_len[rows]] = token_ids
        self.total_len[rows] += 1
