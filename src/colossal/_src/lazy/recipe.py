"""How the values of a storage come about: the operations that write to it, in order, each ready to run later."""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import Any, final
from weakref import finalize, ref

import torch
import xxhash
from torch.utils._pytree import tree_leaves, tree_map

from colossal.errors import UnsupportedError

_SCRATCH = 1 << 16
_BLOCK = 16  # the elements that torch draws together for a normal distribution, on a CPU
_aten = torch.ops.aten
GENERATOR_LOCK = RLock()
"""Held while a generator is temporarily set to another state: threads that simulate ranks use the same generator."""
_UNIFORM = {_aten.uniform_.default, _aten.rand.default, _aten.rand.generator, _aten.rand_like.default}
_NORMAL = {_aten.normal_.default, _aten.randn.default, _aten.randn.generator, _aten.randn_like.default}


def is_random(func: Any) -> bool:
    """Whether an operation draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


@final
class RandomDraw:
    """What a random operation draws from: a generator, and the state that it had before."""

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        self._generator = generator if generator is not None else _generator_of(device)
        self.state = self._generator.get_state()

    @contextmanager
    def again(self) -> Generator[None]:
        """Rewind the generator inside the context; afterwards its state is restored. Other threads wait."""
        with GENERATOR_LOCK:
            after = self._generator.get_state()
            self._generator.set_state(self.state)
            try:
                yield
            finally:
                self._generator.set_state(after)

    def skip(self, func: Any, result: torch.Tensor) -> bool:
        """Move the generator on as the operation would, without room for its result, where that is known how."""
        if not (result.is_contiguous() and result.is_floating_point()) or self._generator.device.type != "cpu":
            return False
        numel = result.numel()
        if func in _NORMAL and numel >= _BLOCK and _tail(result.dtype) is not None:
            begun = numel % _BLOCK
            numel += (_BLOCK if _tail(result.dtype) == "again" else _BLOCK - begun) if begun else 0
        elif func not in _UNIFORM:
            return False
        scratch = torch.empty(min(numel, _SCRATCH), dtype=result.dtype, device="cpu")
        for start in range(0, numel, _SCRATCH):
            scratch[: numel - start].uniform_(generator=self._generator)
        return True


def _generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if device.index is None:  # pyright: ignore[reportUnnecessaryComparison]
        return module.default_generators[module.current_device()]
    return module.default_generators[device.index]


@cache
def _tail(dtype: torch.dtype) -> str | None:
    """Find out what a normal distribution draws for a block that is not full: versions of torch differ."""
    generator = torch.Generator()
    start = generator.get_state()
    torch.empty(_BLOCK + 1, dtype=dtype, device="cpu").normal_(generator=generator)
    state_after = generator.get_state()
    for tail, drawn in (("again", 2 * _BLOCK + 1), ("filled up", 2 * _BLOCK)):
        generator.set_state(start)
        torch.empty(drawn, dtype=dtype, device="cpu").uniform_(generator=generator)
        if torch.equal(state_after, generator.get_state()):
            return tail
    return None


_INDEX = itertools.count()
_OVERWRITE = {
    _aten.uniform_.default,
    _aten.normal_.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.copy_.default,
    _aten.random_.default,
    _aten.bernoulli_.float,
}
LATEST = 1 << 62


@final
@dataclass(frozen=True)
class View:
    """A tensor as a window on a storage."""

    recipe: "Recipe"  # of the storage
    meta: torch.Tensor  # a tensor on the meta device with the same sizes, strides, offset and dtype

    @property
    def is_full(self) -> bool:
        """Whether the view has every byte of the storage exactly once."""
        return self.meta.is_contiguous() and self.meta.nbytes == self.recipe.num_bytes

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Open the window on a storage with values."""
        real = torch.empty(0, dtype=self.meta.dtype, device=storage.device)
        real.set_(storage, self.meta.storage_offset(), self.meta.size(), self.meta.stride())
        real = real.conj() if self.meta.is_conj() else real
        return torch._neg_view(real) if self.meta.is_neg() else real  # noqa: SLF001 (it has no public name)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


@final
@dataclass(frozen=True)
class Constant:
    """A tensor that had values from the beginning, as an operation saw it."""

    tensor: torch.Tensor
    digest: int  # of its values by then

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Constant":
        """Note what a tensor holds now."""
        return cls(tensor, _digest(tensor))

    def unchanged(self, func: Any) -> torch.Tensor:
        """Get the tensor, as long as it holds what it held."""
        if _digest(self.tensor) != self.digest:
            raise UnsupportedError(
                f"An operation is run again with the tensors that it saw. Found one of shape "
                f"{tuple(self.tensor.shape)} that was written to after {func} had read it. Make such tensors "
                "inside of LazyInitContext, or write to a copy."
            )
        return self.tensor


@final
@dataclass(frozen=True, eq=False)
class RecordedOperation:
    """One call of an operator."""

    func: Any  # the overload
    args: Sequence[Any]  # its arguments, with `View` and `Constant` in place of tensors
    kwargs: Mapping[str, Any]  # its keyword arguments, likewise
    touched: "Sequence[Recipe]"  # the recipes of the storages that it writes to and that were there before
    draw: RandomDraw | None  # what it draws from; None if it draws nothing
    # windows on the storages that it makes, each under the place of that tensor among the results
    made: dict[int, View] = field(default_factory=dict[int, "View"])
    index: int = field(default_factory=lambda: next(_INDEX))  # its place in the order of all operations

    def reads(self) -> "set[Recipe]":
        """Find the storages whose values it needs, at least partly."""
        return {value.recipe for value in self._views() if not self.overwrites(value.recipe)}

    def overwrites(self, recipe: "Recipe") -> bool:
        """Whether it overwrites all previous values of a storage."""
        views = self._views()
        return (
            self.func in _OVERWRITE
            and views[0] is self.args[0]
            and views[0].recipe is recipe
            and views[0].is_full
            and all(value.recipe is not recipe for value in views[1:])
        )

    def writes(self) -> "list[Recipe]":
        """Find the storages whose values it changes."""
        return list(dict.fromkeys([*(view.recipe for view in self.made.values()), *self.touched]))

    def run(self, world: "dict[Recipe, torch.UntypedStorage]", *, again: bool = True) -> None:
        """Run it for real."""

        def real(value: Any) -> Any:
            if isinstance(value, View):
                return value.on(value.recipe.storage_in(world))
            return value.unchanged(self.func) if isinstance(value, Constant) else value

        args, kwargs = tree_map(real, (tuple(self.args), dict(self.kwargs)))
        with torch.no_grad(), self.draw.again() if self.draw is not None and again else nullcontext():
            results = tree_leaves(self.func(*args, **kwargs))
        for number, view in self.made.items():
            world[view.recipe] = _fitting(results[number], view)

    def run_and_discard(self) -> None:
        """Run it only to advance its generator."""
        needed: set[Recipe] = set() if self.func in _OVERWRITE else self.reads()
        world = _replay(dict.fromkeys(needed, self.index))
        for recipe in set(self.touched) & needed:
            # in place it would change kept values, which others are going to read
            world[recipe] = world[recipe].clone()
        self.run(world, again=False)

    def _views(self) -> list[View]:
        return [value for value in tree_leaves((self.args, self.kwargs)) if isinstance(value, View)]


@final
class Owner:
    """Stands for the lazy tensors of one storage."""


@final
class Recipe:
    """What makes the values of one storage."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        self.writes: list[RecordedOperation] = []
        self._owner: ref[Owner] | None = None
        self._kept: torch.UntypedStorage | None = None
        self._kept_at = -1  # what is kept holds from this index on
        self._num_done = 0

    def owner(self) -> "Owner":
        """Get what every lazy tensor of this storage holds: with the last of them, what is kept of it goes.

        Recipes and operations hold each other, so that they stay until the garbage collector comes.
        """
        owner = None if self._owner is None else self._owner()
        if owner is None:
            owner = Owner()
            self._owner = ref(owner)
            finalize(owner, self.forget).atexit = False
        return owner

    def forget(self) -> None:
        """Release the kept values; no caller may rely on finding them here again."""
        with GENERATOR_LOCK:
            self._kept, self._kept_at, self._num_done = None, -1, 0

    def storage(self) -> torch.UntypedStorage:
        """Make the values, once. Whoever gets them may change them: recipes that need them make them anew."""
        with GENERATOR_LOCK:
            storage = _replay({self: LATEST})[self]
            self._kept, self._kept_at, self._num_done = storage, next(_INDEX), len(self.writes)
            return storage

    def storage_before(self, index: int) -> torch.UntypedStorage:
        """Make the values that an operation sees, to be read, not changed."""
        return _replay({self: index})[self]

    def storage_in(self, world: "dict[Recipe, torch.UntypedStorage]") -> torch.UntypedStorage:
        """Find its storage among others, or make room."""
        if self not in world:
            world[self] = torch.UntypedStorage(self.num_bytes, device=self.device)
        return world[self]

    def event_before(self, index: int) -> "tuple[int, RecordedOperation | Recipe]":
        """Find what made the values that an operation sees: a write, or what is kept."""
        last = bisect_left(self.writes, index, key=lambda operation: operation.index) - 1
        assert last >= 0, "an operation sees a storage before it is made"
        if self._kept is not None and self._num_done > last and self._kept_at < index:
            return self._kept_at, self
        return self.writes[last].index, self.writes[last]

    @property
    def has_kept(self) -> bool:
        """Whether values are kept, of now or of before."""
        return self._kept is not None

    def kept(self) -> torch.UntypedStorage:
        """Get what is kept."""
        assert self._kept is not None
        return self._kept

    def keep(self, storage: torch.UntypedStorage, index: int) -> None:
        """Keep values for the next one who needs them, unless somebody may have changed what is kept."""
        done = bisect_left(self.writes, index + 1, key=lambda operation: operation.index)
        if storage is self._kept:
            self._kept_at, self._num_done = max(index, self._kept_at), max(done, self._num_done)
        elif self._kept is None and done == len(self.writes) and self._owner is not None and self._owner() is not None:
            self._kept, self._kept_at, self._num_done = storage, index, done


def _replay(wanted: Mapping[Recipe, int]) -> dict[Recipe, torch.UntypedStorage]:
    """Make storages as they were before some index: what they need runs once each, in the order of the program."""
    world: dict[Recipe, torch.UntypedStorage] = {}
    with GENERATOR_LOCK:
        for event in reversed(list(_needed(wanted))):
            if isinstance(event, Recipe):
                world[event] = event.kept()
                continue
            event.run(world)
            for recipe in event.writes():
                recipe.keep(recipe.storage_in(world), event.index)
    return world


def _needed(wanted: Mapping[Recipe, int]) -> Iterator[RecordedOperation | Recipe]:
    """Go back in time from storages that are wanted, past all that they come from, latest first."""
    open_recipes: set[Recipe] = set()
    heap: list[tuple[int, bool, int, RecordedOperation | Recipe]] = []
    # events are not compared with each other
    ties = itertools.count()

    def need(recipe: Recipe, index: int) -> None:
        if recipe not in open_recipes:
            open_recipes.add(recipe)
            at, event = recipe.event_before(index)
            heapq.heappush(heap, (-at, isinstance(event, RecordedOperation), next(ties), event))

    for recipe, index in wanted.items():
        need(recipe, index)
    done: set[RecordedOperation] = set()
    while heap:
        *_, event = heapq.heappop(heap)
        if isinstance(event, Recipe):
            open_recipes.discard(event)
            yield event
        elif event not in done:
            done.add(event)
            open_recipes.difference_update(event.writes())
            for recipe in event.reads():
                need(recipe, event.index)
            yield event


def _fitting(result: torch.Tensor, view: View) -> torch.UntypedStorage:
    """Copy a result into the layout of its view: kernels may use other strides than the meta kernel predicts."""
    storage, meta = result.untyped_storage(), view.meta
    laid_out = (result.size(), result.stride(), result.storage_offset(), storage.nbytes())
    if laid_out == (meta.size(), meta.stride(), meta.storage_offset(), view.recipe.num_bytes):
        return storage
    storage = torch.UntypedStorage(view.recipe.num_bytes, device=result.device)
    view.on(storage).copy_(result)
    return storage


def _digest(tensor: torch.Tensor) -> int:
    """Sum up what a tensor holds; on other devices than a CPU, how often it was written to."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor._version  # noqa: SLF001 (it has no public name)
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return xxhash.xxh3_64_intdigest(values.view(torch.uint8).numpy().data)
