"""Break copies of the library on purpose and see which test notices. `python -m tests.mutations` runs it.

`operators.py` changes one expression or statement at a time, `hand.py` lists slips that would be silent and
`patterns.py` finds their places, `lines.py` picks the tests that run a line and `choice.py` the nearest files,
`trial.py` runs them in a copy, in forks of the process of `warm.py`, `record.py` keeps verdicts,
`notes.py` says a word on each survivor, and `report.py` writes the page.
"""
