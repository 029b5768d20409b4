"""Parameters with several owners, those that come late, and states loaded into shards, broken."""

from tests.mutations import Mutation

SHARDING = "mpcore/sharding.py"
OWNERS = "tests/test_gradients.py::test_pitfall_11_30_every_owner_of_a_parameter_says_how_it_is_cut_and_summed"
ENDS = "tests/test_gradients.py::test_pitfall_14_a_tied_table_is_summed_over_the_ends_whichever_of_its_owners_says_so"
DIFFER = "tests/test_gradients.py::test_owners_that_declare_one_parameter_differently_are_refused"
LATE = "tests/test_data_parallel.py::test_a_parameter_added_after_sharding_is_refused_before_anything_is_sent"
LOAD = "tests/test_data_parallel.py::test_a_logical_state_loads_into_shards_whatever_ran_before"

MUTATIONS = [
    Mutation("stages that each hold the whole model are compared", "mpcore/verify/run.py",
             "if stages[0] and all(names == stages[0] for names in stages):", "if False:",
             "tests/test_verify.py::test_what_doesnt_run_is_said"),
    Mutation("of what a model returns in a dict nothing is compared", "mpcore/verify/run.py",
             "list(output.items())", "[]",
             "tests/test_verify.py::test_a_model_may_return_what_its_loss_takes"),
    Mutation("30 the first owner of a parameter alone is asked", SHARDING,
             "said = [place for place in places if place", "said = [place for place in places[:1] if place", OWNERS),
    Mutation("11 the pending sums of the first owner alone count", SHARDING,
             "partial=tuple(union.values())", "partial=first.partial", ENDS),
    Mutation("21 the first owner alone says how a parameter begins", SHARDING,
             "owner = next((place for place in places if place.declared is not None), places[0])",
             "owner = places[0]", OWNERS),
    Mutation("30 owners that cut a parameter differently pass", SHARDING,
             "if _lies(other) != _lies(first):", "if False:", DIFFER),
    Mutation("11 owners with pending and with whole gradients pass", SHARDING,
             "            if key not in added:\n", "            if not axes and key not in added:\n", DIFFER),
    Mutation("14 what is said by hand of one owner is not of all", SHARDING,
             ", added=(*old.added, axis))", ")", ENDS),
    Mutation("33 a parameter that came late is never summed", "mpcore/gradients.py",
             "if sharding.data is None and laid and", "if False and", LATE),
    Mutation("43 with all else frozen nobody misses the sum of a late adapter", "mpcore/gradients.py",
             "for _, _, x in declared if x.data is not None", "for _, p, x in declared if p.requires_grad and x.data",
             LATE),
    Mutation("a late parameter declared by hand is refused too", "mpcore/gradients.py",
             "laid and laid.keys().isdisjoint(once) and", "laid and", LATE),
    Mutation("33 what is cut over data isn't marked", "mpcore/data_parallel.py",
             "        if mesh.data.size > 1:\n            said =",
             "        if which(parameter):\n            said =", LATE),
    Mutation("38 a state is loaded into what a joined stage gathered", SHARDING,
             "is_dtensor(parameter) and _key(over) not in pending", "parameter.numel()", LOAD),
    Mutation("38 every data rank loads the first rank's shard", SHARDING,
             "part = part[start:end]", "part = part[: end - start]", LOAD),
    Mutation("38 a state is loaded into what is only gathered", SHARDING,
             "    reshard(model)  # what is gathered is a copy, dropped before the next step\n", "", LOAD),
]  # fmt: skip
