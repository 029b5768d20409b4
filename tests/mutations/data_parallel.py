"""Data parallelism, broken."""

from tests.mutations import Mutation

FILE = "tests/test_data_parallel.py::"
ODD = FILE + "test_pitfall_33_34_43_frozen_unused_empty_scalar_and_tiny_parameters"
NODES = FILE + "test_pitfall_24_30_shards_replicated_over_nodes_give_the_dense_gradients"
EXPERTS = FILE + "test_pitfall_28_30_experts_are_dealt_out_over_the_ranks_that_hold_them"
HALF = FILE + "test_pitfall_44_half_precision_gradients_are_summed_in_float32"
TRAFFIC = FILE + "test_each_stage_of_zero_sends_what_the_theory_says"
HELD = FILE + "test_only_zero_3_drops_parameters_after_forward_and_placements_tell"
REFUSED = FILE + "test_what_cant_be_had_is_refused_on_every_rank_before_anything_changes"
PIPELINES = FILE + "test_pitfall_14_24_30_33_every_zero_stage_in_every_kind_of_pipeline_gives_the_dense_gradients"

MUTATIONS = [
    Mutation("39 what fills the last round of an evaluation counts", "examples/gpt/pretrain.py",
             "targets.masked_fill((indices >= samples)[:, None], -100)", "targets",
             "tests/examples/test_pretrain.py::test_every_layout_trains_as_one_process_does[tp1pp1dp2-untied-float64]"),
    Mutation("33 ranks that used other parameters post other sums", "mpcore/data_parallel.py",
             "sharded.set_reduce_scatter_unused_params(True)", "sharded.set_reduce_scatter_unused_params(False)", ODD),
    Mutation("30 replicas of a shard each count in the norm", "mpcore/gradients.py",
             "return all(rank == 0 for place, rank in", "return True or all(rank == 0 for place, rank in", NODES),
    Mutation("24 replicas of shards are never summed", "mpcore/data_parallel.py",
             "model.set_requires_all_reduce(last)", "model.set_requires_all_reduce(False)", NODES),
    Mutation("28 experts are summed over all data ranks", "mpcore/sharding.py",
             "return mesh.edp if self._is_expert(mesh) else mesh.data", "return mesh.data", EXPERTS),
    Mutation("44 gradients are summed in bfloat16", "mpcore/data_parallel.py",
             "None if wide else self.reduce_dtype", "None", HALF),
    Mutation("ZeRO-2 sums gradients once a step", "mpcore/data_parallel.py",
             "model.set_requires_gradient_sync(last or state.zero > 1)", "model.set_requires_gradient_sync(last)",
             TRAFFIC),
    Mutation("ZeRO-1 gathers parameters each micro-batch", "mpcore/data_parallel.py",
             "model.set_reshard_after_backward(last or state.zero == 3)", "model.set_reshard_after_backward(True)",
             TRAFFIC),
    Mutation("ZeRO-2 sums once more after the last micro-batch", "mpcore/data_parallel.py",
             "isinstance(model, FSDPModule) and not reduces_each_micro_batch(model):", "isinstance(model, FSDPModule):",
             TRAFFIC),
    Mutation("ZeRO-3 keeps parameters after forward", "mpcore/data_parallel.py",
             '"reshard_after_forward": zero == 3', '"reshard_after_forward": False', HELD),
    Mutation("33 a split backward's second half is not summed", "mpcore/pipeline/engine.py",
             "reduce_held(self.submod, last_backward)", "pass", PIPELINES + "[zb-2-tied]"),
    Mutation("14 a table that two stages share is not summed", "mpcore/data_parallel.py",
             "        unit.finish()\n", "        pass\n", PIPELINES + "[zbv-1-tied]"),
    Mutation("a validation leaves copies of parameters that nobody steps", "mpcore/data_parallel.py",
             "if evaluated and not state.gathered:", "if False:",
             FILE + "test_a_forward_without_gradients_may_run_at_any_time"),
    Mutation("outer blocks take the parameters of inner ones", "mpcore/data_parallel.py",
             "key=lambda block: sum(module in given for module in block.modules())", "key=lambda block: 0",
             FILE + "test_blocks_may_be_nested_repeated_and_in_any_order"),
    Mutation("a fifth stage of ZeRO", "mpcore/data_parallel.py", "if zero not in (0, 1, 2, 3):", "if False:", REFUSED),
    Mutation("44 a router's bias is cast with its weights", "mpcore/data_parallel.py",
             "    whole |= {p for router in routers for p in router.statistics}", "    pass",
             FILE + "test_routers_keep_their_statistics_in_float32_whatever_is_computed_in"),
]  # fmt: skip
