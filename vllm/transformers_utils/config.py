# SPDX-License-Identifier: Apache-2.0
"""Where a model lies and what its config says, read without torch and without transformers' model
code.

`build_hf_config` alone imports transformers (and with it torch); only the engine process calls it.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.transformers_utils.gguf_config import (
    config_dict_from_gguf,
    generation_config_dict_from_gguf,
)
from vllm.transformers_utils.gguf_reader import GGUFFile, is_gguf_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = init_logger(__name__)

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


@lru_cache(maxsize=8)
def _open_gguf(path: str, size_bytes: int, modified_ns: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: str | Path) -> GGUFFile:
    """The parsed header of a GGUF file, kept while the file stays the same."""
    stat = os.stat(path)
    return _open_gguf(str(path), stat.st_size, stat.st_mtime_ns)


def resolve_model_path(
    model: str | Path,
    revision: str | None = None,
    download_dir: str | None = None,
) -> Path:
    """The directory or GGUF file that `model` names: a path, or a hub name that is in the local
    cache.

    Raises ValueError when there is neither, saying what was looked for and what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if is_gguf_file(path):
            return path
        raise ValueError(
            f"{path} is a file but not a GGUF file; pass a model directory or a .gguf file"
        )
    return _cached_snapshot(str(model), revision, download_dir)


def _cached_snapshot(name: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    missing = (
        f"model {name!r} is neither a directory, a GGUF file nor a model in the local "
        "Hugging Face cache"
    )
    if name.endswith(".gguf") or name.startswith(("/", "./", "../", "~")):
        raise ValueError(
            f"model {name!r} does not exist; pass a model directory, a .gguf file or a cached "
            "hub name"
        )
    try:
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except HFValidationError:
        raise ValueError(f"{missing}, and not a name the hub would accept") from None
    except LocalEntryNotFoundError:
        at = "" if revision is None else f" --revision {revision}"
        raise ValueError(f"{missing}; fetch it first with `hf download {name}{at}`") from None


def get_config_dict(
    model: str | Path,
    revision: str | None = None,
    download_dir: str | None = None,
) -> dict[str, Any]:
    """The raw model config: `config.json` of a directory, or its like made from GGUF metadata.

    Raises ValueError when the model or its config cannot be found or read.
    """
    path = resolve_model_path(model, revision, download_dir)
    if path.is_file():
        return config_dict_from_gguf(open_gguf(path))
    config_path = path / CONFIG_NAME
    if not config_path.is_file():
        gguf_files = sorted(file.name for file in path.glob("*.gguf"))
        if gguf_files:
            raise ValueError(
                f"{path} holds GGUF files; name one: "
                f"{', '.join(str(path / f) for f in gguf_files[:8])}"
            )
        raise ValueError(f"{path} has no {CONFIG_NAME}; it is not a model directory")
    return read_json_object(config_path)


def get_generation_config_dict(
    model: str | Path,
    revision: str | None = None,
    download_dir: str | None = None,
) -> dict[str, Any]:
    """The model's own generation defaults (`generation_config.json`); empty where it has none."""
    path = resolve_model_path(model, revision, download_dir)
    if path.is_file():
        return generation_config_dict_from_gguf(open_gguf(path))
    file = path / GENERATION_CONFIG_NAME
    return read_json_object(file) if file.is_file() else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object. Raises ValueError naming the file and the fault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _special_float(value: dict[str, Any]) -> Any:
    """Transformers writes an infinite number, which JSON lacks, as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def get_text_config_dict(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the text decoder; the config itself where it is not
    nested."""
    for key in ("text_config", "decoder"):
        if isinstance(config.get(key), dict) and "num_attention_heads" not in config:
            return config[key]
    return config


def get_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters with `rope_type` and `rope_theta`, from either spelling.

    Transformers 5 writes `rope_parameters`; before, there were `rope_theta` and `rope_scaling`
    (whose type was once called `type`).
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters["rope_type"] = (
        parameters.pop("type", None) or parameters.get("rope_type") or "default"
    )
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return parameters


def build_hf_config(
    config: dict[str, Any],
    model: str | Path = "",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PretrainedConfig:
    """Transformers' config object for a raw config dict.

    Imports transformers: seconds, and torch with it. A `model_type` that transformers does not know
    (a plugin's own) becomes a plain PretrainedConfig with the same fields; with `trust_remote_code`
    the class that the directory `model` brings along is taken.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type].from_dict(dict(config))
    if trust_remote_code and "AutoConfig" in (config.get("auto_map") or {}):
        remote = AutoConfig.from_pretrained(str(model), trust_remote_code=True, revision=revision)
        built = type(remote).from_dict(dict(config))
        built._name_or_path = str(model)  # where its model's code is looked for
        return built
    if model_type:
        logger.warning(
            "model_type %r is not known to transformers; using its config fields as they are",
            model_type,
        )
    return PretrainedConfig.from_dict(dict(config))


def get_config(
    model: str | Path,
    trust_remote_code: bool = False,
    revision: str | None = None,
    code_revision: str | None = None,
    config_format: str = "auto",
    hf_overrides_kw: dict[str, Any] | None = None,
) -> PretrainedConfig:
    """Transformers' config object of a model; `hf_overrides_kw` replaces top-level fields."""
    if config_format not in ("auto", "hf"):
        raise ValueError(f"config_format {config_format!r} is not supported; supported: auto, hf")
    config = {**get_config_dict(model, revision), **(hf_overrides_kw or {})}
    return build_hf_config(config, model, trust_remote_code, code_revision or revision)
