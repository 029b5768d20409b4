"""`Phase`: where a run is in its step, and which calls may come next."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a `Run` is in its step, and which call comes next.

    Attributes:
        IDLE: no gradients. `forward_backward` leads to COMPUTING; `evaluate`, `save` and `load` stay here.
        COMPUTING: `forward_backward` runs, or raised. It leads to COMPUTED; after an error `drop_gradients` to IDLE.
        COMPUTED: each rank has its own terms of the gradients. `finish_gradients` sums them, and leads to REDUCED.
        REDUCED: the gradients are those of the unsharded model. `optimizer_step` leads to IDLE.
    """

    IDLE = "idle"
    COMPUTING = "computing"
    COMPUTED = "computed"
    REDUCED = "reduced"

    def check(self, call: str, name: str = "") -> None:
        """Raise ValueError if `call` comes in the wrong order. `name` is another call, allowed where `call` is."""
        order = "forward_backward, clip_gradients (once, or not at all), optimizer_step"
        if self is Phase.COMPUTING:
            raise ValueError(f"{call} after a forward_backward that raised: call drop_gradients() on every rank first")
        if call == "forward_backward" and self is not Phase.IDLE:
            more = "" if name else "; to accumulate, prepare(micro_batches=...)"
            raise ValueError(
                f"{name or call} while gradients wait for optimizer_step: the order of a step is {order}; to give it "
                f"up, drop_gradients(){more}"
            )
        if self is Phase.IDLE and call != "forward_backward":
            raise ValueError(f"{call} without gradients: the order of a step is {order}")
        if call == "clip_gradients" and self is Phase.REDUCED:
            raise ValueError(f"gradients are finished or clipped already: the order of a step is {order}")
