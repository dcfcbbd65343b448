"""Models that lie in chunks, trained beside the same models in one process."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from colossal.cluster import current_mesh
from colossal.tensor import full_tensor_of
from colossal.zero.gemini import GeminiDDP, GeminiOptimizer

ROWS, WIDTH = 24, 6
AUTO = {"placement_policy": "auto", "device_budget": 1_000_000, "warmup_non_model_data_ratio": 0.9999}
"""The first pass has room for 100 bytes, so that each chunk goes as soon as another one comes."""
PLACEMENTS: dict[str, dict[str, Any]] = {
    "static": {},
    "ahead, from the host": {"max_prefetch": 2, "offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    "auto": AUTO,
}
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
"""In float64, where Adam divides by gradients that are not tiny."""

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Outcome = dict[str, Any]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BATCHES = [draw(seed, ROWS, WIDTH) for seed in range(3)]


def model_of(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model in float64, the same one each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build().double()


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) ** 2).mean()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam would blow up the rounding of a gradient that is 0 in truth, such as of a bias of attention keys."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def own_rows(batch: torch.Tensor) -> torch.Tensor:
    mesh = current_mesh()
    return batch.chunk(mesh.size("dp"))[mesh.rank("dp")]


def wrap(
    model: nn.Module, make: Make | None = adamw, chunk_numel: int | None = 60, **options: Any
) -> tuple[GeminiDDP, Any]:
    """Put a copy of a model into small chunks, with an optimizer."""
    names = {key: options.pop(key) for key in ("max_norm", "initial_scale") if key in options}
    if chunk_numel is not None:
        options["chunk_config_dict"] = {n: {"chunk_size": chunk_numel} for n in range(1, 9)}
    given: dict[str, Any] = {"mixed_precision": None} | options
    wrapped = GeminiDDP(copy.deepcopy(model), **given)
    if make is None:
        return wrapped, None
    return wrapped, GeminiOptimizer(make(wrapped.parameters()), wrapped, **names)


def gradients_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor | None]:
    """Every gradient, put together from the ranks that share it; None of parameters that nobody used."""
    masters = {working: master for master, working in optimizer.masters.pairs.items()}
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = masters[parameter].grad
            found[name] = None if grad is None else full_tensor_of(grad).detach().clone()
    return found


def train_alone(
    model: nn.Module,
    batches: list[torch.Tensor] = BATCHES,
    make: Make = adamw,
    loss: Loss = loss_of,
    clip_value: float | None = None,
    max_norm: float | None = None,
) -> Outcome:
    """Train a copy of a model in one process, by torch alone."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    losses, gradients = [], []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        gradients.append(
            {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
        )
        losses.append(value.item())
        optimizer.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "gradients": gradients, "state": state}


def train_chunked(
    model: nn.Module,
    batches: list[torch.Tensor] = BATCHES,
    make: Make = adamw,
    loss: Loss = loss_of,
    accumulate: int = 1,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    **options: Any,
) -> Outcome:
    """Train a copy of a model in chunks, on this rank's rows; return what must not depend on the world."""
    wrapped, optimizer = wrap(model, make, **options)
    losses, gradients = [], []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for part in own_rows(batch).chunk(accumulate):
            value = loss(wrapped, part) / accumulate
            optimizer.backward(value)
            total += value.item()
        if clip_norm is not None:
            optimizer.clip_grad_by_norm(clip_norm)
        if clip_value is not None:
            optimizer.clip_grad_by_value(clip_value)
        optimizer.unscale_grad()
        gradients.append(gradients_of(wrapped.unwrap(), optimizer))
        losses.append(total)
        optimizer.step()
    memory, traffic = wrapped.chunks.memory, wrapped.chunks.traffic
    return {
        "losses": losses,
        "gradients": gradients,
        "state": wrapped.state_dict(only_rank_0=False),
        "peak": memory.peak,
        "used": dict(memory.used),
        "moved": dict(traffic.num_bytes),
        "num_chunks": len(wrapped.chunks.chunks),
    }


def assert_equal(ranks: list[Outcome], expected: Outcome, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Compare losses, every gradient and all values of the model with those of one process."""

    def close(actual: Any, wanted: Any, what: str) -> None:
        torch.testing.assert_close(actual, wanted, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")

    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    close(losses, expected["losses"], "losses")
    for rank in ranks:
        for step, (own, wanted) in enumerate(zip(rank["gradients"], expected["gradients"], strict=True)):
            assert own.keys() == wanted.keys()
            for name, grad in wanted.items():
                assert (own[name] is None) == (grad is None), f"gradient of {name} in step {step}: {own[name]} {grad}"
                if grad is not None:
                    close(own[name], grad, f"gradient of {name} in step {step}")
        assert rank["state"].keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            close(rank["state"][name], value, name)


def rank() -> int:
    return dist.get_rank()


class Branches(nn.Module):
    """A tie, a scalar, frozen layers, a layer that nobody uses, a block called twice, and a functional use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 5)
        self.tied = nn.Linear(5, WIDTH, bias=False)
        self.tied.weight = nn.Parameter(self.embed.weight.detach().T.contiguous())
        self.same = nn.Linear(5, WIDTH, bias=False)
        self.same.weight = self.tied.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.idle = nn.Linear(3, 3)
        self.twice = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.embed(x)))
        hidden = self.norm(self.twice(self.twice(hidden)) + hidden)
        hidden = hidden + torch.tanh(nn.functional.linear(hidden, self.twice[0].weight[:5] * 0.5))
        return (self.tied(hidden) + self.same(hidden)) * self.scale


class Deep(nn.Module):
    """Layers of one size, one behind the other."""

    def __init__(self, depth: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x
