"""Keep optimizer states, saved activations and parameters in the host's memory until they are needed.

    offload_optimizer(optimizer)    states and step on the host; gradients and parameters are copied in buckets, one
                                    beside the step of another
    offload_activations()           a context around forward and backward: saved tensors go to the host, and come back
                                    a little before backward asks for them
    offload_parameters(blocks)      a block's parameters come while the block before it runs, and go when the next one
                                    begins

On CUDA copies run on a stream of their own, from and to pinned memory. On a CPU the same code copies within its memory.
Results are bitwise those without offload, on a GPU as long as the optimizer's implementation is the same.

Source: Ren et al. 2021, arXiv:2101.06840, section 4; Rajbhandari et al. 2021, arXiv:2104.07857, section 5.1.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mpcore._torch import optim
from mpcore._torch.autograd import keeps_version
from mpcore._torch.compile import uncompiled
from mpcore._torch.fsdp_wrap import trained_tensors
from mpcore._torch.storage import StorageWeakRef, address, alive
from mpcore.gradients.accumulate import gradient_of
from mpcore.gradients.guard import OF_WHOLE_TENSORS
from mpcore.gradients.reduce import buckets
from mpcore.kernels._main_grad import GradientState, attach_main_grad, main_grad, mark_main_grad
from mpcore.layers.module import as_module_list, recomputing, refuse_second_derivative
from mpcore.optim.adamw import AdamW
from mpcore.optim.muon import Muon
from mpcore.parallel.shared import router_statistics
from mpcore.parallel.sync import hides_tensors
from mpcore.sharding.local import is_dtensor, local_tensor
from mpcore.sharding.state_dict import check_present

_Event: TypeAlias = "torch.cuda.Event | None"  # None: the copy is done


class _Copies:
    """Copy tensors between a device and the host while the device computes."""

    def __init__(self, pin_memory: bool | None) -> None:
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory=True, but pinned memory needs a GPU and there is none: leave it out")
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def host(self, like: Tensor) -> Tensor:
        """Return an empty host tensor like `like`. It is pinned if `like` is on a GPU and pinning is on."""
        return torch.empty_like(like, device="cpu", pin_memory=self.pin_memory and like.is_cuda)

    def copy(self, to: Tensor, source: Tensor) -> _Event:
        """Start a copy, on a GPU after the work that is now in its current stream. Return the event at its end."""
        device = next((x.device for x in (to, source) if x.is_cuda), None)
        if device is None:
            to.copy_(source)
            return None
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            for x in (to, source):
                if x.is_cuda:
                    x.record_stream(stream)  # else its memory may be reused before the copy has run
            return stream.record_event()  # type: ignore[return-value]

    def wait(self, event: _Event, device: torch.device) -> None:
        """Make later work of the device wait for a copy. The host doesn't wait."""
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)


def offload_optimizer(
    optimizer: torch.optim.Optimizer, *, pin_memory: bool | None = None, bucket_bytes: int = 2**26
) -> torch.optim.Optimizer:
    """Keep the state of an element-wise optimizer, such as AdamW, in host memory, and run its step on the host.

    Learning-rate schedulers and checkpoints use `param_groups` and `state` as usual.

    Args:
        optimizer: changed in place and returned. It must not have stepped yet.
        pin_memory: use pinned host memory; None: only if there is a GPU. Without it, copies don't overlap.
        bucket_bytes: bytes of the parameters that are copied and stepped together.

    Raises:
        ValueError: if the optimizer already has state, is not element-wise (such as Muon), or memory can't be pinned.

    Example:
        >>> model = mpcore.ColumnParallelLinear(4, 4)
        >>> optimizer = mpcore.parallel.offload_optimizer(torch.optim.AdamW(model.parameters()))
    """
    if isinstance(optimizer, (Muon, *OF_WHOLE_TENSORS)):
        raise ValueError(
            f"{type(optimizer).__name__} computes each element from the full tensor, but the host has only this rank's "
            f"shard: offload an element-wise optimizer, such as AdamW"
        )
    if any(state.get("step", 1) > 0 for state in optimizer.state.values()):  # Adagrad makes its state before
        raise ValueError(f"the optimizer has state of {len(optimizer.state)} parameters: offload before the first step")
    stepped = _Step(_Copies(pin_memory), bucket_bytes)

    def step(optimizer: torch.optim.Optimizer, closure: None = None, **options: Any) -> None:
        stepped(optimizer, closure, options)  # schedules wrap a plain function alone

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


class _Step:
    """Run the step of an offloaded optimizer."""

    def __init__(self, copies: _Copies, bucket_bytes: int) -> None:
        self.copies, self.bucket_bytes = copies, bucket_bytes
        self.on_host: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, closure: None, options: dict[str, Any]) -> None:
        if closure is not None:
            raise ValueError("an offloaded optimizer takes no closure")
        optim.call_hooks(optimizer, "pre")
        with torch.no_grad():
            options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
            arriving = []
            for group in optimizer.param_groups:
                stepped = (p for p in group["params"] if gradient_of(p) is not None)
                for bucket in buckets(stepped, lambda p: local_tensor(p.data).nbytes, self.bucket_bytes):
                    arriving.append((group, bucket, [event for p in bucket for event in self._fetch(p)]))
            leaving = []
            for group, bucket, events in arriving:
                for event in events:
                    event.synchronize()
                self._step(optimizer, group, bucket, options)
                leaving += [(self.copies.copy(local_tensor(p.data), self.on_host[p].data), p.device) for p in bucket]
            for event, device in leaving:
                self.copies.wait(event, device)
        optim.call_hooks(optimizer, "post")

    def _fetch(self, p: nn.Parameter) -> Iterator[torch.cuda.Event]:
        """Copy a parameter, which others may have written to, and its gradient to the host. Yield the events."""
        mine = local_tensor(p.data)
        if p not in self.on_host:
            self.on_host[p] = nn.Parameter(self.copies.host(mine))
        copy = self.on_host[p]
        grad = local_tensor(gradient_of(p))  # type: ignore[arg-type]
        held = main_grad(copy) if copy.grad is None else copy.grad
        held = self.copies.host(grad) if held is None else held
        if main_grad(p) is None:
            copy.grad = held
        else:
            attach_main_grad(copy, held)
            mark_main_grad(copy, GradientState.LOCAL)
        yield from filter(None, (self.copies.copy(held, grad), self.copies.copy(copy.data, mine)))

    def _step(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], bucket: list[nn.Parameter], how: dict[str, Any]
    ) -> None:
        """Step a bucket by an optimizer of the same class and settings on the parameters' host copies."""
        inner: Any = type(optimizer).__new__(type(optimizer))
        inner.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
        inner.param_groups, inner.state = [{**group, "params": [self.on_host[p] for p in bucket]}], defaultdict(dict)
        optim.drop_hooks(inner)
        if isinstance(optimizer, AdamW):
            of = {self.on_host[p]: p for p in bucket}

            def random(copy: nn.Parameter) -> dict[str, Any]:
                bits = optimizer._random(of[copy])
                return bits | {"place": tuple(index.cpu() for index in bits["place"])}

            inner._random = random
        for p in bucket:
            if p in optimizer.state:  # what a checkpoint loaded may lie with the parameter
                state = optimizer.state[p]
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = local_tensor(value).to("cpu")
                inner.state[self.on_host[p]] = state
        before = {**vars(inner), **inner.param_groups[0]}
        type(optimizer).step(inner, **how)
        after = {**vars(inner), **inner.param_groups[0]}
        if changed := [name for name in after if after[name] is not before.get(name)]:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {changed[0]} of all parameters, and offload of the optimizer steps "
                f"{len(bucket)} at a time: take mpcore.AdamW, or no offload"
            )
        for p in bucket:
            optimizer.state[p] = inner.state[self.on_host[p]]


class _Moved:
    """Hold a storage that autograd saved: on the host, and on the device again while a tensor uses it."""

    def __init__(self, x: Tensor, copies: _Copies) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        self.copies, self.device, self.version = copies, x.device, x._version
        self.host = copies.host(flat)
        copies.copy(self.host, flat)  # needs no wait: one stream has the copies both ways
        self.writes = x.detach()  # counts what is written to x, and holds none of its memory
        self.writes.data = x.new_empty(0)
        self.coming: tuple[Tensor, _Event] | None = None
        self.back: StorageWeakRef | None = None  # the bytes on the device, as long as a tensor uses them

    def call(self) -> None:
        """Start to copy the bytes back, unless they are on the device or this copy has started."""
        if self.coming is None and (self.back is None or alive(self.back) is None):
            flat = torch.empty_like(self.host, device=self.device)
            self.coming = flat, self.copies.copy(flat, self.host)

    def flat(self) -> Tensor:
        """Return the bytes on the device."""
        if self.writes._version != self.version:
            raise RuntimeError(
                f"a tensor of {self.host.numel()} bytes that backward needs was written to in place after "
                f"offload_activations began to copy it: write to a clone"
            )
        storage = None if self.back is None else alive(self.back)
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.call()
        assert self.coming is not None
        (flat, event), self.coming = self.coming, None
        self.copies.wait(event, self.device)
        self.back = StorageWeakRef(flat.untyped_storage())
        return flat


@contextmanager
def offload_activations(*, pin_memory: bool | None = None, min_bytes: int = 2**12, ahead: int = 4) -> Iterator[None]:
    """Copy the tensors that autograd saves in this context to host memory, and back before backward needs them.

    A storage with several saved views is copied once. Parameters and small tensors stay on the device. With
    recomputation, only the tensors that it keeps are copied. Don't write to saved tensors in place: backward raises an
    error, as in torch, except for operations that save their own result, such as `exp`.

    Args:
        pin_memory: use pinned host memory; None: only if there is a GPU. Without it, forward waits for each copy.
        min_bytes: tensors with fewer bytes stay on the device.
        ahead: how many tensors to copy back before backward needs them. 0 uses the least memory and waits for each.

    Raises:
        ValueError: if memory can't be pinned, or `ahead` is negative.

    Example:
        >>> block = mpcore.ColumnParallelLinear(4, 4)
        >>> with mpcore.parallel.offload_activations():
        ...     loss = block(torch.ones(1, 4)).sum()
        >>> loss.backward()
    """
    if ahead < 0:
        raise ValueError(f"ahead {ahead} is negative: 0 brings back nothing before it is asked for")
    copies = _Copies(pin_memory)
    moved: weakref.WeakValueDictionary[int, _Moved] = weakref.WeakValueDictionary()
    sources: dict[int, Any] = {}
    saved: list[weakref.ref[_Moved]] = []  # in the order of forward

    @uncompiled
    def pack(x: Tensor) -> Any:
        stays = type(x) is not Tensor or x.layout != torch.strided or isinstance(x._base, nn.Parameter)
        if stays or x.nbytes < min_bytes:
            return x
        storage = x.untyped_storage()
        place = address(storage)
        held, source = moved.get(place), sources.get(place)
        if held is None or source is None or source() is not storage or held.version != x._version:
            held = moved[place] = _Moved(x, copies)
            sources[place] = weakref.ref(storage)
        saved.append(weakref.ref(held))
        return held, len(saved) - 1, x.dtype, x.storage_offset(), x.size(), x.stride()

    @uncompiled
    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        held, place, dtype, offset, size, stride = packed
        flat = held.flat()
        for before in reversed(saved[max(0, place - ahead) : place]):
            if (earlier := before()) is not None:
                earlier.call()
        return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), offset, size, stride)

    with saved_tensors_hooks(pack, unpack):
        yield


def _check_here(block: nn.Module, *_: Any) -> None:
    for name, p in block.named_parameters():
        check_present(name, p)


def _copied(block: nn.Module, p: nn.Parameter, memo: dict[int, Any]) -> Tensor:
    _check_here(block)
    return type(p).__deepcopy__(p, memo)


class _Swap:
    """Hold the parameters of a block on the host, and on the device while the block needs them."""

    def __init__(self, block: nn.Module, copies: _Copies) -> None:
        self.copies, self.here = copies, True
        stay = router_statistics(block)
        self.homes = {p: copies.host(p.data) for p in block.parameters() if p not in stay}
        self.coming: list[tuple[_Event, torch.device]] = []
        block.register_state_dict_pre_hook(_check_here)
        for p in self.homes:
            vars(p)["__deepcopy__"] = partial(_copied, block, p)
        self.store()

    @torch.no_grad()
    def store(self) -> None:
        for event in filter(None, [self.copies.copy(home, p.data) for p, home in self.homes.items()]):
            event.synchronize()

    @torch.no_grad()
    def call(self) -> None:
        """Start to copy the parameters to the device."""
        if self.here:
            return
        for p, home in self.homes.items():
            p.data.untyped_storage().resize_(home.nbytes)
            with keeps_version(p):
                self.coming.append((self.copies.copy(p.data, home), p.device))
        self.here = True

    def fill(self) -> None:
        """Copy the parameters to the device, and make later work of the device wait for the copies."""
        self.call()
        for event, device in self.coming:
            self.copies.wait(event, device)
        self.coming = []

    def release(self) -> None:
        """Free the parameters' device memory, also if a checkpoint shared it with NumPy, which then keeps it."""
        for p in self.homes:
            if not p.data.untyped_storage().resizable():
                p.data = torch.empty_like(p.data)
        self.drop()

    def drop(self) -> None:
        if self.here:
            for p in self.homes:
                p.data.untyped_storage().resize_(0)
            self.here, self.coming = False, []


class ParameterOffload:
    """The parameters that `offload_parameters` offloads. Within `offload.here()` all are on the device."""

    def __init__(self, swaps: list[_Swap], keep: int) -> None:
        self.swaps, self.keep = swaps, keep
        self.used: list[int] = []  # places in `swaps`
        self.depth: int = 0  # of `here`

    def use(self, place: int, step: int) -> None:
        """Copy a block's parameters to the device, start to copy the next block's, and drop the least recently used."""
        if self.depth:
            return
        after = place + step
        wanted = [i for i in (after, place) if 0 <= i < len(self.swaps)][-self.keep :]
        self.used = [*(i for i in self.used if i not in wanted), *wanted]
        while len(self.used) > self.keep:
            self.swaps[self.used.pop(0)].drop()
        self.swaps[place].fill()
        for i in wanted:
            self.swaps[i].call()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Keep all parameters on the device in this context, to read and write them, as checkpoints do.

        At the end of the outermost context the values are stored on the host.
        """
        for swap in self.swaps:
            swap.fill()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                for swap in self.swaps:
                    swap.store()
                    swap.release()
                self.used = []


def offload_parameters(
    blocks: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None, *, keep: int = 2,
    pin_memory: bool | None = None,
) -> ParameterOffload:  # fmt: skip
    """Keep the blocks' parameters in host memory between uses.

    The parameters of at most `keep` blocks are on the device: those of the running block and of the next one, which are
    copied meanwhile. The others have a shape but no memory: read, write and copy them only inside `here()`. Gradients,
    and the biases and fractions of routers, stay on the device.

    Args:
        blocks: modules that are called one after another. Their parameters must be plain tensors that no other block
            shares. They return tensors, or dicts, lists or tuples of tensors (dataclasses from torch 2.13).
        optimizer: its step then runs inside `here()`; None: step the optimizer inside `here()` yourself.
        keep: the number of blocks whose parameters are on the device. With 1, each block waits for its copy.
        pin_memory: use pinned host memory; None: only if there is a GPU. Without it, copies don't overlap.

    Returns:
        A `ParameterOffload`. Inside its context `here()` all parameters are on the device.

    Raises:
        ValueError: if parameters are sharded over data or shared by blocks, or memory can't be pinned. A block raises
            it if its output holds tensors in an unsupported type.

    Note:
        - Second derivatives and pipeline schedules that split backward are not supported.

    Example:
        >>> model = nn.Sequential(mpcore.ColumnParallelLinear(4, 4), mpcore.ColumnParallelLinear(4, 4))
        >>> offload = mpcore.parallel.offload_parameters(model, keep=1)
        >>> with offload.here():
        ...     model[0].weight.shape
        torch.Size([4, 4])
    """
    blocks, copies = as_module_list(blocks), _Copies(pin_memory)
    if keep < 1:
        raise ValueError(f"keep {keep} is smaller than 1: the block at work needs its parameters")
    seen: set[nn.Parameter] = set()
    for i, block in enumerate(blocks):
        mine = set(block.parameters()) - router_statistics(block)
        if any(map(is_dtensor, mine)):
            raise ValueError(
                f"block {i} is sharded over data: zero=0 leaves parameters whole, which can be offloaded; zero=3 holds "
                f"each once among the data ranks"
            )
        if mine & seen:
            raise ValueError(f"block {i} shares {len(mine & seen)} parameters with one before: they have one home")
        seen |= mine
    swaps = [_Swap(block, copies) for block in blocks]
    offload = ParameterOffload(swaps, keep)

    def backward(place: int, grad: Tensor) -> None:
        refuse_second_derivative("a block whose parameters are offloaded")
        offload.use(place, -1)

    for place, (block, swap) in enumerate(zip(blocks, swaps, strict=True)):

        @uncompiled
        def before(module: nn.Module, args: tuple[Any, ...], place: int = place) -> None:
            offload.use(place, -1 if recomputing() else 1)

        @uncompiled
        def after(module: nn.Module, args: tuple[Any, ...], out: Any, place: int = place) -> None:
            trained = trained_tensors(out)
            if not trained and torch.is_grad_enabled() and hides_tensors(out):
                raise ValueError(
                    f"block {place} returns a {type(out).__name__}, in which no tensor is found whose backward would "
                    f"bring its parameters back: return tensors, or dicts, lists, tuples or dataclasses of them"
                )
            for x in trained:
                x.register_hook(partial(backward, place))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
        swap.drop()
    if optimizer is not None:
        step = ExitStack()

        def enter(*_: Any) -> None:
            step.close()  # of a step that an exception ended
            step.enter_context(offload.here())

        optimizer.register_step_pre_hook(enter)
        optimizer.register_step_post_hook(lambda *_: step.close())
    return offload
