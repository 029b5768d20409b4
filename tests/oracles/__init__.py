"""What a run of the example must be, computed in plain torch without an import of mpcore or of the example.

Layouts are compared with layouts elsewhere; an error that all of them share is seen here alone. `gpt.py` (the model),
`training.py` (the loop) and `muon.py` are the truth; `runs.py` runs the example beside them. `python -m tests.oracles`
prints the table of all cases.
"""
