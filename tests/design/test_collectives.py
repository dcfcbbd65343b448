"""Ranks talk to each other in few places, so that traffic can be counted, faked and quantised there.

Outside of the packages in ``ALLOWED`` no name of ``torch.distributed`` that communicates may be used: not called, not
passed on, not imported under another name.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagebuild.api.collective import PACKAGE, is_communication

ALLOWED = {"comm", "pipeline", "checkpoint_io", "cluster", "testing"}

GROUP_METHODS = re.compile(r"_?(allreduce|allgather|alltoall)(_base|_coalesced|_into_tensor_coalesced)?")


class Finder(ast.NodeVisitor):
    """Collects the uses of communicating names in one module; ``names`` maps what is bound to where it comes from."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.found: list[tuple[int, str]] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.report(node, alias.name)
            bound = alias.asname or alias.name.split(".")[0]
            self.names[bound] = alias.name if alias.asname else bound

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names if not node.level else ():
            name = f"{node.module}.{alias.name}"
            self.report(node, name)
            if alias.name == "*" and f"{node.module}.".startswith(f"{PACKAGE}."):
                self.found.append((node.lineno, name))
            self.names[alias.asname or alias.name] = name

    def visit_Assign(self, node: ast.Assign) -> None:
        origin = self.resolve(node.value)
        for target in node.targets:
            if origin and isinstance(target, ast.Name):
                self.names[target.id] = origin
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        origin = self.resolve(node)
        if origin and is_communication(origin):
            self.found.append((node.lineno, origin))
        elif GROUP_METHODS.fullmatch(node.attr):
            self.found.append((node.lineno, f"a process group's {node.attr}"))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1:
            origin, name = self.resolve(node.args[0]), node.args[1]
            if origin and isinstance(name, ast.Constant):
                self.report(node, f"{origin}.{name.value}")
        self.generic_visit(node)

    def report(self, node: ast.stmt | ast.expr, name: str) -> None:
        if is_communication(name):
            self.found.append((node.lineno, name))

    def resolve(self, node: ast.expr) -> str | None:
        """The full dotted name of an expression like ``dist.all_reduce``."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            origin = self.resolve(node.value)
            return f"{origin}.{node.attr}" if origin else None
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            return str(node.args[0].value) if isinstance(node.args[0], ast.Constant) else None
        return None


def communication_in(source: str) -> list[tuple[int, str]]:
    tree, finder = ast.parse(source), Finder()
    finder.visit(tree)  # once for the names, which may be bound below the function that uses them
    finder.found.clear()
    finder.visit(tree)
    return finder.found


def violations(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        unit = next(part for part in path.relative_to(root).parts if part != "_src").removesuffix(".py")
        for line, name in communication_in(path.read_text(encoding="utf-8")) if unit not in ALLOWED else ():
            yield f"{path.relative_to(root)}:{line}: {name} belongs into colossal.comm"


# ------------------------------------------------------------------------------------------ the library


def test_only_few_packages_communicate(library: Path) -> None:
    found = list(violations(library))
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------ the guard itself

HIDDEN = [
    "import torch.distributed as dist\ndist.all_reduce(x)",
    "import torch.distributed\ntorch.distributed.broadcast(x, 0)",
    "import torch\ntorch.distributed.barrier()",
    "import torch as t\nt.distributed.send(x, 0)",
    "from torch import distributed as d\nd.all_gather_into_tensor(x, y)",
    "from torch.distributed import all_reduce as ar",
    "from torch.distributed import *",
    "from torch.distributed.distributed_c10d import reduce_scatter_tensor",
    "import torch.distributed.distributed_c10d as c10d\nc10d.all_to_all_single(x, y)",
    "import torch.distributed.nn",
    "from torch.distributed.nn.functional import all_gather",
    "from torch.distributed import nn as dnn",
    "import torch.distributed._functional_collectives as funcol",
    "from torch.distributed import _functional_collectives as funcol",
    "import torch\ntorch.ops._c10d_functional.all_reduce(x, 'sum', 'g')",
    "def f():\n    import torch.distributed as dist\n    return dist.irecv(x)",
    "import torch.distributed as dist\nhook = dist.all_reduce",
    "import torch.distributed as dist\nmap(dist.isend, xs)",
    "import torch.distributed as dist\nd = dist\nd.scatter(x)",
    "import torch.distributed as dist\ngetattr(dist, 'all_reduce')(x)",
    "def f():\n    dist.barrier()\nimport torch.distributed as dist",
    "import importlib\nimportlib.import_module('torch.distributed').barrier()",
    "group.allreduce([x]).wait()",
    "group._allgather_base(x, y)",
    *(
        f"import torch.distributed as dist\ndist.{name}()"
        for name in (
            "all_gather",
            "all_gather_object",
            "all_reduce_coalesced",
            "all_to_all",
            "batch_isend_irecv",
            "broadcast_object_list",
            "gather",
            "gather_object",
            "isend",
            "monitored_barrier",
            "recv",
            "recv_object_list",
            "reduce",
            "reduce_scatter",
            "scatter_object_list",
            "send_object_list",
        )
    ),
]


@pytest.mark.parametrize("source", HIDDEN)
def test_finds_communication(source: str) -> None:
    assert len(communication_in(source)) == 1


HARMLESS = [
    "import torch.distributed as dist\ndist.get_rank()\ndist.is_initialized()\ndist.ReduceOp.SUM\ndist.new_group()",
    "import torch.distributed as dist\ndist.init_process_group()\ndist.destroy_process_group()",
    "from colossal.comm import all_reduce\nall_reduce(x)",
    "from colossal import comm\ncomm.all_gather(x)",
    "from .ops import reduce_scatter\nreduce_scatter(x)",
    "import functools\nfunctools.reduce(f, xs)",
    "import torch\ntorch.gather(x, 0, y)\nx.scatter(0, y, z)\ntorch.broadcast_tensors(x, y)",
    "sock.send(data)\nqueue.recv()",
    "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\ndefault_hooks.fp16_compress_hook",
    "'dist.all_reduce'",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_lets_everything_else_pass(source: str) -> None:
    assert communication_in(source) == []


@pytest.mark.parametrize("name", ["zero/a.py", "nn/layer/a.py", "logging.py"])
@pytest.mark.parametrize("allowed", sorted(ALLOWED))
def test_looks_everywhere_but_in_the_allowed_packages(name: str, allowed: str, tmp_path: Path) -> None:
    for each in (name, f"{allowed}/inner/b.py"):
        path = tmp_path / each
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch.distributed as dist\ndist.barrier()\n", encoding="utf-8")
    [violation] = violations(tmp_path)
    assert violation.startswith(f"{name}:2:")
