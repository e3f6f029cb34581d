# SPDX-License-Identifier: Apache-2.0
"""Pages of KV caches read by one engine from another's memory, through NIXL."""
