"""What programs do with a boosted optimizer besides steps: as in one process, or refused with what to do."""

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from loops import PLUGINS, SHARDED, SLOW, Loop, Refused, Values, check_loops, run_loops
from small_models import BATCHES, net
from torch import distributed as dist


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
    return loop.train_all(model, optimizer)


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
        loop.run_pass(model, _, BATCHES[0])
    for parameter in list(model.parameters())[:2] if loop.booster is not None else ():
        dist.all_reduce(parameter.grad)
    other.step()
    return loop.values(model)


def discard_on_one_rank(loop: Loop) -> Values:
    model, optimizer = loop.start()
    loop.run_pass(model, optimizer, BATCHES[0])
    optimizer.step()
    for group in optimizer.param_groups if loop.rank == 0 else ():
        for parameter in group["params"]:
            parameter.grad = None
    loop.run_pass(model, optimizer, BATCHES[1])
    optimizer.step()
    return loop.values(model)


def _held(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def perturb_and_restore(loop: Loop) -> Values:
    """Sharpness-aware minimization without its norm: gradients are those of perturbed values."""
    model, optimizer = loop.start()
    for batch in BATCHES:
        loop.run_pass(model, optimizer, batch)
        loop.unscale(optimizer)
        steps = [0.2 * parameter.grad for parameter in _held(optimizer)]  # type: ignore[operator]
        with torch.no_grad():
            torch._foreach_add_(_held(optimizer), steps)
        optimizer.zero_grad()
        loop.run_pass(model, optimizer, batch)
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

    def change() -> None:
        for parameter in _held(optimizer):
            if parameter.ndim > 1 and parameter.grad is not None:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))

    return loop.train_all(model, optimizer, change)


def centralize_by_gradient(loop: Loop) -> Values:
    model, optimizer = loop.start()

    def change() -> None:
        for parameter in _held(optimizer):
            if parameter.grad is not None and parameter.grad.dim() > 1:
                parameter.grad -= parameter.grad.mean(1, keepdim=True)

    return loop.train_all(model, optimizer, change)


def measure_by_hand(loop: Loop) -> Values:
    """The norm of all gradients, of those of the parameters that the optimizer holds."""
    _, optimizer = loop.start_with_gradients()
    norms = [parameter.grad.norm() for parameter in _held(optimizer) if parameter.grad is not None]
    return {"norm": torch.as_tensor([float(each) for each in norms], dtype=torch.float64).norm()}


def measure_by_squares(loop: Loop) -> Values:
    _, optimizer = loop.start_with_gradients()
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
    loop.run_pass(model, optimizer, BATCHES[0])
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
    return loop.train_all(model, optimizer)


def measure_full_gradients(loop: Loop) -> Values:
    """Norms of rows, of full gradients and values, which shards and DTensors give by one name."""
    _, optimizer = loop.start_with_gradients()
    results = {}
    for number, parameter in enumerate(_held(optimizer)):
        held: dict[str, Any] = {"gradient": parameter.grad, "values": parameter.data}
        for what, values in held.items():
            full = values.full_tensor() if hasattr(values, "full_tensor") else values
            results[f"{what} {number}"] = full.norm(dim=-1)
    return results


def replace_gradients(loop: Loop) -> Values:
    model, optimizer = loop.start()

    def change() -> None:
        for parameter in _held(optimizer):
            parameter.grad.data = parameter.grad.data.square() + 0.1
            parameter.grad = parameter.grad.abs()
        optimizer.clip_grad_by_norm(0.1) if loop.booster is not None else torch.nn.utils.clip_grad_norm_(
            model.parameters(), 0.1
        )

    return loop.train_all(model, optimizer, change)


def centralize_in_hooks(loop: Loop) -> Values:
    """What the refusals of the others recommend."""
    model, optimizer = loop.start()
    for parameter in loop.original(model).parameters():
        if parameter.ndim > 1:
            parameter.register_hook(lambda grad: grad - grad.mean(dim=1, keepdim=True))
    return loop.train_all(model, optimizer)


def load_another_algorithm(loop: Loop) -> Values:
    model, optimizer = loop.start()
    optimizer.load_state_dict(torch.optim.AdamW(net("").parameters()).state_dict())
    loop.train(model, optimizer, BATCHES[0])
    return loop.values(model)


def read_unreduced(loop: Loop) -> Values:
    """Gradients of a pass in no_sync, which under FSDP2 are not in the parameters."""
    model, optimizer = loop.start()
    with loop.no_sync(model):
        loop.run_pass(model, optimizer, BATCHES[0])
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    loop.run_pass(model, optimizer, BATCHES[1])
    optimizer.step()
    return loop.values(model)


def read_reduced(loop: Loop) -> Values:
    """What the refusal of it recommends; some parameters have no gradient; then discarded ones."""
    model, optimizer = loop.start()
    next(iter(loop.original(model).parameters())).requires_grad_(False)
    counts = []
    for batch in BATCHES:
        with loop.no_sync(model):
            loop.run_pass(model, optimizer, batch)
        loop.run_pass(model, optimizer, batch)
        counts.append(sum(parameter.grad is not None for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    with loop.no_sync(model):
        loop.run_pass(model, optimizer, batch)
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
        loop.run_pass(model, optimizer, batch)
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
        loop.run_pass(model, optimizer, batch)
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
    return loop.train_all(model, optimizer)


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
