"""What this machine computes on."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from colossal._src.cli.check.report import Row, Section

TITLE = "devices"
_CPU_INFO = Path("/proc/cpuinfo")


def look() -> Iterator[Row]:
    """Look at the CPU, at GPUs or another accelerator, and at which of them a program would use."""
    import torch

    cores = len(os.sched_getaffinity(0))
    yield Row(TITLE, "cpu", "ok", f"{_processor()}, {cores} cores for this process", cores)
    yield Row(TITLE, "vector instructions", "ok", torch.backends.cpu.get_cpu_capability())
    yield from _gpus()
    yield _used()


def _processor() -> str:
    text = _CPU_INFO.read_text(encoding="utf-8", errors="replace") if _CPU_INFO.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> Iterator[Row]:
    import torch

    from colossal._src.cli.check.versions import kind_of_build

    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type != "cuda":
        count = torch.accelerator.device_count()
        yield Row(TITLE, "accelerators", "ok", f"{count} of type {other.type}", count)
        return
    if not torch.cuda.is_available():
        if torch.version.cuda:
            advice = (
                "If there is one, look at nvidia-smi and at CUDA_VISIBLE_DEVICES; without one, all works on the CPU."
            )
            yield Row(TITLE, "gpus", "note", "none that this torch, built for CUDA, can use", 0, advice)
        else:
            yield Row(TITLE, "gpus", "ok", f"none that this torch, a build for {kind_of_build()}, could use", 0)
        return
    count = torch.cuda.device_count()
    yield Row(TITLE, "gpus", "ok", str(count), count)
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        memory = f"{facts.total_memory / 2**30:.0f} GiB"
        yield Row(
            TITLE, f"gpu {index}", "ok", f"{facts.name}, {memory}, capability {facts.major}.{facts.minor}", facts.name
        )


def _used() -> Row:
    from colossal.accelerator import get_accelerator
    from colossal.errors import ConfigError

    try:
        name = get_accelerator().name
    except ConfigError as error:
        asked = os.environ.get("COLOSSAL_DEVICE")
        return Row(TITLE, "in use", "problem", f"COLOSSAL_DEVICE={asked}: {error}", None, "Unset COLOSSAL_DEVICE.")
    return Row(TITLE, "in use", "ok", name, name)


SECTION = Section(TITLE, look)
