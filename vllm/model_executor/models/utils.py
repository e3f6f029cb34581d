# SPDX-License-Identifier: Apache-2.0
"""Helpers for model classes."""

from __future__ import annotations

from vllm.model_executor.layer_index import extract_layer_index

__all__ = ["extract_layer_index"]
