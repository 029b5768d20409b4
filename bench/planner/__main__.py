"""`python -m bench.planner rows.json`: see `bench.planner.fit`."""

import sys

from bench.planner.fit import main
from mpcore.tools.command_line import reports_errors

sys.exit(reports_errors("bench.planner", ImportError)(main)())
