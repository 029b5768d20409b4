"""Everything about a machine with one GPU that nobody has run these kernels on: `python -m bench.gpu_hour`.

`__main__.py` is the command: which jobs there are, in which order, and what became of each. `jobs.py` is what a job
does in a process of its own. `report.py` makes the tables and the plot from the file of results.
"""
