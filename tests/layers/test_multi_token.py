"""The inputs and targets of multi-token prediction end with their document."""

import pytest
import torch

from mpcore.experimental import MultiTokenPrediction, shift_tokens


def test_no_target_lies_across_the_end_of_a_document():
    tokens = torch.arange(20, 27).expand(2, 7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])
    inputs, targets = shift_tokens(tokens, 2, documents)
    for depth, (given, target) in enumerate(zip(inputs, targets, strict=True), 1):
        for row in range(2):
            for i in range(7):
                ends = [j < 7 and documents[row, j] == documents[row, i] for j in (i + depth, i + depth + 1)]
                assert given[row, i] == (20 + i + depth if ends[0] else 20 + i)
                assert target[row, i] == (20 + i + depth + 1 if ends[1] else -100)


def test_as_many_inputs_as_blocks():
    with pytest.raises(ValueError, match="0 inputs for 1 blocks"):
        MultiTokenPrediction(4, [torch.nn.Identity()])(torch.zeros(1, 2, 4), [], torch.nn.Identity())
