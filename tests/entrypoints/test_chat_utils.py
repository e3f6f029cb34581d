# SPDX-License-Identifier: Apache-2.0
"""Messages to a conversation, and where templates come from. (Messages that are wrong:
openai/test_errors.py.)"""

from __future__ import annotations

import pytest

from vllm.entrypoints.chat_utils import load_chat_template, parse_chat_messages, render_prompt


class _Tokenizer:
    """Records what a template would be given."""

    def get_chat_template(self, chat_template=None, tools=None):
        return chat_template or "own"

    def apply_chat_template(self, conversation, tools=None, **kwargs):
        self.seen = (conversation, kwargs)
        return "rendered"


def test_messages_are_plain():
    """A template gets role, text and name; whatever else a client sends does not reach it."""
    messages = [
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}], "name": "n", "x": object()},
        {"role": "assistant", "content": "", "tool_calls": [], "function_call": None},
    ]
    assert parse_chat_messages(messages) == [
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "assistant", "content": ""},
    ]


def test_template_and_variables():
    """The server's template, the request's own variables, text and not ids."""
    tokenizer = _Tokenizer()
    rendered = render_prompt(
        tokenizer, [{"role": "user", "content": "x"}], chat_template="given",
        template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert rendered == "rendered"
    kwargs = tokenizer.seen[1]
    assert (kwargs["chat_template"], kwargs["tokenize"]) == ("given", False)
    assert kwargs["add_generation_prompt"] is True and kwargs["enable_thinking"] is False


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "add_generation_prompt"])
def test_reserved_variables(name):
    """A request must not change what the server decides: a template is code."""
    with pytest.raises(ValueError, match=f"cannot set {name}"):
        render_prompt(_Tokenizer(), [{"role": "user", "content": "x"}], template_kwargs={name: 1})


def test_deep_variables():
    """A request nested as deep as JSON allows must not become a fault of the server."""
    from vllm.tokenizers import cached_get_tokenizer
    from vllm.transformers_utils.embedded import resolve_model

    deep: list = []
    for _ in range(5000):
        deep = [deep]
    tokenizer = cached_get_tokenizer(resolve_model(None))
    with pytest.raises(ValueError, match="nested too deeply"):
        render_prompt(tokenizer, [{"role": "user", "content": "x"}], template_kwargs={"x": deep})


def test_no_template_says_what_to_pass():
    """Whatever the tokenizer's own words, the option is named."""

    class Bare(_Tokenizer):
        def get_chat_template(self, chat_template=None, tools=None):
            raise ValueError("tokenizer.chat_template is not set")

    with pytest.raises(ValueError, match="--chat-template"):
        render_prompt(Bare(), [{"role": "user", "content": "x"}])


def test_load_chat_template(tmp_path):
    """A file's text, or the template itself; a name that is neither is an error at the start."""
    file = tmp_path / "a.jinja"
    file.write_text("{{ messages }}ü", encoding="utf-8")
    assert load_chat_template(str(file)) == "{{ messages }}ü"
    assert load_chat_template("{{ x }}") == "{{ x }}"
    assert load_chat_template(None) is None
    with pytest.raises(ValueError, match="--chat-template 'nowhere.jinja'"):
        load_chat_template("nowhere.jinja")
    with pytest.raises(ValueError, match="--chat-template"):
        load_chat_template(str(tmp_path))
    # Not only when the first conversation comes.
    with pytest.raises(ValueError, match=r"--chat-template: .* not valid \(line 1\)"):
        load_chat_template("{{")
