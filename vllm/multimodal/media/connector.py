# SPDX-License-Identifier: Apache-2.0
"""Media by URL: data URLs, and http(s) from hosts that the server's owner allows."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from vllm import envs
from vllm.multimodal.media.fetch import MediaFetcher
from vllm.multimodal.media.image import decode_data_url, decode_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

# Images that are fetched and decoded at once: each may take hundreds of megabytes for a moment.
MAX_CONCURRENT_MEDIA = 8


class MediaConnector:
    """Gets images.

    Args:
        allowed_media_domains: hosts that http(s) URLs may name; None: none.
        fetcher: takes the place of one for those hosts, in VLLM_IMAGE_FETCH_TIMEOUT seconds.
    """

    def __init__(
        self,
        allowed_media_domains: Sequence[str] | None = None,
        *,
        fetcher: MediaFetcher | None = None,
    ) -> None:
        self._fetcher = fetcher or MediaFetcher(
            allowed_media_domains or (), timeout_s=envs.VLLM_IMAGE_FETCH_TIMEOUT
        )
        # Its own threads: slow servers must not take those that tokenise.
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_MEDIA, thread_name_prefix="media")

    def fetch_image(self, image_url: str) -> Image:
        """The image that a URL holds or leads to.

        Raises:
            ValueError: it may not be fetched, could not be, or is no image; says why.
        """
        if image_url[:5].lower() == "data:":
            return decode_image(decode_data_url(image_url))
        if image_url[:7].lower() == "file://":
            raise ValueError("file URLs are not supported: send the image as a data URL")
        return decode_image(self._fetcher.fetch(image_url))

    async def fetch_image_async(self, image_url: str) -> Image:
        """As `fetch_image`, in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.fetch_image, image_url)
