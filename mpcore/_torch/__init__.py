"""Everything that mpcore takes from torch under a private name: one file for each engine of torch.

A private name may change with any release of torch. So each is used in one function here, and the rooms above call that
function. All files were read in torch 2.11 and 2.13. Where the two differ, a comment says how. To support a new torch,
read these files beside its source; `make oldest` runs the tests on 2.11.

    autograd      the running backward, hooks on gradients, dispatch below autograd
    compile       run a function or a block without torch.compile
    dispatch      see each operator that runs
    distributed   stores, process groups and meshes; the flight recorder
    fake          tensors without memory, process groups without other processes
    fsdp          the units of `fully_shard`: parameters, gradients, backwards that failed
    fsdp_wrap     what `fully_shard` can be told, and which tensors of an output it looks at
    functional    operations on lists of tensors
    module        the hooks of a module
    optim         the hooks of an optimizer's step
    pipelining    the runtime that executes a pipeline schedule
    pytree        tensors in nested containers
    storage       the memory of a tensor

Imports torch alone. `import mpcore.layers` must stay cheap, so the files that it needs import neither FSDP nor
pipelining. Open `fsdp.py` first: it is the longest.
"""
