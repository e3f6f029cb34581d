# SPDX-License-Identifier: Apache-2.0
"""Keys and values that travel between engines."""
