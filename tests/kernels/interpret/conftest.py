"""The numeric tests of the kernels run in Triton's interpreter, on the CPU, or where nothing interprets on a GPU.

They draw on the CPU (`laws.drawn`), make everything else on torch's default device, and so are the same on both.
"""

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETING:
    import interpreter_repair

    interpreter_repair.install()

else:
    collect_ignore = ["test_interpreter_repair.py"]

    def pytest_itemcollected(item: pytest.Item) -> None:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

    @pytest.fixture(autouse=True)
    def on_the_gpu() -> Iterator[None]:
        with torch.device("cuda"):
            yield
