# SPDX-License-Identifier: Apache-2.0
"""Which architectures the installed Transformers has a language model for.

Importing Transformers' tables takes seconds and brings torch along; reading their source does not.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_TABLES = Path("models", "auto", "modeling_auto.py")
_CAUSAL_LM = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_SEQ_TO_SEQ_LM = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"


def causal_lm_architectures() -> frozenset[str] | None:
    """Class names such as `GPTNeoXForCausalLM`; None where the tables cannot be read (Transformers
    itself then tells what it does not know)."""
    return _architectures(_CAUSAL_LM)


def seq_to_seq_lm_architectures() -> frozenset[str] | None:
    """The same of models with an encoder: names such as `MarianMTModel`."""
    return _architectures(_SEQ_TO_SEQ_LM)


@cache
def _architectures(table_name: str) -> frozenset[str] | None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        source = Path(spec.submodule_search_locations[0], _TABLES).read_text(encoding="utf-8")
        table = next(
            node.value
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table_name
        )
    except (OSError, SyntaxError, StopIteration):
        return None
    strings = (node for node in ast.walk(table) if isinstance(node, ast.Tuple))
    return frozenset(
        pair.elts[1].value
        for pair in strings
        if len(pair.elts) == 2 and isinstance(pair.elts[1], ast.Constant)
    )
