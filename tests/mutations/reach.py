"""What `mpcore.verify` cannot see of a mutation, and why those that nothing catches are let be.

It compares a model under a layout with the same model on one process, in one step in float64. What is no number of such
a step is beyond it, and so is what is wrong on one process too.
"""

from __future__ import annotations

from tests.mutations import Mutation

FILES = {
    "bench/": "benches are no part of a model",
    "examples/gpt/arguments.py": "the flags of the example",
    "examples/gpt/blend.py": "the data of the example, in whose place verify has tokens of its own",
    "examples/gpt/data.py": "the data of the example, in whose place verify has tokens of its own",
    "examples/gpt/generate.py": "it writes no text",
    "examples/gpt/hf.py": "a conversion of files",
    "examples/gpt/plan.py": "an estimate is no number of the step",
    "examples/gpt/prepare.py": "the data of the example, in whose place verify has tokens of its own",
    "examples/gpt/pretrain.py": "the loop of the example, in whose place verify has its own",
    "examples/gpt/records.py": "the files of the example",
    "mpcore/checkpoint/": "a step writes no checkpoint",
    "mpcore/survival.py": "a step meets no fault",
    "mpcore/trace.py": "the log of collectives is no number",
    "mpcore/verify/": "verify itself",
    "mpcore/ledger/": "counts of bytes are no numbers of the step",
    "mpcore/memory.py": "an estimate is no number of the step",
    "mpcore/plan.py": "an estimate is no number of the step",
    "mpcore/dry_run.py": "an estimate is no number of the step",
    "mpcore/storages.py": "an estimate is no number of the step",
    "mpcore/offload.py": "it offloads nothing",
    "mpcore/parallelize.py": "its models are made of our layers",
    "mpcore/local_updates.py": "it has one worker",
    "mpcore/recompute.py": "it recomputes nothing",
    "mpcore/pipeline/prove.py": "its schedule is right",
    "mpcore/pipeline/partition.py": "where the stages are cut is no number of the step",
    "mpcore/pipeline/schedules.py": "its schedule is 1f1b, and read from no file",
    "mpcore/optim.py": "it steps with plain SGD",
    "mpcore/precision.py": "it scales no loss, and converts no layer",
    "tests/": "what tests run on",
    "kernels/_triton.py": "nothing is launched without a GPU",
    "kernels/_main_grad.py": "it keeps no main gradients",
    "kernels/": "an operator, computed alike on one process",
}
ALIKE, COST, REFUSAL = "wrong on one process too", "a cost, no number", "an error that is not raised"
MAIN, DERIVATIVE = "it keeps no main gradients", "it takes no second derivative"
EIGHT = "no layer of its model is in eight bits"
SPLIT, NODES = "its schedule is 1f1b", "its layouts replicate no shards over nodes"
BEYOND = {
    "no layer of its model is wrapped or replaced": (
        "attention asks its projection for heads", "any norm is taken for RMSNorm",
    ),
    "its models give experts all their axes": (
        "28 experts are cut over nothing where etp isn't given", "28 experts' replicas over tp are nobody's",
    ),
    "its models scale scores by the width of keys": ("the scale gets lost between ranks",),
    "its models mask no attention by hand, and pack no documents": (
        "the scale gets lost under a mask of one's own", "the scale gets lost in the kernel",
        "36 cp: a mask of one's own begins anew on each rank", "samples share the first one's mask",
        "a query without keys is left to torch", "a query without keys sees them all",
    ),
    "its models' logits are there whole": (
        "a head in chunks knows one rank's vocabulary", "losses of tokens lose their weights",
    ),
    "its models name no parameter twice": (
        "30 the first owner of a parameter alone is asked", "11 the pending sums of the first owner alone count",
        "21 the first owner alone says how a parameter begins",
    ),
    "its models get nothing more after sharding": (
        "33 a parameter that came late is never summed", "33 what is cut over data isn't marked",
        "43 with all else frozen nobody misses the sum of a late adapter",
        "a late parameter declared by hand is refused too",
    ),
    "its stages return one tensor, alike in every micro-batch, and each layer of theirs is used once": (
        "what a dry run does to buffers stays", "places in a dry run are in no table",
        "an output that begins to need a gradient gets none", "weights that meet no input get no gradient",
        "uses of a weight are taken one by one", "a layer used twice frees what is between",
        "what one use sends to another counts twice", "a stage that fails leaves the next waiting",
    ),
    "its model keeps its dtype": ("a cast rounds the router's bias", "44 a router's bias is cast with its weights"),
    "FLOPs are no number of the step": ("a table that is looked up multiplies", "a window saves no product"),
    "it loads no state into shards": (
        "38 a state is loaded into what a joined stage gathered", "38 every data rank loads the first rank's shard",
        "38 a state is loaded into what is only gathered",
    ),
    EIGHT: (
        "eight bits: the input's gradient isn't summed", "eight bits: tokens gathered again come in another order",
        "eight bits: the weight's gradient from blocks along features",
        "eight bits: the weight isn't quantized in squares", "eight bits: the whole input is kept",
        "eight bits: both passes of a split backward compute both products",
        "eight bits: micro-batches are added in half precision",
    ),
    ALIKE: (
        "20 keys are sums", "7 mean over ignored tokens too", "7 mean of nothing", "8 ignored targets have a loss",
        "8 ignored targets have a gradient", "9 the gradient goes through bf16", "5 z-loss gradient without its factor",
        "6 exponentials without the maximum", "19 sites share a mask", "positions run on over documents",
        "llama3's bands change places", "the layer's soft cap gets lost", "weights of experts aren't normalised",
        "29 ties go to the higher expert", "27 padding is routed", "weights aren't scaled",
        "27 padding counts in the balance loss", "the padding's row is drawn",
        "the loss scales a softmax that is used again", "4 the loss changes its logits",
        "the latent of queries has no norm", "values come before keys", "scores are scaled by what has no rotation",
        "YaRN leaves the scores alone", "YaRN's factor comes once", "padded values stay in the output",
        "a checkpoint's latents are the default's", "the example turns latent attention's halves",
    ),
    COST: (
        "cp: keys go on round where nobody reads them", "DTensor is imported with the library",
        "a block gathers once more", "narrow values take memory of all pairs", "capacity bounds no slots",
        "the host reads whether any token is real",
        "ZeRO-2 sums gradients once a step", "ZeRO-1 gathers parameters each micro-batch",
        "ZeRO-2 sums once more after the last micro-batch", "ZeRO-3 keeps parameters after forward",
        "36 cp: zigzag pairs neighbours", "a split product runs whole, twice",
        "each micro-batch keeps a copy of the weight",
    ),
    REFUSAL: (
        "22 a router that counted nothing passes", "28 experts that lie otherwise than the mesh says pass",
        "all_reduce cuts the gradient in silence", "all_reduce refuses gradients on two ranks alone",
        "30 owners that cut a parameter differently pass", "11 owners with pending and with whole gradients pass",
        "10 gathered logits are taken", "a rank without columns waits for nobody",
        "32 an optimizer that reads .grad alone steps nothing", "an optimizer trains what shards replaced",
        "a mask is refused after the first gather", "processes of another launcher train alone",
        "41 ranks ask for different meshes", "a fifth stage of ZeRO",
        "the product of tokens is a view", "shards of different rows are summed over data",
        "outer blocks take the parameters of inner ones",
        "hf a checkpoint's mixture stays a dict", "parameters that are elsewhere are read past their end",
    ),
    MAIN: (
        "32 autograd adds the product as well", "32 a backward in two passes adds twice",
        "32 the last step's gradients stay",
        "32 what was added is added again",
        "44 products are rounded before the sum",
    ),
    DERIVATIVE: ("a second derivative comes out wrong",),
    SPLIT: (
        "33 a split backward's second half is not summed", "14 a table that two stages share is not summed",
        "a split product doesn't sum its input's gradient",
    ),
    NODES: ("30 replicas of a shard each count in the norm", "24 replicas of shards are never summed"),
    "it steps in float64": (
        "37 cp: gradients of keys summed in bf16", "37 cp: gradients are rounded before they are summed",
        "37 cp: partial outputs are rounded before they are merged", "44 gradients are summed in bfloat16",
        "autocast doesn't reach the product",
    ),
    "the same ranks in another order": (
        "41 the expert groups leave their stage", "ep ranks are numbered before etp ranks",
    ),
    "its experts are cut over tp": ("30 the norm leaves out experts on tp ranks",),
    "it sums over data by shard_data_parallel": ("25 data ranks aren't summed",),
    "its model fits one bucket": ("ranks cut their sums in buckets of their own",),
    "it reads a state dict at once": ("a state dict moves with the model",),
    "it has one worker": ("workers share the first one's groups",),
    "its ranks have no GPUs": ("ranks share a GPU by default", "a world on GPUs has no backend on the host"),
    "it looks at the last stage on its own rank": ("35 the first stage answers for the last",),
    "it starts once": ("2 a new attempt takes the dead one's name",),
    "it meets no NaN": ("30 a NaN is lost in the maximum", "a shard masked with -inf gives NaN"),
    "it takes one step in training, and evaluates after it alone": (
        "27 evaluation counts", "a validation leaves copies of parameters that nobody steps",
        "22 recomputed tokens are counted again", "26 the dry run of a pipeline counts tokens",
        "22 recomputation counts as a call",
    ),
}  # fmt: skip
_REASONS = {what: reason for reason, names in BEYOND.items() for what in names}

EXPLAINED: dict[str, str] = {}


def beyond(mutation: Mutation) -> str:
    """Why verify cannot see it, or ""."""
    if mutation.what in _REASONS:
        return _REASONS[mutation.what]
    return next((reason for file, reason in FILES.items() if mutation.file.startswith(file)), "")
