"""Exposed communication on a link that is slow on purpose: `python -m bench.overlap`."""
