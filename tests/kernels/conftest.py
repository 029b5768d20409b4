"""Kernels are tested in two processes, since Triton decides at import whether it compiles or interprets.

The main one compiles, and runs a kernel only on a GPU: there `interpret/` is collected too, as tests of the marker
`gpu`. The other, which runs `interpret/` alone, begins before the first test, and `test_interpreter.py`, the last, asks
how it went (`tests/beside.py`).
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # laws.py and its like, from both processes
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_*.py"] if INTERPRETING else []
