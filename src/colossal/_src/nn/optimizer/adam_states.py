"""The moments that Adam keeps of each parameter, and where they are stored."""

from collections.abc import Generator, Iterator, MutableMapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, final

import torch

from colossal._src.kernel import huge_zeros
from colossal._src.nn.optimizer.checked_optimizer import state_dtype
from colossal._src.nn.optimizer.disk_states import StatesOnDisk
from colossal._src.tensor import copy_placement, local_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@final
class ParamMoments(NamedTuple):
    """A parameter, or some elements of it, with its means."""

    param: torch.Tensor  # the parameter
    exp_avg: torch.Tensor  # the mean of its gradients
    exp_avg_sq: torch.Tensor  # the mean of their squares
    part: slice | None = None  # which elements of the parameter they are of, counted in its memory; None for all


@final
class AdamStates:
    """Makes the means of parameters, and hands them out for a step.

    They are on the device of the parameter; those on the CPU are allocated from huge pages, or are on disk.
    """

    def __init__(self, state: MutableMapping[torch.Tensor, Any], disk: StatesOnDisk | None = None) -> None:
        self._state, self._disk = state, disk

    def count(self, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, int]:
        """Count a step of each parameter, and make the state of those that have none."""
        self._make([param for param in params if not self._state.get(param)])
        steps = [self._state[param]["step"] for param in params]
        if steps:
            torch._foreach_add_(steps, 1)
        return {param: int(step) for param, step in zip(params, steps, strict=True)}

    def batches(self, params: Sequence[torch.Tensor]) -> Iterator[list[ParamMoments]]:
        """Hand out the means, some parameters after others; what is written to them until the next batch is kept."""
        away = [param for param in params if self._is_offloaded(param)]
        self.offload(away)
        with closing(self._visit(away)) as visits:
            first = next(visits, None)  # which begins to read, while those in memory are computed with
            yield [self._held(param) for param in params if not self._is_offloaded(param)]
            if first is not None:
                yield first
            yield from visits

    def offload(self, params: Sequence[torch.Tensor]) -> None:
        """Bring means that somebody put into memory, such as a checkpoint, to the disk."""
        for param in params:
            entry = self._state.get(param, {})
            if self._disk is not None and param in self._disk and MOMENTS[0] in entry:
                self._disk.store(param, [local_of(entry.pop(name)) for name in MOMENTS])

    def _is_offloaded(self, param: torch.Tensor) -> bool:
        return self._disk is not None and param in self._disk

    def _visit(self, params: Sequence[torch.Tensor]) -> Generator[list[ParamMoments], None, None]:
        for slices in self._disk.walk(params) if self._disk is not None and params else ():
            yield [
                ParamMoments(each.param, each.means[0], each.means[1], slice(each.begin, each.end)) for each in slices
            ]

    def _held(self, param: torch.Tensor) -> ParamMoments:
        return ParamMoments(param, self._mean(param, MOMENTS[0]), self._mean(param, MOMENTS[1]))

    def _mean(self, param: torch.Tensor, name: str) -> torch.Tensor:
        entry = self._state[param]
        if entry[name].dtype != state_dtype(param):  # somebody cast it as torch does
            entry[name] = copy_placement(entry[name].to(state_dtype(param)), param)
        return entry[name]

    def _make(self, params: Sequence[torch.Tensor]) -> None:
        zeros = iter(_zeros_like([param for param in params if not self._is_offloaded(param) for _ in MOMENTS]))
        for param in params:
            means = {} if self._is_offloaded(param) else {name: copy_placement(next(zeros), param) for name in MOMENTS}
            self._state[param] = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu"), **means}


def _zeros_like(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros in the dtype of the state; those on the CPU in one allocation for each dtype."""
    found: list[torch.Tensor | None] = [None] * len(params)
    for dtype in (torch.float32, torch.float64):
        at = [i for i, param in enumerate(params) if _is_plain(param) and state_dtype(param) == dtype]
        for i, zeros in zip(at, huge_zeros([params[i].shape for i in at], dtype), strict=True):
            found[i] = zeros
    return [
        torch.zeros_like(param, dtype=state_dtype(param), memory_format=torch.contiguous_format)
        if zeros is None
        else zeros
        for param, zeros in zip(params, found, strict=True)
    ]


def _is_plain(param: torch.Tensor) -> bool:
    return param.device.type == "cpu" and type(param) in (torch.Tensor, torch.nn.Parameter)
