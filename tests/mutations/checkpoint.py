"""Checkpoints and Hugging Face models, broken."""

from tests.mutations import Mutation

CHECKPOINT = "tests/test_checkpoint.py"
HF = "tests/examples/test_hf.py"

MUTATIONS = [
    Mutation("15 replicas of KV heads are stored again", "mpcore/checkpoint/pieces.py",
             "boxes.append(Box(local, start, shape, first and all(owned)))",
             "boxes.append(Box(local, start, shape, first))", CHECKPOINT),
    Mutation("16 blocks of a fused projection lie as the shard has them", "mpcore/checkpoint/pieces.py",
             "dims[shard.dim] = _declared(shard.mine, shard.owned)",
             "dims[shard.dim] = _declared(tuple(sorted(shard.mine, reverse=True)), shard.owned)", CHECKPOINT),
    Mutation("38 the optimizer stays out", "mpcore/checkpoint/saving.py",
             "        held += held_by_optimizer(model, optimizer, mesh)\n", "", CHECKPOINT),
    Mutation("38 39 the data begin anew", "examples/gpt/pretrain.py",
             "self.first_step, self.first_sample = manifest.step, manifest.sample",
             "self.first_step, self.first_sample = manifest.step, 0", CHECKPOINT),
    Mutation("40 the background saves what training goes on with", "mpcore/checkpoint/saving.py",
             "_snapshot(model, optimizer, mesh, about, copy=True)",
             "_snapshot(model, optimizer, mesh, about, copy=False)", CHECKPOINT),
    Mutation("bytes are loaded unchecked", "mpcore/checkpoint/loading.py",
             "        if check_bytes:\n", "        if False:\n", CHECKPOINT),
    Mutation("a thread's error is lost", "mpcore/checkpoint/format.py",
             "        raise errors[min(errors)]\n", "        results = dict.fromkeys(range(len(todo)))\n", CHECKPOINT),
    Mutation("16 K and V exchanged", "examples/gpt/hf.py", 'for part in "qkv")', 'for part in "qvk")', HF),
    Mutation("16 gate and up exchanged", "examples/gpt/hf.py",
             '("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj")',
             '("model.layers.{}.mlp.up_proj", "model.layers.{}.mlp.gate_proj")', HF),
    Mutation("square matrices aren't transposed", "examples/gpt/hf.py",
             "return tensor.t() if self.transposed else tensor.view(self.shape)",
             "return tensor.t() if self.transposed and len(tensor) != len(tensor.t()) else tensor.view(self.shape)",
             HF),
    Mutation("the head's own values are lost", "examples/gpt/hf.py",
             "or checksum(raw(head)) != checksum(raw(table))", "", HF),
    Mutation("unknown fields are passed over", "examples/gpt/hf.py",
             "        if unknown:\n", "        if False:\n", HF),
    Mutation("rotary scaling isn't exported", "examples/gpt/hf.py",
             '"rope_scaling": c.rope_scaling', '"rope_scaling": None', HF),
    Mutation("a conversion keeps what it has read", "examples/gpt/hf.py",
             "        self._files[chunk.file].forget(chunk.key)\n", "        pass\n", HF),
    Mutation("a giant header is allocated", "mpcore/checkpoint/format.py",
             "            if length > min(HEADER_LIMIT, size - 8):\n", "            if False:\n", HF),
    Mutation("a header may point beyond the file", "mpcore/checkpoint/format.py",
             "return end - start == size and end <= room", "return end - start == size", HF),
    Mutation("an index leads out of its folder", "examples/gpt/hf.py",
             "if Path(name).name != name or not name.endswith", "if not name.endswith", HF),
]  # fmt: skip
