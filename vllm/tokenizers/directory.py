# SPDX-License-Identifier: Apache-2.0
"""A tokenizer from a model directory: `tokenizer.json` beside `tokenizer_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vllm.tokenizers.fast import FastTokenizer, TokenizerSettings
from vllm.transformers_utils.config import read_json_object

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
CHAT_TEMPLATE_DIR = "additional_chat_templates"

# Classes of Transformers that add nothing to what `tokenizer.json` and `tokenizer_config.json` say.
_PLAIN_CLASSES = frozenset(
    {
        "PreTrainedTokenizer",
        "TokenizersBackend",
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "Qwen2Tokenizer",
        "GemmaTokenizer",
    }
)
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Transformers writes 1e30 for "no limit".
_NO_LENGTH_LIMIT = 10**9


def is_plain_tokenizer_dir(path: Path) -> bool:
    """Whether `tokenizer_from_directory` gives what Transformers would: else its own class is
    needed."""
    if not (path / TOKENIZER_NAME).is_file():
        return False
    config = _read_config(path)
    name = str(config.get("tokenizer_class") or "TokenizersBackend").removesuffix("Fast")
    return name in _PLAIN_CLASSES and "auto_map" not in config


def tokenizer_from_directory(path: Path) -> FastTokenizer:
    """The tokenizer of a directory with `tokenizer.json`. Raises ValueError where a file is not
    valid."""
    file = path / TOKENIZER_NAME
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file} cannot be read: {error}") from None
    return FastTokenizer(backend, _settings(path), name_or_path=str(path))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / TOKENIZER_CONFIG_NAME
    return read_json_object(file) if file.is_file() else {}


def _settings(path: Path) -> TokenizerSettings:
    config = _read_config(path)
    special = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    extra = list(extra.values()) if isinstance(extra, dict) else list(extra)
    # Older directories list here tokens that their tokenizer.json lacks.
    added = config.get("added_tokens_decoder") or {}
    extra += [token for token in added.values() if isinstance(token, dict) and token.get("special")]
    max_length = config.get("model_max_length")
    # add_bos_token and add_eos_token are left out: beside a tokenizer.json its post-processor
    # decides.
    return TokenizerSettings(
        special_tokens=special,
        extra_special_tokens=tuple(_token_text(token) for token in extra),
        chat_template=_chat_template(path, config),
        model_max_length=int(max_length) if max_length and max_length < _NO_LENGTH_LIMIT else None,
    )


def _token_text(token: Any) -> str:
    """The text of a token written as text or as `{"content": ...}`."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _chat_template(path: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The templates in files if there are any, else the config's."""
    templates: dict[str, str] = {}
    if (path / CHAT_TEMPLATE_NAME).is_file():
        templates["default"] = (path / CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")
    for file in sorted((path / CHAT_TEMPLATE_DIR).glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    declared = config.get("chat_template")
    if not templates and isinstance(declared, str):
        return declared
    if not templates and isinstance(declared, list):
        templates = {entry["name"]: entry["template"] for entry in declared}
    return templates.get("default") if set(templates) <= {"default"} else templates
