"""Kernels and their references, broken in what they take, and in what they leave to autograd and to compilers."""

from tests.mutations import Mutation

INTERPRET = "tests/kernels/interpret/"
TESTS = "tests/kernels/"

MUTATIONS = [
    Mutation("what a kernel writes over keeps its version", "kernels/_dispatch.py",
             "launch_and_count if mutated else launch", "launch", INTERPRET + "test_adamw.py"),
    Mutation("statistics are differentiated on a CPU alone", "kernels/cross_entropy.py",
             "    logits = logits.detach()\n", "", TESTS + "test_cross_entropy.py"),
    Mutation("an ignored row's NaN is passed on", "kernels/cross_entropy.py",
             "return dz.masked_fill_(ignored.unsqueeze(-1), 0).to", "return dz.to", TESTS + "test_cross_entropy.py"),
    Mutation("gradients of rows keep their dtype", "kernels/cross_entropy.py",
             "None if d is None else d.to(z.dtype)", "d", TESTS + "test_cross_entropy.py"),
    Mutation("counts are read as if contiguous", "kernels/grouped_linear.py",
             "tensors = (x, weight, counts.contiguous(), y, z)", "tensors = (x, weight, counts, y, z)",
             INTERPRET + "test_moe.py"),
    Mutation("places are read as if contiguous", "kernels/adamw.py",
             "None if index is None else index.contiguous()", "index", INTERPRET + "test_adamw.py"),
    Mutation("targets outside the vocabulary are taken", "kernels/linear_cross_entropy.py",
             'wrong = outside(target, vocab_size, loss["ignore_index"])', "wrong = None",
             TESTS + "test_linear_cross_entropy.py"),
    Mutation("a position below zero counts from the table's end", "kernels/rope.py",
             "outside(positions, cos.shape[0])", "outside(positions.abs(), cos.shape[0])", TESTS + "test_rope.py"),
    Mutation("a key is a constant of the graph", "kernels/dropout_add.py",
             "float p,\"\n    \" SymInt key,", "float p,\"\n    \" int key,", INTERPRET + "test_dropout_add.py"),
    Mutation("a traced operator has nothing to run on a CPU", "kernels/quantize_fp8.py",
             "@launches(_quantize_op, _reference)", "@launches(_quantize_op)", TESTS + "test_fp8.py"),
    Mutation("a lone element's stride counts in its bytes", "kernels/cross_replica_hash.py",
             "x.as_strided((x.numel(),), (1,))", "x.view(-1)", TESTS + "test_cross_replica_hash.py"),
    Mutation("the counter of FLOPs is found once", "kernels/_flops.py",
             "            sys.meta_path.insert(0, self)", "            pass", TESTS + "test_attention.py"),
]  # fmt: skip
