"""Layers that are sharded over a process group, by the documented names of `colossal.shardformer.layer`.

Each is the layer of `colossal.nn` that does the same on a mesh, and equals one process in forward and backward.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.nn import functional

from colossal._src.legacy.shardformer.group_layer import (
    Group,
    GroupLayer,
    GroupLinear,
    check_padding,
    sizes_of_blocks,
)
from colossal._src.nn.layer import (
    Embedding,
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelClassifier,
    VocabParallelEmbedding,
)
from colossal._src.shardformer import Conv1DCol, Conv1DRow


class GroupLinearCol(GroupLinear, Linear1D_Col):
    """`colossal.nn.Linear1D_Col` on a process group: the older ``shardformer.layer.Linear1D_Col``.

    Args:
        *args: As of `colossal.nn.Linear1D_Col`: in_features, out_features, bias, dtype, device.
        process_group: The ranks; by default those of the tp axis of the ambient mesh, or all.
        seq_parallel: Stands for the mode ``"split_gather"``.
        seq_parallel_mode: ``"split_gather"``: gather tokens first; ``"ring"``: multiply them as they come.
        seq_parallel_dim: The dimension of tokens.
        overlap: Stands for the mode ``"ring"`` if there is another.
        fp8_communication: Only False.
        use_zbv: No effect: the schedule of a pipeline delays the gradients of weights, of any linear layer.
        **options: As of `colossal.nn.Linear1D_Col`, such as gather_output.

    Raises:
        MeshError: There is no process group.
        UnsupportedError: An argument cannot be honored.

    Communication: none forward; backward all_reduce, the group, the input's bytes. Where tokens are sharded, forward
    all_gather and backward reduce_scatter of them instead. With gather_output all_gather of the output.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import GroupLinearCol
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     GroupLinearCol.from_native_module(torch.nn.Linear(4, 6), process_group=None).weight.shape
        torch.Size([3, 4])
    """


class GroupLinearRow(GroupLinear, Linear1D_Row):
    """`colossal.nn.Linear1D_Row` on a process group: the older ``shardformer.layer.Linear1D_Row``.

    Args:
        *args: As of `colossal.nn.Linear1D_Row`: in_features, out_features, bias, dtype, device.
        process_group: The ranks; by default those of the tp axis of the ambient mesh, or all.
        seq_parallel: Stands for the mode ``"split_gather"``.
        seq_parallel_mode: ``"split_gather"`` or ``"ring"``: each rank keeps some of the output's tokens.
        seq_parallel_dim: The dimension of tokens.
        overlap: Stands for the mode ``"ring"`` if there is another.
        fp8_communication: Only False.
        use_zbv: No effect: the schedule of a pipeline delays the gradients of weights, of any linear layer.
        **options: As of `colossal.nn.Linear1D_Row`, such as parallel_input.

    Raises:
        MeshError: There is no process group.
        UnsupportedError: An argument cannot be honored.

    Communication: all_reduce, the group, the output's bytes; none backward. Where tokens are sharded, forward
    reduce_scatter and backward all_gather of them instead, and backward all_reduce of the bias.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import GroupLinearRow
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     GroupLinearRow.from_native_module(torch.nn.Linear(6, 4), process_group=None).weight.shape
        torch.Size([4, 3])
    """


@final
class FusedLinear1D_Col(GroupLinearCol):  # noqa: N801 (the documented name)
    """A column-parallel layer of packed blocks, such as query, key and value.

    Args:
        in_features: Features of the input.
        out_features: Features of all blocks.
        *args: As of `GroupLinearCol`.
        split_sizes: The lengths of the blocks, each of which is sharded by itself.
        n_fused: Their number, if they are equally long.
        **options: As of `GroupLinearCol`. A gathered output has the order of the serial layer.

    Raises:
        MeshError: There is no process group.
        ShapeError: The lengths do not add up to the features.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import FusedLinear1D_Col
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     FusedLinear1D_Col.from_native_module(torch.nn.Linear(4, 12), None, split_sizes=[4, 4, 4]).weight.shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *args: Any,
        split_sizes: Sequence[int] | None = None,
        n_fused: int | None = None,
        **options: Any,
    ) -> None:
        blocks = sizes_of_blocks(out_features, split_sizes, n_fused)
        super().__init__(in_features, out_features, *args, split_sizes=blocks, **options)


@final
class FusedLinear1D_Row(GroupLinearRow):  # noqa: N801 (the documented name)
    """`GroupLinearRow` by the name that it has after `FusedLinear1D_Col`; its input is sharded in the same order.

    Args:
        *args: As of `GroupLinearRow`.
        process_group: The ranks; by default those of the tp axis of the ambient mesh, or all.
        seq_parallel: Stands for the mode ``"split_gather"``.
        seq_parallel_mode: ``"split_gather"`` or ``"ring"``: each rank keeps some of the output's tokens.
        seq_parallel_dim: The dimension of tokens.
        overlap: Stands for the mode ``"ring"`` if there is another.
        fp8_communication: Only False.
        use_zbv: No effect: the schedule of a pipeline delays the gradients of weights, of any linear layer.
        **options: As of `GroupLinearRow`.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import FusedLinear1D_Row
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     FusedLinear1D_Row.from_native_module(torch.nn.Linear(6, 4), None).weight.shape
        torch.Size([4, 3])
    """


@final
class GPT2FusedLinearConv1D_Col(GroupLinear, Conv1DCol):  # noqa: N801 (the documented name)
    """A column-parallel layer of GPT-2, whose weight lies transposed: (in, out).

    Args:
        in_features: Features of the input.
        out_features: Features of all blocks.
        *args: dtype and device of the parameters.
        split_sizes: The lengths of blocks that are packed into the output, each of which is sharded by itself.
        n_fused: Their number, if they are equally long.
        gather_output: Gather the full output on all ranks.
        **options: As of `GroupLinearCol`.

    Raises:
        MeshError: There is no process group.
        ShapeError: The lengths do not add up to the features.

    Communication: as `GroupLinearCol`.

    Example:
        >>> from transformers.pytorch_utils import Conv1D
        >>> from colossal.legacy.shardformer import GPT2FusedLinearConv1D_Col
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     GPT2FusedLinearConv1D_Col.from_native_module(Conv1D(12, 4), None, split_sizes=[4, 4, 4]).weight.shape
        torch.Size([4, 6])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *args: Any,
        split_sizes: Sequence[int] | None = None,
        n_fused: int | None = None,
        gather_output: bool = False,
        **options: Any,
    ) -> None:
        blocks = sizes_of_blocks(out_features, split_sizes, n_fused)
        super().__init__(out_features, in_features, blocks, *args, **options)
        if gather_output:
            self.product.gather_output()

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        return _conv_sizes(super()._arguments_of(native))


@final
class GPT2FusedLinearConv1D_Row(GroupLinear, Conv1DRow):  # noqa: N801 (the documented name)
    """A row-parallel layer of GPT-2, whose weight lies transposed: (in, out).

    Args:
        in_features: Features of the full input.
        out_features: Features of the output.
        *args: dtype and device of the parameters.
        parallel_input: Whether inputs are already sharded; full ones are rejected then. If not, each rank splits them.
        **options: As of `GroupLinearCol`.

    Raises:
        MeshError: There is no process group.

    Communication: as `GroupLinearRow`.

    Example:
        >>> from transformers.pytorch_utils import Conv1D
        >>> from colossal.legacy.shardformer import GPT2FusedLinearConv1D_Row
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     GPT2FusedLinearConv1D_Row.from_native_module(Conv1D(4, 6), None).weight.shape
        torch.Size([3, 4])
    """

    def __init__(
        self, in_features: int, out_features: int, *args: Any, parallel_input: bool = True, **options: Any
    ) -> None:
        super().__init__(out_features, in_features, None, *args, **options)
        product: Any = self.product
        product.parallel_input = parallel_input

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        return _conv_sizes(super()._arguments_of(native))


def _conv_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    return {"in_features": sizes["nx"], "out_features": sizes["nf"]}


@final
class GroupEmbedding(GroupLayer, Embedding):
    """`colossal.nn.Embedding` on a process group: the older ``shardformer.layer.Embedding1D``.

    Args:
        *args: As of `colossal.nn.Embedding`: num_embeddings, embedding_dim, padding_idx, dtype, device.
        process_group: The ranks; by default those of the tp axis of the ambient mesh, or all.
        gather_output: Gather the features on all ranks; otherwise each returns its own.
        **options: As of `colossal.nn.Embedding`.

    Raises:
        MeshError: There is no process group.

    Communication: all_gather, the group, the output's bytes, if it is gathered; none backward.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import GroupEmbedding
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     GroupEmbedding.from_native_module(torch.nn.Embedding(10, 4), process_group=None).weight.shape
        torch.Size([10, 2])
    """

    def __init__(self, *args: Any, process_group: Group = None, gather_output: bool = True, **options: Any) -> None:
        super().__init__(*args, process_group=process_group, **options)
        self.gather_output = gather_output

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look tokens up.

        Args:
            tokens: Their numbers, of any shape; the same on all ranks.

        Returns:
            Their embeddings, all features or this rank's.
        """
        if self.gather_output:
            return super().forward(tokens)
        return functional.embedding(tokens, self.weight, self.padding_idx)


@final
class GroupVocabEmbedding(GroupLayer, VocabParallelEmbedding):
    """`colossal.nn.VocabParallelEmbedding` on a group: the older ``shardformer.layer.VocabParallelEmbedding1D``.

    Args:
        *args: As of `colossal.nn.VocabParallelEmbedding`: num_embeddings, embedding_dim, padding_idx, dtype, device.
        make_vocab_size_divisible_by: 64 or 1: nothing is padded, and ranks may have a row more than others.
        **options: As of `colossal.nn.VocabParallelEmbedding`, and process_group.

    Raises:
        MeshError: There is no process group.
        UnsupportedError: Rows are to be padded.

    Communication: all_reduce, the group, the output's bytes; none backward.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import GroupVocabEmbedding
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     GroupVocabEmbedding.from_native_module(torch.nn.Embedding(11, 4), process_group=None).weight.shape
        torch.Size([6, 4])
    """

    def __init__(self, *args: Any, make_vocab_size_divisible_by: int = 64, **options: Any) -> None:
        check_padding(make_vocab_size_divisible_by)
        super().__init__(*args, **options)


@final
class VocabParallelLMHead1D(GroupLinear, VocabParallelClassifier):
    """`colossal.nn.VocabParallelClassifier` on a process group.

    Args:
        *args: As of `colossal.nn.VocabParallelClassifier`: in_features, num_classes, weight, bias, dtype, device.
        make_vocab_size_divisible_by: 64 or 1: nothing is padded, and ranks may have a class more than others.
        **options: As of `colossal.nn.VocabParallelClassifier` and `GroupLinearCol`.

    Raises:
        MeshError: There is no process group.
        UnsupportedError: Classes are to be padded.

    Communication: as `GroupLinearCol`.

    Example:
        >>> import torch
        >>> from colossal.legacy.shardformer import VocabParallelLMHead1D
        >>> from colossal.testing import fake_world
        >>> with fake_world(2):
        ...     VocabParallelLMHead1D.from_native_module(torch.nn.Linear(4, 10, bias=False), None).weight.shape
        torch.Size([5, 4])
    """

    def __init__(self, *args: Any, make_vocab_size_divisible_by: int = 64, **options: Any) -> None:
        check_padding(make_vocab_size_divisible_by)
        super().__init__(*args, **options)
