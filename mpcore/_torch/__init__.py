"""Everything that mpcore takes from torch under a private name: one file for each engine of torch.

A private name may change with any release of torch. So each is used in one function here, and the rooms above call that
function. All files were read in torch 2.11 and 2.13. Where the two differ, a comment says how. To support a new torch,
read these files beside its source; `make oldest` runs the tests on 2.11.

Imports torch alone. `import mpcore.layers` must stay cheap, so the files that it needs import neither FSDP nor
pipelining. Open `fsdp.py` first: it is the longest.
"""
