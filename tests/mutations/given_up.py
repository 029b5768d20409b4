"""Steps that are given up, and gradients that nothing summed."""

from tests.mutations import Mutation

FILE = "tests/test_data_parallel.py::"
GIVEN_UP = FILE + "test_nothing_is_left_of_a_step_given_up"
OUTPUTS = FILE + "test_what_hides_its_tensors_is_refused_and_what_shows_them_is_trained"
FIRST = FILE + "test_the_first_forward_may_be_a_blocks_but_not_within_inference_mode"
OLD = FILE + "test_attributes_move_to_the_shards_and_an_optimizer_or_hook_of_what_they_replace_is_refused"
OWN = FILE + "test_zero_grad_forgets_what_is_the_optimizers_own"
REFUSED = FILE + "test_what_cant_be_had_is_refused_on_every_rank_before_anything_changes"
THAWED = "tests/test_optim.py::test_what_was_frozen_is_in_no_group_and_zero_grad_forgets_it_once_it_is_thawed"

MUTATIONS = [
    Mutation("gradients that no backward summed pass", "mpcore/gradients.py",
             "    _check_summed(model)\n    pending", "    pending", GIVEN_UP),
    Mutation("parameters that are still gathered pass", "mpcore/gradients.py",
             "data.group not in once and not cut:", "False:", GIVEN_UP),
    Mutation("replicas of shards are part of the next step", "mpcore/gradients.py",
             "group._partial_reduce_output = None\n", "pass\n", GIVEN_UP),
    Mutation("what isn't summed is part of the next step", "mpcore/gradients.py",
             "                    whole.grad = None", "                    pass", GIVEN_UP),
    Mutation("a model's zero_grad sees only what was summed", "mpcore/data_parallel.py",
             "    drop_gradients(stage)\n", "    nn.Module.zero_grad(stage, set_to_none)\n", GIVEN_UP),
    Mutation("after a backward that raised the next goes on", "mpcore/data_parallel.py",
             "        check_backward(stage)\n", "        pass\n", GIVEN_UP),
    Mutation("no backward ends after one that raised", "mpcore/gradients.py",
             "        if failed:\n            for group", "        if False:\n            for group", GIVEN_UP),
    Mutation("an optimizer's zero_grad forgets what is another's", "mpcore/gradients.py",
             "if chosen is None or id(p.sharded_param) in chosen]", "]", OWN),
    Mutation("an output may hide its tensors", "mpcore/data_parallel.py",
             "hidden = unit is stage and", "hidden = False and", OUTPUTS),
    Mutation("inference mode makes what is trained", "mpcore/data_parallel.py",
             "if torch.is_inference_mode_enabled():", "if False:", FIRST),
    Mutation("a block called first is a model of its own", "mpcore/data_parallel.py",
             "stage._get_fsdp_state()._lazy_init()", "pass", FIRST),
    Mutation("an optimizer trains what shards replaced", "mpcore/gradients.py",
             "            check_current(p)\n", "", OLD),
    Mutation("attributes of parameters are lost", "mpcore/data_parallel.py",
             "shard.__dict__.update(vars(p))", "pass", OLD),
    Mutation("hooks of what shards replace are lost", "mpcore/data_parallel.py",
             "if zero and (parameter._backward_hooks or", "if zero and (False and", REFUSED),
    Mutation("what is thawed keeps its gradient for ever", "mpcore/optim.py",
             "self._whole_model = groups is None", "self._whole_model = False", THAWED),
]  # fmt: skip
