"""Products fused with collectives on symmetric memory. Checked with torch 2.13, on CPUs, where they have no kernels."""

import torch
import torch.distributed._symmetric_memory  # defines the operators

symmetric_memory_ops = torch.ops.symm_mem


def lacks_fused_products(device: torch.device) -> str:
    """Return which of the two operators has no kernel for a device; "" if both have one."""
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", device.type.upper()):
            return f"torch {torch.__version__} has no symm_mem.{name} for {device.type}"
    return ""
