"""The benches' protocol and report, broken."""

from tests.mutations import Mutation

TESTS = "tests/test_bench_report.py"
PROTOCOL = "bench/kernels/protocol.py"
REPORT = "bench/report.py"

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
]  # fmt: skip
