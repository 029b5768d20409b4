"""Write and read messages in the store of the rendezvous, which everybody who reaches its port can write to.

A message is JSON, never a pickle: reading one runs no code, whoever wrote it. If the ranks share a secret, each message
carries an HMAC-SHA256 of its key and content, and a message without it is refused. The secret is the variable
MPCORE_SECRET of the environment. If it is not set and all ranks are on one host, rank 0 draws one and leaves it in a
file that only its user can read. SECURITY.md says what this doesn't protect.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any

import torch

from mpcore._torch.distributed import store_secret

NAME = "MPCORE_SECRET"
_SIZE = 64  # of a signature
_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def seal(key: str, data: bytes, secret: bytes = b"") -> bytes:
    """Return a message for the store: its content, after a signature of key and content if the ranks share a secret."""
    secret = secret or _secret()
    return (_sign(secret, key, data) if secret else b"") + data


def unseal(key: str, message: bytes, secret: bytes = b"") -> bytes:
    """Return the content of a message."""
    secret = secret or _secret()
    if not secret:
        return message
    if not hmac.compare_digest(message[:_SIZE], _sign(secret, key, message[_SIZE:])):
        raise ValueError(
            f"the message {printable(key)} in the store of the run isn't signed with the job's secret: another process "
            f"writes to the store, or the ranks have different values of {NAME}"
        )
    return message[_SIZE:]


def _secret() -> bytes:
    return store_secret() or os.environ.get(NAME, "").encode()


def _sign(secret: bytes, key: str, data: bytes) -> bytes:
    return hmac.new(secret, f"{len(key)} {key} ".encode() + data, hashlib.sha256).hexdigest().encode()


def encode(value: Any) -> bytes:
    """Return a value as JSON: None, numbers, text, bytes, dtypes, and lists, tuples, sets and dicts of them.

    Raises:
        ValueError: if the value holds anything else. A named tuple becomes a tuple.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    try:
        return _value(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"a message of a rank is damaged, or signed with another {NAME}: {error}") from None


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(x) for x in value]
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(x)] for key, x in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, set)):
        return {"set" if isinstance(value, set) else "tuple": [_plain(x) for x in value]}
    raise ValueError(f"{type(value).__name__} can't be sent to other ranks: {str(value)[:200]}")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(x) for x in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dtype":
        return _DTYPES[content]
    values = _value(content)
    return {"dict": dict, "set": set, "tuple": tuple}.get(kind, list)(values)


def printable(text: str) -> str:
    """Return a text of somebody else with its control characters escaped, so that it can't steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text[:100_000])


def private_folder() -> Path:
    """Return a folder for temporary files that only this user can write to: `mpcore-UID` among the temporary files."""
    folder, user = Path(tempfile.gettempdir(), f"mpcore-{os.getuid()}"), os.getuid()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
        raise ValueError(
            f"{folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, not to user {user} "
            f"alone: remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def leave_secret(name: str) -> bytes:
    """Write the secret of a job into a file that only this user can read, for the ranks on this host."""
    secret = os.environ.get(NAME) or secrets.token_hex(32)
    with open(os.open(_path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(secret)
    return secret.encode()


def find_secret(name: str) -> bytes:
    """Read the secret that rank 0 left."""
    path = _path(name)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(
            f"the secret that rank 0 left in {path} can't be read ({error.strerror}): give all ranks of this host one "
            f"TMPDIR, or set {NAME} to one long random text for all"
        ) from None


def remove_secret(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def _path(name: str) -> Path:
    return private_folder() / f"secret-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
