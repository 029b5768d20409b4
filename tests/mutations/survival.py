"""What stands faults, broken."""

from tests.mutations import Mutation

TESTS = "tests/test_survival.py"
TRACE = "tests/test_trace.py"
FILE = "mpcore/survival.py"
RUN, RECORDS = "examples/gpt/pretrain.py", "examples/gpt/records.py"
FULL = "tests/examples/test_pretrain_command.py::test_row_20_a_run_whose_metrics_and_pictures_are_not_written_goes_on"

MUTATIONS = [
    Mutation("29 replicas over data are not compared", FILE,
             "axes |= _data_replicas(parameter, sharding.data_axis(mesh))", "pass", TESTS),
    Mutation("29 replicated KV heads are not compared", FILE,
             "if shard.replicated and not is_dtensor(parameter):", "if False:", TESTS),
    Mutation("29 only hashes above are compared", FILE, "(most != ~least)", "(most > hashes)", TESTS),
    Mutation("29 the majority is blamed", FILE, "key=len)", "key=lambda found: -len(found))", TESTS),
    Mutation("28 a spike enters the window whole", FILE,
             "self.before.append(min(loss, mean + self.threshold * spread))", "self.before.append(loss)", TESTS),
    Mutation("20 a line of metrics that isn't written ends the run", RUN,
             "            if what not in self.unwritten:\n", "            raise\n            if what:\n", FULL),
    Mutation("20 a full disk is told of at every step", RUN,
             "            if what not in self.unwritten:\n", "            if what:\n", FULL),
    Mutation("20 half a line stays", FILE, "        file.truncate(end)\n", "        pass\n", FULL),
    Mutation("20 half a line is taken for written", FILE,
             "if file.write(self.waiting) < len(self.waiting):", "if file.write(self.waiting) is None:", FULL),
    Mutation("20 what was not written is lost", FILE, "self.waiting += (", "self.waiting = (", FULL),
    Mutation("20 lines are written again and again", FILE, '        self.waiting = b""\n', "", FULL),
    Mutation("20 half a picture stays", RECORDS,
             "    finally:\n        part.unlink(missing_ok=True)", "    finally:\n        pass", FULL),
    Mutation("20 a skipped step that isn't written down ends the run", FILE,
             "except OSError as error:  # a full disk", "except MemoryError as error:  # a full disk",
             TESTS),
    Mutation("27 a good step doesn't end the row", FILE, "self.row = 0 if finite else self.row + 1",
             "self.row = self.row if finite else self.row + 1", TESTS),
    Mutation("6 one slow check is enough", FILE, ">= self.patience", ">= 1", TESTS),
    Mutation("6 a rank is compared with itself too", FILE, "if place != rank and phase in other", "if phase in other",
             TESTS),
    Mutation("6 a phase has what was queued before", FILE, "        self._synchronize()\n        began",
             "        began", TESTS),
    Mutation("4 leaving with status 0 is no failure", FILE, 'return 1, "left before the end, with exit status 0"',
             'return 0, "left before the end, with exit status 0"',
             "tests/test_survival.py::test_row_1_3_4_when_a_rank_fails_the_others_name_it"),
    Mutation("3 nobody says why it failed", FILE, 'self.store.set("mpcore/cause", f"rank {self.rank} {cause}")', "pass",
             TESTS),
    Mutation("2 a new attempt takes the dead one's name", "mpcore/mesh.py", "name, waiting, answered = mine,",
             'name, waiting, answered = "0",', TESTS),
    Mutation("3 a rank that stands in C stays", FILE, "if not self.over.wait(2 * self.grace):", "if False:",
             "tests/test_survival.py::test_row_3_a_rank_that_stands_in_c_leaves_with_the_others_and_names_the_first"),
    Mutation("on nccl a rank waits only where its host does", "mpcore/trace.py",
             'call.backend == "nccl"][:1]', 'call.backend == "nccl" and log.waiting][:1]', TRACE),
    Mutation("12 code below a link is not looked at", FILE, "followlinks=True", "followlinks=False", TESTS),
]  # fmt: skip
