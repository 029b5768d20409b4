"""Messages between workers: framed, signed, counted, limited in size; tensors as safetensors bytes, never a pickle.

Both ends of a connection know one token. Each sends 32 random bytes first. Every message is signed by HMAC-SHA256 of
the token over these bytes, the direction and the message's number (`mpcore.mesh.secret.seal`), so that no message can
be forged, changed, left out or sent again. Messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpcore.checkpoint.format import DTYPES
from mpcore.checkpoint.tensor_file import HEADER_LIMIT, file_head, raw, read_header
from mpcore.mesh.secret import NAME, decode, encode, seal, unseal
from mpcore.tools.workers.outer import Tensors

_HELLO = b"mpcore workers 1"
_STRANGER, _LIMIT = 2**12, 2**36  # bytes of a message: before the other end has signed one, and after
_HANDSHAKE = 10.0  # seconds
_REFUSAL = struct.pack("<Q", 2**64 - 1)  # in the place of a message's size: its sender isn't signed by this token

Message = dict[str, Any]


class Channel:
    """A connection to another worker.

    Args:
        sock: the connected socket.
        token: what both ends know.
        serves: whether this end accepted the connection.
        timeout: the seconds to wait for bytes.

    Raises:
        ValueError: if the other end speaks another protocol.
        OSError: if the connection breaks, or the other end is silent.
    """

    def __init__(self, sock: socket.socket, token: bytes, serves: bool, timeout: float) -> None:
        self.sock = sock
        self.token = token
        self.timeout = timeout
        self.sent: int = 0
        self.received: int = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.until: float | None = time.monotonic() + _HANDSHAKE  # of the first message
        mine = secrets.token_bytes(32)
        sock.settimeout(_HANDSHAKE)
        sock.sendall(_HELLO + mine)
        theirs = self._read(len(_HELLO) + 32)
        if not theirs.startswith(_HELLO):
            raise ValueError("the other end of the connection is no worker")
        ends = (theirs[len(_HELLO) :], mine) if serves else (mine, theirs[len(_HELLO) :])
        self.session: str = "".join(end.hex() for end in ends)
        self.out, self.into = ("answer", "question") if serves else ("question", "answer")

    def send(self, message: Message, tensors: bytes = b"") -> None:
        """Send a message, with tensors that `pack` packed."""
        head = encode(message)
        body = struct.pack("<I", len(head)) + head + tensors
        sealed = seal(f"{self.session} {self.out} {self.sent}", body, self.token)
        self.sent += 1
        self.sock.settimeout(self.timeout)
        self.sock.sendall(struct.pack("<Q", len(sealed)))
        for start in range(0, len(sealed), 2**20):  # the timeout holds for each call
            self.sock.sendall(memoryview(sealed)[start : start + 2**20])

    def receive(self) -> tuple[Message, memoryview]:
        """Wait for a message.

        Returns:
            The message, and its packed tensors.

        Raises:
            ValueError: if it is too long or damaged, or its signature is wrong: the tokens differ.
        """
        (size,) = struct.unpack("<Q", head := self._read(8))
        if head == _REFUSAL and not self.received:
            raise ValueError(f"the worker there refused this secret: give both the same {NAME}, or the same token file")
        limit = _LIMIT if self.received else _STRANGER
        if size > limit:
            raise ValueError(f"a message of {size} bytes came, at most {limit} are allowed")
        body = unseal(f"{self.session} {self.into} {self.received}", bytes(self._read(size)), self.token)
        self.received += 1
        self.until = None
        if len(body) < 4 or (length := struct.unpack("<I", body[:4])[0]) > len(body) - 4:
            raise ValueError(f"a message of {len(body)} bytes is cut off")
        message = decode(body[4 : 4 + length])
        if not isinstance(message, dict):
            raise ValueError("a message is no dict")
        return message, memoryview(body)[4 + length :]

    def ask(self, message: Message, tensors: bytes = b"") -> tuple[Message, memoryview]:
        """Send a message and wait for its answer."""
        self.send(message, tensors)
        return self.receive()

    def refuse(self) -> None:
        """Tell the other end that its first message is not signed by this token. These bytes are always the same."""
        with contextlib.suppress(OSError):
            self.sock.sendall(_REFUSAL)

    def close(self) -> None:
        """Close the connection; a thread that waits for a message is woken."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            left = self.timeout if self.until is None else min(self.until - time.monotonic(), self.timeout)
            if left <= 0:
                raise TimeoutError("the other end is too slow")
            self.sock.settimeout(left)
            count = self.sock.recv_into(view[: 2**24])
            if count == 0:
                raise ConnectionError("the other end closed the connection")
            view = view[count:]
        return bytes(data)


def connect(address: str, token: bytes, timeout: float) -> Channel:
    """Connect to the worker at host:port, and check that it knows the token.

    Raises:
        OSError: if nobody answers.
        ValueError: if the tokens differ, or no worker answers there.
    """
    sock = socket.create_connection(split_address(address), min(timeout, _HANDSHAKE))
    try:
        channel = Channel(sock, token, False, timeout)
        channel.ask({"kind": "hello"})
        return channel
    except BaseException:
        sock.close()
        raise


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`.

    Raises:
        ValueError: if the text has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"the address {address!r} is no host:port")
    return host, int(port)


def read_token(path: str | os.PathLike[str] | None) -> bytes:
    """Return the token of a run: from a file that only its user can read, or the variable MPCORE_SECRET.

    Raises:
        ValueError: if there is none, it is short, or others can read the file.
    """
    how = "make one by (umask 077; openssl rand -hex 32 > token), and copy it to each host"
    token = os.environ.get(NAME, "").encode()
    if path is not None:
        mode = os.stat(path).st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise ValueError(f"others can read the token in {path}, mode {stat.S_IMODE(mode):o}: chmod 600 it")
        token = Path(path).read_bytes().strip()
    if len(token) < 16:
        where = NAME if path is None else path
        found = f"has {len(token)} bytes, at least 16 are needed" if token or path is not None else "is not set"
        raise ValueError(f"the token in {where} {found}: {how}")
    return token


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return tensors as the bytes of a safetensors file."""
    head, header, _ = file_head(tensors)
    order = sorted(header.keys() - {"__metadata__"}, key=lambda key: header[key]["data_offsets"])
    return b"".join([head, *(raw(tensors[key]) for key in order)])


def unpack(data: memoryview, what: str = "a message's tensors") -> Tensors:
    """Return the tensors of `pack`. They share the memory of `data`, which must not change.

    Raises:
        ValueError: if the header doesn't fit the data exactly.
    """
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else HEADER_LIMIT
    if length > min(HEADER_LIMIT, len(data) - 8):
        raise ValueError(f"{what} are damaged: a header of {length} bytes, in {len(data)}")
    found, body = read_header(bytes(data[8 : 8 + length]), len(data) - 8 - length, what), bytearray(data[8 + length :])
    tensors = {}
    for key, said in found.items():
        (start, end), dtype = said["data_offsets"], DTYPES[said["dtype"]]
        if end == start:  # torch.frombuffer takes no empty buffer
            tensors[key] = torch.empty(said["shape"], dtype=dtype)
        else:
            values = torch.frombuffer(body, dtype=dtype, count=(end - start) // dtype.itemsize, offset=start)
            tensors[key] = values.view(said["shape"])
    return tensors
