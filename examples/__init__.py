"""Programs that use mpcore. `pip install '.[examples]'` installs the packages that they import."""

import importlib.util
import os
import sys


def check_packages() -> None:
    """End a program, `python -m examples..`, in one line of each host if packages that it imports are missing."""
    missing = [name for name in ("tqdm", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing and sys.argv[0] == "-m":  # what Python writes there until it has found the program
        text = f"error: examples/ needs {' and '.join(missing)}: run pip install '.[examples]' in the clone"
        sys.exit(text if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


check_packages()
