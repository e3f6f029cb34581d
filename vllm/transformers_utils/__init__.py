# SPDX-License-Identifier: Apache-2.0
"""Model files read without torch: configs, GGUF metadata, where models lie on disk."""
