# SPDX-License-Identifier: Apache-2.0
"""Token ids to text as they come, and stop strings in that text."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest

# What decoders write for bytes that are no character (yet).
REPLACEMENT = "\ufffd"
# Prompt tokens before the output in the first decodes: decoders may treat a text's first token
# differently.
_CONTEXT_TOKENS = 5
# A character has 4 bytes at most, so what stays unfinished for longer is no text.
_MAX_PENDING_TOKENS = 32


@dataclass(frozen=True)
class _Vocabulary:
    """What is asked of a tokenizer again and again. `special_ids`: tokens that
    skip_special_tokens leaves out; `added_ids`: those and others that are no part of the model's
    own vocabulary."""

    decode: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]
    added_ids: frozenset[int]


@lru_cache(maxsize=8)
def _vocabulary_of(tokenizer: TokenizerLike) -> _Vocabulary:
    added = frozenset(tokenizer.get_added_vocab().values())
    if not tokenizer.is_fast:
        special = frozenset(tokenizer.all_special_ids)
        return _Vocabulary(lambda ids: tokenizer.decode(ids), special, added)
    backend = tokenizer.backend_tokenizer
    decoder = backend.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in decoder.items() if token.special)
    return _Vocabulary(lambda ids: backend.decode(ids, skip_special_tokens=False), special, added)


class IncrementalDecoder:
    """Decodes a growing sequence of token ids piece by piece.

    The pieces, joined, are what the tokenizer decodes of the whole sequence (after `context_ids`).
    A piece ends where a character ends: the bytes of an unfinished one wait until it is complete,
    or for `flush`. Only a window of recent ids is decoded each time:

        ids:  settled ... | given out, kept as context | pending: a part of a character |
                          <------------------------- _window --------------------------->
                          <------- _num_given -------->
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        context_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        vocabulary = _vocabulary_of(tokenizer)
        self._decode = vocabulary.decode
        self._skipped_ids = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._joined_ids = frozenset() if spaces_between_special_tokens else vocabulary.added_ids
        self._last_id = -1
        context = [t for t in context_ids[-_CONTEXT_TOKENS:] if t not in self._skipped_ids]
        self._start_window(context, len(context))

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return self._settle_what_is_certain(text)
        piece = self._beyond_given(text)
        self._start_window(self._window[self._num_given :])
        return self._without_space_between(token_id, piece)

    def flush(self) -> str:
        """The text of what is still pending, replacement characters and all."""
        if self._num_given == len(self._window):
            return ""
        piece = self._beyond_given(self._decode(self._window))
        self._start_window(self._window[self._num_given :])
        return piece

    def _start_window(self, ids: list[int], num_given: int | None = None) -> None:
        self._window = ids
        self._num_given = len(ids) if num_given is None else num_given
        self._given_text = self._decode(ids[: self._num_given]) if self._num_given else ""

    def _beyond_given(self, text: str) -> str:
        given = self._given_text
        if text.startswith(given):
            return text[len(given) :]
        # The context ended inside a character, which is complete now.
        return text[len(os.path.commonprefix([given, text])) :]

    def _settle_what_is_certain(self, text: str) -> str:
        """Keeps the window small when bytes go on and on that are no character: gives out the part
        that later bytes cannot change, i.e. splits where both sides decode to the whole."""
        if len(self._window) - self._num_given <= _MAX_PENDING_TOKENS:
            return ""
        for num_kept in range(4, 9):
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            head_text = self._decode(head)
            if head_text + self._decode(tail) == text:
                piece = self._beyond_given(head_text)
                self._start_window(tail, 0)
                return piece
        return ""

    def _without_space_between(self, token_id: int, piece: str) -> str:
        """Some decoders put a space between any two tokens; between two added tokens it is dropped
        if the request says so."""
        if token_id in self._joined_ids and self._last_id in self._joined_ids:
            piece = piece.removeprefix(" ")
        self._last_id = token_id
        return piece


class IncrementalDetokenizer:
    """The output of one completion: its ids, its text so far, and whether a stop string ended it.

    Without a tokenizer, or with detokenize=False, it keeps ids only and the text stays empty.
    """

    def __init__(self, params: SamplingParams, decoder: IncrementalDecoder | None) -> None:
        self.token_ids: list[int] = []
        self.output_text = ""
        self._decoder = decoder
        self._stop = params.stop if decoder is not None else []
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_held_back = params.output_text_buffer_length
        self._num_checked = 0
        self._num_sent = 0

    @classmethod
    def from_new_request(
        cls, tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> IncrementalDetokenizer:
        """For a request that starts now."""
        params = request.sampling_params
        if tokenizer is None or not params.detokenize:
            return cls(params, None)
        decoder = IncrementalDecoder(
            tokenizer,
            request.prompt_token_ids,
            params.skip_special_tokens,
            params.spaces_between_special_tokens,
        )
        return cls(params, decoder)

    @property
    def output_token_ids(self) -> list[int]:
        """All ids sampled so far; to be read only."""
        return self.token_ids

    def num_output_tokens(self) -> int:
        """Ids sampled so far."""
        return len(self.token_ids)

    def update(
        self, new_token_ids: list[int], stop_terminated: bool, finished: bool = False
    ) -> str | None:
        """Takes in new ids; returns the stop string that ends the output, if one does.

        stop_terminated: the last id is a stop token; it is left out of the text unless the request
            asks for stop strings in its output.
        finished: nothing more comes, so text of unfinished characters is given out.
        """
        self.token_ids.extend(new_token_ids)
        if self._decoder is None:
            return None
        num_before = len(self.token_ids) - len(new_token_ids)
        hides_last = stop_terminated and not self._include_stop
        shown = new_token_ids[:-1] if hides_last else new_token_ids
        for number, token_id in enumerate(shown, num_before + 1):
            self.output_text += self._decoder.step(token_id)
            # Text of the first min_tokens ends nothing, but a stop string may begin in it.
            if number <= self._min_tokens:
                self._num_checked = len(self.output_text)
        if finished or stop_terminated:
            self.output_text += self._decoder.flush()
        return self._check_stop() if self._stop else None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """All text so far, or with `delta` what was not given out yet. Unless `finished`, as many
        characters are held back as may become a stop string."""
        held_back = 0 if finished else self._num_held_back
        end = max(len(self.output_text) - held_back, self._num_sent if delta else 0)
        if not delta:
            return self.output_text[:end] if held_back else self.output_text
        begin, self._num_sent = self._num_sent, end
        return self.output_text[begin:end]

    def _check_stop(self) -> str | None:
        """The stop string that is complete first in the unchecked text; cuts the text there. What
        is found does not depend on how the text is divided into tokens."""
        text, checked = self.output_text, self._num_checked
        self._num_checked = len(text)
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = text.find(stop, max(0, checked - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        end, begin, stop = best
        self.output_text = text[: end if self._include_stop else begin]
        return stop
