# SPDX-License-Identifier: Apache-2.0
"""Images by URL: what is none, is broken or is a bomb is refused in words."""

import asyncio
import base64
import io
import struct
import zlib

import pytest
from PIL import Image

from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.media.image import FORMATS, MAX_MEDIA_BYTES, decode_image

RED = Image.new("RGB", (3, 2), (255, 0, 0))


def file_of(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_that_claims(width, height):
    """A PNG of some bytes whose header promises that many pixels."""

    def chunk(kind, data):
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind):
    image = decode_image(file_of(RED, kind))
    assert image.size == (3, 2)
    red, green, blue = image.convert("RGB").getpixel((1, 1))
    assert red > 200 and green < 60 and blue < 60


def test_data_urls():
    connector = MediaConnector()
    for url in (
        data_url(file_of(RED)),
        data_url(file_of(RED, "JPEG"), "image/jpeg;charset=x"),
        data_url(file_of(RED)).replace("data:image/png", "DATA:Image/PNG").replace("+", "%2B"),
    ):
        assert connector.fetch_image(url).size == (3, 2)
    assert asyncio.run(connector.fetch_image_async(data_url(file_of(RED)))).size == (3, 2)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:", "must be of the form"),
        ("data:image/png;base64", "must be of the form"),
        ("data:text/plain;base64,QQ==", "must be of the form"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,Q", "not valid base64"),
        ("data:image/png;base64,QQ==\n", "not valid base64"),
        ("data:image/png;base64,", "cannot be read"),
        (data_url(b"hello"), "none of PNG"),
        (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "none of PNG"),
        (data_url(file_of(Image.effect_noise((64, 64), 50))[:900]), "broken"),
        (data_url(png_that_claims(20000, 20000)), "larger than PIL takes"),
        (data_url(png_that_claims(10000, 10000)), "10000 x 10000 pixels; at most"),
        ("data:image/png;base64," + "A" * (2 * MAX_MEDIA_BYTES + 4), "larger than 32 MiB"),
        ("file:///etc/passwd", "file URLs are not supported"),
        ("http://images.test/a.png", "--allowed-media-domains has none; send.* data URL"),
        ("/etc/passwd", "no scheme"),
    ],
    ids=lambda value: value[:40],
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_what_is_no_image(url, message):
    """Fault: a traceback, or memory for what a header promises."""
    with pytest.raises(ValueError, match=message):
        MediaConnector().fetch_image(url)
