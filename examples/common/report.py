"""What the programs report: speed, memory, each step to a tracker, and what a step does to a trace."""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from colossal.accelerator import get_accelerator

PEAK_FLOPS = {  # of products of bf16 or fp16 matrices, without sparsity, as NVIDIA and AMD state them
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "MI300X": 1307e12,
}

Log = Callable[[int, Mapping[str, float]], object]


def open_log(kind: str, folder: Path, first_step: int, settings: Mapping[str, Any]) -> Log:
    """Open the tracker, on rank 0; other ranks log nothing.

    Args:
        kind: ``"jsonl"``, ``"tensorboard"`` or ``"wandb"``.
        folder: Where it writes.
        first_step: Where this run begins; what a run that was killed logged after it is dropped.
        settings: The options of the program.

    Returns:
        Takes a step and its values.
    """
    if dist.get_rank() != 0:
        return lambda _step, _values: None
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "wandb":
        wandb: Any = importlib.import_module("wandb")
        run = wandb.init(project=folder.resolve().name, dir=folder, config=dict(settings))
        return lambda step, values: run.log(dict(values), step=step)
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)
        return lambda step, values: [writer.add_scalar(name, value, step) for name, value in values.items()]
    path = folder / "log.jsonl"
    before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in before if json.loads(line)["step"] <= first_step]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def append(step: int, values: Mapping[str, float]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    return append


def flops_per_token(model: nn.Module, length: int) -> float:
    """Count the operations that training one token needs, before the model is boosted.

    Args:
        model: A model of transformers.
        length: Tokens of a sample.

    Returns:
        2 for each weight in the forward pass, 2 for gradients of activations, 2 for those of weights that are trained;
        and the products of attention. Of experts, the weights of those that a token goes to.
    """
    config: Any = model.config
    used = config.num_experts_per_tok / config.num_local_experts if hasattr(config, "num_local_experts") else 1.0
    sizes = [
        (each.numel() * (used if ".experts." in name else 1.0), each.requires_grad)
        for name, each in model.named_parameters()
    ]
    total, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    untied = hasattr(config, "vocab_size") and not config.tie_word_embeddings
    looked_up = config.vocab_size * config.hidden_size if untied else 0
    return 4.0 * (total - looked_up) + 2.0 * trained + 12.0 * config.num_hidden_layers * config.hidden_size * length


def utilization(flops_per_second: float, precision: str) -> str:
    """Say which part of the peak of all devices is used, where it is known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = next((peak for device, peak in PEAK_FLOPS.items() if device in name), None)
    if peak is None or precision == "fp32":
        return ""
    return f"  MFU {flops_per_second / (peak * dist.get_world_size()):.1%}"


@contextmanager
def open_profiler(folder: Path, *, is_on: bool) -> Iterator[Callable[[], object]]:
    """Trace the third to the fifth step.

    Args:
        folder: Where each rank writes its trace, which chrome://tracing and Perfetto show.
        is_on: Otherwise nothing is traced.

    Yields:
        What to call after each step.
    """
    if not is_on:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{dist.get_rank()}.json"
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        yield profiler.step


def peak_memory() -> str:
    """Say how much memory each rank has had at most: tensors on a GPU; on a CPU, what the process had resident."""
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, get_accelerator().max_memory_allocated())
    of = "process, with libraries and mapped files" if get_accelerator().is_cpu else "rank's tensors"
    return f"peak memory of each {of}: {', '.join(f'{peak / 2**20:,.0f} MiB' for peak in peaks)}"
