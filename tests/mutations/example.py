"""What the example's command makes of a newcomer's text and flags, broken."""

from tests.mutations import Mutation

COMPILE = "tests/examples/test_compile.py"
OFFLOAD = "tests/test_offload.py"
DATA = "tests/examples/test_data.py"
ONE = f"{DATA}::test_of_a_single_document_the_end_is_held_out"
SHORT = f"{DATA}::test_too_little_text_says_of_which_part_and_the_way_out"

MUTATIONS = [
    Mutation("a single document's end is trained on too", "examples/gpt/data.py",
             "(_Excerpt(dataset, 0, end), None)", "(_Excerpt(dataset, 0, tokens), None)", ONE),
    Mutation("a single document's end is a twentieth, be it less than a sample", "examples/gpt/data.py",
             "max(tokens // 20, seq_len + 1), 0)", "tokens // 20, 0)", ONE),
    Mutation("an excerpt begins where its document does", "examples/gpt/data.py",
             "[self.start : self.end]", "[: self.end]", ONE),
    Mutation("the seed moves what is held out", "examples/gpt/data.py",
             "for ids in split_documents(len(dataset))]", "for ids in split_documents(len(dataset), seed=seed)]",
             f"{DATA}::test_documents_are_dealt_out_as_split_documents_says"),
    Mutation("a run without evaluations needs a held-out part", "examples/gpt/data.py",
             "            if found and not evaluate:\n", "            if False:\n", SHORT),
    Mutation("a short text is held out though nothing is evaluated", "examples/gpt/data.py",
             "end = tokens if end <= seq_len and not evaluate else end", "pass", SHORT),
    Mutation("--compile compiles nothing", "examples/gpt/pretrain.py",
             "compile_blocks(layers, args.compile)", "pass", COMPILE),
    Mutation("evaluations are compiled too", "examples/gpt/pretrain.py",
             'return torch.compiler.set_stance("force_eager") if', "return nullcontext() if", COMPILE),
    Mutation("parameters that are sharded are offloaded as far as a block says no", "examples/gpt/arguments.py",
             'if "parameters" in args.offload and args.zero and', "if False and",
             f"{OFFLOAD}::test_parameters_sharded_over_data_stay"),
    Mutation("parameters that are whole on each data rank aren't offloaded", "examples/gpt/arguments.py",
             'in args.offload and args.zero and mesh', "in args.offload and mesh",
             f"{OFFLOAD}::test_parameters_sharded_over_data_stay"),
]  # fmt: skip
