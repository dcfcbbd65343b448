"""Lets the probe into the processes of a page; every other Python process of the page's tree passes through."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_HERE = str(Path(__file__).parent)


def _is_page(script: str) -> bool:
    """Whether this process runs the page itself, or was spawned by it through multiprocessing."""
    return os.path.abspath(sys.argv[0]) == script or "--multiprocessing-fork" in sys.orig_argv  # noqa: PTH100


def _start_probe() -> None:
    script = os.environ.get("COLOSSAL_PAGE_SCRIPT", "")
    if script and _is_page(script):
        from page_probe import Probe

        probe = Probe(script)
        probe.install()
        probe.start(os.environ["COLOSSAL_PAGE_RUN"], int(os.environ.get("RANK", "0")))


def _run_hidden_sitecustomize() -> None:
    """Runs the `sitecustomize` that this one hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if entry != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec and spec.loader:
        spec.loader.exec_module(module_from_spec(spec))


_start_probe()
_run_hidden_sitecustomize()
