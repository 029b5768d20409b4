"""`mpcore preflight`: check on this machine, in minutes, that a large run on many GPUs will work."""

from mpcore.tools.preflight.checks import FAILED, OK, SKIPPED, Check, Options, Result, Skip, run_checks, verdict
from mpcore.tools.preflight.command import Command, checks_of, main, read_command

__all__ = ["FAILED", "OK", "SKIPPED", "Check", "Command", "Options", "Result", "Skip", "checks_of", "main",
           "read_command", "run_checks", "verdict"]  # fmt: skip
