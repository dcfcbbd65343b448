"""Adam in one pass over memory: each parameter by the kernel of the device that it is on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from colossal._src.kernel import AdamStep, AdamTensors, adam_step
from colossal._src.nn.optimizer.adam_states import MOMENTS, AdamStates, ParamMoments, StatesOnDisk, make_disk_states
from colossal._src.nn.optimizer.checked_optimizer import (
    CheckedOptimizer,
    Closure,
    call_closure,
    check_grads,
    reject_option,
    state_dtype,
)
from colossal._src.tensor import copy_placement, local_of
from colossal.errors import ConfigError, ShapeError

_COPIES = (torch.float32, torch.bfloat16, torch.float16)
_AS_TORCH = "Leave it out, or use torch.optim.AdamW, which has it."


class KernelAdam(CheckedOptimizer):
    """The base of the three Adams: a step of all parameters by a few kernel calls.

    Args:
        params: Parameters, named parameters, or parameter groups.
        defaults: The hyperparameters of groups that do not have their own.
    """

    _copies: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})
    _disk: StatesOnDisk | None = None
    _runs: Sequence[Sequence[torch.Tensor]] = ()
    _report: Callable[[Sequence[torch.Tensor]], None] | None = None

    @property
    def num_offloaded_bytes(self) -> int:
        """How many bytes of state are on disk, after the first step."""
        return 0 if self._disk is None else self._disk.num_bytes

    def state_dict(self) -> dict[str, Any]:
        """Collect the state, including the state on disk, in torch's format.

        Returns:
            The state by number of the parameter, and the groups.

        Raises:
            CheckpointError: Reading from the disk failed.
        """
        found = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for number, entry in found["state"].items():
            if self._disk is not None and params[number] in self._disk and MOMENTS[0] not in entry:
                means = [copy_placement(mean, params[number]) for mean in self._disk.load(params[number])]
                found["state"][number] = entry | dict(zip(MOMENTS, means, strict=True))
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; the state of offloaded parameters is written to disk.

        Args:
            state_dict: What `state_dict` returned, here or for an optimizer of torch with the same state.

        Raises:
            CheckpointError: Writing to the disk failed.
        """
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        if self._disk is not None and self.state:
            self._disk.choose(params)
            AdamStates(self.state, self._disk).offload(params)

    def set_param_copies(self, copies: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Have each step write the new values of parameters elsewhere as well, in the same pass.

        Args:
            copies: Parameters, and for each a contiguous tensor of as many elements, in float32, bfloat16, float16
                or the dtype of the parameter; they replace what was passed before.

        Raises:
            ConfigError: This optimizer does not have such a parameter.
            ShapeError: A tensor cannot take the values.
        """
        own = {param for group in self.param_groups for param in group["params"]}
        for param, copy in copies.items():
            if param not in own:
                raise ConfigError(
                    f"Copies are of parameters that the optimizer updates. Found another one, of the shape "
                    f"{tuple(param.shape)}. Pass those of its groups."
                )
            fits = copy.numel() == local_of(param).numel() and copy.is_contiguous() and copy.device == param.device
            if not (fits and (copy.dtype in _COPIES or copy.dtype == param.dtype)):
                raise ShapeError(
                    f"The copy of a parameter is contiguous, of {local_of(param).numel()} elements on {param.device}, "
                    f"in {' or '.join(map(str, _COPIES))}. Found {tuple(copy.shape)} in {copy.dtype} on {copy.device}"
                    f"{'' if copy.is_contiguous() else ', not contiguous'}. Pass, say, "
                    "torch.empty_like(param, dtype=torch.bfloat16, memory_format=torch.contiguous_format)."
                )
        self._copies = {**copies}

    def set_update_hook(
        self, runs: Sequence[Sequence[torch.Tensor]], report: Callable[[Sequence[torch.Tensor]], None]
    ) -> None:
        """Have each step update parameters run by run, and report each run while it continues with the next.

        Args:
            runs: Parameters that are updated together; all others are before them. They replace those of before.
            report: Gets parameters of one run, or of none, that have their new values; not those with state on a disk.
        """
        self._runs, self._report = runs, report

    @torch.no_grad()
    def step(self, closure: Closure = None, div_scale: float = -1) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: Computes the loss and its gradients anew.
            div_scale: What the gradients are divided by in the same pass, such as a loss scale; -1 for nothing.

        Returns:
            What the closure returned; None without one.

        Raises:
            UnsupportedError: A gradient is sparse.
        """
        loss = call_closure(closure)
        check_grads(self.params_with_grads)
        self._step(1.0 / div_scale if div_scale > 0 else 1.0)
        return loss

    def _update(self) -> None:
        self._step(1.0)

    def _step(self, grad_scale: float) -> None:
        if self._disk is not None:
            self._disk.choose([param for group in self.param_groups for param in group["params"]])
        states = AdamStates(self.state, self._disk)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            together: dict[tuple[int, torch.device, bool], list[torch.Tensor]] = {}
            for param, number in states.count(params).items():
                together.setdefault((number, param.device, param.dtype == torch.float64), []).append(param)
            for (number, _, is_double), some in together.items():
                step = _step_of(group, number, grad_scale)
                for batch in states.batches(some):
                    for run in self._divide(batch):
                        tensors = [self._tensors(held) for held in run]
                        _float64_step(tensors, step) if is_double else adam_step(tensors, step)
                        self._finish(run, tensors)

    def _divide(self, batch: list[ParamMoments]) -> Iterable[list[ParamMoments]]:
        if self._report is None or any(held.part is not None for held in batch):
            return (batch,)
        place_of = {param: place for place, run in enumerate(self._runs) for param in run}
        found: dict[int, list[ParamMoments]] = {}
        for held in batch:
            found.setdefault(place_of.get(held.param, -1), []).append(held)
        return (found[place] for place in sorted(found))

    def _tensors(self, held: ParamMoments) -> AdamTensors:
        """What the kernel takes: parts that are here, without gaps."""
        assert held.param.grad is not None
        copy = self._copies.get(held.param)
        if held.part is not None:
            param, grad = (local_of(one).contiguous().view(-1) for one in (held.param.detach(), held.param.grad))
            copy = None if copy is None else copy.view(-1)[held.part]
            return AdamTensors(param[held.part], grad[held.part], held.exp_avg, held.exp_avg_sq, copy)
        four = (held.param.detach(), held.param.grad, held.exp_avg, held.exp_avg_sq)
        return AdamTensors(*(local_of(one).contiguous() for one in four), copy=copy)

    def _finish(self, batch: Sequence[ParamMoments], tensors: Sequence[AdamTensors]) -> None:
        """Copy back the results for non-contiguous tensors, and report the updated parameters."""
        for held, taken in zip(batch, tensors, strict=True):
            if held.part is not None:
                continue  # an offloaded parameter has no gaps
            for own, used in zip(held[:3], (taken.param, taken.exp_avg, taken.exp_avg_sq), strict=True):
                if not local_of(own).is_contiguous():
                    local_of(own).copy_(used)
        if self._report is not None and all(held.part is None for held in batch):
            self._report([held.param for held in batch])


@final
class CPUAdam(KernelAdam):
    """Adam or AdamW with parameters in host memory, in one pass of vector instructions over many of them.

    The state is float32, in huge pages; parameters may be in half precision as well, and float64 ones are computed in
    float64. Parameters on a GPU are updated there. Its state dicts are those of `torch.optim.Adam`, either way.

    Args:
        model_params: Parameters, named parameters, or parameter groups.
        lr: The learning rate.
        bias_correction: Whether to correct the bias of the moments, which start at zero.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay: decoupled (multiplied by `lr`), or added to the gradient.
        adamw_mode: Whether weight decay is decoupled, as in AdamW; otherwise it is added to the gradient, as in Adam.
        nvme_offload_fraction: The fraction of the state that is kept on disk.
        nvme_offload_dir: The folder for it, on a fast disk; that of temporary files by default. What is in it vanishes
            with the process; `state_dict` reads it.

    Raises:
        ConfigError: An argument is out of its range.
        UnsupportedError: A parameter whose state is to be on disk is not in host memory, or has 64 bits; at the first
            step.

    Source: Kingma, Ba, "Adam", 2014, https://arxiv.org/abs/1412.6980; Loshchilov, Hutter, "Decoupled Weight Decay
    Regularization", 2017, https://arxiv.org/abs/1711.05101.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import CPUAdam
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = CPUAdam([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1024.0, -1024.0])
        >>> optimizer.step(div_scale=1024)
        >>> weight.data
        tensor([0.5000, 1.5000])
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        self._disk = make_disk_states(nvme_offload_fraction, nvme_offload_dir)
        super().__init__(model_params, _defaults(lr, bias_correction, betas, eps, weight_decay, adamw_mode))


@final
class HybridAdam(KernelAdam):
    """Adam or AdamW with parameters in host memory and on GPUs, each updated where it is.

    Those in host memory are updated as `CPUAdam` does it, those on a GPU by a kernel for many tensors; a parameter may
    move in between with its state. Its state dicts are those of `torch.optim.Adam`, either way.

    Args:
        model_params: Parameters, named parameters, or parameter groups.
        lr: The learning rate.
        bias_correction: Whether to correct the bias of the moments, which start at zero.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay: decoupled (multiplied by `lr`), or added to the gradient.
        adamw_mode: Whether weight decay is decoupled, as in AdamW; otherwise it is added to the gradient, as in Adam.
        nvme_offload_fraction: The fraction of the state that is kept on disk.
        nvme_offload_dir: The folder for it, on a fast disk; that of temporary files by default. What is in it vanishes
            with the process; `state_dict` reads it.
        **defaults: Further entries of the groups, which steps do not depend on.

    Raises:
        ConfigError: An argument is out of its range.
        UnsupportedError: `amsgrad` or `maximize` is set. At the first step: a parameter whose state is to be on disk is
            not in host memory, or has 64 bits.

    Source: Kingma, Ba, "Adam", 2014, https://arxiv.org/abs/1412.6980; Loshchilov, Hutter, "Decoupled Weight Decay
    Regularization", 2017, https://arxiv.org/abs/1711.05101.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import HybridAdam
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = HybridAdam([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 1.5000])
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,
    ) -> None:
        from colossal._src.interface import refuse_misspelled

        self._disk = make_disk_states(nvme_offload_fraction, nvme_offload_dir)
        own = _defaults(lr, bias_correction, betas, eps, weight_decay, adamw_mode)
        refuse_misspelled("HybridAdam", defaults, own)
        super().__init__(model_params, defaults | own)


@final
class FusedAdam(KernelAdam):
    """Adam or AdamW that updates many tensors by one kernel, on the device that they are on.

    Its state dicts are those of `torch.optim.Adam`, either way.

    Args:
        params: Parameters, named parameters, or parameter groups.
        lr: The learning rate.
        bias_correction: Whether to correct the bias of the moments, which start at zero.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment.
        adamw_mode: Take `weight_decay` away from the parameter, as in AdamW; if not, add it to the gradient.
        weight_decay: Weight decay: decoupled (multiplied by `lr`), or added to the gradient.
        amsgrad: Not built.
        set_grad_none: Whether `zero_grad` frees the gradients rather than fill them with zeros.

    Raises:
        ConfigError: An argument is out of its range.
        UnsupportedError: `amsgrad` is set.

    Source: Kingma, Ba, "Adam", 2014, https://arxiv.org/abs/1412.6980; Loshchilov, Hutter, "Decoupled Weight Decay
    Regularization", 2017, https://arxiv.org/abs/1711.05101.

    Example:
        >>> import torch
        >>> from colossal.nn.optimizer import FusedAdam
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = FusedAdam([weight], lr=0.5)
        >>> weight.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.5000, 1.5000])
    """

    set_grad_none = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            reject_option("amsgrad", amsgrad, _AS_TORCH)
        super().__init__(params, _defaults(lr, bias_correction, betas, eps, weight_decay, adamw_mode))
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Throw the gradients away.

        Args:
            set_to_none: Free them rather than fill them with zeros; by default as passed to the constructor.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _defaults(
    lr: float, bias_correction: bool, betas: Sequence[float], eps: float, weight_decay: float, adamw_mode: bool
) -> dict[str, Any]:
    return {
        "lr": lr,
        "bias_correction": bias_correction,
        "betas": tuple(betas) if isinstance(betas, Sequence) else betas,  # which is refused
        "eps": eps,
        "weight_decay": weight_decay,
        "adamw_mode": adamw_mode,
    }


def _step_of(group: Mapping[str, Any], number: int, grad_scale: float) -> AdamStep:
    lr, betas, eps, decay = float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]
    return AdamStep(number, lr, betas, eps, decay, group["adamw_mode"], group["bias_correction"], grad_scale)


def _float64_step(tensors: Sequence[AdamTensors], step: AdamStep) -> None:
    """The step of the kernel in float64, which it does not know."""
    for one in tensors:
        grad = one.grad.to(state_dtype(one.param)) * step.grad_scale
        if step.is_decoupled:
            one.param.mul_(1 - step.lr * step.weight_decay)
        else:
            grad = grad.add(one.param, alpha=step.weight_decay)
        one.exp_avg.lerp_(grad, 1 - step.betas[0])
        one.exp_avg_sq.mul_(step.betas[1]).addcmul_(grad, grad, value=1 - step.betas[1])
        root = one.exp_avg_sq.sqrt().div_(step.root_of_correction).add_(step.eps)
        one.param.addcdiv_(one.exp_avg, root, value=-step.step_size)
        if one.copy is not None:
            one.copy.detach().copy_(one.param.view_as(one.copy))
