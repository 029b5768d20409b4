"""What the pipeline's engine asks of a stage and keeps from it, and backward in halves, broken."""

from tests.mutations import Mutation

ENGINE, SPLIT = "mpcore/pipeline/engine.py", "mpcore/pipeline/split.py"
FILE = "tests/pipeline/test_engine.py::"
OWN = FILE + "test_own_models_get_the_dense_gradients_and_are_called_once_a_micro_batch[1f1b]"
HALVES = OWN.replace("1f1b", "zbv")
CHANGED = FILE + "test_outputs_that_change_or_cant_be_sent_are_refused_on_every_rank"

MUTATIONS = [
    Mutation("the dry run is one in evaluation", ENGINE,
             "with _undone(module), uncompiled", "with _undone(module.eval()), uncompiled", OWN),
    Mutation("what a dry run does to buffers stays", ENGINE,
             "                    x.copy_(value)", "                    pass", OWN),
    Mutation("places in a dry run are in no table", ENGINE, "x.detach().zero_()", "x.detach().fill_(99)", HALVES),
    Mutation("an output that begins to need a gradient gets none", ENGINE,
             "if is_ == was and x.requires_grad and", "if False and", CHANGED + "[1f1b]"),
    Mutation("weights that meet no input get no gradient", SPLIT, "    if deferred.ends:", "    if False:", HALVES),
    Mutation("uses of a weight are taken one by one", SPLIT,
             "leaves if leaf in groups}.values():", "()}.values():", HALVES),
    Mutation("a layer used twice frees what is between", SPLIT,
             "more = len(group.nodes) > 1 and i + 1 < len(groups)", "more = False", HALVES),
    Mutation("what one use sends to another counts twice", SPLIT,
             "lambda _, dys=dys: dys)", "lambda _, dys=dys: None)", HALVES),
    Mutation("what a stage froze since the first step passes", ENGINE,
             "            self.problems.append(ValueError(problem))", "            pass",
             FILE + "test_freezing_on_one_rank_after_the_first_step_is_refused_on_all"),
    Mutation("a stage that fails leaves the next waiting", ENGINE,
             "                            _send((), self.pp,", "                            str((), self.pp,",
             FILE + "test_a_stage_that_fails_in_evaluation_is_told_to_the_next"),
]  # fmt: skip
