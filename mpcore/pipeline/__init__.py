"""Floor 4: pipelines. `Pipeline` runs one step over its micro-batches, on a model that is whole or cut in stages."""

from mpcore.pipeline.engine import Pipeline

__all__ = ["Pipeline"]
