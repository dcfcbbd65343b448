"""The state of an optimizer under the names of its parameters, so that their order may change between runs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
from torch.optim import Optimizer

from colossal._src.checkpoint_io.content import (
    Content,
    Entry,
    ParameterContent,
    as_mapping,
    extract_tensors,
    insert_tensors,
)
from colossal._src.checkpoint_io.index_and_names import listing
from colossal._src.checkpoint_io.source import Item, Source, in_memory, map_in_threads
from colossal._src.interface import FullOptimizerSpec, OptimizerWrapper
from colossal._src.tensor import copy_placement, local_regions_of, placement_of
from colossal.errors import CheckpointError

ParamId = int | str
_PER_PARAMETER = ("step", "mu_product", "mu", "eta")
_FACTORED_ENDINGS = ("_row", "_col")
"""Optimizer states of torch that are not elementwise: scalars, and the factored moments of our optimizers."""
_LIKE_THE_PARAMETER = ("exp_avg", "momentum_buffer")
"""Optimizer states with one value for each element of a parameter."""
MASTER = "master_param"
"""The key under which a parameter's copy in full precision stands among its state."""


@final
class OptimizerState:
    """The state of an optimizer by parameter.

    A parameter is known by its name if the wrapper or the parameter groups say it, else by its position among all
    parameters of the optimizer, as in torch.
    """

    def __init__(self, optimizer: Optimizer | OptimizerWrapper, rank: int = 0) -> None:
        names: Mapping[torch.nn.Parameter, str] = {}
        scaler = None
        self._masters: Any = getattr(optimizer, "masters", None)
        self._outline: FullOptimizerSpec | None = None
        if isinstance(optimizer, OptimizerWrapper):
            self._outline = optimizer.full_spec
            optimizer, scaler, names = optimizer.unwrap(), optimizer.scaler, optimizer.param_names
        self._optim, self._scaler, self._rank = optimizer, scaler, rank
        self._params = _identify(self._optim, names)
        remaining = iter(self._params)
        self._own: list[list[ParamId]] = [
            list(islice(remaining, len(group["params"]))) for group in self._optim.param_groups
        ]
        self._groups: list[list[ParamId]] = list(self._own)
        if self._outline is not None:
            known: list[list[ParamId]] = [list(group) for group in self._outline.groups]
            self._groups[: len(known)] = known  # followed by groups that were added since

    @property
    def ids(self) -> list[ParamId]:
        """Name or position of every parameter, in the order of the full optimizer."""
        return [id_ for group in self._groups for id_ in group]

    def content(self, ranks: Sequence[int]) -> Content:
        """Take the state apart."""
        plain, tensors = extract_tensors(self.header())
        parameters: dict[Any, ParameterContent] = {None: ParameterContent(_entries(tensors, ranks), plain)}
        state, holders = self._state(), ranks if self._outline is None else self._outline.ranks
        for id_, parameter in self._params.items():
            plain_state, tensors = extract_tensors(state.get(id_), (str(id_),))
            parameters[id_] = ParameterContent(
                _entries(tensors, holders), (list(placement_of(parameter).shape), plain_state)
            )
        return Content(parameters, [None, *self.ids])

    def header(self) -> dict[str, Any]:
        """Return what concerns all parameters: groups, and the loss scaler."""
        groups = self._optim.state_dict()["param_groups"]
        return {
            "param_groups": [
                {key: value for key, value in group.items() if key != "param_names"} | {"params": ids}
                for group, ids in zip(groups, self._groups, strict=True)
            ],
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }

    def _state(self) -> dict[ParamId, Any]:
        """Return the state of each parameter that has one, and its master copy where the model runs in half."""
        content = self._optim.state_dict()["state"]
        state: dict[ParamId, Any] = {}
        for position, (id_, parameter) in enumerate(self._params.items()):
            entry = {key: self._as_shard(key, value, id_) for key, value in content.get(position, {}).items()}
            if self._has_copy(parameter):
                entry[MASTER] = copy_placement(parameter.detach(), parameter)
            if entry:
                state[id_] = entry
        return state

    def _has_copy(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a parameter is in more bits here than in the model."""
        working = None if self._masters is None else self._masters.pairs.get(parameter)
        return working is not None and working.dtype != parameter.dtype

    def _as_shard(self, key: str, value: Any, id_: ParamId) -> Any:
        """Say of a value by element what part or range it is, if its parameter is one."""
        parameter = self._params[id_]
        if getattr(value, "shape", None) == parameter.shape and not _is_full(key):
            return copy_placement(value.detach(), parameter)
        is_full = _is_full(key) or getattr(self._optim, "updates_shards", False)  # ours has full sums on all ranks
        if (
            placement_of(parameter).is_compute_sharded
            and not is_full
            and isinstance(value, torch.Tensor)
            and value.numel() > 1
        ):
            raise CheckpointError(
                "State of a parameter that ranks shard has a number for each of its elements, or is one number. Found "
                f"{key} of the shape {tuple(value.shape)} for {id_}, of whose {list(placement_of(parameter).shape)} "
                f"this rank has {list(parameter.shape)}. Train with an optimizer such as torch.optim.AdamW."
            )
        return value

    def prepare(self, saved: Mapping[str, Any], source: object) -> Callable[[int], None]:
        """Check what was saved, and match it by name; a saved position stands for itself."""
        groups = _valid_groups(saved, source)
        ids = self._saved_ids(groups)
        self._check_shapes(saved.get("param_shapes") or _shapes_of_state(saved, groups), ids, source)
        positions = {id_: position for position, id_ in enumerate(self._params)}
        matching = [self._matching_group(group_ids, groups, ids, source) for group_ids in self._groups]
        self._check_algorithm(matching, saved.get("state", {}), source)
        restored = [self._restored_group(number, group, positions) for number, group in enumerate(matching)]
        state = {id_: saved.get("state", {})[ids[id_]] for id_ in self._params if ids[id_] in saved.get("state", {})}
        return lambda threads: self._restore(restored, state, dict(saved.get("scaler", {})), threads)

    def _restore(
        self, groups: list[dict[str, Any]], state: dict[ParamId, Any], scaler: dict[str, Any], threads: int
    ) -> None:
        reads: list[tuple[Item, torch.Tensor]] = []
        # without the state, which is read directly into its memory below
        self._optim.load_state_dict({"state": {}, "param_groups": groups})
        for group, own in zip(self._optim.param_groups, self._own, strict=True):
            is_wide = getattr(self._optim, "keeps_float32", False)
            for id_, parameter in zip(own, group["params"], strict=True):
                if id_ in state:
                    entry = dict(state[id_])
                    master = entry.pop(MASTER, None)
                    if master is not None and parameter.dtype.itemsize >= torch.float32.itemsize:
                        reads.append((master, copy_placement(parameter.detach(), parameter)))
                    filled = {k: _build(parameter, k, value, group, reads, is_wide) for k, value in entry.items()}
                    self._optim.state.update({parameter: filled} if filled else {})
        self._read(reads, threads)
        if self._masters is not None:
            # saved master weights are more precise than the parameters; without any, these are all there is
            self._masters.copy_params_from_masters() if any(
                MASTER in each for each in state.values()
            ) else self._masters.refresh()
        if self._scaler is not None:
            self._scaler.load_state_dict(scaler)

    def _read(self, reads: list[tuple[Item, torch.Tensor]], threads: int) -> None:
        """Read the local shard of each tensor, directly into its memory if dtype and device allow it."""

        def read(each: tuple[Item, torch.Tensor]) -> None:
            item, target = each
            for region, part in local_regions_of(target, self._rank):
                item.read(region, part)

        map_in_threads(read, reads, threads)

    def _saved_ids(self, groups: list[dict[str, Any]]) -> dict[ParamId, ParamId]:
        """Return, for each parameter, the id under which it was saved: its name if that is there, else its position."""
        saved = {id_ for group in groups for id_ in group["params"]}
        return {id_: id_ if id_ in saved else position for position, id_ in enumerate(self.ids)}

    def _check_shapes(self, shapes: Mapping[Any, Any], saved: dict[ParamId, ParamId], source: object) -> None:
        wrong = [
            f"{id_} (file {list(shapes[saved[id_]])}, model {list(placement_of(parameter).shape)})"
            for id_, parameter in self._params.items()
            if list(shapes.get(saved[id_], placement_of(parameter).shape)) != list(placement_of(parameter).shape)
        ]
        if wrong:
            raise CheckpointError(
                f"Loading needs an optimizer of the same parameters. Found in {source} other shapes for "
                f"{len(wrong)} of them: {listing(wrong)}. Nothing was loaded. Build the model that was saved."
            )

    def _check_algorithm(self, groups: list[dict[str, Any]], state: Mapping[Any, Any], source: object) -> None:
        from colossal._src.interface import another_algorithm

        # before the first step there is nothing but master weights
        states = [
            [{key for key in state[id_] if key != MASTER} for id_ in group["params"] if id_ in state]
            for group in groups
        ]
        if another := another_algorithm(self._optim, groups, states):
            raise CheckpointError(
                f"Loading needs an optimizer of the algorithm that was saved. Found in {source} {another}. "
                "Nothing was loaded."
            )

    def _matching_group(
        self, ids: list[ParamId], groups: list[dict[str, Any]], saved: dict[ParamId, ParamId], source: object
    ) -> dict[str, Any]:
        """Return the saved group of the same parameters; their order, and that of the groups, may differ."""
        wanted = {saved[id_] for id_ in ids}
        for group in groups:
            if set(group["params"]) == wanted and len(groups) == len(self._groups):
                return group
        known = {id_ for group in groups for id_ in group["params"]}
        absent = listing(id_ for id_ in ids if saved[id_] not in known) or "none"
        foreign = listing(sorted(known - set(saved.values()), key=str)) or "none"
        raise CheckpointError(
            f"Loading needs {len(self._groups)} parameter groups of the same parameters. Found in {source} "
            f"{len(groups)} groups of {[len(group['params']) for group in groups]} parameters, none of which is "
            f"the group of {listing(ids)}; not in the file at all: {absent}; only in the file: {foreign}. "
            "Nothing was loaded. Split the parameters as for saving."
        )

    def _restored_group(self, number: int, group: dict[str, Any], positions: Mapping[ParamId, int]) -> dict[str, Any]:
        """Return a saved group as torch takes it for the optimizer's group `number`."""
        restored = {key: item.read_full() if isinstance(item, Item) else item for key, item in group.items()}
        restored["params"] = [positions[id_] for id_ in self._own[number]]
        restored.pop("param_names", None)
        own = self._optim.param_groups[number]
        unsaved = {key: value for key, value in own.items() if key not in (*group, "params")}  # of another version
        return restored | unsaved | ({"param_names": own["param_names"]} if "param_names" in own else {})


def plain_of(content: Content) -> dict[str, Any]:
    """Say everything about an optimizer but its tensors, as JSON holds it."""
    plain = content.plain
    header = plain.pop(None)
    shapes = {id_: shape for id_, (shape, _) in plain.items()}
    state = {id_: plain_state for id_, (_, plain_state) in plain.items() if plain_state is not None}
    groups, scaler = header["param_groups"], header["scaler"]
    return {
        "param_groups": groups,
        "param_shapes": extract_tensors(shapes)[0],
        "scaler": scaler,
        "state": as_mapping(list(state.items())),
    }


def _entries(tensors: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> tuple[Entry, ...]:
    return tuple(Entry.of([name], tensor, ranks) for name, tensor in tensors.items())


def _identify(optim: Optimizer, names: Mapping[torch.nn.Parameter, str]) -> dict[ParamId, torch.nn.Parameter]:
    """Return the parameters in order, under their names; under their positions where a name is unknown or shared."""
    params = [parameter for group in optim.param_groups for parameter in group["params"]]
    known = [
        names.get(parameter) or own_name
        for group in optim.param_groups
        for parameter, own_name in zip(
            group["params"], group.get("param_names") or [None] * len(group["params"]), strict=True
        )
    ]
    uses = Counter(known)
    return {
        name if name and uses[name] == 1 else position: parameter
        for position, (name, parameter) in enumerate(zip(known, params, strict=True))
    }


def _valid_groups(header: Mapping[str, Any], source: object) -> list[dict[str, Any]]:
    groups = header.get("param_groups") if isinstance(header, Mapping) else None
    if isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups):
        return groups
    raise CheckpointError(
        f"Loading an optimizer needs its parameter groups. Found none in {source}, which holds "
        f"{listing(header or ()) or 'tensors only'}. "
        "Pass a checkpoint that save_optimizer wrote; a model is loaded by load_model."
    )


def _shapes_of_state(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[ParamId, Any]:
    """Return the shapes of parameters as their moments have them, where a file does not say them itself."""
    projected = {id_ for group in groups if "rank" in group for id_ in group["params"]}  # low-rank moments have others
    shapes: dict[ParamId, Any] = {}
    for id_, state in saved.get("state", {}).items():
        for key in _LIKE_THE_PARAMETER:
            if id_ not in projected and isinstance(state, Mapping) and isinstance(state.get(key), Item):
                shapes[id_] = list(state[key].shape or ())
    return shapes


def _is_full(key: str) -> bool:
    return key in _PER_PARAMETER or key.endswith(_FACTORED_ENDINGS)


def _build(
    parameter: torch.Tensor,
    key: str,
    value: Any,
    group: Mapping[str, Any],
    reads: list[tuple[Item, torch.Tensor]],
    is_wide: bool,
) -> Any:
    """Make room for the tensors inside nested dicts and lists, as torch's own `load_state_dict` places them.

    Tensors of the parameter's shape get its layout; steps stay on the CPU unless the kernel counts them.
    """
    if isinstance(value, dict):
        return {k: _build(parameter, key, inner, group, reads, is_wide) for k, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_build(parameter, key, inner, group, reads, is_wide) for inner in value)
    if key == "step" and isinstance(value, (int, float)):
        value = in_memory(torch.tensor(float(value), device="cpu"))  # as some optimizers count, and none of ours
    if not isinstance(value, Item):
        return value
    assert value.shape is not None
    assert value.dtype is not None
    dtype, device = value.dtype, parameter.device
    if key == "step":
        # where torch's own optimizers keep the step
        device = device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    elif parameter.is_floating_point() and dtype.is_floating_point:
        dtype = torch.promote_types(parameter.dtype, torch.float32) if is_wide else parameter.dtype
    if value.shape == placement_of(parameter).shape and not _is_full(key):
        target = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        reads.append((value, copy_placement(target.detach(), parameter)))
    else:
        target = torch.empty(value.shape, dtype=dtype, device=device)
        reads.append((value, target))
    return target


def optimizer_tree(source: Source) -> dict[str, Any]:
    """Return the groups, the state by parameter, and what else was saved, an `Item` in the place of each tensor."""
    if source.plain is not None:
        return insert_tensors(source.plain, source.item)
    skeleton, tensors = extract_tensors(_torch_tree(source))
    return insert_tensors(skeleton, lambda name: in_memory(tensors[name]))


def _torch_tree(source: Source) -> dict[str, Any]:
    values = {name: item.value for name, item in source.items.items()}
    if source.index is None:
        return values
    groups = source.index.get_param_group_filename()
    if groups is None:
        raise CheckpointError(
            f"The index of an optimizer must name its file of groups as param_groups. Found the metadata "
            f"{source.index.metadata} in {source.index.root_path}. Pass a checkpoint that save_optimizer wrote."
        )
    header = set(source.files[Path(groups)])
    return {name: values[name] for name in header} | {
        "state": {name: value for name, value in values.items() if name not in header}
    }
