# SPDX-License-Identifier: Apache-2.0
"""Models, their layers, and how weights get into them."""
