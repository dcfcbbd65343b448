"""Layers of `colossal.shardformer.layer` that every rank has as they are: torch's, and the norms in one kernel."""

from collections.abc import Sequence
from typing import Any, Self, final

import torch

from colossal._src.comm import Channel
from colossal._src.lazy import LazyTensor
from colossal._src.legacy.shardformer.group_layer import Group, check_padding, mesh_of
from colossal._src.shardformer import fused_norm_of
from colossal.errors import ConfigError, UnsupportedError


def _take(layer: Any, module: torch.nn.Module) -> Any:
    """Give a layer without memory the parameters of a serial one."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, LazyTensor):
            parameter.materialize()  # in place
        layer.register_parameter(name, parameter)
    return layer.train(module.training)


def _check(layer: type, module: torch.nn.Module, kind: type[torch.nn.Module]) -> Any:
    if not isinstance(module, kind):
        raise ConfigError(
            f"{layer.__name__} is made from {kind.__name__}. Found {type(module).__name__}. Pass such a module."
        )
    return module


class _NativeLinear(torch.nn.Linear):
    """Makes a linear layer of a serial one."""

    @classmethod
    def from_native_module(
        cls,
        module: torch.nn.Module,
        process_group: Group = None,  # noqa: ARG003 (documented; nothing is sharded)
        **kwargs: Any,
    ) -> Self:
        """Take the parameters of a serial module.

        Args:
            module: A `torch.nn.Linear`.
            process_group: No effect: every rank has the parameters.
            **kwargs: Further arguments of the layer.

        Returns:
            The layer.

        Raises:
            ConfigError: The module is another one.
        """
        native = _check(cls, module, torch.nn.Linear)
        layer = cls(native.in_features, native.out_features, native.bias is not None, device="meta", **kwargs)
        return _take(layer, module)


@final
class LinearWithGradAccum(_NativeLinear):
    """`torch.nn.Linear`: the schedule of a pipeline delays the gradients of weights, of any linear layer.

    Args:
        in_features: Features of the input.
        out_features: Features of the output.
        bias: Whether to add a bias.
        dtype: Of the parameters.
        device: Of the parameters.
        use_zbv: No effect.
        seq_parallel_mode: Only None: no rank communicates.

    Raises:
        UnsupportedError: A mode of sequence parallelism is given.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import LinearWithGradAccum
        >>> native = torch.nn.Linear(4, 6)
        >>> LinearWithGradAccum.from_native_module(native).weight is native.weight
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        use_zbv: bool = False,
        seq_parallel_mode: str | None = None,
    ) -> None:
        _refuse_mode(self, seq_parallel_mode)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.use_zbv = use_zbv


@final
class GPT2FusedLinearConv1D(torch.nn.Module):
    """A linear layer of GPT-2, whose weight lies transposed, as every rank has it.

    Args:
        in_features: Features of the input.
        out_features: Features of the output.
        dtype: Of the parameters.
        device: Of the parameters.
        split_sizes: No effect: no block is sharded.
        use_zbv: No effect: the schedule of a pipeline delays the gradients of weights.
        seq_parallel_mode: Only None: no rank communicates.

    Attributes:
        weight: Of shape (in_features, out_features).
        bias: Of shape (out_features,).

    Raises:
        UnsupportedError: A mode of sequence parallelism is given.

    Example:
        >>> from transformers.pytorch_utils import Conv1D
        >>> from colossal.legacy.shardformer import GPT2FusedLinearConv1D
        >>> native = Conv1D(12, 4)
        >>> GPT2FusedLinearConv1D.from_native_module(native).weight is native.weight
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        split_sizes: Sequence[int] | None = None,
        use_zbv: bool = False,
        seq_parallel_mode: str | None = None,
    ) -> None:
        _refuse_mode(self, seq_parallel_mode)
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.split_sizes, self.use_zbv = split_sizes, use_zbv
        weight = torch.empty(in_features, out_features, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(torch.nn.init.normal_(weight, std=0.02))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: Its features last.

        Returns:
            The output, its features last.
        """
        return torch.nn.functional.linear(x, self.weight.mT, self.bias)

    @classmethod
    def from_native_module(
        cls,
        module: torch.nn.Module,
        process_group: Group = None,  # noqa: ARG003 (documented; nothing is sharded)
        **kwargs: Any,
    ) -> Self:
        """Take the parameters of a serial module.

        Args:
            module: One with a weight of (in, out) and a bias, as `transformers.pytorch_utils.Conv1D`.
            process_group: No effect: every rank has the parameters.
            **kwargs: Further arguments of the layer.

        Returns:
            The layer.
        """
        weight = module.get_parameter("weight")
        in_features, out_features = weight.shape
        return _take(cls(in_features, out_features, device="meta", **kwargs), module)


@final
class PaddingEmbedding(torch.nn.Embedding):
    """`torch.nn.Embedding`: nothing is padded, as ranks shard a vocabulary unevenly.

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Features of the table.
        padding_idx: A row that gets no gradient.
        dtype: Of the table.
        device: Of the table.
        make_vocab_size_divisible_by: 64 or 1.

    Raises:
        UnsupportedError: Rows are to be padded.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import PaddingEmbedding
        >>> PaddingEmbedding.from_native_module(torch.nn.Embedding(10, 4)).weight.shape
        torch.Size([10, 4])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        make_vocab_size_divisible_by: int = 64,
    ) -> None:
        check_padding(make_vocab_size_divisible_by)
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)

    @classmethod
    def from_native_module(
        cls,
        module: torch.nn.Module,
        process_group: Group = None,  # noqa: ARG003 (documented; nothing is sharded)
        **kwargs: Any,
    ) -> Self:
        """Take the table of a serial module.

        Args:
            module: A `torch.nn.Embedding`.
            process_group: No effect: every rank has the table.
            **kwargs: Further arguments of the layer.

        Returns:
            The layer.

        Raises:
            ConfigError: The module is another one.
        """
        native = _check(cls, module, torch.nn.Embedding)
        sizes = native.num_embeddings, native.embedding_dim, native.padding_idx
        return _take(cls(*sizes, device="meta", **kwargs), module)


@final
class PaddingLMHead(_NativeLinear):
    """`torch.nn.Linear`: nothing is padded, as ranks shard a vocabulary unevenly.

    Args:
        in_features: Features of the input.
        out_features: Tokens of the vocabulary.
        bias: Whether to add a bias.
        dtype: Of the parameters.
        device: Of the parameters.
        make_vocab_size_divisible_by: 64 or 1.

    Raises:
        UnsupportedError: Rows are to be padded.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import PaddingLMHead
        >>> PaddingLMHead.from_native_module(torch.nn.Linear(4, 10)).weight.shape
        torch.Size([10, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        make_vocab_size_divisible_by: int = 64,
    ) -> None:
        check_padding(make_vocab_size_divisible_by)
        super().__init__(in_features, out_features, bias, device, dtype)


@final
class NormOfModule:
    """Makes norms of one kernel; ``LayerNorm``, ``RMSNorm``, ``FusedLayerNorm`` and ``FusedRMSNorm`` of older modules.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import NormOfModule
        >>> native = torch.nn.LayerNorm(4)
        >>> NormOfModule.from_native_module(native).weight is native.weight
        True
    """

    @staticmethod
    def from_native_module(
        module: torch.nn.Module, process_group: Group = None, *, sp_partial_derived: bool = False
    ) -> torch.nn.Module:
        """Return a module that computes a norm in one kernel.

        Args:
            module: A norm of torch, or of a family of Hugging Face.
            process_group: The ranks over which tokens are sharded, if they are.
            sp_partial_derived: Sum the gradients of the parameters over these ranks, each of which has some tokens.

        Returns:
            The module, with the same parameters; `module` itself if it is one kernel.

        Raises:
            UnsupportedError: The norm is not known.

        Communication: with `sp_partial_derived` backward all_reduce, the group, the bytes of the parameters.
        """
        norm = fused_norm_of(module)
        if sp_partial_derived:
            channel = Channel("tp", mesh_of(process_group))
            for parameter in norm.parameters():
                held = parameter.materialize() if isinstance(parameter, LazyTensor) else parameter
                held.register_hook(channel.all_reduce)
        return norm


def _refuse_mode(layer: object, seq_parallel_mode: str | None) -> None:
    if seq_parallel_mode is not None:
        raise UnsupportedError(
            f"{type(layer).__name__} does not communicate. Found seq_parallel_mode={seq_parallel_mode!r}. Leave it "
            "out, or use Linear1D_Col."
        )
