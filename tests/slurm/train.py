"""Train examples/own_model.py on tp 2 for three steps. Each rank prints its place and the losses, all of their bits."""

import os

from examples.own_model import train
from mpcore.mesh import read_launch

if __name__ == "__main__":
    launch = read_launch(os.environ)
    losses = " ".join(loss.hex() for loss in train(tp=2, steps=3))
    print(f"{launch.rank}/{launch.world_size} {launch.local_rank}/{launch.local_size} {losses}", flush=True)
