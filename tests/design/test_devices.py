"""Where a tensor is, and what it computes on, is said by one module: no other names a type of accelerator.

A name in a string, or an attribute of torch that belongs to one kind of device, is a place where another accelerator
goes wrong. And a tensor that belongs into host memory says so: ``torch.set_default_device`` would put it elsewhere.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

HOME = "accelerator.py"
KINDS = ("cuda", "xpu", "npu", "mps", "hpu", "mlu", "hip", "rocm")
BACKENDS = ("nccl", "xccl", "hccl")
ATTRIBUTES = {*KINDS, *(f"is_{kind}" for kind in KINDS)}

OWN_CODE = "the kernel of Adam is written in CUDA, and runs there only; elsewhere torch's operations do it"
POLICY = "the documented name of a placement, on any accelerator"
BUILD = "says how this torch was built, to the reader of `colossal check`"
NAMED: Mapping[tuple[str, str], str] = {
    ("_native.py", "torch.cuda.is_available()"): OWN_CODE,
    ("_native.py", "torch.cuda.get_device_capability()"): OWN_CODE,
    ("kernel/adam/native.py", "torch.cuda.device(device)"): OWN_CODE,
    ("kernel/adam/native.py", "torch.cuda.current_stream()"): OWN_CODE,
    ("kernel/adam/native.py", 'device="cuda"'): OWN_CODE,
    ("kernel/adam/native.py", "on cuda:{device}"): OWN_CODE,
    ("kernel/adam/op.py", '"cuda": native.on_cuda'): OWN_CODE,
    ("legacy/zero/sharded_model.py", 'tensor_placement_policy: str = "cuda"'): "the documented name of a policy",
    ("kernel/adam/op.py", "torch.version.hip"): "AMD's GPUs are called cuda, and run no code in CUDA",
    (
        "amp/fp8_linear.py",
        "torch.version.hip",
    ): "units for 8-bit products are known of NVIDIA's GPUs; elsewhere it is emulated",
    ("amp/fp8_linear.py", "torch.cuda.get_device_capability"): "units for 8-bit products came with a capability",
    ("booster/lora/quantization.py", 'device.type != "cuda"'): "bitsandbytes; refused by name on other devices",
    ("cli/check/devices.py", 'other.type != "cuda"'): "GPUs of CUDA are listed one by one, others are counted",
    ("cli/check/devices.py", "torch.cuda"): "GPUs of CUDA are listed one by one, others are counted",
    ("cli/check/devices.py", "torch.version.cuda"): BUILD,
    ("cli/check/versions.py", "torch.version.hip"): BUILD,
    ("cli/check/versions.py", "torch.version.cuda"): BUILD,
    ("cli/check/versions.py", "from torch.cuda import nccl"): BUILD,
    ("cli/check/compatibility.py", "torch.version.cuda"): BUILD,
    ("cli/check/communication.py", '"nccl": "cuda"'): "lists what every build is asked for; the device's own is added",
    ("cli/run/job.py", '"xpu"'): "a word that torchrun itself takes for the number of processes",
    ("cluster/backends.py", '("nccl", *own)'): "what many programs pass on as the default stands for the device's own",
    ("cluster/watchdog.py", '"nccl" not in backend'): "the variables are those of torch's watchdog of this backend",
    ("comm/channel.py", '_IN_PLACE = ("nccl"'): "known to allow it; an unknown backend gets a buffer of its own",
    ("testing/asserts.py", "held.is_cuda"): "where rounding was seen to differ; elsewhere the limits stay strict",
    ("zero/gemini/gemini_config.py", '"cuda": (0.0, 0.0)'): POLICY,
    ("zero/gemini/gemini_config.py", "'cuda' for everything on the device"): POLICY,
    (
        "zero/gemini/managed_parameter.py",
        '"is_cuda"',
    ): "attributes of a tensor that tell nothing of its values, of each kind",
    (
        "zero/gemini/managed_parameter.py",
        '"is_xpu"',
    ): "attributes of a tensor that tell nothing of its values, of each kind",
}
"""Lines that may name one, by file and a part of the line, and why."""

CONSTRUCTORS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
READ_BACK = "is read back at once, and is right wherever it was"
UNPLACED: Mapping[tuple[str, str], str] = {
    ("zero/flat_parameters.py", "torch.tensor(lengths).cumsum(0).tolist()"): READ_BACK,
    (
        "pipeline/stage_extraction.py",
        "torch.zeros(native.shape, dtype=native.dtype)",
    ): "moves with the model that it stands in",
    ("pipeline/p2p.py", "torch.tensor(numbers + "): "a header, which its sender moves",
    ("inference/online/batch_manager.py", "torch.tensor("): "tokens that wait, as tokenizers return them",
}
"""Lines that may leave the device to torch, and why."""


def docstrings(tree: ast.AST) -> set[int]:
    """The objects that are documentation: strings that are statements."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def names_device(text: str) -> bool:
    """Whether a string is a name of a device or a backend, or an example of one in a message."""
    head = text.strip().partition(":")[0]
    return head in KINDS or head in BACKENDS or head in ATTRIBUTES or any(f" {kind}:" in text for kind in KINDS)


def naming(tree: ast.AST) -> Iterator[Any]:
    """The places in a module that name a kind of accelerator."""
    documentation = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            words = [node.value, *(word.strip("'") for word in node.value.split())]
            if any(map(names_device, words)):
                yield node
        elif isinstance(node, ast.Attribute):
            yield from [node] if node.attr in ATTRIBUTES else []
        elif isinstance(node, ast.ImportFrom) and set((node.module or "").split(".")) & set(KINDS):
            yield node


def unplaced(tree: ast.AST) -> Iterator[Any]:
    """The places in a module that make a tensor on what happens to be the default device."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        keywords = {keyword.arg for keyword in node.keywords}
        if is_torch and node.func.attr in CONSTRUCTORS and not keywords & {"device", None}:
            yield node


def found_in(root: Path, look: Callable[[ast.AST], Iterator[Any]], allowed: Mapping[tuple[str, str], str]) -> list[str]:
    """What is not allowed."""
    problems = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix().removeprefix("_src/")
        if name == HOME:
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for begin, end in sorted({(node.lineno, node.end_lineno) for node in look(ast.parse(source))}):
            text = "\n".join(lines[begin - 1 : end])
            if not any(name == file and part in text for file, part in allowed):
                problems.append(f"{name}:{begin}: {lines[begin - 1].strip()}")
    return problems


@pytest.mark.parametrize(("look", "allowed"), [(naming, NAMED), (unplaced, UNPLACED)])
def test_the_library_leaves_devices_to_one_module(look, allowed, library) -> None:
    problems = found_in(library, look, allowed)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("line", "look"),
    [
        ('x = torch.ones(2, device="cuda")', naming),
        ('x = torch.ones(2, device=f"cuda:{rank}")', naming),
        ('if tensor.device.type == "xpu": pass', naming),
        ("if tensor.is_cuda: pass", naming),
        ("torch.cuda.synchronize()", naming),
        ("from torch.cuda import Stream", naming),
        ('dist.init_process_group("nccl")', naming),
        ("x = torch.zeros(3, dtype=torch.uint8)", unplaced),
        ("x = torch.tensor([1, 2])", unplaced),
    ],
)
def test_a_violation_is_found(line, look, tmp_path) -> None:
    (tmp_path / "module.py").write_text(f'"""Names ``"cuda"`` in words only."""\n{line}\n', encoding="utf-8")
    problems = found_in(tmp_path, look, {})
    assert problems == [f"module.py:2: {line}"]


@pytest.mark.parametrize(
    "line",
    [
        'x = torch.zeros(3, device="cpu")',
        "x = torch.zeros(3, device=like.device)",
        "x = torch.zeros_like(y)",
        "x = torch.ones(2, **options)",
        "if tensor.is_cpu: pass",
        "torch.accelerator.synchronize()",
    ],
)
def test_what_any_accelerator_takes_is_no_violation(line, tmp_path) -> None:
    (tmp_path / "module.py").write_text(line, encoding="utf-8")
    assert not any(found_in(tmp_path, look, {}) for look in (naming, unplaced))
