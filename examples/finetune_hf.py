"""Fine-tune a causal Hugging Face model with tensor parallelism, ZeRO and LoRA, on Python's standard library.

python -m examples.finetune_hf                                        # all weights of a small new model
python -m examples.finetune_hf --model runs/finetune/model --lora 8   # then an adapter on what it learned
torchrun --nproc-per-node 4 -m examples.finetune_hf --tp 2 --zero 3   # the same losses on any mesh
torchrun --nproc-per-node 4 -m examples.finetune_hf --tp 2 --pp 2 --micro-batches 2   # in two pipeline stages
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM

import mpcore as mp
from examples.gpt.indexed_dataset import IndexedDataset
from examples.gpt.prepare import default_corpus
from examples.gpt.samples import split_samples
from examples.gpt.tokenizer import ByteTokenizer, load_tokenizer
from mpcore.interop.hugging_face.extra_files import tokenizer_files
from mpcore.interop.lora import add_lora, load_lora, save_lora
from mpcore.sharding import local_tensor

VOCABULARY = ByteTokenizer.vocab_size


def load_model(folder: Path | None, mesh: mp.Mesh) -> nn.Module:
    """Open a folder of Hugging Face, whose values `prepare` reads, or make a small Llama, the same on every rank."""
    if folder is not None:
        model = mp.from_pretrained(folder, mesh, defer=True)
        if not (folder / "tokenizer.json").is_file() and model.config.get_text_config().vocab_size != VOCABULARY:
            raise ValueError(f"{folder} has no tokenizer.json: save the model's tokenizer there")
        return model
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": VOCABULARY, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, **sizes))
    return mp.parallelize(model, tp=mesh.tp).to(mesh.device)  # by the plan that the model carries


def token_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The SUM over tokens: the run divides it once, by the tokens of the whole step."""
    return F.cross_entropy(output["logits"].flatten(0, 1).float(), target.flatten(), reduction="sum")


def start(args: argparse.Namespace) -> mp.Run:
    """Lay the model out on a mesh, ready to train."""
    mesh = mp.build_mesh(tp=args.tp, pp=args.pp, ep=args.ep, device_type=args.device)  # dp: what tp and pp leave
    model: Any = load_model(args.model, mesh)
    model.config.use_cache = False  # training keeps no keys and values
    if args.adapter is not None:
        load_lora(model, args.adapter, mesh)
    elif args.lora:
        add_lora(model, rank=args.lora, alpha=2 * args.lora)
    stages, blocks, schedule = mp.pipeline_stages(model, mesh, micro_batches=args.micro_batches)
    return mp.prepare(
        stages, mesh, blocks=blocks, schedule=schedule, loss=token_loss, initialize=False,  # each rank reads its shards
        optimizer=lambda model: mp.AdamW(model, lr=args.lr), data=mp.Zero(args.zero), precision=args.dtype,
        recompute=args.recompute, micro_batches=args.micro_batches,
    )  # fmt: skip


def finetune(args: argparse.Namespace) -> list[float]:
    """Train, save, and return the loss before each step: the same on every mesh."""
    adapts = bool(args.lora or args.adapter)
    args.out = args.out or Path("runs/lora" if adapts else "runs/finetune")
    if args.lora and args.adapter:
        raise ValueError(f"--lora {args.lora} and --adapter {args.adapter}, whose rank is its own: give one")
    if (args.out / "model").exists():
        raise ValueError(f"{args.out / 'model'} is there: give another --out")
    run: Any = start(args)
    mesh = run.mesh
    vocabulary = args.model / "tokenizer.json" if args.model else Path()
    tokenizer = load_tokenizer(vocabulary) if vocabulary.is_file() else ByteTokenizer()
    train_samples, held_out = split_samples(IndexedDataset(default_corpus(tokenizer=tokenizer)), args.seq_len, seed=0)
    assert held_out is not None
    if first := mesh.job.rank == 0:
        sizes = [(local_tensor(p).numel(), p.requires_grad) for p in run.model.parameters()]
        print(f"a rank trains {sum(n for n, on in sizes if on):,} of its {sum(n for n, _ in sizes):,} parameters")

    def batch(indices: range, samples=train_samples) -> tuple[Tensor, Tensor]:
        x, target = samples.batch(indices)
        return x.to(mesh.device), target.to(mesh.device)

    share, losses = run.share(args.batch), []
    before = run.evaluate([batch(share, held_out)])
    for step in (bar := trange(args.steps, disable=not first)):
        run.forward_backward(*batch(range(step * args.batch + share.start, step * args.batch + share.stop)))
        run.clip_gradients(1.0)
        losses.append(run.optimizer_step(lr=args.lr * min(1, (step + 1) / 10)).loss)  # ten steps of warmup
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
    after = run.evaluate([batch(share, held_out)])

    with run.parameters() as whole:
        whole.config.use_cache = True
        if adapts:
            save_lora(whole, args.out / "adapter", run.mesh)
        merged = mp.save_pretrained(whole, args.out / "model", run.mesh)  # with the adapter's product
    if first:
        for name, content in tokenizer_files(args.model).items() if vocabulary.is_file() else ():
            (merged / name).write_bytes(content)
        print(f"loss on held-out text {before:.4f} -> {after:.4f}")
        print(f"the model, for AutoModelForCausalLM.from_pretrained: {merged}")
        if adapts:
            print(f"the adapter alone, for PeftModel.from_pretrained(base, ..) or --adapter: {args.out / 'adapter'}")
        else:
            print(f"next, train an adapter on it: python -m examples.finetune_hf --model {merged} --lora 8")
    return losses


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal Hugging Face model; without: a small new Llama")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters; 0: all weights")
    parser.add_argument("--adapter", type=Path, help="go on with the adapter in this folder, PEFT's or save_lora's")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel size, within the data ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages, of the decoder's layers")
    parser.add_argument("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO over the data ranks")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights, activations")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="samples a step, over all ranks")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a rank's samples, one after the other")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="without: the GPU if there is one")
    parser.add_argument("--out", type=Path, help="gets the folders model and adapter: runs/finetune, or runs/lora")
    return parser.parse_args(argv)


if __name__ == "__main__":
    finetune(parse())
