"""Attention layers with fewer key-value heads than ranks, and embeddings with a column for each head."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

from colossal._src import comm
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import Channel
from colossal._src.lazy import LazyTensor
from colossal._src.nn.layer.tp import ColumnParallel, ParallelLayer, find_mesh, make_layout


@final
class HeadInputSplitter:
    """A hook that keeps of some arguments what this rank's heads need.

    Communication: none forward; backward all_gather, tp, the argument's bytes.
    """

    def __init__(self, arguments: Sequence[str], mesh: ParallelMesh) -> None:
        self._arguments, self._mesh = arguments, mesh

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Shard the arguments of a call."""
        # The module's own number is divided by the tp size already.
        heads = module.num_heads * self._mesh.size("tp")
        given = {name: kwargs[name] for name in self._arguments if kwargs.get(name) is not None}
        return args, {**kwargs, **{name: self._local_heads(full, heads) for name, full in given.items()}}

    def _local_heads(self, full: torch.Tensor, heads: int) -> torch.Tensor:
        if full.dim() > 1 and full.shape[1] == heads:
            return comm.scatter(full, "tp", 1, self._mesh)
        if full.shape[0] % heads:
            return full
        return comm.scatter(full.unflatten(0, (-1, heads)), "tp", 1, self._mesh).flatten(0, 1)


@final
class ReplicatedKVLinear(nn.Module):
    """A linear layer into fewer heads than there are ranks: each rank makes one, and some make the same.

    Every rank keeps all heads, which are few, and sums their gradients up.

    Communication: backward all_reduce, tp, the input's bytes and those of the parameters.
    """

    weight: nn.Parameter  # the full weight, the same on all ranks
    bias: nn.Parameter | None  # the full bias, or None

    def __init__(self, native: nn.Module, num_heads: int, mesh: ParallelMesh) -> None:
        super().__init__()
        assert isinstance(native, nn.Linear)
        for name, parameter in native._parameters.items():  # noqa: SLF001 (also one that is None)
            self.register_parameter(name, parameter)
        length = native.out_features // num_heads
        # Consecutive ranks make the same head, as consecutive heads of queries use it.
        begin = mesh.rank("tp") * num_heads // mesh.size("tp") * length
        self._own = slice(begin, begin + length)
        self.product = ColumnParallel(mesh, native.in_features, native.out_features)
        for parameter in (each for each in native.parameters() if each.requires_grad):
            # A rank makes gradients for the head that it uses only, and all ranks keep all heads.
            sum_gradient(parameter, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the head of this rank."""
        bias = None if self.bias is None else self.bias[self._own]
        return self.product(x, self.weight[self._own], bias)


@final
class _SumOverRanks:
    """A hook of a parameter, of whose gradient each rank has a part."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._channel = Channel("tp", mesh)

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        return self._channel.all_reduce(grad)


def sum_gradient(parameter: nn.Parameter, mesh: ParallelMesh) -> None:
    """Sum the gradient of a replicated parameter up over tp: once, however many layers share it."""
    # hooks registered on a lazy one would be lost when it is materialized later
    real = parameter.materialize() if isinstance(parameter, LazyTensor) else parameter
    hooks = real._backward_hooks or {}  # noqa: SLF001 (torch has no public name for them)
    if not any(isinstance(hook, _SumOverRanks) for hook in hooks.values()):
        real.register_hook(_SumOverRanks(mesh))


@final
class HeadParallelEmbedding(ParallelLayer):
    """A table with a column for each head, such as a bias of positions; each rank looks up those of its heads.

    Communication: none.
    """

    weight: nn.Parameter  # this rank's columns

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        mesh: ParallelMesh | None = None,
    ) -> None:
        super().__init__(find_mesh(mesh, "1d"))
        self.num_embeddings, self.embedding_dim, self._dtype = num_embeddings, embedding_dim, dtype
        self._build({"weight": make_layout(self.mesh, (num_embeddings, embedding_dim), {1: ("tp",)})}, device)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Look numbers up."""
        return functional.embedding(numbers, self.weight)

    @classmethod
    def _arguments_of(cls, native: nn.Module) -> dict[str, Any]:
        table: Any = native
        return {"num_embeddings": table.num_embeddings, "embedding_dim": table.embedding_dim}

    def _make_native(self, device: torch.device | str | None) -> nn.Module:
        return nn.Embedding(self.num_embeddings, self.embedding_dim, device=device, dtype=self._dtype)
