"""Imported last by the process that ranks are forked from: it looks through all objects once, not each rank."""

from mpcore.verify.pool import imported_caches

imported_caches()
