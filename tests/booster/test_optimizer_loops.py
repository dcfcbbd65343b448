"""What programs do with a boosted optimizer besides steps: as in one process, or refused with what to do."""

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from loops import PLUGINS, SHARDED, SLOW, Loop, Refused, Values, check_loops, run_loops
from small_models import BATCHES, net
from torch import distributed as dist

from colossal.booster import Booster
from colossal.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from colossal.errors import ConfigError
from colossal.testing import run_processes
from colossal.zero import zero_model_wrapper, zero_optim_wrapper


def reduce_rate_by_own_loss(loop: Loop) -> Values:
    """A schedule of the loss of each rank's own samples."""
    model, optimizer = loop.start()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.01)
    for number in range(9):
        schedule.step(float(loop.train(model, optimizer, BATCHES[number % len(BATCHES)])))
    return loop.values(model)


def reduce_rate_by_common_loss(loop: Loop) -> Values:
    model, optimizer = loop.start()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.01)
    for number in range(6):
        loss = loop.train(model, optimizer, BATCHES[number % len(BATCHES)])
        if loop.booster is not None:
            dist.all_reduce(loss)
        schedule.step(float(loss / loop.size))
    return loop.values(model)


def set_rate_by_rank(loop: Loop) -> Values:
    model, optimizer = loop.start()
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (1 + loop.rank)
    for batch in BATCHES:
        loop.train(model, optimizer, batch)
    return loop.values(model)


def save_rate_by_rank(loop: Loop) -> Values:
    """A rate that no step has compared yet."""
    model, optimizer = loop.start()
    loop.train(model, optimizer, BATCHES[0])
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (1 + loop.rank)
    if loop.booster is not None:
        with TemporaryDirectory() as folder:
            loop.booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
    return loop.values(model)


def step_another_optimizer(loop: Loop) -> Values:
    """Two optimizers of one model, of which the first has stepped when the second one does."""
    model, _ = loop.start(lr=0.0)
    other = torch.optim.SGD(list(model.parameters())[2:], lr=0.3)
    with loop.no_sync(model):
        loop.backward(model(loop.own(BATCHES[0])).square().mean(), _)
    for parameter in list(model.parameters())[:2] if loop.booster is not None else ():
        dist.all_reduce(parameter.grad)
    other.step()
    return loop.values(model)


def discard_on_one_rank(loop: Loop) -> Values:
    model, optimizer = loop.start()
    loop.backward(model(loop.own(BATCHES[0])).square().mean(), optimizer)
    optimizer.step()
    for group in optimizer.param_groups if loop.rank == 0 else ():
        for parameter in group["params"]:
            parameter.grad = None
    loop.backward(model(loop.own(BATCHES[1])).square().mean(), optimizer)
    optimizer.step()
    return loop.values(model)


def _held(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def perturb_and_restore(loop: Loop) -> Values:
    """Sharpness-aware minimization without its norm: gradients are those of perturbed values."""
    model, optimizer = loop.start()
    for batch in BATCHES:
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
        loop.unscale(optimizer)
        steps = [0.2 * parameter.grad for parameter in _held(optimizer)]  # type: ignore[operator]
        with torch.no_grad():
            torch._foreach_add_(_held(optimizer), steps)
        optimizer.zero_grad()
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
        with torch.no_grad():
            torch._foreach_sub_(_held(optimizer), steps)
        optimizer.step()
        optimizer.zero_grad()
    return loop.values(model)


def decay_by_hand(loop: Loop) -> Values:
    """What is written between a step and the next pass counts there, in the state and in parameters."""
    model, optimizer = loop.start()
    average = {}
    for batch in BATCHES:
        loop.train(model, optimizer, batch)
        for parameter in _held(optimizer):
            parameter.data.mul_(0.8)
        average |= {f"{name} {len(average)}": each for name, each in loop.values(model).items()}
    with torch.no_grad():
        outputs = model(BATCHES[0])
    return {**average, **loop.values(model), "outputs": outputs}


def read_written(loop: Loop) -> Values:
    model, optimizer = loop.start()
    loop.train(model, optimizer, BATCHES[0])
    for parameter in _held(optimizer):
        parameter.data = parameter.data * 0.5
    return {name.replace("module.", ""): each.detach().clone() for name, each in model.named_parameters()}


def look_ahead(loop: Loop) -> Values:
    model, optimizer = loop.start()
    slow = [parameter.detach().clone() for parameter in _held(optimizer)]
    for number, batch in enumerate([*BATCHES, *BATCHES]):
        loop.train(model, optimizer, batch)
        for kept, parameter in zip(slow, _held(optimizer), strict=True) if number % 2 else ():
            kept.add_(parameter.data - kept, alpha=0.5)
            parameter.data.copy_(kept)
    return {"outputs": model(BATCHES[0]).detach(), **loop.values(model)}


def load_and_write(loop: Loop) -> Values:
    """Values of the model are written, then those that the optimizer holds, which are the same tensors elsewhere."""
    model, optimizer = loop.start()
    first = loop.values(model)
    loop.train(model, optimizer, BATCHES[0])
    loop.load(model, first)
    with torch.no_grad():
        for parameter in _held(optimizer):
            parameter.mul_(0.8)
    loop.train(model, optimizer, BATCHES[1])
    return loop.values(model)


def centralize(loop: Loop) -> Values:
    """Subtract from the gradients of rows their means, of what the optimizer holds."""
    model, optimizer = loop.start()
    for batch in BATCHES:
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
        loop.unscale(optimizer)
        for parameter in _held(optimizer):
            if parameter.ndim > 1 and parameter.grad is not None:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))
        optimizer.step()
        optimizer.zero_grad()
    return loop.values(model)


def centralize_by_gradient(loop: Loop) -> Values:
    model, optimizer = loop.start()
    for batch in BATCHES:
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
        loop.unscale(optimizer)
        for parameter in _held(optimizer):
            if parameter.grad is not None and parameter.grad.dim() > 1:
                parameter.grad -= parameter.grad.mean(1, keepdim=True)
        optimizer.step()
        optimizer.zero_grad()
    return loop.values(model)


def measure_by_hand(loop: Loop) -> Values:
    """The norm of all gradients, of those of the parameters that the optimizer holds."""
    model, optimizer = loop.start()
    loop.backward(model(loop.own(BATCHES[0])).square().mean(), optimizer)
    loop.unscale(optimizer)
    norms = [parameter.grad.norm() for parameter in _held(optimizer) if parameter.grad is not None]
    return {"norm": torch.as_tensor([float(each) for each in norms], dtype=torch.float64).norm()}


def measure_by_squares(loop: Loop) -> Values:
    model, optimizer = loop.start()
    loop.backward(model(loop.own(BATCHES[0])).square().mean(), optimizer)
    loop.unscale(optimizer)
    return {"squares": sum((each.grad.data.pow(2).sum() for each in _held(optimizer)), torch.zeros(()))}


def measure_values(loop: Loop) -> Values:
    """The norm of each parameter, also of those with one dimension."""
    _, optimizer = loop.start()
    norms = [torch.linalg.vector_norm(each.detach()) for each in _held(optimizer) if len(each.shape) == 1]
    return {"norms": torch.stack([torch.as_tensor(float(each)) for each in norms])}


def mask_gradients(loop: Loop) -> Values:
    """Some elements of each parameter keep their values."""
    own = net("")
    masks = [torch.arange(each.numel()).view(each.shape) % 2 for each in own.parameters()]
    model, optimizer = loop.boost(own, torch.optim.SGD(own.parameters(), lr=0.3))
    loop.backward(model(loop.own(BATCHES[0])).square().mean(), optimizer)
    loop.unscale(optimizer)
    for parameter, mask in zip(_held(optimizer), masks, strict=True):
        parameter.grad.mul_(mask)
    optimizer.step()
    return loop.values(model)


def mask_in_hooks(loop: Loop) -> Values:
    """What the refusal of it recommends."""
    own = net("")
    masks = [torch.arange(each.numel()).view(each.shape) % 2 for each in own.parameters()]
    model, optimizer = loop.boost(own, torch.optim.SGD(own.parameters(), lr=0.3))
    for parameter, mask in zip(loop.original(model).parameters(), masks, strict=True):
        parameter.register_hook(lambda grad, mask=mask: grad * mask)
    for batch in BATCHES:
        loop.train(model, optimizer, batch)
    return loop.values(model)


def measure_full_gradients(loop: Loop) -> Values:
    """Norms of rows, of full gradients and values, which shards and DTensors give by one name."""
    model, optimizer = loop.start()
    loop.backward(model(loop.own(BATCHES[0])).square().mean(), optimizer)
    loop.unscale(optimizer)
    results = {}
    for number, parameter in enumerate(_held(optimizer)):
        held: dict[str, Any] = {"gradient": parameter.grad, "values": parameter.data}
        for what, values in held.items():
            full = values.full_tensor() if hasattr(values, "full_tensor") else values
            results[f"{what} {number}"] = full.norm(dim=-1)
    return results


def replace_gradients(loop: Loop) -> Values:
    model, optimizer = loop.start()
    for batch in BATCHES:
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
        loop.unscale(optimizer)
        for parameter in _held(optimizer):
            parameter.grad.data = parameter.grad.data.square() + 0.1
            parameter.grad = parameter.grad.abs()
        optimizer.clip_grad_by_norm(0.1) if loop.booster is not None else torch.nn.utils.clip_grad_norm_(
            model.parameters(), 0.1
        )
        optimizer.step()
        optimizer.zero_grad()
    return loop.values(model)


def centralize_in_hooks(loop: Loop) -> Values:
    """What the refusals of the others recommend."""
    model, optimizer = loop.start()
    for parameter in loop.original(model).parameters():
        if parameter.ndim > 1:
            parameter.register_hook(lambda grad: grad - grad.mean(dim=1, keepdim=True))
    for batch in BATCHES:
        loop.train(model, optimizer, batch)
    return loop.values(model)


def load_another_algorithm(loop: Loop) -> Values:
    model, optimizer = loop.start()
    optimizer.load_state_dict(torch.optim.AdamW(net("").parameters()).state_dict())
    loop.train(model, optimizer, BATCHES[0])
    return loop.values(model)


def read_unreduced(loop: Loop) -> Values:
    """Gradients of a pass in no_sync, which under FSDP2 are not in the parameters."""
    model, optimizer = loop.start()
    with loop.no_sync(model):
        loop.backward(model(loop.own(BATCHES[0])).square().mean(), optimizer)
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    loop.backward(model(loop.own(BATCHES[1])).square().mean(), optimizer)
    optimizer.step()
    return loop.values(model)


def read_reduced(loop: Loop) -> Values:
    """What the refusal of it recommends; some parameters have no gradient; then discarded ones."""
    model, optimizer = loop.start()
    next(iter(loop.original(model).parameters())).requires_grad_(False)
    counts = []
    for batch in BATCHES:
        with loop.no_sync(model):
            loop.backward(model(loop.own(batch)).square().mean(), optimizer)
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
        counts.append(sum(parameter.grad is not None for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    with loop.no_sync(model):
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
    optimizer.zero_grad()
    counts.append(sum(parameter.grad is not None for parameter in model.parameters()))
    return {"counts": torch.as_tensor(counts), **loop.values(model)}


def differentiate_twice(loop: Loop) -> Values:
    """A Hessian of inputs, by torch.autograd.functional."""
    model, _ = loop.start()
    hessian: Any = torch.autograd.functional.hessian(lambda each: model(each).square().mean(), BATCHES[0][:2])
    return {"hessian": hessian}


def append_group(loop: Loop) -> Values:
    """Add a group past the method of the optimizer."""
    own = net("")
    model, optimizer = loop.boost(own, torch.optim.SGD(list(own.parameters())[:2], lr=0.3))
    loop.train(model, optimizer, BATCHES[0])
    model.zero_grad()
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": list(loop.original(model).parameters())[2:]})
    for batch in BATCHES[1:]:
        loop.train(model, optimizer, batch)
        model.zero_grad()
    return loop.values(model)


def step_two_optimizers(loop: Loop) -> Values:
    """Weights and biases have optimizers of their own, of which one is boosted."""
    model = net("")
    parameters = list(model.parameters())
    other = torch.optim.Adam([each for each in parameters if each.ndim == 1], lr=0.1)
    model, optimizer = loop.boost(model, torch.optim.SGD([each for each in parameters if each.ndim > 1], lr=0.3))
    for batch in BATCHES:
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
        optimizer.step()
        other.step()
        model.zero_grad()
    return loop.values(model)


def step_in_hooks(loop: Loop) -> Values:
    """Each parameter is updated as soon as it has its gradient, which is freed then."""
    model, optimizer = loop.start()

    @torch.no_grad()
    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    handles = [each.register_post_accumulate_grad_hook(update) for each in model.parameters()]
    for batch in BATCHES:
        loop.backward(model(loop.own(batch)).square().mean(), optimizer)
    for handle in handles:
        handle.remove()
    loop.train(model, optimizer, BATCHES[0])
    return loop.values(model)


def clip_in_hooks(loop: Loop) -> Values:
    """Not linear in gradients: that of a mean is not the mean of those of ranks."""
    model, optimizer = loop.start()

    def clip(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.05, 0.05)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    for batch in BATCHES:
        loop.train(model, optimizer, batch)
    return loop.values(model)


OTHERS = ("FSDP", *SHARDED)
REFUSED: Refused = {
    reduce_rate_by_own_loss: dict.fromkeys(PLUGINS, "Reduce what a schedule is given"),
    reduce_rate_by_common_loss: {},
    set_rate_by_rank: dict.fromkeys(PLUGINS, "lr of the optimizer's group 0 differs between ranks"),
    save_rate_by_rank: dict.fromkeys(PLUGINS, "lr of the optimizer's group 0 differs between ranks"),
    step_another_optimizer: {"DDP": "outside of no_sync", "Hybrid": "outside of no_sync"} | dict.fromkeys(OTHERS, ""),
    perturb_and_restore: {},
    decay_by_hand: {},
    read_written: {"FSDP": "", "Gemini": "Between passes"},
    look_ahead: {},
    load_and_write: {},
    load_another_algorithm: dict.fromkeys(PLUGINS, "betas, where SGD has .* Build the optimizer that was saved"),
    read_unreduced: dict.fromkeys(SHARDED, "") | {"FSDP": "outside of no_sync"},
    read_reduced: dict.fromkeys(SHARDED, ""),
    differentiate_twice: {"FSDP": "or a Hessian.* Use TorchDDPPlugin"},
    append_group: dict.fromkeys(SHARDED, "Call optimizer.add_param_group"),
    step_two_optimizers: dict.fromkeys(OTHERS, "Join the optimizers before boost"),
    centralize: dict.fromkeys(SHARDED, "no rows and columns"),
    centralize_by_gradient: dict.fromkeys(SHARDED, "no rows and columns"),
    centralize_in_hooks: {"FSDP": ""},
    measure_by_hand: dict.fromkeys(SHARDED, "optimizer.get_grad_norm"),
    measure_by_squares: dict.fromkeys(SHARDED, "Found sum of one.*full_tensor") | {"FSDP": ""},
    measure_values: dict.fromkeys(SHARDED, "Found vector_norm of one"),
    mask_gradients: dict.fromkeys(SHARDED, "another shape.* of masked ones") | {"FSDP": ""},
    mask_in_hooks: {"FSDP": ""},
    measure_full_gradients: {},
    replace_gradients: {"FSDP": ""},
    step_in_hooks: dict.fromkeys(OTHERS, ""),
    clip_in_hooks: dict.fromkeys(OTHERS, ""),
    discard_on_one_rank: {
        **dict.fromkeys(SHARDED, "Discard gradients by zero_grad"),
        **dict.fromkeys(("DDP", "Hybrid", "FSDP"), ""),
    },
}


def train_all(plugin: str) -> list[Values | str]:
    return run_loops(REFUSED, plugin)


@pytest.mark.parametrize(
    "plugin", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PLUGINS]
)
def test_loops_train_as_in_one_process_or_are_refused(plugin: str) -> None:
    check_loops(REFUSED, plugin, train_all)


IN_BF16: dict[str, Callable[[], Any]] = {
    "ZeRO": partial(LowLevelZeroPlugin, precision="bf16"),
    "Gemini": partial(GeminiPlugin, precision="bf16"),
    "Hybrid": partial(HybridParallelPlugin, tp_size=1, pp_size=1, precision="bf16"),
}


def write_master_weights() -> dict[str, tuple[list[float], str]]:
    """Write float32 copies by a number that bfloat16 has; then once more after values of the model."""
    results: dict[str, tuple[list[float], str]] = {}
    for name, plugin in IN_BF16.items():
        own = torch.nn.Linear(6, 2)
        model: Any
        optimizer: Any
        model, optimizer, *_ = Booster(device="cpu", plugin=plugin()).boost(own, torch.optim.SGD(own.parameters()))
        first = model.state_dict(only_rank_0=False)
        for parameter in _held(optimizer):
            parameter.data.fill_(0.5)
        outputs = model(torch.ones(4, 6)).flatten().tolist()
        (model if name == "Gemini" else own).load_state_dict(first)
        for parameter in _held(optimizer):
            parameter.data.mul_(2.0)
        try:
            model(torch.ones(4, 6))
            results[name] = outputs, ""
        except ConfigError as error:
            results[name] = outputs, str(error)
    return results


def test_written_master_weights_are_rounded_into_the_model() -> None:
    for results in run_processes(write_master_weights, 2):
        for name, (outputs, message) in results.items():
            assert outputs == [3.5] * 8, name
            assert "both were written" in message, name


def decay_without_booster() -> dict[str, list[torch.Tensor]]:
    """Halve what the optimizer holds after a step of zeros, and read it by a pass and by a state dict."""
    results = {}
    for stage, precision in ((1, torch.float64), (2, torch.bfloat16), (3, torch.float64)):
        plain = net("").to(precision)
        chunks = {"mixed_precision": None} if stage > 2 else None
        model: Any = zero_model_wrapper(plain, zero_stage=stage, gemini_config=chunks)
        optimizer = zero_optim_wrapper(model, torch.optim.SGD(model.parameters(), lr=0.0))
        optimizer.backward(model(BATCHES[0].to(precision)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        read = partial(model.state_dict, only_rank_0=False) if stage > 2 else model.state_dict
        first = {name: each.clone() for name, each in read().items()}
        for parameter in _held(optimizer):
            parameter.data.mul_(0.5)
        outputs = model(BATCHES[0].to(precision)).detach()
        for parameter in _held(optimizer):
            parameter.data.mul_(0.5)
        state = read()
        half = net("").to(precision)
        half.load_state_dict({name: each * 0.5 for name, each in first.items()})
        wanted = half(BATCHES[0].to(precision)).detach()
        results[f"stage {stage}"] = [outputs, wanted, *(t for name in first for t in (state[name], first[name] * 0.25))]
    return results


def test_written_shards_count_without_a_booster() -> None:
    for results in run_processes(decay_without_booster, 2):
        for stage, tensors in results.items():
            for found, wanted in zip(tensors[::2], tensors[1::2], strict=True):
                torch.testing.assert_close(
                    found, wanted, rtol=1e-12, atol=0, msg=lambda text, at=stage: f"{at}: {text}"
                )
