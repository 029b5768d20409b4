"""Tools that look at training steps, plan them, play them and survive them. The core imports nothing from here.

verify             compare a model on each layout with itself on one process
analysis           plan a layout: memory, messages and time of a step
invariant          train with the same bits on every mesh
simulation         run all ranks of a mesh in this process, to debug them
fault_tolerance    end together, save on a signal, explain a hang, find slow ranks
preflight, doctor  try a large run on this machine; check the machine
"""
