"""Pipeline parallelism. `Pipeline` runs one training step over its micro-batches, on a full model or on its stages."""

from mpcore.pipeline.engine import Pipeline
from mpcore.pipeline.partition import partition

__all__ = ["Pipeline", "partition"]
