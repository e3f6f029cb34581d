# SPDX-License-Identifier: Apache-2.0
"""Media as they come from clients: decoding (`image`) and fetching (`fetch`, `connector`)."""

from vllm.multimodal.media.base import MediaWithBytes

__all__ = ["MediaWithBytes"]
