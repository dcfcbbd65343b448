"""Every plugin against plain torch in one process on the same device: gradient norms, and parameters after steps."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from equality import exactly_apart, rounding_apart
from families import build, inputs_of
from float64 import KeepFloat64
from torch import distributed as dist

import colossal
from colossal.accelerator import get_accelerator
from colossal.booster import Booster
from colossal.booster import plugin as plugins

MODEL, LAYERS, STEPS, MAX_NORM, BATCH = "llama-tied", 4, 3, 0.05, 8
ADAM: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
Parameters = dict[str, torch.Tensor]

ZERO, GEMINI, HYBRID = "LowLevelZeroPlugin", "GeminiPlugin", "HybridParallelPlugin"
CHUNKS: dict[str, Any] = {"search_range_m": 1, "hidden_dim": 64, "min_chunk_size_m": 0.01}
EXACT: dict[str, tuple[int, str, dict[str, Any]]] = {
    "DDP": (1, "TorchDDPPlugin", {}),
    "FSDP": (1, "TorchFSDPPlugin", {}),
    "FSDP, offloaded": (1, "TorchFSDPPlugin", {"cpu_offload": True}),
    "ZeRO-1": (1, ZERO, {"stage": 1}),
    "ZeRO-2": (1, ZERO, {"stage": 2}),
    "ZeRO-2, offloaded": (1, ZERO, {"stage": 2, "cpu_offload": True}),
    "ZeRO-1, overlapped": (1, ZERO, {"stage": 1, "overlap_allgather": True}),
    "Gemini": (1, GEMINI, {**CHUNKS, "placement_policy": "cuda"}),
    "Gemini, from the host": (1, GEMINI, {**CHUNKS, "placement_policy": "cpu"}),
    "Gemini, page-locked": (1, GEMINI, {**CHUNKS, "placement_policy": "cpu", "pin_memory": True}),
    "Gemini, auto": (1, GEMINI, {**CHUNKS, "placement_policy": "auto"}),
    "Hybrid, replicas": (1, HYBRID, {"tp_size": 1, "pp_size": 1}),
    "Hybrid, ZeRO-1": (1, HYBRID, {"tp_size": 1, "pp_size": 1, "zero_stage": 1}),
    "Hybrid, tp2": (2, HYBRID, {"tp_size": 2, "pp_size": 1}),
    "Hybrid, tp2, sequences": (
        2,
        HYBRID,
        {
            "tp_size": 2,
            "pp_size": 1,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "split_gather",
        },
    ),
    "Hybrid, sp2, all_to_all": (
        2,
        HYBRID,
        {
            "tp_size": 1,
            "pp_size": 1,
            "sp_size": 2,
            "enable_sequence_parallelism": True,
            "sequence_parallelism_mode": "all_to_all",
        },
    ),
    "Hybrid, pp2": (2, HYBRID, {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}),
    "Hybrid, pp2, zbv": (
        2,
        HYBRID,
        {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2},
    ),
    "Gemini, tp2": (2, GEMINI, {**CHUNKS, "tp_size": 2}),
}
"""Ranks that a plugin needs at least, its class and its options; in float64."""

ROUNDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{name}, {precision}": (precision, kind, options)
    for precision in ("bf16", "fp16")
    for name, kind, options in (
        ("DDP", "TorchDDPPlugin", {}),
        ("ZeRO-1", ZERO, {"stage": 1}),
        ("Gemini", GEMINI, CHUNKS),
        ("Hybrid", HYBRID, {"tp_size": 1, "pp_size": 1}),
    )
}
"""The same in half precision, compared by what rounding does to one process."""


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The whole batch of a step."""
    ids = torch.cat([(inputs_of(MODEL)["input_ids"] * (1 + 2 * row + step)) % 131 for row in range(BATCH // 2)])
    return {"input_ids": ids, "labels": ids}


def alone(model: Any, precision: str | None = None) -> tuple[Parameters, list[float]]:
    """Train in one process, by plain torch."""
    device = get_accelerator().get_current_device()
    model = copy.deepcopy(model).to(device)
    optimizer, norms = torch.optim.AdamW(model.parameters(), **ADAM), []
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
    for step in range(STEPS):
        optimizer.zero_grad()
        with KeepFloat64() if half is None else torch.autocast(device.type, half):
            loss = model(**{name: value.to(device) for name, value in batch_of(step).items()}).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}, norms


def boosted(
    model: Any, kind: str, options: dict[str, Any], precision: str | None, file: Path
) -> tuple[Parameters, list[float]]:
    """Train by a plugin, save, and read what was saved."""
    parts = {} if kind.startswith("Torch") else {"precision": precision or "fp32"}
    booster = Booster(
        plugin=getattr(plugins, kind)(**options, **parts),
        mixed_precision=None if parts else precision,
        max_norm=MAX_NORM,
    )
    optimizer, norms = torch.optim.AdamW(model.parameters(), **ADAM), []
    wrapped, optimizer, criterion, *_ = booster.boost(model, optimizer, lambda outputs, _inputs: outputs.loss)
    assert optimizer is not None
    assert criterion is not None
    rank, size = booster.plugin.data_parallel_rank_and_size()
    keep: Callable[[], Any] = nullcontext if precision else KeepFloat64
    for step in range(STEPS):
        own = {name: value[rank * BATCH // size : (rank + 1) * BATCH // size] for name, value in batch_of(step).items()}
        with keep():
            booster.execute_pipeline(iter([own]), wrapped, criterion, optimizer)
        norms.append(float(optimizer.get_grad_norm()))
        optimizer.step()
        optimizer.zero_grad()
    booster.save_model(wrapped, file)
    dist.barrier()
    found = torch.load(file, map_location="cpu")
    shapes = {name: value.shape for name, value in build(MODEL, num_layers=LAYERS).state_dict().items()}
    assert {name: value.shape for name, value in found.items()} == shapes, "other names or shapes were saved"
    return found, norms


def worst_of(apart: Iterable[float]) -> float:
    """Return the largest, and NaN where one is: what cannot be compared does not get lost."""
    return torch.tensor(list(apart), dtype=torch.float64).max().item()


def exact(name: str, folder: str) -> Iterator[dict[str, float]]:
    """Yield ``worst``: the largest difference, in units of what rounding in float64 can reach; equal below 1."""
    _, kind, options = EXACT[name]
    colossal.launch_from_torch(verbose=False)
    expected, wanted = alone(build(MODEL, num_layers=LAYERS))
    found, norms = boosted(build(MODEL, num_layers=LAYERS), kind, options, None, Path(folder, "model.bin"))
    apart = [exactly_apart(found[key], value) for key, value in expected.items()]
    apart.append(exactly_apart(*(torch.tensor(each, dtype=torch.float64) for each in (norms, wanted))))
    yield {"worst": worst_of(apart)}


def rounded(name: str, folder: str) -> Iterator[dict[str, float]]:
    """Yield ``worst``: the largest difference in units of what rounding to a half explains; as good below 1."""
    precision, kind, options = ROUNDED[name]
    colossal.launch_from_torch(verbose=False)
    exactly, _ = alone(build(MODEL, num_layers=LAYERS))
    expected, _ = alone(build(MODEL, num_layers=LAYERS).float(), precision)
    found, _ = boosted(build(MODEL, num_layers=LAYERS).float(), kind, options, precision, Path(folder, "model.bin"))
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    yield {"worst": worst_of(rounding_apart(found[key], expected[key], exactly[key], half) for key in exactly)}
