"""The device that pages run on: what is asked for, and what this machine has."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CPU, CUDA, PRETEND = "cpu", "cuda", "pretend"
DEVICES = (CPU, CUDA, PRETEND)
VARIABLE = "COLOSSAL_DEVICE"

_PRETEND = Path(__file__).resolve().parents[3] / "tests" / "device"

_CUDA_QUERY = "import torch; print('yes' if torch.cuda.is_available() else f'torch {torch.__version__}')"


@dataclass(frozen=True)
class Device:
    """Where pages run."""

    requested: str = ""  # one of `DEVICES`; empty to leave it to the pages, which take the best that there is

    def add_to_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Adds what lets the library know what was asked for, and torch the device that it does not have."""
        if not self.requested:
            return dict(environment)
        added = {VARIABLE: self.requested}
        if self.requested == PRETEND:
            paths = [environment.get("PYTHONPATH", ""), str(_PRETEND)]
            added["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return {**environment, **added}

    @property
    def fault(self) -> str:
        """Why no page can run on the device that was asked for; empty if it can."""
        if self.requested != CUDA or not self._why_no_cuda:
            return ""
        return f"--device cuda needs a GPU and a CUDA build of torch; found {self._why_no_cuda}: use --device cpu"

    @cached_property
    def expected(self) -> str:
        """The device of a page that was killed before it could say, or was not run at all."""
        return self.requested or os.environ.get(VARIABLE) or (CPU if self._why_no_cuda else CUDA)

    @cached_property
    def _why_no_cuda(self) -> str:
        """What there is in place of a usable GPU; torch is asked in a process of its own."""
        done = subprocess.run([sys.executable, "-P", "-c", _CUDA_QUERY], capture_output=True, text=True, check=False)
        answer = done.stdout.strip()
        if answer == "yes":
            return ""
        reason = answer or (done.stderr.strip().splitlines() or ["no torch"])[-1]
        return f"{reason} without a usable GPU"
