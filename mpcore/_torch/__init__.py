"""Everything that mpcore uses of torch under a private name, one file per part of torch.

A private name may change with any release of torch. So each one is used in one function here, and the other packages
call that function. All files were checked against torch 2.11 and 2.13; a comment says where the two versions differ. To
support a new torch, read these files beside its source. `make oldest` runs the tests on 2.11.

The package imports only torch. `import mpcore.layers` must stay fast, so the files that it needs import neither FSDP
nor pipelining. Read `fsdp.py` first: it is the longest.
"""
