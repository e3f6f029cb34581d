# SPDX-License-Identifier: Apache-2.0
"""Images from the bytes of their files."""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats that clients send; PIL knows others, whose decoders are less tried.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_MEDIA_BYTES = 32 << 20


def decode_image(data: bytes) -> Image:
    """The (first) image of a file, all of it decoded.

    Raises:
        ValueError: no image, a broken one, or one with more pixels than PIL takes for sane.
    """
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    try:
        # Reads the header; the pixels are decoded below.
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ...
        reason = "it is larger than PIL takes" if isinstance(
            error, Image.DecompressionBombError
        ) else f"it is none of {', '.join(FORMATS)}"
        raise ValueError(f"the image cannot be read: {reason}") from None
    if limit is not None and image.width * image.height > limit:
        raise ValueError(
            f"the image has {image.width} x {image.height} pixels; at most {limit} are read"
        )
    try:
        image.load()
    except Exception as error:
        raise ValueError(f"the image is broken: {error}") from None
    return image


def decode_data_url(url: str) -> bytes:
    """The bytes of a data URL such as data:image/png;base64,...

    Raises:
        ValueError: it is none of an image, or too large.
    """
    header, comma, payload = url.partition(",")
    media_type, *options = header[len("data:") :].split(";")
    if not comma or not media_type.strip().lower().startswith("image/"):
        raise ValueError("a data URL must be of the form data:image/png;base64,...")
    if len(payload) > 2 * MAX_MEDIA_BYTES:
        raise ValueError(f"the image is larger than {MAX_MEDIA_BYTES >> 20} MiB")
    if not any(option.strip().lower() == "base64" for option in options):
        raise ValueError("the data URL is not in base64")
    try:
        data = base64.b64decode(unquote_to_bytes(payload), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the data URL is not valid base64") from None
    if len(data) > MAX_MEDIA_BYTES:
        raise ValueError(f"the image is larger than {MAX_MEDIA_BYTES >> 20} MiB")
    return data
