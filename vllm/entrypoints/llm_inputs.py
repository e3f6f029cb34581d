# SPDX-License-Identifier: Apache-2.0
"""What callers of `LLM` may hand in: one of a thing, or a list of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.inputs import PromptType
from vllm.inputs.parse import check_unicode

Message = Mapping[str, Any]


def prompts_of(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """The prompts one by one. A list of integers is one: token ids.

    Raises:
        TypeError: it is neither a prompt nor several.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a prompt or a list of prompts, not {_kind(prompts)}")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def conversations_of(messages: Any) -> list[list[Message]]:
    """The conversations one by one. A list of dicts is one.

    Raises:
        TypeError: it is neither a conversation nor several.
        ValueError: a conversation is empty.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages must be a list of messages, not {_kind(messages)}")
    conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        if not isinstance(conversation, (list, tuple)):
            raise TypeError(f"a conversation must be a list of messages, not {_kind(conversation)}")
        if not conversation:
            raise ValueError("a conversation is empty: it needs a message")
        wrong = next((m for m in conversation if not isinstance(m, Mapping)), None)
        if wrong is not None:
            raise TypeError(f"a message must be a dict with role and content, not {_kind(wrong)}")
    return list(conversations)


def with_text_content(message: Message) -> Message:
    """The message with its content as one text, as most templates want it.

    Raises:
        ValueError: it holds something else than text, or what is no Unicode.
    """
    content = message.get("content")
    if content is None:
        return message
    if isinstance(content, str):
        check_unicode(content, "content")
        return message
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"content must be a text or a list of parts, not {_kind(content)}")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise ValueError(f"content of type {kind!r} is not supported; supported: text")
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"a part's text must be a string, not {_kind(text)}")
        check_unicode(text, "content")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def one_each(name: str, given: Any, count: int, kind: type) -> list[Any]:
    """One for each prompt, of one for all or of as many as there are prompts.

    Raises:
        TypeError: it is something else than `kind`, or than a list of it.
        ValueError: there are more or fewer.
    """
    if isinstance(given, kind):
        return [given] * count
    is_list = isinstance(given, (list, tuple))
    for value in given if is_list else [given]:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {kind.__name__} or a list of it, not {_kind(value)}")
    if len(given) != count:
        raise ValueError(f"there are {count} prompts, but {len(given)} {name}")
    return list(given)


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
