"""Imported last by the process that ranks are forked from, so that the search through all objects runs only once."""

from mpcore.tools.verify.pool import imported_caches

imported_caches()
