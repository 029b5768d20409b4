"""The example as a command, broken."""

from tests.mutations import Mutation

PRETRAIN = "examples/gpt/pretrain.py"
COMMAND = "tests/examples/test_pretrain_command.py::"
BEHIND = COMMAND + "test_a_checkpoint_behind_the_newest_goes_on_in_another_folder_only"
WAITS = "tests/examples/test_pretrain.py::test_a_step_waits_for_the_device_once"

MUTATIONS = [
    Mutation("38 restarts go on from what was left behind", PRETRAIN,
             "if newest is None or read_manifest(newest).step <= read_manifest(path).step:", "if True:", BEHIND),
    Mutation("38 the newest checkpoint itself counts as left behind", PRETRAIN,
             ".step <= read_manifest(path).step", ".step < read_manifest(path).step",
             BEHIND),
    Mutation("the host reads the count of tokens", PRETRAIN,
             "all_reduce((targets != -100).sum(), self.mesh.data).double()",
             "all_reduce((targets != -100).sum(), self.mesh.data).double() + 0 * int((targets != -100).sum())", WAITS),
    Mutation("the host reads the norm twice", PRETRAIN,
             "math.isfinite(loss) and math.isfinite(length)", "math.isfinite(loss) and bool(norm.isfinite())", WAITS),
    Mutation("processes of another launcher train alone", "mpcore/mesh.py",
             'if int(os.environ.get("WORLD_SIZE") or 1) < 2:', "if True:",
             "tests/test_mesh.py::test_any_launcher_will_do_that_says_where_the_others_are"),
    Mutation("memory: what is offloaded is counted as if it weren't", "examples/gpt/plan.py",
             'if set(args.offload) != {"none"}:', "if False:",
             "tests/test_memory.py::test_the_command_prints_a_table_and_refuses"),
]  # fmt: skip
