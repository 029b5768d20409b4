"""What a step sends: counted from the real run or from a planned one, with the theory beside it."""

from mpcore.ledger.counts import Ledger, block_bytes, volume, zero_bytes

__all__ = ["Ledger", "block_bytes", "volume", "zero_bytes"]
