"""`python -m mpcore.verify`: the command `mpcore verify`."""

import sys

from mpcore.tools.verify.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
