# SPDX-License-Identifier: Apache-2.0
"""Multimodal inputs. Importing this imports no torch."""

from vllm.multimodal.inputs import BatchedTensorInputs, MultiModalKwargsItems, NestedTensors

__all__ = ["BatchedTensorInputs", "MultiModalKwargsItems", "NestedTensors"]
