"""A model that is built lazily takes no room, and one that is materialized takes its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
from pathlib import Path
from torch import nn
from colossal.lazy import LazyInitContext, materialize

def megabytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024

def build(width, count):
    return nn.ParameterList([nn.Parameter({values}) for _ in range(count)])

with LazyInitContext():
    materialize(build(64, 2))
before = megabytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
with LazyInitContext():
    model = build(4096, {count})
built = megabytes("VmHWM") - before
materialize(model)
print(built, megabytes("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ("torch.zeros(width, width)", 16),
        ("nn.init.normal_(torch.empty(width, width))", 2),
        ("torch.randn(width, width, generator=torch.Generator().manual_seed(1))", 2),
        ("torch.empty(width, width, dtype=torch.bfloat16).normal_()", 2),
    ],
)
def test_peak_memory(values: str, count: int) -> None:
    program = PROGRAM.format(values=values, count=count)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    built, materialized = map(int, run.stdout.split())
    assert built < 50
    size = count * 64 // (2 if "bfloat16" in values else 1)
    assert size - 10 < materialized < size + 100, "the model, and what one tensor needs while it is made"
