# SPDX-License-Identifier: Apache-2.0
"""Chat messages and content parts to prompts of encoder-decoder models.

A text is what it would be in a plain prompt: the encoder's for a model that reads text, the
decoder's for one that reads images; the images go to the encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.chat_utils import (
    IMAGE_PART_TYPES,
    SUPPORTED_PART_TYPES,
    ConversationMessage,
    parse_chat_messages,
    render_prompt,
)
from vllm.inputs import PromptType, TextPrompt
from vllm.multimodal.media.connector import MediaConnector
from vllm.tokenizers import TokenizerLike

if TYPE_CHECKING:
    from PIL.Image import Image

    from vllm.inputs.encoder_decoder import EncoderDecoderPreprocessor


@dataclass(frozen=True)
class ImageSource:
    """An image in a message: a URL to be fetched, or the image."""

    place: str
    source: str | Image
    is_url: bool


@dataclass(frozen=True)
class EncoderChat:
    """A conversation for one answer. `is_rendered`: a template wrote its special tokens."""

    text: str
    images: Sequence[ImageSource]
    is_rendered: bool


def part_types_of(preprocessor: EncoderDecoderPreprocessor, is_server: bool) -> tuple[str, ...]:
    """The content parts that a model takes. Imports the model's class."""
    if "image" not in preprocessor.modalities:
        return SUPPORTED_PART_TYPES
    return SUPPORTED_PART_TYPES + (IMAGE_PART_TYPES[:1] if is_server else IMAGE_PART_TYPES)


def parse_encoder_chat(
    messages: Sequence[Mapping[str, Any]],
    part_types: Sequence[str],
    tokenizer: TokenizerLike,
    *,
    chat_template: str | None = None,
    **options: Any,
) -> EncoderChat:
    """The text that the template makes of a conversation, and its images. Without a template there
    must be one message, a user's: its text is the prompt.

    Args:
        options: of `render_prompt`.

    Raises:
        ValueError: what is wrong with the messages.
    """
    conversation = parse_chat_messages(messages, part_types)
    images = [
        source
        for i, message in enumerate(messages)
        for source in image_sources(message.get("content"), f"messages[{i}].content")
    ]
    if _has_template(tokenizer, chat_template):
        text = render_prompt(tokenizer, conversation, chat_template=chat_template, **options)
        return EncoderChat(text, images, is_rendered=True)
    return EncoderChat(_only_text(conversation), images, is_rendered=False)


def image_sources(content: Any, place: str) -> list[ImageSource]:
    """The images among the parts of a message's content.

    Raises:
        ValueError: a part holds none; names its place.
    """
    sources: list[ImageSource] = []
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PART_TYPES:
            continue
        where = f"{place}[{index}].{part['type']}"
        source = part.get(part["type"])
        is_url = part["type"] == "image_url"
        if is_url:
            source = source.get("url") if isinstance(source, Mapping) else source
            if not isinstance(source, str) or not source:
                raise ValueError(f'{where} must be of the form {{"url": "..."}}')
        sources.append(ImageSource(where, source, is_url))
    return sources


def encoder_prompt(text: str, images: Sequence[Any]) -> PromptType:
    """A text with images, fetched, as a prompt."""
    if not images:
        return text
    return TextPrompt(prompt=text, multi_modal_data={"image": list(images)})


def _has_template(tokenizer: TokenizerLike, chat_template: str | None) -> bool:
    try:
        tokenizer.get_chat_template(chat_template)
    except ValueError:
        return False
    return True


def _only_text(conversation: Sequence[ConversationMessage]) -> str:
    if len(conversation) != 1 or conversation[0]["role"] != "user":
        roles = ", ".join(message["role"] for message in conversation)
        raise ValueError(
            f"the model has no chat template: messages must be one of role user, not {roles:.100}"
        )
    return conversation[0]["content"]


def chat_prompts(
    preprocessor: EncoderDecoderPreprocessor,
    allowed_media_domains: Sequence[str] | None,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tokenizer: TokenizerLike,
    **options: Any,
) -> tuple[list[PromptType], dict[str, Any]]:
    """Conversations in a program as prompts, with the tokenisation options that all of them need.

    Args:
        options: of `parse_encoder_chat`.

    Raises:
        ValueError: what is wrong with the messages, or with an image.
    """
    part_types = part_types_of(preprocessor, is_server=False)
    media = MediaConnector(allowed_media_domains)
    chats = [parse_encoder_chat(one, part_types, tokenizer, **options) for one in conversations]
    prompts = [
        encoder_prompt(chat.text, [_fetched(image, media) for image in chat.images])
        for chat in chats
    ]
    return prompts, {"add_special_tokens": not any(chat.is_rendered for chat in chats)}


def _fetched(image: ImageSource, media: MediaConnector) -> Any:
    if not image.is_url:
        return image.source
    try:
        return media.fetch_image(str(image.source))
    except ValueError as error:
        raise ValueError(f"{image.place}: {error}") from error
