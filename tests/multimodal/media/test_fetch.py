# SPDX-License-Identifier: Apache-2.0
"""A client who names a URL reaches public hosts that the server's owner allowed, and nothing else.

The servers are real, on this machine; the resolver and the connector are the test's, since names
and addresses of the internet are not to be had.
"""

from __future__ import annotations

import io
import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from vllm.multimodal.media import fetch as fetch_module
from vllm.multimodal.media.address import is_public
from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.media.fetch import MediaFetcher

HOST, OTHER, PUBLIC, PUBLIC_6 = "images.test", "other.test", "93.184.216.34", "2606:2800:220::1"


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.seen.append((self.headers["Host"], self.path))
        name, _, argument = self.path.lstrip("/").partition("/")
        getattr(self, f"_{name}")(argument)

    def _answer(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers and "Transfer_Encoding" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, size):
        self._answer(200, b"x" * int(size))

    def _png(self, _):
        buffer = io.BytesIO()
        Image.new("RGB", (3, 2)).save(buffer, "PNG")
        self._answer(200, buffer.getvalue(), Content_Type="text/html")

    def _status(self, status):
        self._answer(int(status))

    def _to(self, target):
        self._answer(302, Location=target)

    def _away(self, _):
        self._answer(302)

    def _loop(self, _):
        self._answer(302, Location="/loop/")

    def _gzip(self, _):
        self._answer(200, b"x", Content_Encoding="gzip")

    def _short(self, _):
        self._answer(200, b"x", Content_Length="10")
        self.close_connection = True

    def _claims(self, size):
        self._answer(200, Content_Length=size)
        self.close_connection = True

    def _endless(self, _):
        self._answer(200, Transfer_Encoding="chunked")
        try:
            while True:
                self.wfile.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        except OSError:
            self.close_connection = True

    def _drip(self, where):
        """A byte now and then: in the headers, or in a body that ends with the connection."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if where == "body" else b"X: "))
        self.close_connection = True
        try:
            while not self.server.stopping.wait(0.02):
                self.wfile.write(b"x")
        except OSError:
            pass

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.seen, made.stopping = [], threading.Event()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.stopping.set()
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def make_fetcher(server):
    """Connects to the server whatever the address, and remembers it."""

    def make(names=None, **options):
        names = {HOST: [PUBLIC], OTHER: [PUBLIC]} if names is None else names
        fetcher = MediaFetcher(
            options.pop("allowed", [HOST]),
            resolver=lambda host, port: names[host],
            connector=lambda address, port, timeout: (
                connected.append((address, port)),
                socket.create_connection(server.server_address, timeout),
            )[1],
            **options,
        )
        connected = fetcher.connected = []
        return fetcher

    return make


def test_a_file_of_an_allowed_host(make_fetcher, server):
    fetcher = make_fetcher()
    assert fetcher.fetch(f"http://{HOST}/file/70000") == b"x" * 70000
    assert fetcher.fetch("HTTP://Images.Test.:8080/file/1") == b"x"
    assert fetcher.connected == [(PUBLIC, 80), (PUBLIC, 8080)]
    assert server.seen == [(HOST, "/file/70000"), (f"{HOST}:8080", "/file/1")]


def test_an_image_of_an_allowed_host(make_fetcher):
    """What the file is says its content, not the server."""
    connector = MediaConnector(fetcher=make_fetcher())
    assert connector.fetch_image(f"http://{HOST}/png/").size == (3, 2)
    with pytest.raises(ValueError, match="the image cannot be read"):
        connector.fetch_image(f"http://{HOST}/file/9")


@pytest.mark.parametrize(
    "url",
    [
        f"http://{OTHER}/file/1",
        f"http://x.{HOST}/file/1",
        f"http://{HOST}.evil.test/file/1",
        f"http://{HOST}@{OTHER}/file/1",
        f"http://{OTHER}/{HOST}",
        f"http://{OTHER}#@{HOST}/file/1",
        f"http://{OTHER}?@{HOST}/file/1",
        f"http://{OTHER}\\@{HOST}/file/1",
        f"http://{HOST} .{OTHER}/file/1",
        f"http://{HOST}%2f.{OTHER}/file/1",
        f"http://user@{HOST}/file/1",
        f"http://:@{HOST}/file/1",
        f"http://{HOST}:0x50/file/1",
        f"http://{HOST}:99999/file/1",
        f"http://{HOST}\r\nX: y/file/1",
        "http://ｉmages.test/file/1",
        f"ftp://{HOST}/file/1",
        "file:///etc/passwd",
        f"//{HOST}/file/1",
        f"{HOST}/file/1",
        "http:///file/1",
        "http://[::1/file/1",
        "http://127.0.0.1/file/1",
        "http://2130706433/file/1",
        "http://[::ffff:127.0.0.1]/file/1",
        "",
        f"http://{HOST}/" + "x" * 9000,
    ],
)
def test_other_urls_are_refused_before_anything_is_reached(make_fetcher, url):
    """Fault: the host that is checked is not the one that is connected to."""
    fetcher = make_fetcher()
    with pytest.raises(ValueError):
        fetcher.fetch(url)
    assert fetcher.connected == []


NOT_PUBLIC = [
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
    "::ffff:7f00:1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::",
    "2002:a00:1::", "2001:0:7f00:1::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00::1", "ff02::1",
    "2001:db8::1", "100::1", "fec0::1", "", "images.test", "0x7f.1",
]  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
@pytest.mark.parametrize("is_alone", [True, False])
def test_names_of_addresses_that_are_not_public_are_refused(make_fetcher, address, is_alone):
    """Fault: a public name leads to the server's own machine, network or metadata service; one
    address of several is checked and another is taken."""
    fetcher = make_fetcher({HOST: [address] if is_alone else [PUBLIC, address]})
    with pytest.raises(ValueError, match="its address is not public") as caught:
        fetcher.fetch(f"http://{HOST}/file/1")
    assert fetcher.connected == [] and (not address or address not in str(caught.value)[20:])


@pytest.mark.parametrize("address", [PUBLIC, PUBLIC_6, "8.8.8.8", "::ffff:8.8.8.8"])
def test_public_addresses(make_fetcher, address):
    assert is_public(address)
    fetcher = make_fetcher({HOST: [address]})
    assert fetcher.fetch(f"http://{HOST}/file/1") == b"x"
    assert fetcher.connected == [(address, 80)]


def test_allowing_a_host_does_not_allow_its_private_address(make_fetcher):
    """The owner may list anything; localhost stays out of reach."""
    for host in ("localhost", "127.0.0.1", "::1"):
        name = f"[{host}]" if ":" in host else host
        fetcher = MediaFetcher([host])  # the system's resolver
        with pytest.raises(ValueError, match="not public"):
            fetcher.fetch(f"http://{name}/file/1")


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(make_fetcher, server):
    """Fault (rebinding): the name is looked up again, and by then is that of the server itself."""
    answers = [[PUBLIC], ["127.0.0.1"]]
    fetcher = make_fetcher()
    fetcher.resolver = lambda host, port: answers.pop(0)
    assert fetcher.fetch(f"http://{HOST}/file/1") == b"x"
    assert fetcher.connected == [(PUBLIC, 80)] and len(answers) == 1


def test_redirects_within_the_allowed_hosts(make_fetcher):
    fetcher = make_fetcher(allowed=[HOST, OTHER])
    assert fetcher.fetch(f"http://{HOST}/to//file/2") == b"xx"
    assert fetcher.fetch(f"http://{HOST}/to/http://{OTHER}/file/3") == b"xxx"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"to/http://{OTHER}/file/1", "media of other.test are not fetched"),
        ("to///127.0.0.1/file/1", "media of 127.0.0.1 are not fetched"),
        ("to/http://127.0.0.1/file/1", "media of 127.0.0.1 are not fetched"),
        ("to/http://[::ffff:127.0.0.1]/", "are not fetched"),
        ("to/file:///etc/passwd", "URLs of file are not supported"),
        ("away/", "redirects to nowhere"),
        ("loop/", "redirects more than 5 times"),
    ],
)
def test_redirects_elsewhere_are_refused(make_fetcher, path, message):
    """Fault: the first URL is checked, and the redirect followed by the library."""
    fetcher = make_fetcher()
    with pytest.raises(ValueError, match=message):
        fetcher.fetch(f"http://{HOST}/{path}")
    assert {address for address, _ in fetcher.connected} == {PUBLIC}


def test_a_redirect_to_a_name_with_a_private_address_is_refused(make_fetcher):
    fetcher = make_fetcher({HOST: [PUBLIC], OTHER: ["10.0.0.1"]}, allowed=[HOST, OTHER])
    with pytest.raises(ValueError, match="media of other.test are not fetched"):
        fetcher.fetch(f"http://{HOST}/to/http://{OTHER}/file/1")
    assert fetcher.connected == [(PUBLIC, 80)]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/1001", "larger than 1000 bytes"),
        ("claims/99999999999", "larger than 1000 bytes"),
        ("endless/", "larger than 1000 bytes"),
        ("short/", "the connection to images.test failed"),
        ("gzip/", "compressed"),
        ("status/404", "status 404"),
        ("status/500", "status 500"),
        ("status/204", "status 204"),
    ],
)
def test_answers_that_are_no_file_of_bounded_size(make_fetcher, path, message):
    """Fault: memory fills up; half a file is taken for one."""
    with pytest.raises(ValueError, match=message):
        make_fetcher(max_bytes=1000).fetch(f"http://{HOST}/{path}")
    assert make_fetcher(max_bytes=1000).fetch(f"http://{HOST}/file/1000") == b"x" * 1000


@pytest.mark.parametrize("where", ["headers", "body"])
def test_the_time_is_bounded_as_a_whole(make_fetcher, where):
    """Fault: each read waits anew, so that a byte now and then holds a thread for ever."""
    with pytest.raises(ValueError, match="did not answer in 0.3 s"):
        make_fetcher(timeout_s=0.3).fetch(f"http://{HOST}/drip/{where}")


def test_a_resolver_that_hangs_and_one_that_fails(make_fetcher):
    fetcher = make_fetcher(timeout_s=0.1)
    stop = threading.Event()
    fetcher.resolver = lambda host, port: stop.wait(10) and []
    with pytest.raises(ValueError, match="cannot be resolved"):
        fetcher.fetch(f"http://{HOST}/file/1")
    stop.set()

    def fail(host, port):
        raise socket.gaierror(-2, "Name or service not known")

    fetcher.resolver = fail
    with pytest.raises(ValueError, match="images.test cannot be resolved"):
        fetcher.fetch(f"http://{HOST}/file/1")


def test_a_host_that_refuses_connections(make_fetcher):
    fetcher = make_fetcher()

    def refuse(address, port, timeout):
        raise ConnectionRefusedError

    fetcher.connector = refuse
    with pytest.raises(ValueError, match="images.test cannot be reached"):
        fetcher.fetch(f"http://{HOST}/file/1")


@pytest.mark.parametrize("failure", [ConnectionRefusedError, TimeoutError, OSError])
def test_each_address_is_tried(make_fetcher, server, failure):
    """Fault: a name with an IPv6 address, asked for where there is no IPv6, is never reached. An
    address that says nothing leaves time for the next."""
    fetcher = make_fetcher({HOST: [PUBLIC, "8.8.4.4", "1.1.1.1"]}, timeout_s=6.0)
    tried = []

    def take_the_last(address, port, timeout):
        tried.append((address, timeout))
        if address != "1.1.1.1":
            raise failure
        return socket.create_connection(server.server_address, timeout)

    fetcher.connector = take_the_last
    assert fetcher.fetch(f"http://{HOST}/file/3") == b"xxx"
    assert [address for address, _ in tried] == [PUBLIC, "8.8.4.4", "1.1.1.1"]
    assert tried[0][1] <= 2.0 and tried[1][1] <= 3.0
    fetcher.connector = lambda *_: (_ for _ in ()).throw(failure)
    said = "did not answer" if failure is TimeoutError else "cannot be reached"
    with pytest.raises(ValueError, match=said):
        fetcher.fetch(f"http://{HOST}/file/3")


@pytest.mark.parametrize("host", ["http://a.test", "a.test/x", "*.a.test", "a b", "u@a.test", "", "x" * 70])
def test_the_owners_list_holds_host_names(host):
    """Fault: an entry that never matches is taken without a word."""
    with pytest.raises(ValueError, match="takes host names"):
        MediaFetcher([host])


def test_numbers_are_connected_to_as_they_are():
    """Fault: the default connector looks up a name."""
    with pytest.raises(OSError):
        fetch_module.connect("127.0.0.1", 1, 0.5)
    assert fetch_module.resolve("127.0.0.1", 80) == ["127.0.0.1"]


@pytest.fixture
def tls_files(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("makes a certificate with openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def test_https_proves_the_name_and_not_the_address(make_fetcher, server, tls_files):
    """Fault: connecting to a number, the certificate is checked against the number, or not at
    all."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls_files)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    trusting = ssl.create_default_context(cafile=tls_files[0])
    fetcher = make_fetcher(tls=trusting, allowed=[HOST, OTHER], timeout_s=20.0)
    assert fetcher.fetch(f"https://{HOST}/file/3") == b"xxx"
    assert fetcher.connected == [(PUBLIC, 443)]
    with pytest.raises(ValueError, match="connection to other.test is not trusted"):
        fetcher.fetch(f"https://{OTHER}/file/3")
    with pytest.raises(ValueError, match="connection to images.test is not trusted"):
        make_fetcher().fetch(f"https://{HOST}/file/3")
    fetcher.timeout_s = 0.5
    begin = time.monotonic()
    with pytest.raises(ValueError, match="did not answer"):
        fetcher.fetch(f"https://{HOST}/drip/body")
    assert time.monotonic() - begin < 15
