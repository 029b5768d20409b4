"""`mpcore.verify` on a broken copy, in processes forked from one that has imported torch and nothing of mpcore yet.

Started in the copy as `python -m tests.mutations.warm`; each line read is a number of seconds, and is answered with one
JSON line: what departs first under the layouts of `tests.verify_models.PROOFS`, or "".
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import warnings

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import triton  # noqa: F401


class FoundError(Exception):
    """A layout differs: nothing more is looked at."""


def proof() -> str:
    """What departs first, and where."""
    from mpcore.verify import Verdict, verify
    from mpcore.verify.pool import Pool
    from tests.verify_models import PROOFS

    def stop(verdict: Verdict) -> None:
        if not verdict.equal:
            raise FoundError(f"{name} {verdict.layout}: {verdict.departure or verdict.error}")

    pool = Pool(4, start="fork")
    for name, (build, batch, loss, layouts) in PROOFS.items():
        try:
            verify(build, batch(), layouts, loss=loss, pool=pool, report=stop)
        except FoundError as found:
            return str(found)
        except ValueError as problem:
            return f"{name}: {str(problem).strip().splitlines()[-1]}"
    return ""


def answer(seconds: float) -> str:
    """Fork, prove, and end all that was started."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            said = proof()
        except BaseException as problem:  # such as an import that fails
            said = f"{type(problem).__name__}: {problem}"
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], seconds)
        said = os.read(reading, 65536).decode() if ready else json.dumps(f"hang: no result within {seconds:.0f} s")
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return said or json.dumps("the process died")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    for line in sys.stdin:
        print(answer(float(line)), flush=True)
