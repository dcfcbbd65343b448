"""Looks at what forward passes of units write into the parameters that FSDP2 gathered for them."""

from collections.abc import Iterable
from functools import partial
from typing import Any, final

import torch

from colossal._src.booster.plugin.fsdp.fsdp_pass_checks import fsdp_params, is_in_backward
from colossal._src.comm import end_graphs_in
from colossal._src.interface import digests_of, is_watched, refuse_lost_writes

_REMEDY = (
    "Write it between passes, under torch.no_grad() after optimizer.step(), where what is written into shards counts; "
    "or before boost; or, of frozen modules, keep full parameters by TorchFSDPPlugin(ignored_modules=[...]); or take "
    "TorchDDPPlugin or LowLevelZeroPlugin."
)

end_graphs_in(__name__)  # FSDP2 ends graphs at its hooks too


@final
class WrittenInPass:
    """Compares full parameters after some forward passes with those before; others take no more time.

    All ranks have the same full parameters, so that all raise the error.
    """

    def __init__(self, units: Iterable[Any]) -> None:
        self._units, self._before = list(units), dict[Any, tuple[list[Any], torch.Tensor]]()
        self._handles: list[Any] = []
        self._num_passes = 1
        self._watch()
        # after FSDP2 gathers it
        self._units[-1].register_forward_pre_hook(self._start)

    def _watch(self) -> None:
        self._handles = [
            handle
            for unit in self._units
            for handle in (
                # after FSDP2 gathers a unit, and before it shards it again
                unit.register_forward_pre_hook(partial(self._begin, unit)),
                unit.register_forward_hook(self._end, prepend=True),
            )
        ]

    def _start(self, model: Any, *_forward: Any) -> None:
        if self._handles or is_in_backward() or not torch.is_grad_enabled():
            return
        self._num_passes += 1
        if is_watched(self._num_passes):
            self._watch()
            self._begin(model)  # the hooks that run now were counted before

    def _begin(self, unit: Any, *_forward: Any) -> None:
        held = [each for each in fsdp_params([unit]) if _is_gathered(each)]
        if held and self._handles and not is_in_backward():
            self._before[unit] = held, digests_of([each._unsharded_param for each in held])  # noqa: SLF001 (torch has no public name for it)

    def _end(self, unit: Any, *_forward: Any) -> None:
        if is_in_backward():
            return
        is_root = unit is self._units[-1]
        for each in self._units if is_root else [unit]:
            self._compare(each, is_last=is_root)
        if is_root and torch.is_grad_enabled():
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _compare(self, unit: Any, is_last: bool) -> None:
        """Compare a unit when it ends, and those that stay gathered once more at the end of the pass."""
        held, before = self._before.get(unit, ([], None))
        if before is None or not all(map(_is_gathered, held)):
            return
        after = digests_of([each._unsharded_param for each in held])  # noqa: SLF001 (torch has no public name for it)
        if is_last:
            del self._before[unit]
        for each, is_written in zip(held, (before != after).tolist(), strict=True):
            if is_written:
                place = each._module_info  # noqa: SLF001 (torch has no public name for it)
                name = f"{place.param_name} of a {type(place.module).__name__}"
                refuse_lost_writes(name, "TorchFSDPPlugin", _REMEDY)


def _is_gathered(held: Any) -> bool:
    place = held._module_info  # noqa: SLF001 (torch has no public name for it)
    gathered = getattr(held, "_unsharded_param", None)
    return gathered is not None and place.module._parameters.get(place.param_name) is gathered  # noqa: SLF001 (as above)
