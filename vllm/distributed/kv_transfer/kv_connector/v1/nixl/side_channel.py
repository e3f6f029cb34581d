# SPDX-License-Identifier: Apache-2.0
"""What engines tell each other beside the transfers: a ZMQ socket, bounded msgpack messages.

    decode                          prefill
    GetMetadata(hash)       ->
                            <-      Handshake(hash, metadata)     or Refused(reason)
    Heartbeat(ids)          ->                                    renews leases
    Release(id)             ->
                            <-      Released(id, held)            see `leases`

It listens on localhost unless told otherwise: whoever reaches it can learn where the KV cache is.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time

import msgspec
import zmq
import zmq.utils.monitor

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.leases import Leases
from vllm.logger import init_logger

logger = init_logger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
_MAX_PARKED = 65536
_MAX_QUEUED_MESSAGES = 65536


class GetMetadata(msgspec.Struct, tag=True):
    """Opens a handshake with `engine_id`."""

    compatibility_hash: str
    engine_id: str


class Heartbeat(msgspec.Struct, tag=True):
    """These requests of `engine_id` will still be read."""

    engine_id: str
    request_ids: list[str]


class Release(msgspec.Struct, tag=True):
    """A request of `engine_id` was read, or will not be."""

    engine_id: str
    request_id: str


class Handshake(msgspec.Struct, tag=True):
    """`metadata` is to be read only where the hash is one's own."""

    compatibility_hash: str
    metadata: bytes


class Refused(msgspec.Struct, tag=True):
    """No handshake; `reason` is for people."""

    reason: str


class Released(msgspec.Struct, tag=True):
    """`held`: the pages were kept until this was answered."""

    request_id: str
    held: bool


Question = GetMetadata | Heartbeat | Release
Answer = Handshake | Refused | Released
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


def _limit(sock: zmq.Socket) -> zmq.Socket:
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, _MAX_QUEUED_MESSAGES)
    sock.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
    return sock


class SideChannelServer:
    """Answers peers, in a thread of its own, whatever the engine is doing.

    Args:
        port: 0: any free one, see `port`.

    Raises:
        ValueError: host and port cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        engine_id: str,
        compatibility_hash: str,
        metadata: bytes,
        leases: Leases,
    ) -> None:
        self._engine_id = engine_id
        self._hash = compatibility_hash
        self._metadata = metadata
        self._leases = leases
        # Releases of leases that are not known yet: (peer, request) -> until when to wait.
        self._parked: dict[tuple[bytes, str], float] = {}
        self._socket = _limit(zmq.Context.instance().socket(zmq.ROUTER))
        self._wake_address = f"inproc://nixl-side-channel-{next(_numbers)}"
        self._waker = zmq.Context.instance().socket(zmq.PAIR)
        self._waker.bind(self._wake_address)
        try:
            self.port = self._bind(host, port)
        except (zmq.ZMQError, OSError) as error:
            self._socket.close()
            self._waker.close()
            raise ValueError(
                f"the NIXL side channel cannot listen on {host}:{port} ({error}); set "
                "VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT, to other ports for "
                "engines of one machine"
            ) from error
        self._thread = threading.Thread(target=self._run, name="nixl-side-channel", daemon=True)
        self._thread.start()

    def _bind(self, host: str, port: int) -> int:
        address = socket.gethostbyname(host)
        if port == 0:
            return self._socket.bind_to_random_port(f"tcp://{address}")
        self._socket.bind(f"tcp://{address}:{port}")
        return port

    def close(self) -> None:
        """Stops the thread. May be called twice."""
        if not self._waker.closed:
            self._waker.send(b"")
            self._thread.join()
            self._waker.close()

    def _run(self) -> None:
        wake = zmq.Context.instance().socket(zmq.PAIR)
        wake.connect(self._wake_address)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        try:
            while wake not in dict(poller.poll(5 if self._parked else None)):
                try:
                    self._answer_all()
                except Exception:  # A peer's message must not end the thread.
                    logger.exception("NIXL side channel")
        finally:
            wake.close()
            self._socket.close()

    def _answer_all(self) -> None:
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            peer, message = frames[0], frames[-1]
            try:
                question = _questions.decode(message)
            except msgspec.MsgspecError as error:
                logger.warning("NIXL side channel: a message that is none: %s", error)
                continue
            self._take(peer, question)
        self._retry_parked()

    def _take(self, peer: bytes, question: Question) -> None:
        is_mine = question.engine_id == self._engine_id
        if isinstance(question, Heartbeat):
            if is_mine:
                self._leases.renew(question.request_ids)
        elif isinstance(question, Release):
            self._release(peer, question.request_id, is_mine)
        elif not is_mine:
            reason = f"engine {question.engine_id} is gone; {self._engine_id} is here now"
            self._send(peer, Refused(reason))
        else:
            # The hash alone where it is another: what it stands for may not be readable there.
            is_same = question.compatibility_hash == self._hash
            self._send(peer, Handshake(self._hash, self._metadata if is_same else b""))

    def _release(self, peer: bytes, request_id: str, is_mine: bool) -> None:
        held = self._leases.release(request_id) if is_mine else False
        is_new = (peer, request_id) not in self._parked
        if held is None and is_new and len(self._parked) < _MAX_PARKED:
            # The response overtook the step that makes the lease known.
            self._parked[peer, request_id] = time.monotonic() + self._leases.seconds
        else:
            self._send(peer, Released(request_id, bool(held)))

    def _retry_parked(self) -> None:
        for (peer, request_id), deadline in list(self._parked.items()):
            held = self._leases.release(request_id)
            if held is not None or time.monotonic() > deadline:
                del self._parked[peer, request_id]
                self._send(peer, Released(request_id, bool(held)))

    def _send(self, peer: bytes, answer: Answer) -> None:
        try:
            self._socket.send_multipart([peer, _encoder.encode(answer)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("NIXL side channel: an answer could not be sent: %s", error)


_numbers = itertools.count()


class SideChannelClient:
    """One peer's side channel, from the worker's thread; never blocks.

    Raises:
        zmq.ZMQError: the process has no more sockets.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = _limit(zmq.Context.instance().socket(zmq.DEALER))
        try:
            self._monitor = self._socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
            )
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._was_lost = False
        try:
            self._socket.connect(f"tcp://{host}:{port}")
        except zmq.ZMQError:  # No address: requests say where their pages are.
            self._was_lost = True

    def send(self, question: Question) -> None:
        """Queues a message; a peer that takes none is lost."""
        try:
            self._socket.send(_encoder.encode(question), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._was_lost = True

    def receive(self) -> list[Answer]:
        """Answers that have come. A message that is none means that the peer is lost."""
        answers: list[Answer] = []
        while self._socket.poll(0):
            try:
                answers.append(_answers.decode(self._socket.recv()))
            except msgspec.MsgspecError as error:
                logger.warning("NIXL side channel: an answer that is none: %s", error)
                self._was_lost = True
        return answers

    def is_lost(self) -> bool:
        """Whether the connection broke, or could not be made."""
        while self._monitor.poll(0):
            zmq.utils.monitor.recv_monitor_message(self._monitor)
            self._was_lost = True
        return self._was_lost

    def close(self) -> None:
        """Drops the connection."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
