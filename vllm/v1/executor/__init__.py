# SPDX-License-Identifier: Apache-2.0
"""Executors."""

from vllm.v1.executor.abstract import Executor

__all__ = ["Executor"]
