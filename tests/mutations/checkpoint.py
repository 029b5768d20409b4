"""Checkpoints and Hugging Face models, broken."""

from tests.mutations import Mutation

CHECKPOINT = "tests/test_checkpoint.py"
FORMAT = "mpcore/checkpoint/format.py"
CHECKSUM = "tests/test_checkpoint_checksum.py"
RESUMES = f"{CHECKPOINT}::test_pitfall_38_39_a_stopped_run_goes_on_as_if_it_had_not_been[float16]"
MOMENT = f"{CHECKPOINT}::test_pitfall_40_a_save_in_the_background_has_the_bytes_of_its_moment"
DAMAGED = f"{CHECKPOINT}::test_what_is_damaged_is_refused_by_name_and_changes_nothing"
THREADS = f"{CHECKPOINT}::test_what_fails_in_a_thread_fails_here"
OTHERS = f"{CHECKPOINT}::test_other_optimizers_and_frozen_parameters"
LARGE = f"{CHECKPOINT}::test_pitfall_40_large_tensors_come_back_into_new_memory_and_into_old"
KIND = f"{CHECKPOINT}::test_settings_and_states_of_another_kind_of_optimizer_are_refused"
HF = "tests/examples/test_hf.py"
FLAGS = f"{CHECKPOINT}::test_the_flags_of_a_resumed_run_hold_and_a_new_run_begins_with_its_weights"
OTHER_RUN = f"{CHECKPOINT}::test_resuming_another_run_is_refused_and_a_damaged_checkpoint_passed_over"
SET_ASIDE = f"{CHECKPOINT}::test_a_save_that_fails_leaves_what_one_killed_between_two_renames_set_aside"

MUTATIONS = [
    Mutation("a folder has its name before its list of files is on the disk", "mpcore/checkpoint/folders.py",
             "    sync_folder(new)\n", "", f"{CHECKPOINT}::test_all_is_on_the_disk_before_it_has_its_name"),
    Mutation("what a killed save set aside is thrown away", "mpcore/checkpoint/folders.py",
             "if old.is_dir() and not path.exists():", "if False:", SET_ASIDE),
    Mutation("SGD takes AdamW's settings and moments", "mpcore/checkpoint/loading.py",
             "        if others:\n", "        if False:\n", KIND),
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
             "self.first_step, self.first_sample = manifest.step, 0", RESUMES),
    Mutation("38 a resumed run keeps the options of the checkpoint's command", "examples/gpt/pretrain.py",
             "            group.update(mine)  #", "            pass  #", FLAGS),
    Mutation("39 tokens are counted as if the batch had never changed", "examples/gpt/pretrain.py",
             "self.sample(step + 1) * self.config.seq_len", "(step + 1) * tokens_a_step", FLAGS),
    Mutation("38 another optimizer's state is taken", "examples/gpt/pretrain.py",
             '            "optimizer": self.args.optimizer,\n', "", OTHER_RUN),
    Mutation("a last checkpoint that isn't written passes", "examples/gpt/pretrain.py",
             "                self.save_last(done)\n", "                self._try(lambda done=done: self.save(done))\n",
             f"{CHECKPOINT}::test_a_run_whose_last_checkpoint_is_not_written_fails"),
    Mutation("what goes along isn't written", "mpcore/checkpoint/saving.py",
             "        write_beside(temporary(path) / name, data)\n", "        pass\n",
             f"{HF}::test_what_goes_along_with_a_model_stays_with_it_through_training"),
    Mutation("40 the background saves what training goes on with", "mpcore/checkpoint/saving.py",
             "_snapshot(model, optimizer, mesh, about, copy=True)",
             "_snapshot(model, optimizer, mesh, about, copy=False)", MOMENT),
    Mutation("bytes are loaded unchecked", "mpcore/checkpoint/loading.py",
             "        if check_bytes:\n", "        if False:\n", DAMAGED),
    Mutation("a thread's error is lost", "mpcore/checkpoint/format.py",
             "        raise errors[min(errors)]\n", "        results = dict.fromkeys(range(len(todo)))\n", THREADS),
    Mutation("the last rows aren't in the checksum", FORMAT, "for first in range(0, len(rows), ROWS):",
             "for first in range(0, len(rows) - ROWS + 1, ROWS):", CHECKSUM),
    Mutation("bytes that fill no row aren't in the checksum", FORMAT,
             "    return zlib.crc32(data[rows.nbytes :], crc)\n", "    return crc\n", CHECKSUM),
    Mutation("the checksum is of the last rows alone", FORMAT, "axis=0), crc)", "axis=0))", CHECKSUM),
    Mutation("a row of the checksum is a page", FORMAT, "WORDS, ROWS = 1021, 63", "WORDS, ROWS = 512, 63", CHECKSUM),
    Mutation("the checksum forgets equal words", FORMAT, "np.add.reduce(", "np.bitwise_xor.reduce(", CHECKSUM),
    Mutation("a used optimizer gets memory beside its own", "mpcore/checkpoint/loading.py",
             "                if not _alike(old, parameter, dtype):\n", "                if True:\n", OTHERS),
    Mutation("memory lies otherwise than the parameter", "mpcore/checkpoint/loading.py",
             'local.device.type == "cpu" and local.is_contiguous()', 'local.device.type == "cpu"', LARGE),
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
             "        self._files[chunk.file].forget(chunk.key)\n", "        pass\n",
             f"{HF}::test_a_conversion_holds_one_tensor_at_a_time"),
    Mutation("a giant header is allocated", "mpcore/checkpoint/format.py",
             "            if length > min(HEADER_LIMIT, size - 8):\n", "            if False:\n", HF),
    Mutation("a header may point beyond the file", "mpcore/checkpoint/format.py",
             "return end - start == size and end <= room", "return end - start == size", HF),
    Mutation("an index leads out of its folder", "examples/gpt/hf.py",
             "if Path(name).name != name or not name.endswith", "if not name.endswith", HF),
    Mutation("an export doesn't say what format it is in", "mpcore/checkpoint/format.py",
             '{"__metadata__": {"format": "pt"}}', "{}",
             "tests/examples/test_hf.py::test_pitfall_16_17_a_checkpoint_of_any_layout_exports[gpt2]"),
    Mutation("moments outlive a checkpoint that has none", "mpcore/checkpoint/loading.py",
             "    optimizer.state.clear()\n", "    if plan.state:\n        optimizer.state.clear()\n",
             "tests/test_checkpoint.py::test_a_checkpoint_from_before_the_first_step_forgets_what_the_optimizer_had"),
]  # fmt: skip
