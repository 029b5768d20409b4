"""Authenticate the messages that ranks leave in the store of their rendezvous, which every local user can write to.

The messages are JSON, never pickles: reading one runs no code, whoever wrote it. If the ranks share a secret, each message
carries an HMAC-SHA256 of its key and content, and a message without it is refused. The secret is `MPCORE_SECRET`. If all
ranks are on one host and the launcher didn't set it, rank 0 draws one and leaves it in a file that only its user can read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

NAME = "MPCORE_SECRET"


def private_folder() -> Path:
    """Return a folder for temporary files that only this user can write to, `mpcore-UID` among the temporary files.

    Raises:
        ValueError: if the folder belongs to somebody else, or others can write to it.
    """
    folder = Path(tempfile.gettempdir(), f"mpcore-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(
            f"{folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, and must be a folder that "
            f"only user {os.getuid()} can write to: remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def share_secret(name: str, rank: int) -> None:
    """Give every rank of this host the secret of rank 0.

    Call it on rank 0 before the others read `name` in the store.

    Args:
        name: a name of this start of the job, the same on all ranks.
        rank: this process's rank.

    Raises:
        ValueError: if another rank can't read what rank 0 wrote.
    """
    path = private_folder() / f"secret-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    if rank == 0:
        os.environ[NAME] = os.environ.get(NAME) or secrets.token_hex(32)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(os.environ[NAME])
        return
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            os.environ[NAME] = file.read()
    except OSError as error:
        raise ValueError(
            f"rank {rank} can't read the secret that rank 0 left in {path} ({error.strerror}): give the ranks of this "
            f"host one TMPDIR, or set {NAME} to one long random text for all"
        ) from None


def forget_secret(name: str) -> None:
    """Remove the file of the secret, after all ranks have read it."""
    (private_folder() / f"secret-{hashlib.sha256(name.encode()).hexdigest()[:32]}").unlink(missing_ok=True)
