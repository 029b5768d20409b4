"""Mixtures from Hugging Face and back, broken."""

from tests.mutations import Mutation

HF = "examples/gpt/hf.py"
TESTS = "tests/examples/test_hf.py"

MUTATIONS = [
    Mutation("hf mixtral's gate and up change places", HF, "for i in (1, 3))", "for i in (3, 1))", TESTS),
    Mutation("hf every expert is the first one", HF, "corner = (*expert, start,",
             "corner = (*(0 for _ in expert), start,", TESTS),
    Mutation("hf norm_topk_prob is passed over", HF, '"normalize": c.take("norm_topk_prob", False)',
             '"normalize": c.take("norm_topk_prob", False) or True', TESTS),
    Mutation("hf layers dense by name are passed over", HF, "if i not in dense and (i + 1) % step == 0]",
             "if (i + 1) % step == 0]", TESTS),
    Mutation("hf a router's bias is dropped", HF, "    if bias.any():\n", "    if False:\n", TESTS),
    Mutation("hf a capacity is dropped", HF, '"capacity_factor": moe.capacity_factor is not None',
             '"capacity_factor": False', TESTS),
    Mutation("hf mixtral's rotary base is llama's", HF, '"rope_theta": 1e6}', '"rope_theta": 1e4}', TESTS),
    Mutation("hf a checkpoint's mixture stays a dict", "examples/gpt/model.py",
             "        if isinstance(self.moe, dict):", "        if False:", TESTS),
]  # fmt: skip
