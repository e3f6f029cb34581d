# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `vllm bench`. Each can measure a peer in the same run."""
