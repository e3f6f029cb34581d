# SPDX-License-Identifier: Apache-2.0
"""Chat messages as clients send them, to a conversation as templates take it, to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.chat_template import check_chat_template

SUPPORTED_PART_TYPES = ("text",)
# Parts that hold an image, for models that read them; the last in a program only.
IMAGE_PART_TYPES = ("image_url", "image_pil")
_TOOL_ROLES = ("tool", "function")
# What the server decides itself; a request's template variables must not.
_RESERVED_VARIABLES = (
    "chat_template", "tokenize", "conversation", "messages", "tools", "documents",
    "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors",
)  # fmt: skip

ConversationMessage = dict[str, Any]


def parse_chat_messages(
    messages: Sequence[Mapping[str, Any]], part_types: Sequence[str] = SUPPORTED_PART_TYPES
) -> list[ConversationMessage]:
    """Checks messages and joins the text parts of each with line breaks. Parts of the other
    `part_types` are left out.

    Raises:
        ValueError: names the message and what is wrong with it.
    """
    if not messages:
        raise ValueError("messages is empty: give at least one")
    return [
        _parse_message(message, f"messages[{i}]", part_types) for i, message in enumerate(messages)
    ]


def _parse_message(
    message: Mapping[str, Any], place: str, part_types: Sequence[str]
) -> ConversationMessage:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place}.role must be a text such as user, not {role!r:.100}")
    if role in _TOOL_ROLES or message.get("tool_calls") or message.get("function_call"):
        raise ValueError(f"{place}: tool calls are not supported by this server")
    parsed: ConversationMessage = {
        "role": role,
        "content": text_of(message.get("content"), f"{place}.content", part_types),
    }
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise ValueError(f"{place}.name must be a text, not {name!r:.100}")
        parsed["name"] = name
    return parsed


def text_of(content: Any, place: str, part_types: Sequence[str] = SUPPORTED_PART_TYPES) -> str:
    """The text parts of a message's content, joined with line breaks.

    Raises:
        ValueError: names the place of a part that is none of `part_types`.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place} must be a text or a list of parts, not {content!r:.100}")
    texts = [_text_of_part(part, f"{place}[{i}]", part_types) for i, part in enumerate(content)]
    return "\n".join(text for text in texts if text is not None)


def _text_of_part(part: Any, place: str, part_types: Sequence[str]) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ValueError(f'{place} must be a part such as {{"type": "text", "text": "..."}}')
    if part["type"] not in part_types:
        raise ValueError(
            f"{place}: parts of type {part['type']!r:.100} are not supported; supported: "
            f"{', '.join(part_types)}"
        )
    if part["type"] != "text":
        return None
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{place}.text must be a text")
    return part["text"]


def render_prompt(
    tokenizer: TokenizerLike,
    conversation: Sequence[ConversationMessage],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text, with the special tokens that the template writes.

    Raises:
        ValueError: there is no template, it fails on this conversation, or `template_kwargs` would
            change what the server decides.
    """
    reserved = [name for name in template_kwargs or {} if name in _RESERVED_VARIABLES]
    if reserved:
        raise ValueError(f"chat_template_kwargs cannot set {reserved[0]}")
    try:
        rendered = tokenizer.apply_chat_template(
            list(conversation),
            chat_template=_template(tokenizer, chat_template),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **(template_kwargs or {}),
        )
        assert isinstance(rendered, str)
        rendered.encode()
    except UnicodeEncodeError:
        raise ValueError("the conversation is not valid Unicode") from None
    except RecursionError:
        raise ValueError("chat_template_kwargs is nested too deeply") from None
    return rendered


def _template(tokenizer: TokenizerLike, chat_template: str | None) -> str:
    try:
        return tokenizer.get_chat_template(chat_template)
    except ValueError as error:
        advice = "start the server with --chat-template"
        if "--chat-template" in str(error):
            raise
        raise ValueError(f"the model has no chat template that can be used; {advice}") from error


def load_chat_template(chat_template: str | None) -> str | None:
    """The template that `--chat-template` names: a file, or the template itself.

    Raises:
        ValueError: no such file, and no template: it has nothing that Jinja would fill in; or its
            syntax is wrong.
    """
    if chat_template is None:
        return None
    text = _read_template(chat_template)
    try:
        check_chat_template(text)
    except ValueError as error:
        raise ValueError(f"--chat-template: {error}") from None
    return text


def _read_template(chat_template: str) -> str:
    is_template = any(mark in chat_template for mark in "{}\n")
    if is_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--chat-template {chat_template!r} is neither a Jinja template nor a readable file: "
            f"{error}"
        ) from None
