# SPDX-License-Identifier: Apache-2.0
"""Chat templates rendered as Transformers documents it, without importing Transformers.

https://huggingface.co/docs/transformers/main/en/chat_templating_writing: jinja2's immutable sandbox
with `trim_blocks`, `lstrip_blocks`, loop controls, a `tojson` that escapes nothing,
`raise_exception`, `strftime_now` and the `{% generation %}` tag. A template is code from a
stranger: it sees plain JSON data only, and whatever goes wrong in it is the request's ValueError.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

# Appended to the message that is to be continued; ends in a space so that trimming can be noticed.
_CONTINUE_MARK = "VLLM_CONTINUE_FINAL_MESSAGE_HERE "


def render_chat_template(
    conversation: Sequence[Mapping[str, Any]],
    chat_template: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **template_kwargs: Any,
) -> str:
    """The prompt text of a conversation.

    `continue_final_message` leaves the last message open, so that the model goes on with it. Raises
    ValueError when the options contradict each other, the template is not valid or it fails on
    these messages.
    """
    if not conversation:
        raise ValueError("the conversation is empty; give at least one message")
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them"
        )
    messages = [_plain_message(message) for message in conversation]
    final_text = _mark_final_message(messages) if continue_final_message else ""
    rendered = _render(
        chat_template,
        {
            **_plain(template_kwargs),
            "messages": messages,
            "tools": _plain(tools),
            "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return _cut_at_mark(rendered, final_text) if continue_final_message else rendered


def check_chat_template(chat_template: str) -> None:
    """Checks a template's syntax, without a conversation.

    Raises:
        ValueError: it is no valid Jinja template; says in which line.
    """
    import jinja2

    try:
        _compile(chat_template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is not valid (line {error.lineno}): {error.message}"
        ) from None


def _render(chat_template: str, variables: dict[str, Any]) -> str:
    import jinja2

    check_chat_template(chat_template)
    try:
        return _compile(chat_template).render(**variables)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"the chat template refused this conversation: {error.message or error}"
        ) from None
    except Exception as error:  # the template is foreign code: any fault of it is the request's
        raise ValueError(
            f"the chat template failed on this conversation: {type(error).__name__}: {error}"
        ) from None


@lru_cache(maxsize=32)
def _compile(chat_template: str) -> Template:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks what the model wrote; here it is
        transparent."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(chat_template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _plain_message(message: Any) -> dict[str, Any]:
    """A message as plain data, without the keys that are None (APIs send `tool_calls: null`)."""
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise ValueError(
            f"a chat message must be an object with a role, not {type(message).__name__}"
        )
    return {key: value for key, value in plain.items() if value is not None}


def _plain(value: Any) -> Any:
    """`value` rebuilt from JSON types, so that no object with methods reaches a template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if callable(getattr(value, "model_dump", None)):  # a pydantic model
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _mark_final_message(messages: list[dict[str, Any]]) -> str:
    """Append the mark to the last message's text; returns that text as it was."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_MARK
        return content
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = part["text"]
            part["text"] = text + _CONTINUE_MARK
            return text
    raise ValueError("continue_final_message is set, but the final message has no text to continue")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    position = rendered.rfind(_CONTINUE_MARK.strip())
    if position < 0 or final_text.strip() not in rendered:
        raise ValueError(
            "continue_final_message is set, but the chat template does not keep the final "
            "message as it is"
        )
    kept = rendered[:position]
    # The mark's space is gone where the template trims messages: then the message's own end was
    # trimmed too.
    return kept if rendered.startswith(_CONTINUE_MARK, position) else kept.rstrip()
