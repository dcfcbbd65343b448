"""What uses memory: the totals of the device, and the tensors that are alive."""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from colossal.accelerator import get_accelerator
from colossal.logging import DistributedLogger, get_dist_logger

_MIB = 1 << 20


def report_memory_usage(message: str, logger: DistributedLogger | None = None, report_cpu: bool = False) -> None:
    """Log how much memory this rank uses on its device.

    Args:
        message: Put before the numbers, such as the place in the program.
        logger: Logs it; the logger of the library by default.
        report_cpu: The memory of this process on the host as well.

    Example:
        >>> import tempfile
        >>> from colossal.legacy.utils import report_memory_usage
        >>> from colossal.logging import DistributedLogger
        >>> logger = DistributedLogger("memory")
        >>> path = logger.log_to_file(tempfile.mkdtemp())
        >>> report_memory_usage("after the first step", logger)
        >>> logger.close()
        >>> "after the first step: " in path.read_text(), "memory in use" in path.read_text()
        (True, True)
    """
    accelerator = get_accelerator()
    used, peak = accelerator.memory_allocated() / _MIB, accelerator.max_memory_allocated() / _MIB
    text = f"{message}: {accelerator.name} memory in use {used:.2f} MiB, at most {peak:.2f} MiB"
    available = accelerator.available_memory()
    if available is not None:
        text += f", available {available / _MIB:.2f} MiB"
    if report_cpu:
        text += f", host memory in use {get_accelerator('cpu').memory_allocated() / _MIB:.2f} MiB"
    (logger or get_dist_logger()).info(text)


@final
@dataclass(frozen=True)
class _TensorRow:
    """A tensor that is alive, as a table shows it."""

    kind: str
    shape: tuple[int, ...]
    requires_grad: bool
    dtype: torch.dtype
    device: torch.device
    num_bytes: int

    @property
    def text(self) -> str:
        """A line of the table."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        numbers = f"{self.requires_grad!s:>5} {str(self.dtype).removeprefix('torch.'):>9} {self.device!s:>8}"
        return f"{self.kind:<32} {shape:>20} {numbers} {self.num_bytes / _MIB:10.3f} MiB"


@final
class TensorDetector:
    """Finds the tensors that are alive, and those that came and went since the last look.

    Args:
        show_info: Print what was found.
        log: A file to which it is appended.
        include_cpu: Tensors in host memory too; on a CPU these are always included.
        module: A model whose parameters are shown by their names.

    Attributes:
        num_bytes: Memory of all tensors that the last look found, each storage counted once.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from colossal.legacy.utils import TensorDetector
        >>> path = Path(tempfile.mkdtemp(), "tensors.txt")
        >>> detector = TensorDetector(show_info=False, log=path, include_cpu=True)
        >>> detector.detect()
        >>> tensor = torch.zeros(512, 257)
        >>> detector.detect()
        >>> came = [line for line in path.read_text().splitlines() if "512x257" in line]
        >>> [line.split() for line in came], detector.num_bytes >= tensor.nbytes
        ([['+', 'Tensor', '512x257', 'False', 'float32', 'cpu', '0.502', 'MiB']], True)
    """

    def __init__(
        self,
        show_info: bool = True,
        log: str | Path | None = None,
        include_cpu: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self.num_bytes = 0
        self._show_info, self._log = show_info, None if log is None else Path(log)
        self._include_cpu = include_cpu or get_accelerator().is_cpu
        self._module = module
        self._last: dict[int, _TensorRow] = {}

    def detect(self, include_cpu: bool = False) -> None:
        """Look at the tensors that are alive.

        Args:
            include_cpu: Tensors in host memory too.
        """
        # tensors of other classes, such as parameters in chunks, would gather their values if asked for their memory
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 (it has no public name)
            self._look(include_cpu or self._include_cpu)

    def _look(self, include_cpu: bool) -> None:
        tensors = [each for each in _live_tensors() if each.device.type != "cpu" or include_cpu]
        names = {} if self._module is None else {id(each): name for name, each in self._module.named_parameters()}
        rows = {id(each): _row_of(each, names) for each in tensors}
        came = [row for key, row in rows.items() if self._last.get(key) != row]
        went = [row for key, row in self._last.items() if rows.get(key) != row]
        self._last = rows
        self.num_bytes = _storage_bytes(tensors)
        self._report(came, went)

    def close(self) -> None:
        """Forget what was found."""
        self._last.clear()
        self._module = None

    def _report(self, came: list[_TensorRow], went: list[_TensorRow]) -> None:
        lines = [*(f"+ {row.text}" for row in came), *(f"- {row.text}" for row in went)]
        text = "\n".join([*lines, f"{len(self._last)} tensors, {self.num_bytes / _MIB:.3f} MiB"])
        if self._show_info:
            print(text, flush=True)  # noqa: T201 (its documented purpose)
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


def _live_tensors() -> list[torch.Tensor]:
    """Find the tensors that Python knows, and the gradients that only they know."""
    gc.collect()  # what is unreachable is not alive, and would go at any moment
    found: dict[int, torch.Tensor] = {}
    for value in gc.get_objects():
        # by its type: isinstance would ask proxies, which may do anything
        if issubclass(type(value), torch.Tensor) and type(value) not in {UninitializedBuffer, UninitializedParameter}:
            found[id(value)] = value
    grads = (value.grad for value in list(found.values()) if value.is_leaf and value.grad is not None)
    return list({**found, **{id(grad): grad for grad in grads}}.values())


def _row_of(tensor: torch.Tensor, names: dict[int, str]) -> _TensorRow:
    kind = names.get(id(tensor), type(tensor).__name__)
    num_bytes = tensor.numel() * tensor.element_size()
    return _TensorRow(kind, tuple(tensor.shape), tensor.requires_grad, tensor.dtype, tensor.device, num_bytes)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    sizes: dict[Any, int] = {}
    for tensor in tensors:
        # a tensor of a tracer, that has no address, is on the meta device in truth
        if tensor.layout == torch.strided and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()
            sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
