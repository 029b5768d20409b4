"""A Hopper multiprocessor in Python, on which a Gluon kernel's own source runs: for what can go wrong between warps.

The partitions of a kernel run as threads, one at a time; at each synchronisation a seeded scheduler takes another one,
or lets the copy engine or the tensor cores do some of what they were asked for. Seeds also make some of them slow.
So a kernel that waits too little sees memory that is not there yet (NaN), and one that waits too much stands still.

What must not depend on the schedule is not left to it: each partition has a vector clock of what it knows to have
happened, which only barriers pass on. Whoever reads memory must know that it was written, and whoever writes to it
must know that it was read (Lamport, "Time, clocks, and the ordering of events", 1978; Mattern, "Virtual time and
global states of distributed systems", 1989). That and all other misuse is a `MachineError` that names those involved.

Not seen: warps of one partition that overtake each other, layouts (the compiler checks them), banks, registers, time.
"""

from __future__ import annotations

import linecache
import math
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from mpcore.kernels._dispatch import made

Clock = dict[str, int]


def join(known: Clock, other: Clock) -> None:
    """Add to what is known what another knows."""
    for agent, time in other.items():
        known[agent] = max(time, known.get(agent, 0))


class MachineError(AssertionError):
    """What the kernel did that the hardware does not allow, or does wrong without a word."""


class Aborted(BaseException):
    """Another partition has failed."""


class Whole(Tensor):
    """Whole numbers, whose unsigned form torch can't compare."""

    def to(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        if dtype == torch.uint32:
            return super().to(torch.int64) & 0xFFFFFFFF
        return super().to(dtype)


class Event:
    """What an engine does by itself, some time after it was asked for."""

    def __init__(self, engine: str, what: str, act: Callable[[], None], in_order: bool = False) -> None:
        self.engine, self.what, self.act, self.in_order, self.happened = engine, what, act, in_order, False


class Pending:
    """The result of a product that nobody has waited for."""

    def __init__(self, event: Event, operands: list[Slot]) -> None:
        self.event, self.operands = event, operands
        self.value: Any = None

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise MachineError(f"the result of {self.event.what} is used before a warpgroup_mma_wait for it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __getitem__ = refuse
    to = refuse

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> None:
        next(x for x in args if isinstance(x, cls)).refuse()


class Partition:
    """A group of warps that run the same code."""

    def __init__(self, name: str, clock: Clock, weight: float) -> None:
        self.name, self.clock, self.weight = name, {**clock, name: 1}, weight
        self.baton, self.done = threading.Semaphore(0), False
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.products: list[Pending] = []  # in order, that were not waited for
        self.stores: list[tuple[Event, Slot]] = []

    def knows(self, agent: str, time: int) -> bool:
        return self.clock.get(agent, 0) >= time


class Slot:
    """A buffer of shared memory: who wrote it, and who reads it."""

    def __init__(self, name: str) -> None:
        self.name, self.copies = name, 0
        self.reads: Clock = {}
        self.unfinished: list[Event] = []  # products and stores that may still read it
        self.stored: tuple[str, int] | None = None
        self.fenced = True

    def check_written(self, me: Partition, reader: str) -> None:
        """An engine that `me` starts reads this: it must know of the last write, which must have been fenced."""
        said = f"{reader} reads {self.name}"
        if not me.knows(self.name, self.copies):
            raise MachineError(f"{said} and has not waited for the copy into it")
        if self.stored is not None and not me.knows(*self.stored):
            raise MachineError(f"{said}, which {self.stored[0]} stores to: no barrier is between them")
        if self.stored is not None and not self.fenced:
            raise MachineError(f"{said}, which {self.stored[0]} stored to: fence_async_shared is missing")

    def check_free(self, me: Partition, writer: str, engine: bool) -> None:
        """What `me` does, or an engine that it starts, writes over this: it must know of all that came before."""
        said = f"{writer} writes over {self.name}"
        if self.unfinished:
            raise MachineError(f"{said}, which {self.unfinished[0].what} still reads")
        for who, time in self.reads.items():
            if not me.knows(who, time):
                raise MachineError(f"{said}, which {who} may still read: no barrier is between them")
        if not me.knows(self.name, self.copies):
            raise MachineError(f"{said}, into which a copy may still be under way: {me.name} has not waited for it")
        if self.stored is not None and (not me.knows(*self.stored) or (engine and not self.fenced)):
            raise MachineError(f"{said}, to which {self.stored[0]} stores")


class Barrier:
    """An mbarrier: a phase ends when enough have arrived, and all bytes that were announced."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.pending, self.bytes, self.phase = name, 0, 0, 0, 0
        self.coming: list[Event] = []
        self.fenced = False
        self.clock: Clock = {}  # of all who arrived in phases that are over
        self.gathering: Clock = {}

    def arrive(self, who: str, count: int, clock: Clock) -> None:
        if not self.count:
            raise MachineError(f"{who} arrives at {self.name}, which was not initialised")
        if count > self.pending:
            raise MachineError(f"{who} arrives {count} times at {self.name}, which waits for {self.pending} more only")
        self.pending -= count
        join(self.gathering, clock)
        self.advance()

    def advance(self) -> None:
        if self.pending or self.bytes:
            return
        if self.coming:
            raise MachineError(f"{self.name} ends its phase, but {self.coming[0].what} is coming: expect more bytes")
        join(self.clock, self.gathering)
        self.phase, self.pending, self.gathering = self.phase + 1, self.count, {}

    def __str__(self) -> str:
        more = f"{self.pending} more arrivals" + (f" and {self.bytes} more bytes" if self.bytes else "")
        return f"{self.name} (phase {self.phase}, {more} to come)"


class Shared:
    """A view of shared memory, as of Gluon's shared_memory_descriptor."""

    def __init__(self, machine: Program, name: str, data: Tensor | None, slots: list[Any]) -> None:
        self.machine, self.name, self.data, self.slots = machine, name, data, slots

    def index(self, i: int) -> Shared:
        if not 0 <= i < len(self.slots):
            raise MachineError(f"{self.name} has {len(self.slots)} buffers, but number {i} is asked for")
        slot = self.slots[i]
        return Shared(self.machine, slot.name, None if self.data is None else self.data[i], [slot])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.machine, self.name, self.tensor.view(shape), self.slots)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.machine, self.name, self.tensor.permute(order), self.slots)

    @property
    def tensor(self) -> Tensor:
        assert self.data is not None, f"{self.name} is a barrier"
        return self.data

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def one(self) -> Any:
        if len(self.slots) != 1:
            raise MachineError(f"{self.name} has {len(self.slots)} buffers: one of them must be named")
        return self.slots[0]

    def store(self, value: Tensor) -> None:
        me = self.machine.step()
        if isinstance(value, Pending):
            value.refuse()
        if (value.dtype, value.shape) != (self.tensor.dtype, self.tensor.shape):
            raise MachineError(f"{value.dtype} {tuple(value.shape)} is stored to {self.name}")
        self.one.check_free(me, f"a store of {me.name}", engine=False)
        self.tensor.copy_(value)
        self.one.stored, self.one.fenced = (me.name, me.clock[me.name]), False


class Descriptor:
    """A tensor in global memory as the copy engine sees it, made of Gluon's TensorDescriptor."""

    def __init__(self, given: Any) -> None:
        base = given.base.detach()
        self.x = base.as_strided(given.shape, given.strides, base.storage_offset())
        self.block, self.layout, self.dtype = list(given.block_shape), given.layout, base.dtype
        nbytes = math.prod(self.block) * base.element_size()
        self.block_type = types.SimpleNamespace(nbytes=nbytes)
        for size, stride in list(zip(given.shape, given.strides, strict=True))[:-1]:
            assert stride * base.element_size() % 16 == 0, given
            assert min(size, stride) > 0, given

    def box(self, coordinates: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor is in the box, and where in the box it is."""
        if len(coordinates) != len(self.block):
            raise MachineError(f"{len(coordinates)} coordinates for {len(self.block)} dimensions")
        inside, there = [], []
        for at, length, size in zip(coordinates, self.block, self.x.shape, strict=True):
            begin, end = max(at, 0), min(at + length, size)
            inside.append(slice(begin, max(begin, end)))
            there.append(slice(begin - at, max(begin, end) - at))
        return tuple(inside), tuple(there)


class Pointer:
    """A pointer to a whole tensor, or tensors of them."""

    def __init__(self, x: Tensor, at: Any = 0) -> None:
        self.flat, self.at = x.detach().view(-1), at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.at + offset)


class Program:
    """One program of the grid, from its start to its end."""

    def __init__(self, numbers: tuple[int, ...], grid: tuple[int, ...], seed: int) -> None:
        self.numbers, self.grid, self.random = numbers, grid, random.Random(seed)
        self.weights: dict[str, float] = {}
        self.main = Partition("the kernel", {}, 1.0)
        self.partitions, self.current = [self.main], self.main
        self.events: list[Event] = []
        self.barriers: list[Barrier] = []
        self.slots: list[Slot] = []
        self.threads: list[threading.Thread] = []
        self.failure: BaseException | None = None

    def weight(self, name: str) -> float:
        return self.weights.setdefault(name, self.random.choice([0.02, 1.0, 50.0]))

    # --- the scheduler ---

    def step(self, condition: Callable[[], bool] | None = None, waits_for: str = "") -> Partition:
        """A synchronisation of the running partition: others may go on, and it does once the condition holds."""
        me = self.current
        me.condition, me.waits_for = condition, waits_for
        self.hand_over(me)
        me.condition = None
        return me

    def hand_over(self, me: Partition) -> None:
        chosen = self.choose()
        if chosen is not me:
            self.current = chosen
            chosen.baton.release()
            if not me.done:
                me.baton.acquire()
        if self.failure is not None and not me.done:
            raise Aborted

    def choose(self) -> Partition:
        while True:
            ready = [p for p in self.partitions if not p.done and (p.condition is None or p.condition())]
            products = {e.engine: e for e in reversed(self.events) if e.in_order}
            choices = [*ready, *products.values(), *(e for e in self.events if not e.in_order)]
            if not choices:
                stuck = "; ".join(f"{p.name} waits for {p.waits_for}" for p in self.partitions if not p.done)
                raise MachineError(f"nobody can go on: {stuck}")
            weights = [c.weight if isinstance(c, Partition) else self.weight(c.engine) for c in choices]
            chosen = self.random.choices(choices, weights)[0]
            if isinstance(chosen, Partition):
                return chosen
            self.events.remove(chosen)
            chosen.act()
            chosen.happened = True

    def specialise(self, functions: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
        assert len(functions) == len(warps) + 1 == len(registers) + 1
        parent = self.current
        for i, (function, arguments) in enumerate(functions):
            name = f"partition {i} ({function.__name__.strip('_')})"
            partition = Partition(name, parent.clock, self.weight(name))
            self.partitions.append(partition)
            self.threads.append(threading.Thread(target=self.run_partition, args=(partition, function, arguments)))
            self.threads[-1].start()
        workers = self.partitions[-len(functions) :]
        self.step(lambda: all(p.done for p in workers), "the partitions' end")
        for worker in workers:
            join(parent.clock, worker.clock)

    def run_partition(self, me: Partition, function: Callable, arguments: tuple) -> None:
        me.baton.acquire()
        try:
            if self.failure is None:
                function(*arguments)
                for event in [*(p.event for p in me.products), *(event for event, _ in me.stores)]:
                    raise MachineError(f"{me.name} ends without waiting for {event.what}")
                me.done = True
                self.hand_over(me)
                return
        except Aborted:
            pass
        except BaseException as error:  # whatever it is, the main thread raises it
            self.failure = self.failure or error
        self.give_up(me)

    def give_up(self, me: Partition) -> None:
        """Wake one that has not failed yet, to do so and wake the next: the last is the kernel itself."""
        me.done = True
        left = [p for p in self.partitions if not p.done]
        if left:
            self.current = left[-1]
            left[-1].baton.release()

    def run(self, kernel: Any, arguments: tuple) -> None:
        function = Replaced(self).function(kernel)
        try:
            function(*arguments)
        except BaseException as error:
            if self.failure is None:
                self.failure = error
                self.give_up(self.main)
            raise self.failure from None
        finally:
            for thread in self.threads:
                thread.join()
        if self.events:
            raise MachineError(f"the kernel ends while {self.events[0].what} is under way")
        for barrier in self.barriers:
            if barrier.pending != barrier.count or barrier.bytes:
                raise MachineError(f"the kernel ends in the middle of a phase: {barrier}")

    # --- memory and barriers ---

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        frame = sys._getframe(1)
        name = linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition("=")[0].strip()
        if dtype == torch.int64:
            barriers = [Barrier(f"{name}[{i}]") for i in range(shape[0])]
            self.barriers += barriers
            return Shared(self, name, None, barriers)
        slots = [Slot(f"{name}[{i}]") for i in range(shape[0])]
        self.slots += slots
        return Shared(self, name, torch.full(shape, math.nan, dtype=dtype), slots)

    def init(self, barrier: Shared, count: int) -> None:
        held = barrier.one
        if held.count:
            raise MachineError(f"{held.name} is initialised twice")
        held.count = held.pending = count

    def fence(self) -> None:
        me = self.step()
        for barrier in self.barriers:
            barrier.fenced = barrier.fenced or bool(barrier.count)
        for slot in self.slots:
            if slot.stored is not None and slot.stored[0] == me.name:
                slot.fenced = True

    def expect(self, barrier: Shared, nbytes: int, pred: bool = True) -> None:
        me = self.step()
        if pred:
            barrier.one.bytes += nbytes
            self.arrive_as(me, barrier.one, 1)

    def arrive(self, barrier: Shared, *, count: int = 1, pred: bool = True) -> None:
        me = self.step()
        if pred:
            self.arrive_as(me, barrier.one, count)

    def arrive_as(self, me: Partition, barrier: Barrier, count: int) -> None:
        barrier.arrive(me.name, count, me.clock)
        me.clock[me.name] += 1

    def wait(self, barrier: Shared, phase: int, pred: bool = True) -> None:
        held = barrier.one
        if not held.count:
            raise MachineError(f"{self.current.name} waits for {held.name}, which was not initialised")
        if phase not in (0, 1):
            raise MachineError(f"{self.current.name} waits for a phase of {held.name} of parity {phase}")
        if pred:
            waited = Waited(held, phase)
            me = self.step(waited.over, f"the end of a phase of parity {phase} of {held}")
            join(me.clock, held.clock)

    # --- the copy engine ---

    def copy_in(
        self, descriptor: Descriptor, coordinates: list[int], barrier: Shared, into: Shared, pred: bool = True
    ) -> None:
        me = self.step()
        if not pred:
            return
        slot, held = into.one, barrier.one
        what = f"a copy into {slot.name}"
        if list(into.tensor.shape) != descriptor.block or into.dtype != descriptor.dtype:
            raise MachineError(f"{what} of a block {descriptor.block}, but it is {list(into.tensor.shape)}")
        if not held.fenced:
            raise MachineError(f"{what} may see {held.name} before it is initialised: fence_async_shared is missing")
        slot.check_free(me, what, engine=True)
        slot.copies += 1
        nbytes, number, clock = descriptor.block_type.nbytes, slot.copies, dict(me.clock)
        if nbytes * (len(held.coming) + 1) > held.bytes:
            raise MachineError(f"{what} brings {nbytes} bytes, but {held.name} was not told to expect as many")
        source, there = descriptor.box(coordinates)
        into.tensor.fill_(math.nan)
        slot.stored = None

        def land() -> None:
            into.tensor.zero_()
            into.tensor[there] = descriptor.x[source]
            held.coming.remove(event)
            held.bytes -= nbytes
            join(held.gathering, {**clock, slot.name: number})
            held.advance()

        event = Event(f"copies into {slot.name.partition('[')[0]}", what, land)
        held.coming.append(event)
        self.events.append(event)

    def copy_out(self, descriptor: Descriptor, coordinates: list[int], source: Shared) -> None:
        me = self.step()
        slot = source.one
        what = f"a copy out of {slot.name}"
        if list(source.tensor.shape) != descriptor.block or source.dtype != descriptor.dtype:
            raise MachineError(f"{what} of a block {descriptor.block}, but it is {list(source.tensor.shape)}")
        slot.check_written(me, what)
        target, here = descriptor.box(coordinates)

        def leave() -> None:
            descriptor.x[target] = source.tensor[here]

        event = Event("copies out", what, leave)
        slot.unfinished.append(event)
        self.events.append(event)
        me.stores.append((event, slot))

    def wait_for_stores(self, pendings: int) -> None:
        me = self.current
        over = me.stores[: max(0, len(me.stores) - pendings)]
        self.step(lambda: all(event.happened for event, _ in over), "its copies to global memory")
        me.stores = me.stores[len(over) :]
        for event, slot in over:
            slot.unfinished.remove(event)
            slot.reads[me.name] = me.clock[me.name]

    # --- the tensor cores ---

    def multiply(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        me = self.step()
        operands = [x for x in (a, b) if isinstance(x, Shared)]
        what = f"a product of {me.name} with {b.name}"
        for operand in operands:
            operand.one.check_written(me, what)
        if isinstance(a, Pending):
            a.refuse()
        left, right = (x.tensor if isinstance(x, Shared) else x for x in (a, b))
        if left.dtype != right.dtype or left.element_size() != 2 or left.shape[1] != right.shape[0]:
            raise MachineError(f"{what}: {left.dtype} {tuple(left.shape)} by {right.dtype} {tuple(right.shape)}")
        if isinstance(acc, Pending) and acc.event.engine != f"products of {me.name}":
            acc.refuse()

        def compute() -> None:
            product = left.float() @ right.float()
            before = acc.value if isinstance(acc, Pending) else acc
            result.value = product + before if use_acc else product

        event = Event(f"products of {me.name}", what, compute, in_order=True)
        result = Pending(event, [x.one for x in operands])
        for slot in result.operands:
            slot.unfinished.append(event)
        self.events.append(event)
        me.products.append(result)
        return result if is_async else self.wait_for_products(0, [result])

    def wait_for_products(self, num_outstanding: int = 0, deps: Any = ()) -> Any:
        me = self.current
        over = me.products[: max(0, len(me.products) - num_outstanding)]
        self.step(lambda: all(p.event.happened for p in over), "its products")
        me.products = me.products[len(over) :]
        for product in over:
            for slot in product.operands:
                slot.unfinished.remove(product.event)
                slot.reads[me.name] = me.clock[me.name]
        found = [d.value if isinstance(d, Pending) and d not in me.products else d for d in deps]
        return found[0] if len(found) == 1 else tuple(found)


class Waited:
    """Whether the phase of this parity is over, as the hardware tells it: by the parity of the phase it is in."""

    def __init__(self, barrier: Barrier, parity: int) -> None:
        self.barrier, self.parity = barrier, parity

    def over(self) -> bool:
        return self.barrier.phase & 1 != self.parity


class Replaced:
    """Functions of a kernel with this machine's names for those of Gluon, Triton and each other."""

    def __init__(self, program: Program) -> None:
        self.functions: dict[int, Callable] = {}
        language = types.SimpleNamespace(
            **ARITHMETIC, program_id=lambda axis: program.numbers[axis], num_programs=lambda axis: program.grid[axis]
        )
        gluon = types.SimpleNamespace(
            **vars(language), allocate_shared_memory=program.allocate, warp_specialize=program.specialise
        )
        hopper = {
            "mbarrier": types.SimpleNamespace(
                init=program.init, expect=program.expect, arrive=program.arrive, wait=program.wait,
                MBarrierLayout=lambda: None,
            ),
            "tma": types.SimpleNamespace(
                async_copy_global_to_shared=program.copy_in, async_copy_shared_to_global=program.copy_out,
                store_wait=program.wait_for_stores,
            ),
            "fence_async_shared": program.fence,
            "warpgroup_mma": program.multiply,
            "warpgroup_mma_wait": program.wait_for_products,
        }  # fmt: skip
        self.names = {"gl": gluon, "tl": language, **hopper}

    def function(self, kernel: Any) -> Callable:
        plain = made(kernel).fn
        if id(plain) not in self.functions:
            names = dict(plain.__globals__)
            self.functions[id(plain)] = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
            for name in plain.__code__.co_names:
                if hasattr(made(names.get(name)), "fn"):
                    names[name] = self.function(names[name])
            names.update(self.names)
        return self.functions[id(plain)]


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
    if isinstance(pointer.at, int):
        return int(pointer.flat[pointer.at])
    return pointer.flat[pointer.at.long()].as_subclass(Whole)


def _store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    if isinstance(value, Pending):
        value.refuse()
    at, value, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), value, mask)
    pointer.flat[at[mask].as_subclass(Tensor).long()] = value[mask].to(pointer.flat.dtype)


def _fma(x: Tensor, y: Any, z: Tensor) -> Tensor:
    return (x.double() * y + z.double()).float()  # exact before it is rounded once, but for luck


def _of_two(whole: Callable, tensors: Callable) -> Callable:
    def call(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor) or isinstance(y, Tensor):
            return tensors(torch.as_tensor(x), torch.as_tensor(y))
        return whole(x, y)

    return call


ARITHMETIC: dict[str, Any] = {
    "abs": torch.abs,
    "arange": lambda begin, end, layout=None: torch.arange(begin, end, dtype=torch.int32).as_subclass(Whole),
    "cast": lambda x, dtype: x if isinstance(x, int) else x.to(dtype),
    "cdiv": lambda x, y: -(-x // y),
    "constexpr": Any,
    "convert_layout": lambda x, layout: x.refuse() if isinstance(x, Pending) else x,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "fma": _fma,
    "full": lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    "load": _load,
    "log": torch.log,
    "max": lambda x, axis: x.refuse() if isinstance(x, Pending) else x.amax(axis),
    "maximum": _of_two(max, torch.maximum),
    "minimum": _of_two(min, torch.minimum),
    "static_range": range,
    "store": _store,
    "sum": lambda x, axis: x.refuse() if isinstance(x, Pending) else x.sum(axis),
    "where": lambda sees, x, y: torch.where(sees, x, y) if isinstance(sees, Tensor) else x if sees else y,
    "zeros": lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    **{name: getattr(torch, name) for name in ("int32", "int64", "uint32", "float16", "bfloat16", "float32")},
    **{name: lambda *args, **options: None for name in ("SliceLayout", "NVMMADistributedLayout", "DotOperandLayout")},
}


def simulate(
    kernel: Any, grid: tuple[int, ...], descriptors: tuple[Any, ...], tensors: tuple[Tensor | None, ...],
    scalars: tuple[Any, ...], constants: tuple[Any, ...], seed: int = 0,
) -> None:  # fmt: skip
    """Run `kernel[grid](*descriptors, *tensors, *scalars, *constants)`, one program after the other.

    Raises:
        MachineError: the kernel misuses the hardware, in the schedule of this seed or in any.
    """
    described = [None if d is None else Descriptor(d) for d in descriptors]
    pointers = [None if t is None else Pointer(t) for t in tensors]
    for number in range(math.prod(grid)):
        numbers = number % grid[0], number // grid[0] % grid[1], number // grid[0] // grid[1]
        Program(numbers, grid, seed * 1_000_003 + number).run(kernel, (*described, *pointers, *scalars, *constants))
