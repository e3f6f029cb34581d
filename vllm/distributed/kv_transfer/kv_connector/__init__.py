# SPDX-License-Identifier: Apache-2.0
"""Connectors: the two halves (scheduler, worker) of what moves keys and values."""
