"""Blocks of a program's own plan, compared in their first training pass with what they were before they were sharded.

A plan says how layers are sharded, and nothing about the code between them: a gated activation that takes features of
other ranks for its gate, a number of heads that is that of the full model, or a parameter that each rank uses for its
own features. All of these would train without an error, and wrongly.
"""

import copy
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
from torch import distributed as dist
from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.comm import all_reduce_over, equal_on_all_ranks, int64_digest, uncounted
from colossal._src.shardformer.block_pass import BlockInputs, BlockPass, gradients_of, run_copy
from colossal._src.shardformer.head_counts import COLWISE
from colossal._src.tensor import (
    ParallelPlan,
    find_modules,
    full_tensor_of,
    hook_ids_of,
    keep_hooks,
    local_of,
    placement_of,
    remove_hook,
)
from colossal.errors import ColossalError, PlanError

_ROWWISE = r"rowwise(_split_input)?"
_REDUCED = "replicated_with_grad_allreduce"
# Of the norm: far above what rounding does to a block, also to products that it computes in a lower precision itself,
# and far below what a wrong plan does.
_FAR, _FAR_IN_HALF = 0.03, 0.1


def blocks_to_compare(base: nn.Module, plan: ParallelPlan, mesh: ParallelMesh) -> "list[ComparedBlock]":
    """Copy one block of each kind, before the plan is applied: what has a colwise layer and the rowwise one after."""
    if not plan.compare_blocks:
        return []
    plan = plan.for_stage()
    styles = {name: style for name, _, style in plan.rows(base)}
    columns = [name for name, style in styles.items() if re.fullmatch(COLWISE, style)]
    found: dict[str, ComparedBlock | None] = {}
    for pattern in (pattern for pattern, style in plan.styles.items() if re.fullmatch(_ROWWISE, style)):
        for row, module in find_modules(base, pattern)[:1]:
            path = _smallest_around(row, columns)
            # what is on this stage; the forward method of a whole stage gets hidden states as a copy does not
            is_here = next(module.parameters(), None) is not None and (path or mesh.size("pp") == 1)
            if path is not None and path not in found and is_here:
                found[path] = _copy_block(path, base, styles, mesh)
    return [each for each in found.values() if each is not None]


def _smallest_around(row: str, columns: Sequence[str]) -> str | None:
    while row:
        row = row.rpartition(".")[0]
        if any(name.startswith(_prefix(row)) for name in columns):
            return row
    return None


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _copy_block(path: str, base: nn.Module, styles: Mapping[str, str], mesh: ParallelMesh) -> "ComparedBlock | None":
    """Copy a block; not one with hooks, which may do anything, and none that cannot be copied."""
    block, prefix = base.get_submodule(path), _prefix(path)
    if hook_ids_of(block):
        return None
    try:
        full = _without_values(block)
    except Exception:  # noqa: BLE001 (of the program's own class)
        return None
    inner = {name.removeprefix(prefix): style for name, style in styles.items() if name.startswith(prefix)}
    inner |= {"": styles[path]} if path in styles else {}
    return ComparedBlock(path, full, inner, mesh)


def _without_values(block: nn.Module) -> nn.Module:
    """Copy a module in evaluation, without the values of its parameters and buffers."""
    memo: dict[int, Any] = {}
    for each in (*block.parameters(), *block.buffers()):
        empty = torch.empty(each.shape, dtype=each.dtype, device="meta")
        memo[id(each)] = nn.Parameter(empty, requires_grad=False) if isinstance(each, nn.Parameter) else empty
    return copy.deepcopy(block, memo).eval()


@final
class ComparedBlock:
    """A block as it was before a plan was applied: a copy without values, and the styles of the layers in it."""

    def __init__(self, path: str, full: nn.Module, styles: Mapping[str, str], mesh: ParallelMesh) -> None:
        self._path, self._full, self._styles, self._mesh = path, full, styles, mesh
        self._rows = [name for name, style in styles.items() if re.fullmatch(_ROWWISE, style)]

    def watch(self, base: nn.Module) -> None:
        """Compare the block, which is sharded by now, before its first training pass."""
        block = base.get_submodule(self._path)
        hooks = hook_ids_of(block)

        def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            device = next(module.parameters()).device
            is_real = device.type != "meta" and dist.get_backend(self._mesh.group("tp")) != "fake"
            if not is_real or not module.training:
                return
            remove_hook(module, handle.id)
            buffers = {name: each.detach() for name, each in module.named_buffers(remove_duplicate=False)}
            inputs = BlockInputs(args, kwargs, buffers)
            with _aside(device):
                self._compare(module, hooks, inputs)

        # the rowwise layer ends a graph in any case
        uncompiled: Any = torch.compiler.disable(compare)
        handle = block.register_forward_pre_hook(uncompiled, with_kwargs=True)

    def _compare(self, block: nn.Module, hooks: set[int], inputs: BlockInputs) -> None:
        params = dict(block.named_parameters(remove_duplicate=False))
        names = {name for name, _ in self._full.named_parameters(remove_duplicate=False)}
        groups = [self._mesh.group("tp")]
        is_same = all(equal_on_all_ranks([int64_digest(*inputs.tensors)], groups))
        if not inputs.is_plain or names != params.keys() or not is_same:  # a cache would be written twice
            return
        whole = [name for name, each in params.items() if not placement_of(each).shard_groups and self._is_own(name)]
        full = {each: full_tensor_of(each) for each in params.values()}
        expected = self._run_full({name: full[each] for name, each in params.items()}, whole, inputs)
        if max(self._agree([float(expected is None)])) or expected is None:
            return
        try:
            sharded = _without_values(block)
            keep_hooks(sharded, hooks)
            values = {name: local_of(each) for name, each in params.items()}
            found = run_copy(sharded, values, whole, self._rows, inputs)
        except ColossalError:
            raise
        except Exception as error:  # noqa: BLE001 (of the program's own class)
            self._refuse(f"raises {type(error).__name__}: {error}", error)
        pairs = found.pairs(expected)
        distances = self._agree([_distance(one, two) for _, one, two in pairs])
        for (name, *_), distance in zip(pairs, distances, strict=True):
            if distance > 1:
                self._refuse(f"returns other values{f' from {name}' if name else ''}")
        self._compare_gradients(found, expected)

    def _run_full(
        self, values: Mapping[str, torch.Tensor], whole: Sequence[str], inputs: BlockInputs
    ) -> BlockPass | None:
        """Run the full block; None if it draws random numbers, counts on shards, or does not run in evaluation."""
        try:
            expected = run_copy(self._full, values, whole, self._rows, inputs)
            with torch.no_grad():
                again = run_copy(self._full, values, whole, self._rows, inputs)
        except Exception:  # noqa: BLE001 (of the program's own class)
            return None
        return None if any(_distance(one, two) > 1 for _, one, two in again.pairs(expected)) else expected

    def _compare_gradients(self, found: BlockPass, expected: BlockPass) -> None:
        """Refuse gradients that are parts of what they should be; others may differ, as sums that rounding decides."""
        # of the layers: in the output of the block, what they compute may be little beside its input
        pairs = [(one, two) for name, one, two in found.pairs(expected) if name and one.requires_grad]
        try:
            own = gradients_of(found, [one for one, _ in pairs])
            full = gradients_of(expected, [two for _, two in pairs])
        except torch.OutOfMemoryError:  # perhaps of this rank only
            raise
        except RuntimeError:  # of a reentrant checkpoint
            return
        sums = {name: all_reduce_over(grad, [self._mesh.group("tp")]) for name, grad in own.items()}
        apart = self._agree([_distance(own[name], grad) for name, grad in full.items()])
        summed = self._agree([_distance(sums[name], grad) for name, grad in full.items()])
        for name, distance, distance_of_sum in zip(full, apart, summed, strict=True):
            if distance > 1 >= distance_of_sum:
                self._refuse_part(name)

    def _is_own(self, name: str) -> bool:
        return self._styles.get(name.rpartition(".")[0]) != _REDUCED

    def _agree(self, distances: Sequence[float]) -> list[float]:
        """Take the largest of all ranks, so that all of them refuse the same."""
        if not distances:
            return []
        own = torch.tensor(distances, dtype=torch.float64, device="cpu")
        found: list[float] = all_reduce_over(own, [self._mesh.group("tp")], "max").tolist()
        return found

    def _refuse(self, what: str, error: Exception | None = None) -> NoReturn:
        layers = ", ".join(f"{name!r}: {style!r}" for name, style in self._styles.items())
        raise PlanError(
            "A model that is sharded by a plan computes what it computes on one rank. Found, in the first training "
            f"pass, that {self._path or 'the model'} {what}, with {{{layers}}} on {self._mesh}. Between a layer whose "
            "output stays sharded and the rowwise one that takes it, each rank has the code see some of the features. "
            "Give a layer that packs several projections, as for glu or chunk(3), the style 'packed_colwise(2)' or "
            "'packed_colwise(3)'; name numbers of heads in divide_by_tp; and where code uses all features, as "
            "LayerNorm or softmax over them do, use 'colwise_gather_output' with 'rowwise_split_input', or leave the "
            "layers out. If ranks are to differ here, write ParallelPlan(..., compare_blocks=False)."
        ) from error

    def _refuse_part(self, name: str) -> NoReturn:
        raise PlanError(
            "Ranks of the tp axis get the same gradient of an input, and of a parameter that is replicated. Found, in "
            f"the first training pass, that each rank of {self._mesh} has a part of that of {_prefix(self._path)}"
            f"{name}, which it uses for features or heads of its own: replicas would drift apart. Give the module of "
            f"such a parameter the style {_REDUCED!r}, and put one that others use as well, or one of the model "
            "itself, into a module of its own; give a layer of such an input the style 'colwise', or 'replicate'."
        )


@contextmanager
def _aside(device: torch.device) -> Generator[None]:
    """Leave no trace in random numbers, in what is counted, or in what a checkpoint around saves for its own pass."""
    others = [] if device.type == "cpu" else [device]
    with (
        uncounted(),
        torch.enable_grad(),
        torch.random.fork_rng(others, device_type=device.type),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
    ):
        yield


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Compare by the norm of the difference: above 1, rounding does not explain it. What is not finite counts as 0."""
    one, two = (torch.nan_to_num(each.detach().double(), 0.0, 0.0, 0.0) for each in (found, expected))
    norm = two.norm() * (_FAR if expected.dtype in (torch.float32, torch.float64) else _FAR_IN_HALF)
    return ((one - two).norm() / norm).item() if norm else 0.0
