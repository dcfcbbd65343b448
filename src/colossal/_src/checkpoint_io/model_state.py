"""The state of a model by name: which names are one tensor, what a checkpoint must hold, and how it is filled in."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.autograd.graph import increment_version

from colossal._src.checkpoint_io.content import Content, Entry, ParameterContent
from colossal._src.checkpoint_io.index_and_names import listing
from colossal._src.checkpoint_io.source import Item, map_in_threads
from colossal._src.interface import AdapterNames, full_spec_of, model_without_adapters
from colossal._src.tensor import (
    backing_shard,
    copy_placement,
    local_of,
    local_regions_of,
    placement_of,
    strip_compile_prefix,
)
from colossal.errors import CheckpointError

T = TypeVar("T")

_ONE_EXPERT = r"\.experts\.\d+\."
"""In names of weights of the Hub, of which transformers makes one parameter for all experts of a layer."""

# [Note: two models in one] A `peft.PeftModel` renames every parameter of the model that it wraps. A checkpoint
# under those names is only useful to the program that wrote it; next to a config.json it is even taken for the
# base model, whose own names are all missing then. So the base model is saved under its own names, and adapters under
# those of peft's files. A tensor that belongs to both, such as a bias that is trained, is saved under both names.


@final
class SavedNames:
    """The names of a state in files: those of the base model for its tensors, those of peft's files for adapters."""

    def __init__(self, adapters: AdapterNames | None = None) -> None:
        self.has_adapters = adapters is not None
        self._saved: dict[str, tuple[str, ...]] = {}
        if adapters is not None:
            for full, saved in (*adapters.base.items(), *((full, saved) for saved, full in adapters.adapters.items())):
                self._saved[full] = (*self._saved.get(full, ()), strip_compile_prefix(saved))
        self._base = set() if adapters is None else {strip_compile_prefix(name) for name in adapters.base.values()}
        self._full = {saved: full for full, names in self._saved.items() for saved in names}
        self._first = {strip_compile_prefix(full): names[0] for full, names in self._saved.items()}

    def __getitem__(self, name: str) -> tuple[str, ...]:
        """Return the names in files of a name in the state; adapters that are not trained keep theirs."""
        return self._saved.get(name, (strip_compile_prefix(name),))

    def split(self, items: Iterable[T], name_of: Callable[[T], str] = str) -> tuple[list[T], list[T]]:
        """Return what belongs to the base model, and what belongs to its adapters."""
        parts: tuple[list[T], list[T]] = ([], [])
        for item in items:
            parts[self.has_adapters and name_of(item) not in self._base].append(item)
        return parts

    def translated(self, items: Mapping[str, T], known: Mapping[str, object]) -> dict[str, T]:
        """Return entries under the names of the model, also of those that a wrapper named, or earlier a `PeftModel`."""
        exact = {name: item for name, item in items.items() if name in known}
        others = {name: item for name, item in items.items() if name not in known}
        return {_without_wrappers(self._first.get(name, name), known): item for name, item in others.items()} | exact

    def in_state(self, saved: str) -> str:
        """Return the name in the state of a name in files."""
        return self._full.get(saved, saved)

    def metadata(self, metadata: Mapping[str, Any]) -> "OrderedDict[str, Any]":
        """Return what torch notes of each module under the names that modules have in files."""
        if not self.has_adapters:
            return OrderedDict(metadata)
        modules = {_module(saved): _module(full) for saved, full in self._full.items() if saved in self._base}
        return OrderedDict((saved, metadata[full]) for saved, full in modules.items() if full in metadata)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _without_wrappers(name: str, known: Mapping[str, object]) -> str:
    """Leave out of a name what `DistributedDataParallel` and `torch.compile` add to it, if the model has the rest."""
    short = strip_compile_prefix(name)
    while short not in known and short.startswith(_WRAPPER):
        short = short.removeprefix(_WRAPPER)
    return short if short in known else name


_WRAPPER = "module."
_THREADS = 2  # one hashes while the other one waits for the disk


@final
class ModelState:
    """The parameters, persistent buffers and extra state of a model, by name."""

    def __init__(self, model: nn.Module, rank: int = 0) -> None:
        self._rank = rank
        full_spec = full_spec_of(model)
        self._roots: Sequence[nn.Module] = [model] if full_spec is None else full_spec.roots
        states: list[Any] = [root.state_dict(keep_vars=True) for root in self._roots]
        self._saved = SavedNames(AdapterNames.of(model) if full_spec is None else full_spec.adapter_names)
        found = [(name, value) for state in states for name, value in state.items()]
        self._state = {saved: backing_shard(value) for name, value in found for saved in self._saved[name]}
        self._metadata = getattr(states[0], "_metadata", OrderedDict())
        self._names, self._ties, self._holders = list(self._state), list(_group_aliases(self._state)), None
        if full_spec is not None:
            self._names = [saved for name in full_spec.names for saved in self._saved[name]]
            self._ties = [[saved for name in names for saved in self._saved[name]] for names in full_spec.groups]
            self._holders, self._metadata = full_spec.ranks, full_spec.metadata
            self._state = _under_all_names(self._state, self._ties)
        self._known = dict.fromkeys([*self._names, *self._state])
        empty = [name for name, value in self._state.items() if getattr(value, "is_meta", False)]
        if empty:
            raise CheckpointError(
                f"Saving and loading need a model that has its values. Found on the meta device: {listing(empty)}. "
                "Create the model on a real device, or materialize it first."
            )

    def content(self, ranks: Sequence[int], for_safetensors: bool) -> Content:
        """Return the state in order, with all names of one tensor in one entry."""
        if for_safetensors:
            self._check_only_tensors()
        ties = [part for names in self._ties for part in self._saved.split(names) if part]
        chosen = {names[0]: [self._leading(names)] if for_safetensors else names for names in ties}
        trained = {id(backing_shard(each)) for root in self._roots for each in root.parameters()}
        parameters = {
            name: ParameterContent(
                (Entry.of(names, value, self._holders or ranks, is_buffer=id(value) not in trained),)
            )
            for name, names in chosen.items()
            for value in ([self._state[name]] if name in self._state else [])
        }
        return Content(parameters, list(chosen))

    def _check_only_tensors(self) -> None:
        foreign = {n: type(value).__name__ for n, value in self._state.items() if not isinstance(value, torch.Tensor)}
        if foreign:
            raise CheckpointError(
                f"A safetensors file can hold tensors only. Found state of other types: {foreign}. "
                "Pass use_safetensors=False for this model."
            )

    def _leading(self, names: list[str]) -> str:
        """Return the name that is not tied to another one by the model's own list; the first if there is none."""
        base = model_without_adapters(self._roots[0])
        tied: Any = getattr(base, "all_tied_weights_keys", None)
        tied = tied or getattr(base, "_tied_weights_keys", None) or ()
        return next((name for name in names if not any(re.search(pattern, name) for pattern in tied)), names[0])

    @property
    def has_adapters(self) -> bool:
        """Whether adapters of peft stand in the model."""
        return self._saved.has_adapters

    def split(self, entries: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
        """Return the entries of the model without adapters, and those of its adapters, which go into other files."""
        return self._saved.split(entries, lambda entry: entry.names[0])

    def in_order(self, content: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return the full state with all names, as `torch.nn.Module.load_state_dict` takes it."""
        state = OrderedDict((name, content[name]) for name in self._names if name in content)
        metadata = self._saved.metadata(self._metadata)
        state._metadata = metadata  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own convention
        return state

    def check(self, items: Mapping[str, Item], strict: bool, source: object) -> None:
        """Compare the names, shapes and kinds of a checkpoint with the model's, before any value is written.

        A tensor with several names needs one of them only. A checkpoint of which the model has no name is never loaded.
        """
        items = self._saved.translated(items, self._known)
        agrees = not self._known or bool(items.keys() & self._known.keys())
        if not agrees and (items or not strict):
            raise CheckpointError(_foreign(items, next(iter(self._known)), source))
        common = {name: item for name, item in items.items() if name in self._state}
        problems = {
            "with another shape": [
                f"{name} (file {_shape(item.shape)}, model {_shape(shape_of(self._state[name]))})"
                for name, item in common.items()
                if item.shape != shape_of(self._state[name])
            ],
            "with another kind of numbers": [
                f"{name} (file {item.dtype}, model {self._state[name].dtype})"
                for name, item in common.items()
                if item.dtype is not None and _kind(item.dtype) != _kind(getattr(self._state[name], "dtype", None))
            ],
        }
        # which of them a model would take is by chance: files are read by several threads
        problems["with other values than what they are tied to in the model"] = (
            [] if any(problems.values()) else [name for names in self._ties for name in self._differing(names, items)]
        )
        if strict:
            problems["missing from the file"] = [
                names[0] for names in self._ties if not any(name in items for name in names)
            ]
            problems["unexpected in the file"] = [name for name in items if name not in self._known]
        only_names = agrees and not any(names for what, names in problems.items() if what.startswith("with"))
        found = [f"{len(names)} {what}: {listing(names)}" for what, names in problems.items() if names]
        if found:
            advice = "Build the model with the configuration that was saved"
            if any(re.search(_ONE_EXPERT, name) for name in problems.get("unexpected in the file", ())):
                advice = (
                    "Where a file names each expert by itself, and the model has all experts of a layer in one "
                    "parameter, load it by from_pretrained before boost, inside of LazyInitContext for large models"
                )
            elif only_names:
                advice += ", or pass strict=False to load_model for the names that agree"
            raise CheckpointError(
                f"Loading needs a checkpoint of the same model. Found in {source} {'; '.join(found)}. "
                f"Nothing was loaded. {advice}."
            )

    def _differing(self, names: Sequence[str], items: Mapping[str, Item]) -> Iterable[str]:
        """Find names of one tensor for which a checkpoint has other values than for the first, in this rank's part."""
        value = self._state.get(names[0])
        first, *others = [name for name in names if name in items] or [""]
        if not others or not isinstance(value, torch.Tensor):
            return
        for name in others:
            for region, part in local_regions_of(copy_placement(value.detach(), value), self._rank):
                one, other = (torch.empty_like(part, device="cpu") for _ in range(2))
                items[first].read(region, one)
                items[name].read(region, other)
                if not torch.equal(one.nan_to_num(), other.nan_to_num()):  # a file of NaNs is read as it is
                    yield name
                    break

    def fill(self, items: Mapping[str, Item]) -> None:
        """Write the values of one file into the model, in the model's dtypes and on its devices.

        Each rank reads its local shards, directly into the memory of the parameter where dtype and device allow it.
        What is not a parameter or a buffer itself goes through the `load_state_dict` of its module.
        """
        tensors = (each for root in self._roots for each in (*root.parameters(), *root.buffers()))
        own = {id(backing_shard(tensor)) for tensor in tensors}
        others: OrderedDict[str, Any] = OrderedDict()
        direct: list[tuple[torch.Tensor, Item]] = []
        for name, item in self._saved.translated(items, self._known).items():
            value = self._state.get(name)
            if item.shape is not None and isinstance(value, torch.Tensor) and id(value) in own:
                direct.append((value, item))
            elif name in self._state:
                others[self._saved.in_state(name)] = item.value if item.shape is None else item.read_full()
        map_in_threads(self._fill_tensor, direct, _THREADS)
        others._metadata = self._metadata  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own convention
        try:
            for root in self._roots if others else ():
                root.load_state_dict(others, strict=False)
        except RuntimeError as error:
            raise CheckpointError(
                f"Loading needs values that the model's modules accept. Found that one did not: {error}. "
                "Build the model with the configuration that was saved."
            ) from error

    def log_experts(self, items: Mapping[str, Item], source: object) -> None:
        """Log how many of the experts of the model a checkpoint has."""
        from colossal._src.tensor import log_experts

        items = self._saved.translated(items, self._known)
        names, _ = self._saved.split(self._known)
        # of what other stages of a pipeline have, the shape is in the file only
        shapes = {
            name: shape_of(self._state[name]) if name in self._state else items[name].shape
            for name in names
            if name in self._state or name in items
        }
        log_experts({name: shape for name, shape in shapes.items() if shape is not None}, items, source)

    def _fill_tensor(self, pair: tuple[torch.Tensor, Item]) -> None:
        value, item = pair
        local = local_of(value).detach()
        with torch.no_grad():
            for region, part in local_regions_of(copy_placement(value.detach(), value), self._rank):
                item.read(region, part)
        # torch did not see this write, and the fp32 master weights must notice it.
        increment_version(local)


def shape_of(value: object) -> torch.Size | None:
    """Return the shape of a tensor, or of what it is a part of; None for anything else."""
    return torch.Size(placement_of(value).shape) if isinstance(value, torch.Tensor) else None


def _group_aliases(state: Mapping[str, Any]) -> Iterable[list[str]]:
    """Return the names of each distinct tensor, in the order of the first ones."""
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        key: Any = name
        if isinstance(value, torch.Tensor):
            key = id(value)
            # tensors without elements all have the same address, and those on the meta device have none
            if local_of(value) is value and value.numel() > 0 and not value.is_meta:
                key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        groups.setdefault(key, []).append(name)
    return groups.values()


def _under_all_names(state: Mapping[str, Any], groups: Iterable[Sequence[str]]) -> dict[str, Any]:
    """Return the tensors that are here, each under all its names, of which other ranks may use some."""
    found = {}
    for names in groups:
        here = next((name for name in names if name in state), None)
        found |= {} if here is None else dict.fromkeys(names, state[here])
    return found


def _foreign(items: Mapping[str, Item], expected: str, source: object) -> str:
    """Say what a file has that has nothing of the model, and what to do."""
    nested = next((name for name, item in items.items() if isinstance(item.value, Mapping)), None)
    found = f"only other names, such as {next(iter(items))!r}" if items else "nothing"
    advice = "Build the model with the configuration that was saved, or give the tensors its names"
    if nested is not None:
        found = f"the names {listing(list(items))}, with a dict under {nested!r}"
        advice = f"Load it by torch.load, and save what is under {nested!r} as a file of its own"
    return (
        f"Loading needs a checkpoint that has tensors of the model, such as {expected!r}, also with strict=False. "
        f"Found in {source} {found}. Nothing was loaded. {advice}."
    )


def _kind(dtype: torch.dtype | None) -> str:
    if dtype is None or dtype.is_floating_point:
        return "float" if dtype else "none"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "int"


def _shape(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(list(shape))
