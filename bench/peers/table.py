"""All rows."""

from bench.peers import checkpoints, layers, training
from bench.peers.measure import Row

ROWS: list[Row] = [*layers.ROWS, *training.ROWS, *checkpoints.ROWS]
