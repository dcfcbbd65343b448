"""Which packages are installed, and whether their versions are among the supported ones."""

import importlib
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import final

from colossal._src.cli.check.report import Row, Section
from colossal._src.cli.common import VERSION

TITLE = "versions"
PYTHON = "3.11"
TESTED_TORCH = "2.13.0"


@final
@dataclass(frozen=True)
class Package:
    """A package that the library uses."""

    name: str  # as pip knows it
    least: str  # the oldest version that is supported
    extra: str | None  # the extra that brings it; None if the library cannot do without it
    purpose: str  # what is missing without it


PACKAGES = (
    Package("torch", "2.11", None, "everything"),
    Package("numpy", "1.26", None, "everything"),
    Package("xxhash", "3.5", None, "checksums of checkpoints"),
    Package("transformers", "5.17", "hf", "models of Hugging Face"),
    Package("safetensors", "0.6", "hf", "checkpoints in the format of Hugging Face"),
    Package("peft", "0.21", "lora", "low-rank adapters"),
    Package("click", "8.1", "cli", "the command line"),
    Package("rich", "13", "cli", "tables on a terminal"),
    Package("fabric", "3.2", "cli", "starting programs on other nodes"),
)
"""The lower bounds are those of the installation; a test holds them against it."""


def look() -> Iterator[Row]:
    """Look at Python, the library, and every package of the table."""
    yield Row(TITLE, "colossal", "ok", VERSION, VERSION)
    yield _python(platform.python_version(), sys.version_info[:2])
    for package in PACKAGES:
        yield _package(package)
    yield from _cuda()


def _python(version: str, found: tuple[int, ...]) -> Row:
    if found < release(PYTHON):
        return Row(TITLE, "python", "problem", version, version, f"Use Python {PYTHON} or newer.")
    return Row(TITLE, "python", "ok", version, version)


def _package(package: Package) -> Row:
    install = f"pip install '{package.name}>={package.least}'"
    if package.extra:
        install = f"pip install -e '.[{package.extra}]' in the clone"
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        status, found = ("note", "not installed (optional)") if package.extra else ("problem", "not installed")
        return Row(TITLE, package.name, status, found, None, f"For {package.purpose}: {install}")
    if release(version) < release(package.least):
        status = "note" if package.extra else "problem"
        advice = f"For {package.purpose}, {package.least} or newer: {install}"
        return Row(TITLE, package.name, status, f"{version}, older than {package.least}", version, advice)
    try:
        importlib.import_module(package.name)
    except Exception as error:  # noqa: BLE001 (a broken build may raise anything)
        status = "note" if package.extra else "problem"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Row(TITLE, package.name, status, f"{version}, cannot be imported: {reason}", version, _again(package))
    if package.name == "torch" and release(version)[:2] > release(TESTED_TORCH)[:2]:
        advice = f"The tests run with {TESTED_TORCH}; use that if something fails."
        return Row(TITLE, "torch", "note", f"{version}, newer than the tested {TESTED_TORCH}", version, advice)
    return Row(TITLE, package.name, "ok", version, version)


def _again(package: Package) -> str:
    return f"For {package.purpose}, install it anew: pip install --force-reinstall '{package.name}>={package.least}'"


def _cuda() -> Iterator[Row]:
    import torch
    from torch.cuda import nccl

    cuda = torch.version.cuda
    yield Row(TITLE, "CUDA of torch", "ok", cuda or f"none: a build for {kind_of_build()}", cuda)
    if cuda and torch.distributed.is_nccl_available():
        version = ".".join(map(str, nccl.version()))
        yield Row(TITLE, "NCCL of torch", "ok", version, version)


def kind_of_build() -> str:
    """Say what a torch without CUDA computes on: CPUs, or an accelerator too, such as ROCm's or 'xpu'."""
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    device = torch.accelerator.current_accelerator()
    return "CPUs" if device is None else f"{device.type!r}"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: 2.13.0+cpu is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


SECTION = Section(TITLE, look)
