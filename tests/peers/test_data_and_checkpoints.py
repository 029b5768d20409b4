"""Samples, corpora, blends, and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpcore as mp
from examples.gpt.indexed_dataset import IndexedDataset, IndexedDatasetWriter, smallest_dtype
from examples.gpt.samples import Blend, TokenSamples, parse_sources, split_documents
from examples.gpt.tokenizer import ByteTokenizer, encode_document
from mpcore.checkpoint import checkpoints, latest, load, save, save_async, step_path, verify
from mpcore.sharding.declare import cut
from tests.peers.sources import states

DATA, CHECKPOINTS = "data", "checkpoints"


class Corpus:
    """Documents in memory: a token is its place in the corpus."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = np.array(lengths)
        self.starts = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.starts[index] + np.arange(self.lengths[index])

    def origin(self, index: int) -> tuple[str, int, int]:
        return "corpus", index, 0


def parts(*counts: int) -> list[TokenSamples]:
    """Corpora that hold so many samples of 10 tokens."""
    return [TokenSamples(Corpus(10 * count + 1), 10, seed=i) for i, count in enumerate(counts)]


# --- data ----------------------------------------------------------------------------------------------------------


@states(
    DATA,
    "Megatron-LM",
    "data/test_gpt_dataset.py: test_mock_gpt_dataset",
    table={"an index gives the same sample": True, "other indices give others": False},
)
def test_a_sample_depends_on_its_index_alone(same):
    samples = TokenSamples(Corpus(*[64] * 40), 32, seed=1234)
    first, again = (samples.batch(range(start, start + 10))[0] for start in (0, 0 if same else 10))
    assert torch.equal(first, again) is same


@states(DATA, "Megatron-LM", "data/test_gpt_dataset.py", "test_mock_gpt_dataset, its splits")
def test_training_and_held_out_documents_are_not_the_same():
    train, held_out = split_documents(1000)
    assert len(train) + len(held_out) == 1000
    assert not {*train.tolist()} & {*held_out.tolist()}


@states(
    DATA, "torchtitan", "test_text_dataset_packing.py", "test_no_cross_document_targets, labels are the next tokens"
)
def test_targets_are_the_next_tokens():
    tokens, targets = TokenSamples(Corpus(7, 5, 20), 4, seed=0).batch(range(7))
    assert torch.equal(targets, tokens + 1)


@states(DATA, "DeepSpeed", "runtime/test_data.py", "test_repeating_loader")
def test_after_the_last_sample_every_sample_comes_again():
    samples = TokenSamples(Corpus(31), 10, seed=0)
    assert len(samples) == 3
    epochs = [[int(samples.sample(3 * epoch + i)[0]) for i in range(3)] for epoch in range(10)]
    assert all(sorted(epoch) == [0, 10, 20] for epoch in epochs)


@states(
    DATA,
    "torchtitan",
    "",
    "test_text_dataset_packing.py: test_packing_state_round_trips",
    "test_dataset_checkpointing.py: test_c4_resumption",
)
@states(DATA, "nanotron", "nanoset/test_build_nanoset_dataloader.py", "test_recover_nanoset_dataloader")
def test_a_resumed_run_reads_on_where_it_stopped():
    """A run needs only the number of the next sample."""
    samples = TokenSamples(Corpus(*[64] * 40), 32, seed=42)
    whole = samples.batch(range(20))[0]
    again = TokenSamples(Corpus(*[64] * 40), 32, seed=42).batch(range(12, 20))[0]
    assert torch.equal(again, whole[12:])


SIZES = [10 * (i + 1) for i in range(10)]


@states(
    DATA,
    "Megatron-LM",
    "data/test_builder.py: test_builder",
    table={"as long as all corpora": 0, "each sample once": 1},
)
def test_a_blend_without_weights_holds_every_sample_once(what):
    blend = Blend(parts(*SIZES), None, seed=1234)
    assert len(blend) == sum(SIZES)
    if what:
        places = [blend.place(i) for i in range(len(blend))]
        assert len({*places}) == len(blend)
        assert [sum(part == i for part, _ in places) for i in range(10)] == SIZES


@states(DATA, "nanotron", "nanoset/test_build_nanoset_dataloader.py", "test_build_nanoset_dataloader, its weights")
@states(DATA, "Megatron-LM", "data/test_builder.py", "test_builder, weights 1 to 10")
def test_a_blends_shares_are_its_weights():
    blend = Blend(parts(*SIZES), range(1, 11), seed=1234)
    found = np.bincount([blend.place(i)[0] for i in range(10_000)], minlength=10)
    assert np.abs(found - 10_000 * np.arange(1, 11) / 55).max() < 1


@states(DATA, "nanotron", "nanoset/test_build_nanoset_dataloader.py", "test_build_nanoset_dataloader, indices in range")
def test_a_blend_asks_no_corpus_for_a_sample_it_lacks():
    """A corpus that ends begins its next epoch."""
    blend = Blend(parts(3, 5), [0.9, 0.1], seed=0)
    for i in range(100):
        assert blend.sample(i).shape == (11,)


@states(
    DATA,
    "Megatron-LM",
    "data/test_builder.py: test_builder",
    table={
        "a weight before each prefix": (["1", "a", "2", "b"], (["a", "b"], [1.0, 2.0])),
        "one prefix without a weight": (["a"], (["a"], None)),
        "prefixes without weights": (["a", "b"], (["a", "b"], None)),
    },
)
def test_sources_are_read_as_megatrons(words, read):
    assert parse_sources(words) == read


@states(
    DATA,
    "Megatron-LM",
    "data/test_builder.py: test_fast_builder",
    table={"20,000 tokens": (20000, np.uint16), "131,072 tokens": (131072, np.int32)},
)
def test_a_corpus_has_megatrons_dtype(vocab, dtype):
    assert smallest_dtype(vocab) == dtype


@states(DATA, "Megatron-LM", "data/test_builder.py", "test_fast_builder, lengths and pointers of documents")
def test_a_corpus_is_read_as_it_was_written(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(20000, size=size) for size in rng.integers(50, 101, 10)]
    with IndexedDatasetWriter(tmp_path / "file_0", smallest_dtype(20000)) as writer:
        for document in documents:
            writer.add_document(document)
    corpus = IndexedDataset(tmp_path / "file_0")
    assert corpus.lengths.tolist() == [len(document) for document in documents]
    assert all(np.array_equal(a, b) for a, b in zip(corpus, documents, strict=True))


@states(DATA, "Megatron-LM", "data/test_preprocess_data.py", "test_preprocess_data_gpt, numbers_ascending")
def test_each_text_is_a_document_that_decodes_to_it(tmp_path):
    """One hundred lines of "1", "1 2" and so on."""
    tokenizer = ByteTokenizer()
    texts = [" ".join(str(j + 1) for j in range(i + 1)) for i in range(100)]
    with IndexedDatasetWriter(tmp_path / "numbers", smallest_dtype(tokenizer.vocab_size)) as writer:
        for text in texts:
            writer.add_document(encode_document(tokenizer, text))
    corpus = IndexedDataset(tmp_path / "numbers")
    assert len(corpus) == 100
    assert [tokenizer.decode(document[:-1]) for document in corpus] == texts
    assert {int(document[-1]) for document in corpus} == {tokenizer.end_of_document}


def test_batches_go_on_into_the_next_epoch():
    """A convention: DeepSpeed's loader drops the last incomplete batch, or makes it smaller."""
    assert TokenSamples(Corpus(51), 10, seed=0).batch(range(4, 8))[0].shape == (4, 10)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def model(seed: int = 0, width: int = 4, on: mp.Mesh = mp.Mesh()) -> nn.Module:
    found = nn.Sequential(mp.ColumnParallelLinear(4, width, tp=on.tp), mp.RowParallelLinear(width, 2, tp=on.tp))
    return mp.layers.materialize(found, seed)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def stepped(of: nn.Module) -> mp.AdamW:
    optimizer = mp.AdamW(of, lr=0.1)
    for i in range(3):
        of(torch.ones(1, 4) + i).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


HERE = {"mesh": mp.Mesh()}


@states(CHECKPOINTS, "torchtitan", "test_checkpoint.py", "test_save_load_restores_state")
@states(CHECKPOINTS, "nanotron", "test_serialize.py", "test_save_and_load_model", "test_save_and_load_optimizer")
def test_a_checkpoint_restores_model_and_optimizer(tmp_path):
    saved, other = model(), model(1)
    optimizer, new = stepped(saved), mp.AdamW(other, lr=0.1)
    assert not equal(saved, other)
    save(step_path(tmp_path, 3), saved, optimizer, step=3, **HERE)
    found = load(step_path(tmp_path, 3), other, new, **HERE)
    assert found.step == 3
    assert equal(saved, other)
    for p, q in zip(saved.parameters(), other.parameters(), strict=True):
        a, b = optimizer.state[p], new.state[q]
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) if isinstance(a[key], Tensor) else a[key] == b[key] for key in a)


@states(
    CHECKPOINTS,
    "torchtitan",
    "test_checkpoint.py",
    table={
        "test_save_and_purge_keeps_last_k_checkpoints": (2, ["step-00000002", "step-00000003"]),
        "test_retention_disabled_does_not_purge": (None, ["step-00000001", "step-00000002", "step-00000003"]),
    },
)
def test_the_newest_checkpoints_are_kept(keep, names, tmp_path):
    for step in (1, 2, 3):
        save(step_path(tmp_path, step), model(), step=step, keep=keep, **HERE)
    assert sorted(os.listdir(tmp_path)) == names


@states(
    CHECKPOINTS,
    "torchtitan",
    "test_checkpoint.py",
    "test_load_finds_latest_and_calls_dcp_load",
    "test_returns_max_valid_step",
)
@states(CHECKPOINTS, "DeepSpeed", "checkpoint/test_latest_checkpoint.py", "TestLatestCheckpoint.test_existing_latest")
@states(
    CHECKPOINTS, "Megatron-LM", "dist_checkpointing/test_nonpersistent.py", "test_basic_save_load_scenarios, the newest"
)
def test_the_newest_complete_checkpoint_is_found(tmp_path):
    """Of steps 5, 20 and 10; a folder of step 30 without a manifest is none."""
    for step in (5, 20, 10):
        save(step_path(tmp_path, step), model(), step=step, **HERE)
    step_path(tmp_path, 30).mkdir()
    assert latest(tmp_path) == step_path(tmp_path, 20)
    assert [path.name[-2:] for path in checkpoints(tmp_path)] == ["20", "10", "05"]


@states(
    CHECKPOINTS,
    "torchtitan",
    "test_checkpoint.py",
    "test_load_returns_false_when_no_checkpoint_folder",
    "test_missing_folder_returns_negative_one",
)
@states(CHECKPOINTS, "DeepSpeed", "checkpoint/test_latest_checkpoint.py", "TestLatestCheckpoint.test_missing_latest")
def test_without_a_folder_there_is_no_newest_checkpoint(tmp_path):
    assert latest(tmp_path / "none") is None


@states(
    CHECKPOINTS,
    "torchtitan",
    "test_checkpoint.py",
    "test_explicit_load_step_raises_when_checkpoint_folder_missing",
    "test_explicit_load_step_raises_when_checkpoint_step_missing",
)
def test_a_named_checkpoint_that_is_missing_is_an_error(tmp_path):
    save(step_path(tmp_path, 1), model(), step=1, **HERE)
    for path in (step_path(tmp_path, 5), step_path(tmp_path / "none", 5)):
        with pytest.raises(ValueError, match="step-00000005"):
            load(path, model(), **HERE)


@states(CHECKPOINTS, "torchtitan", "test_checkpoint.py", "test_last_save_model_only_and_initial_load_model_only")
def test_weights_can_be_saved_and_loaded_alone(tmp_path):
    saved, other, third = model(), model(1), model(2)
    optimizer = stepped(saved)
    save(tmp_path / "all", saved, optimizer, step=1, **HERE)
    load(tmp_path / "all", other, **HERE)
    assert equal(saved, other)
    save(tmp_path / "weights", saved, step=1, **HERE)
    load(tmp_path / "weights", third, **HERE)
    assert equal(saved, third)
    with pytest.raises(ValueError, match="the optimizer: missing from the checkpoint"):
        load(tmp_path / "weights", third, mp.AdamW(third), **HERE)


@states(CHECKPOINTS, "torchtitan", "test_checkpoint.py", "test_non_persist_buffer_not_saved")
def test_buffers_that_do_not_persist_are_not_saved(tmp_path):
    made = model()
    made.register_buffer("freqs_cis", torch.ones(2), persistent=False)
    made.register_buffer("seen", torch.ones(2))
    held = {name for name, _ in save_and_list(tmp_path / "a", made)}
    assert "seen" in held
    assert "freqs_cis" not in held


def save_and_list(path: Path, of: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    save(path, of, step=0, **HERE)
    return [(name.removeprefix("model/"), entry.shape) for name, entry in mp.checkpoint.inspect(path).tensors.items()]


def both(*, missing: bool, unexpected: bool) -> tuple[nn.Module, nn.Module]:
    """What is saved, and what is loaded into."""
    saved, other = (nn.ModuleDict({"a": nn.Linear(2, 2)}) for _ in range(2))
    if missing:
        other["lacking"] = nn.Linear(1, 1, bias=False)
    if unexpected:
        saved["surplus"] = nn.Linear(1, 1, bias=False)
    return saved, other


@states(
    CHECKPOINTS,
    "Megatron-LM",
    "dist_checkpointing/test_strict.py: TestStrictLocal",
    table={
        "test_raise_all, missing": (True, False),
        "test_raise_unexpected": (False, True),
        "test_raise_all, both": (True, True),
    },
)
def test_each_missing_and_unexpected_name_is_told(missing, unexpected, tmp_path):
    saved, other = both(missing=missing, unexpected=unexpected)
    save(tmp_path / "a", saved, step=0, **HERE)
    with pytest.raises(ValueError, match="can't be loaded") as error:
        load(tmp_path / "a", other, **HERE)
    assert ("lacking.weight: missing from the checkpoint" in str(error.value)) is missing
    assert ("surplus.weight: in the checkpoint, but not in the model" in str(error.value)) is unexpected


@states(
    CHECKPOINTS,
    "Megatron-LM",
    "dist_checkpointing/test_strict.py: TestStrictLocal",
    table={
        "test_everything_ok": (False, False),
        "test_passthrough, returned": (True, False),
        "test_passthrough_errors, returned": (False, True),
    },
)
def test_without_strict_the_names_are_returned(missing, unexpected, tmp_path):
    saved, other = both(missing=missing, unexpected=unexpected)
    save(tmp_path / "a", saved, step=0, **HERE)
    found = load(tmp_path / "a", other, strict=False, **HERE)
    assert found.missing_keys == ["model/lacking.weight"] * missing
    assert found.unexpected_keys == ["model/surplus.weight"] * unexpected
    assert torch.equal(other["a"].weight, saved["a"].weight)


@states(
    CHECKPOINTS,
    "Megatron-LM",
    "dist_checkpointing/test_integrity.py: TestIntegrity",
    table={
        "test_save_verify_integrity_manifest_with_ckpt": False,
        "test_save_verify_integrity_manifest_error": True,
    },
)
def test_a_changed_file_is_found(changed, tmp_path):
    save(tmp_path / "a", model(), step=0, **HERE)
    if changed:
        (file,) = (tmp_path / "a").glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert bool(verify(tmp_path / "a")) is changed
    if changed:
        with pytest.raises(ValueError, match="can't be loaded"):
            load(tmp_path / "a", model(), **HERE)


@states(
    CHECKPOINTS,
    "Megatron-LM",
    "dist_checkpointing/test_async_save.py",
    "TestAsyncSave.test_async_is_equivalent_to_sync",
)
@states(CHECKPOINTS, "torchtitan", "test_checkpoint.py", "test_async_save_calls_maybe_wait_for_saving")
def test_a_save_in_the_background_writes_the_same_bytes(tmp_path):
    """And a second one waits for the first."""
    saved = model()
    first = save_async(tmp_path / "a", saved, step=0, **HERE)
    second = save_async(tmp_path / "b", saved, step=0, after=first, **HERE)
    assert first.done
    save(tmp_path / "c", saved, step=0, **HERE)
    second.wait()
    for name in os.listdir(tmp_path / "c"):
        if name.endswith(".safetensors"):
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


@states(
    CHECKPOINTS,
    "DeepSpeed",
    "checkpoint/test_shared_weights.py",
    "TestCheckpointSharedWeights.test_checkpoint_shared_weights",
)
def test_shared_weights_are_restored(tmp_path):
    saved, other = (nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}) for _ in range(2))
    for made in (saved, other):
        made["b"].weight = made["a"].weight
    save(tmp_path / "a", saved, step=0, **HERE)
    load(tmp_path / "a", other, **HERE)
    assert other["a"].weight is other["b"].weight
    assert torch.equal(other["a"].weight, saved["a"].weight)


@states(
    CHECKPOINTS,
    "Megatron-LM",
    "dist_checkpointing/test_mapping.py",
    "TestShardedTensor.test_from_rank_offsets_constructor",
)
def test_rank_three_of_six_holds_the_fourth_sixth():
    """7 of 42 rows, from 21 on."""
    assert cut(42, mp.Axis(6, 3, name="tp"), 2).mine == ((21, 28),)


@states(
    CHECKPOINTS,
    "Megatron-LM",
    "dist_checkpointing/test_serialization.py",
    "test_partition_change_save_load",
    "test_multi_process_save",
)
def test_another_layout_reads_a_checkpoint(tmp_path):
    """Saved on tp 4, with one file of each rank, and read on one rank."""
    whole = model(5, width=8)

    def written(on: mp.Mesh) -> None:
        save(tmp_path / "a", model(5, width=8, on=on), step=0, mesh=on)

    mp.simulate(written, tp=4)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 4
    other = model(6, width=8)
    load(tmp_path / "a", other, **HERE)
    assert equal(whole, other)


@states(CHECKPOINTS, "Megatron-LM", "dist_checkpointing/test_mapping.py", "test_is_main_replica")
def test_a_replica_is_written_once(tmp_path):
    """Rank 0 writes the replicated bias of a row-parallel layer."""

    def written(on: mp.Mesh) -> None:
        save(tmp_path / "a", model(on=on), step=0, mesh=on)

    mp.simulate(written, tp=2)
    chunks = mp.checkpoint.inspect(tmp_path / "a").tensors
    assert len(chunks["model/1.bias"].chunks) == 1
    assert len(chunks["model/1.weight"].chunks) == 2
