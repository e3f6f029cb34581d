# SPDX-License-Identifier: Apache-2.0
"""Media as they come from clients: decoding and fetching."""
