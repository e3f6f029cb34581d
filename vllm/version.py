# SPDX-License-Identifier: Apache-2.0
"""The version: upstream's API level first, so that plugins' version checks hold, then a local label."""

__version__ = "0.28.0+compact.1"
__version_tuple__ = (0, 28, 0, "compact.1")
