"""The benches' protocol and report, broken."""

from tests.mutations import Mutation

TESTS = "tests/test_bench_report.py"
PROTOCOL = "bench/kernels/protocol.py"
REPORT = "bench/report.py"
TUNE = "bench/tune.py"

MUTATIONS = [
    Mutation("benches: NaN passes the check", PROTOCOL,
             "        if not error <= slack * bound:", "        if error > slack * bound:", TESTS),
    Mutation("benches: gradients are not checked", PROTOCOL,
             "zip(found, bounds, strict=True)", "zip(found[:1], bounds[:1], strict=True)", TESTS),
    Mutation("benches: a wrong peer gets a number", PROTOCOL,
             "            functions[name] = function if checked == shape else make(shape)\n        except",
             "            functions[name] = function if checked == shape else make(shape)\n"
             "        except WrongError:\n            functions[name], errors[name] = function, 0.0\n        except",
             TESTS),
    Mutation("benches: forward's cost for both passes", PROTOCOL,
             "[which == BOTH]\n", "[0]\n", TESTS),
    Mutation("benches: the earlier result wins", REPORT,
             'found[entry["fullname"], path.stem.partition("_")[0]] = entry',
             'found.setdefault((entry["fullname"], path.stem.partition("_")[0]), entry)', TESTS),
    Mutation("benches: the report loses what follows the table", REPORT,
             "+ END + after)", "+ END)", TESTS),
    Mutation("benches: compiled code of one case counts in the next", PROTOCOL,
             "        torch.compiler.reset()\n", "", TESTS),
    Mutation("benches: FlexAttention may run as it is", "bench/kernels/bench_attention.py",
             "dynamic=False, fullgraph=True)", "dynamic=False)", TESTS),
    Mutation("benches: our results may be of any dtype", PROTOCOL,
             "        if own and y.dtype != dtype:", "        if False:", TESTS),
    Mutation("benches: inputs are copied without their strides", PROTOCOL,
             "torch.preserve_format", "torch.contiguous_format", TESTS),
    Mutation("benches: a run's rows replace all that was written", "bench/conftest.py",
             "[e for e in kept if e[\"fullname\"] not in again]", "[]", TESTS),
    Mutation("benches: a candidate is checked as the kernel is", TUNE,
             "            with in_place(module, candidate):\n", "            with in_place(module, None):\n", TESTS),
    Mutation("benches: all candidates are tried, however long it takes", TUNE,
             "time.monotonic() > until", "False", TESTS),
]  # fmt: skip
