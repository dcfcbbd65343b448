"""The device that pages run on: what is asked for, and what this machine has."""

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property

CPU, CUDA = "cpu", "cuda"
VARIABLE = "COLOSSAL_DEVICE"

_QUESTION = "import torch; print('yes' if torch.cuda.is_available() else f'torch {torch.__version__}')"


@dataclass(frozen=True)
class Device:
    """Where pages run.

    Attributes:
        asked: `cpu` or `cuda`; empty to leave it to the pages, which take the best that there is.
    """

    asked: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which the library learns what was asked for."""
        return {VARIABLE: self.asked} if self.asked else {}

    @property
    def fault(self) -> str:
        """Why no page can run on the device that was asked for; empty if it can."""
        if self.asked != CUDA or not self._without_cuda:
            return ""
        return f"--device cuda needs a GPU and a CUDA build of torch; found {self._without_cuda}: use --device cpu"

    @cached_property
    def expected(self) -> str:
        """The device of a page that was killed before it could say, or was not run at all."""
        return self.asked or os.environ.get(VARIABLE) or (CPU if self._without_cuda else CUDA)

    @cached_property
    def _without_cuda(self) -> str:
        """What there is in place of a usable GPU; torch is asked in a process of its own."""
        done = subprocess.run([sys.executable, "-P", "-c", _QUESTION], capture_output=True, text=True, check=False)
        answer = done.stdout.strip()
        if answer == "yes":
            return ""
        reason = answer or (done.stderr.strip().splitlines() or ["no torch"])[-1]
        return f"{reason} without a usable GPU"
