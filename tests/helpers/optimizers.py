# pyright: reportAssignmentType=false
"""Optimizers with options, what their papers say that they do, and parameters to do it with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch.optim import Optimizer

from colossal._src.tensor import set_placement
from colossal.cluster import ParallelMesh
from colossal.nn import optimizer as optimizers
from colossal.tensor import FlatLayout, Placement

SHAPES = ((), (7,), (5, 4), (3, 8), (4, 3, 2, 3), (1, 1))
STEPS = 4

Tensors = list[torch.Tensor]
Cutter = Callable[[int, int], list[int]]


def draw(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start() -> Tensors:
    return [draw(shape, i) for i, shape in enumerate(SHAPES)]


def grads_at(step: int) -> Tensors:
    return [draw(shape, 100 * step + i) * (1 + i) for i, shape in enumerate(SHAPES)]


# ------------------------------------------------------------------------------------------ the papers, in float64


def adam_direction(state: dict[str, Any], grad: torch.Tensor, betas: Sequence[float], eps: float, correct: bool):  # noqa: ANN201
    state["t"] = state.get("t", 0) + 1
    state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * grad
    state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * grad**2
    first, second = ((1 - beta ** state["t"]) if correct else 1.0 for beta in betas)
    return (state["m"] / first) / (torch.sqrt(state["v"] / second) + eps)


def lamb(params: Tensors, states: list[dict], grads: Tensors, o: dict[str, Any]) -> Tensors:
    new = []
    for w, state, grad in zip(params, states, grads, strict=True):
        u = adam_direction(state, grad, o["betas"], o["eps"], o["bias_correction"]) + o["weight_decay"] * w
        ratio = 1.0
        if not o["adam"] and w.norm() > 0 and u.norm() > 0:
            ratio = min(w.norm().item(), 10.0) / u.norm()
        new.append(w - o["lr"] * ratio * u)
    return new


def fused_lamb(params: Tensors, states: list[dict], grads: Tensors, o: dict[str, Any]) -> Tensors:
    norm, new = sqrt(sum(float((grad**2).sum()) for grad in grads)), []
    for w, state, grad in zip(params, states, grads, strict=True):
        g = grad / max(1.0, norm / o["max_grad_norm"]) if o["max_grad_norm"] else grad
        if not o["adam_w_mode"]:
            g = g + o["weight_decay"] * w
        state["t"] = state.get("t", 0) + 1
        state["m"] = o["betas"][0] * state.get("m", 0.0) + (1 - o["betas"][0] if o["grad_averaging"] else 1.0) * g
        state["v"] = o["betas"][1] * state.get("v", 0.0) + (1 - o["betas"][1]) * g**2
        first, second = (1 - beta ** state["t"] for beta in o["betas"])
        u = (state["m"] / first) / ((state["v"] / second).sqrt() + o["eps"])
        u = u + o["weight_decay"] * w if o["adam_w_mode"] else u
        adapts = o["use_nvlamb"] or o["weight_decay"]
        new.append(w - o["lr"] * (w.norm() / u.norm() if adapts else 1.0) * u)
    return new


def lars(params: Tensors, states: list[dict], grads: Tensors, o: dict[str, Any]) -> Tensors:
    new = []
    for w, state, g in zip(params, states, grads, strict=True):
        local = o["eeta"] * w.norm() / (g.norm() + o["weight_decay"] * w.norm() + o["epsilon"])
        state["v"] = o["momentum"] * state.get("v", 0.0) + o["lr"] * local * (g + o["weight_decay"] * w)
        new.append(w - state["v"])
    return new


def second_moment(state: dict, key: str, squares: torch.Tensor, kept: float) -> torch.Tensor:
    """The estimate of the mean of squares: of matrices the outer product of the means of rows and columns."""
    if squares.dim() < 2:
        state[key] = kept * state.get(key, 0.0) + (1 - kept) * squares
        return state[key]
    rows, columns = state.get(key, (0.0, 0.0))
    rows = kept * rows + (1 - kept) * squares.mean(-1)
    columns = kept * columns + (1 - kept) * squares.mean(-2)
    state[key] = rows, columns
    return rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]


def root_mean_square(tensor: torch.Tensor) -> float:
    return (tensor**2).mean().sqrt().item()


def adafactor(params: Tensors, states: list[dict], grads: Tensors, o: dict[str, Any]) -> Tensors:
    new = []
    for w, state, g in zip(params, states, grads, strict=True):
        sides = projections(w, state, g, o) if "rank" in o and is_low(w, o) else None
        g = g if sides is None else sides[0].T @ g @ sides[1]  # noqa: PLW2901 (the gradient in the subspace)
        t = state["t"] = state.get("t", 0) + 1
        u = g / second_moment(state, "v", g**2 + o["eps"][0], 1 - t ** o["decay_rate"]).sqrt()
        u = u / max(1.0, root_mean_square(u) / o["clip_threshold"])
        rate = min(1e-6 * t if o["warmup_init"] else 1e-2, 1 / sqrt(t)) if o["relative_step"] else o["lr"]
        rate *= max(o["eps"][1], root_mean_square(w)) if o["scale_parameter"] else 1.0
        if o["beta1"] is not None:
            state["m"] = o["beta1"] * state.get("m", 0.0) + (1 - o["beta1"]) * rate * u
        moved = rate * u if o["beta1"] is None else state["m"]
        moved = moved if sides is None else o["scale"] * (sides[0] @ moved @ sides[1].T)
        new.append(w - o["weight_decay"] * rate * w - moved)
    return new


def came(params: Tensors, states: list[dict], grads: Tensors, o: dict[str, Any]) -> Tensors:
    new = []
    for w, state, g in zip(params, states, grads, strict=True):
        u = g / second_moment(state, "v", g**2 + o["eps"][0], o["betas"][1]).sqrt()
        u = u / max(1.0, root_mean_square(u) / o["clip_threshold"])
        m = state["m"] = o["betas"][0] * state.get("m", 0.0) + (1 - o["betas"][0]) * u
        if w.dim() > 1:
            m = m / second_moment(state, "s", (u - m) ** 2 + o["eps"][1], o["betas"][2]).sqrt()
        new.append(w - o["lr"] * (m + o["weight_decay"] * w))
    return new


def projections(w: torch.Tensor, state: dict[str, Any], g: torch.Tensor, o: dict[str, Any]) -> Tensors:
    """The matrices P and Q of a gradient P.T @ g @ Q, found anew every so many steps."""
    rank = o["rank"]
    if state.get("t", 0) % o["update_proj_gap"] == 0:
        left, _, right = torch.linalg.svd(g)
        signs = torch.stack([column[column.abs().argmax()].sign() for column in left.T])[:rank]
        state["P"], state["Q"] = left[:, :rank] * signs, right[:rank].T * signs
    sides = {"std": "right" if w.shape[0] >= w.shape[1] else "left"}.get(o["proj_type"], o["proj_type"])
    if o["proj_type"] == "reverse_std":
        sides = "left" if w.shape[0] >= w.shape[1] else "right"
    eyes = torch.eye(w.shape[0], dtype=w.dtype), torch.eye(w.shape[1], dtype=w.dtype)
    return [eyes[0] if sides == "right" else state["P"], eyes[1] if sides == "left" else state["Q"]]


def is_low(w: torch.Tensor, o: dict[str, Any]) -> bool:
    return w.dim() == 2 and min(w.shape) > o["rank"]


def galore(params: Tensors, states: list[dict], grads: Tensors, o: dict[str, Any]) -> Tensors:
    new = []
    for w, state, g in zip(params, states, grads, strict=True):
        if is_low(w, o):
            p, q = projections(w, state, g, o)
            u = o["scale"] * (p @ adam_direction(state, p.T @ g @ q, o["betas"], o["eps"], correct=True) @ q.T)
        else:
            u = adam_direction(state, g, o["betas"], o["eps"], correct=True)
        new.append(w - o["lr"] * (u + o["weight_decay"] * w))
    return new


def torchs(kind: type[Optimizer], names: Sequence[str]) -> Callable[..., Tensors]:
    """What an optimizer of torch does, as a reference."""

    def update(params: Tensors, states: list[dict], grads: Tensors, o: dict[str, Any]) -> Tensors:
        new = []
        for w, state, grad in zip(params, states, grads, strict=True):
            if "own" not in state:
                state["own"] = w.clone().requires_grad_()
                state["optimizer"] = kind([state["own"]], **{name: o[name] for name in names})
            state["own"].grad = grad
            state["optimizer"].step()
            new.append(state["own"].detach().clone())
        return new

    return update


# ------------------------------------------------------------------------------------------ cases


@dataclass(frozen=True)
class Case:
    kind: Callable[..., Optimizer]
    reference: Callable[..., Tensors]
    options: dict[str, Any]
    group: dict[str, Any] = field(default_factory=dict)

    def build(self, params: Sequence[torch.Tensor]) -> Optimizer:
        return self.kind([{"params": list(params), **self.group}], **self.options)

    def expected(self, steps: int = STEPS) -> Tensors:
        """The parameters after some steps, in float64."""
        params, states = start(), [{} for _ in SHAPES]
        options = dict(self.build([torch.zeros(1, dtype=torch.float64)]).param_groups[0])
        for step in range(1, steps + 1):
            params = self.reference(params, states, grads_at(step), options)
        return params


_ADAM = ("lr", "betas", "eps", "weight_decay")
_DECAY = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
_ADAMW, _L2 = torchs(torch.optim.AdamW, _ADAM), torchs(torch.optim.Adam, _ADAM)
_SGD = torchs(torch.optim.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov"))
_RANKED = {"rank": 2, "update_proj_gap": 2, "scale": 0.5}

CASES: dict[str, Case] = {
    "CPUAdam": Case(optimizers.CPUAdam, _ADAMW, _DECAY),
    "CPUAdam, L2": Case(optimizers.CPUAdam, _L2, _DECAY | {"adamw_mode": False}),
    "HybridAdam": Case(optimizers.HybridAdam, _ADAMW, _DECAY),
    "FusedAdam": Case(optimizers.FusedAdam, _ADAMW, _DECAY),
    "FusedSGD": Case(optimizers.FusedSGD, _SGD, {"lr": 0.1}),
    "FusedSGD, momentum": Case(
        optimizers.FusedSGD, _SGD, {"lr": 0.1, "momentum": 0.7, "dampening": 0.2, "weight_decay": 0.1}
    ),
    "FusedSGD, nesterov": Case(
        optimizers.FusedSGD, _SGD, {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.1, "nesterov": True}
    ),
    "Lamb": Case(optimizers.Lamb, lamb, {"lr": 0.1, "weight_decay": 0.1}),
    "Lamb, corrected": Case(optimizers.Lamb, lamb, _DECAY | {"bias_correction": True}),
    "Lamb, adam": Case(optimizers.Lamb, lamb, _DECAY | {"adam": True}),
    "FusedLAMB": Case(optimizers.FusedLAMB, fused_lamb, {"lr": 0.1}),
    "FusedLAMB, no decay": Case(
        optimizers.FusedLAMB, fused_lamb, {"lr": 0.1, "weight_decay": 0.0, "max_grad_norm": 0.0}
    ),
    "FusedLAMB, nvlamb": Case(
        optimizers.FusedLAMB,
        fused_lamb,
        {"lr": 0.1, "weight_decay": 0.0, "use_nvlamb": True, "grad_averaging": False, "max_grad_norm": 20.0},
    ),
    "FusedLAMB, L2": Case(optimizers.FusedLAMB, fused_lamb, {"lr": 0.1, "weight_decay": 0.3, "adam_w_mode": False}),
    "Lars": Case(optimizers.Lars, lars, {"lr": 0.5, "momentum": 0.8, "eeta": 0.1, "weight_decay": 0.1}),
    "Lars, plain": Case(optimizers.Lars, lars, {"lr": 0.5, "eeta": 0.1, "epsilon": 0.01}),
    "Adafactor": Case(optimizers.Adafactor, adafactor, {}),
    "Adafactor, warm-up": Case(optimizers.Adafactor, adafactor, {"warmup_init": True, "scale_parameter": False}),
    "Adafactor, rate": Case(
        optimizers.Adafactor,
        adafactor,
        {"lr": 0.05, "relative_step": False, "beta1": 0.7, "weight_decay": 0.1, "clip_threshold": 0.5},
    ),
    "CAME": Case(optimizers.CAME, came, {"lr": 0.05}),
    "CAME, decay": Case(optimizers.CAME, came, {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9, 0.95)}),
    "GaLoreAdamW": Case(optimizers.GaLoreAdamW, galore, _DECAY, _RANKED),
    "GaLoreAdamW8bit": Case(optimizers.GaLoreAdamW8bit, galore, {"lr": 0.1}, _RANKED | {"proj_type": "reverse_std"}),
    "GaLoreAdamW, full": Case(optimizers.GaLoreAdamW, galore, _DECAY, _RANKED | {"proj_type": "full"}),
    "GaLoreAdamW, left": Case(optimizers.GaLoreAdamW, galore, _DECAY, _RANKED | {"proj_type": "left", "rank": 3}),
    "GaLoreAdamW, right": Case(optimizers.GaLoreAdamW, galore, _DECAY, _RANKED | {"proj_type": "right"}),
    "GaLoreAdafactor": Case(
        optimizers.GaLoreAdafactor,
        adafactor,
        {"lr": 0.05, "relative_step": False, "beta1": 0.7, "weight_decay": 0.1, "clip_threshold": 0.5},
        _RANKED,
    ),
    "GaLoreAdafactor, both sides": Case(
        optimizers.GaLoreAdafactor, adafactor, {"lr": 0.05, "relative_step": False}, _RANKED | {"proj_type": "full"}
    ),
}
TWINS = {
    "Lamb, corrected": optimizers.DistributedLamb,
    "Adafactor, rate": optimizers.DistributedAdaFactor,
    "CAME, decay": optimizers.DistributedCAME,
    "GaLoreAdamW": optimizers.DistGaloreAwamW,
}


# ------------------------------------------------------------------------------------------ shards

CUTTERS: dict[str, Cutter] = {
    "even": lambda numel, size: [numel * i // size for i in range(size + 1)],
    "odd": lambda numel, size: [0, *sorted((numel * 7 * i // 9 + i) % (numel + 1) for i in range(1, size)), numel],
    "all on the last": lambda numel, size: [0] * size + [numel],
    "all on the first": lambda numel, size: [0] + [numel] * size,
}


def to_shards(wholes: Sequence[torch.Tensor], cutter: Cutter, mesh: ParallelMesh) -> list[torch.nn.Parameter]:
    """This rank's ranges of parameters."""
    shards = []
    for whole in wholes:
        ends = cutter(whole.numel(), mesh.size("dp"))
        ranges = tuple(pairwise(ends))
        own = torch.nn.Parameter(whole.flatten()[slice(*ranges[mesh.rank("dp")])].clone())
        layout = FlatLayout(tuple(whole.shape), mesh.ranks("dp"), ranges)
        set_placement(own, Placement.full(whole.shape).flattened(layout, mesh.group("dp")))
        shards.append(own)
    return shards


def set_grads(shards: Sequence[torch.nn.Parameter], grads: Sequence[torch.Tensor], cutter: Cutter, mesh) -> None:
    for shard, grad in zip(shards, grads, strict=True):
        ends = cutter(grad.numel(), mesh.size("dp"))
        at = mesh.rank("dp")
        shard.grad = grad.flatten()[ends[at] : ends[at + 1]].to(shard.dtype)
