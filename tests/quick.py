"""Which cases run when: `make quick` has one of each law and a run of each kind, `make test` all but the slow."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

RUNS = ("tp 2", "tp 2 x dp 2, ZeRO-3", "pp 2, 1f1b", "pp 2 x dp 2, zb", "cp 2, zigzag ring", "fp16 with a scale",
        "experts, ep 2, balanced by a loss", "DiLoCo", "resume on another layout")  # fmt: skip
FIRST = [
    "test_every_layer_under_pairs_of_features_equals_plain_torch_or_is_refused",
    "test_every_backward_is_the_adjoint_of_its_forward",
    "test_column_parallel_equals_dense_with_every_option", "test_row_parallel_equals_dense_with_every_option",
    "test_pitfall_18_a_row_bias_is_added_once", "test_sharded_equals_dense",
    "test_sharded_equals_dense_for_every_grouping_of_heads", "test_sharded_equals_dense_for_every_mask",
    "test_sharded_equals_dense_for_every_activation", "test_pitfall_17_vocabulary_50257_equals_dense",
    "test_pitfall_05_smoothing_and_z_loss_are_over_the_whole_vocabulary", "test_linear_cross_entropy_equals_dense",
    "test_every_layout_equals_a_loop_over_tokens_and_experts", "test_every_kind_is_dense_attention",
    "test_every_layout_runs_each_document_as_if_it_were_alone", "test_every_tp_size_computes_the_same_products",
    "test_a_word_depends_on_its_global_place_alone", "test_pitfall_30_the_norm_is_the_dense_norm_in_every_layout",
    "test_pitfall_34_a_step_is_that_of_the_whole_model_bit_for_bit_on_every_layout",
    "test_pitfall_14_24_30_33_a_table_of_two_stages_is_summed_once_and_stays_whole",
    "test_pitfall_14_24_26_30_every_schedule_gives_the_dense_gradients",
    "test_pitfall_15_16_17_38_what_one_layout_saves_every_other_loads_bitwise",
    "test_logits_gradients_and_training_equal_the_original", "test_every_layout_trains_as_plain_torch_does",
    "test_the_page_on_training_has_the_same_losses_on_a_mesh",
    "test_every_mesh_has_the_losses_of_one_process", "test_rooms_import_down_only",
    "test_no_two_modules_import_each_other", "test_a_block_makes_two_collectives_each_way_and_nothing_else",
]  # fmt: skip
ALL = [
    "test_a_wrong_order_is_refused_with_the_right_one",
    "test_a_policy_refuses_what_it_cannot_mean",
    "test_a_step_can_be_given_up_after_a_forward_that_raised",
    "test_float16_skips_a_step_that_overflows_and_goes_on",
    "test_a_batch_without_a_token_has_no_loss_and_moves_nothing",
]
RECORDED = "test_a_run_has_its_recorded_numbers"
SEVERAL = re.compile(r"\b[tpdce]p'?:? ?[2-9]|\[[2-9]\b")  # of "tp2xetp1", "tp 2", "{'tp': 2}", "[2-None]"


def some(*short, of: Iterable) -> list:
    """Of all cases these alone for `make test`; the others are for `make soak`."""
    others = [each if isinstance(each, tuple) else (each,) for each in (case for case in of if case not in short)]
    return [*short, *(pytest.param(*each, marks=pytest.mark.slow) for each in others)]


def mark_quick(items: Iterable[pytest.Item]) -> None:
    """Mark a case of each law of `FIRST`, every case of `ALL`, and the recorded `RUNS`.

    Of a law it is the first case on several ranks, as its name says: a mistake in what ranks sum shows there alone.
    """
    first: dict[str, pytest.Item] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name in FIRST and item.get_closest_marker("slow") is None:
            one_rank = name in first and not SEVERAL.search(first[name].name)
            if name not in first or (one_rank and SEVERAL.search(item.name)):
                first[name] = item
        elif name in ALL or item.name in {f"{RECORDED}[{run}]" for run in RUNS}:
            item.add_marker("quick")
    for item in first.values():
        item.add_marker("quick")
