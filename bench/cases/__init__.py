"""The table of all kernels: operator, reference, peers, shapes, bytes and operations.

`pytest bench` times them, `bench.gpu_hour` checks and times them, and tests may loop over them.
"""

from bench.cases.activation import KERNELS as ACTIVATIONS
from bench.cases.adamw import ADAMW
from bench.cases.attention import MASKS
from bench.cases.cross_entropy import CROSS_ENTROPY
from bench.cases.dropout_add import DROPOUT_ADD
from bench.cases.layer_norm import LAYER_NORM
from bench.cases.linear_cross_entropy import LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_ROWS, LINEAR_LOG_PROB
from bench.cases.moe_permute import MOE_PERMUTE
from bench.cases.quantize_fp8 import QUANTIZE, QUANTIZE_BOTH
from bench.cases.ring import RING
from bench.cases.rms_norm import ADD_RMS_NORM, RMS_NORM
from bench.cases.rope import ROPE
from bench.protocol import Kernel

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        *(RMS_NORM, ADD_RMS_NORM, CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_ROWS, LINEAR_LOG_PROB),
        *(*ACTIVATIONS, *MASKS, RING, ROPE, LAYER_NORM, ADAMW, DROPOUT_ADD, MOE_PERMUTE, QUANTIZE, QUANTIZE_BOTH),
    )
}
