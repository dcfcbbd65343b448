"""What layers that are sharded over a process group have in common: how they are made, and full tensors in files."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import distributed as dist

from colossal._src.cluster import ParallelMesh
from colossal._src.legacy.mesh import grid_of_group
from colossal._src.nn.layer import ParallelLayer
from colossal._src.shardformer import shard_tokens
from colossal._src.tensor import shard
from colossal.errors import UnsupportedError

Group = dist.ProcessGroup | Sequence[dist.ProcessGroup] | None


class GroupLayer(ParallelLayer):
    """A layer that is sharded over a process group; beside the layer of a mesh among the bases of a class."""

    def __init__(
        self, *args: Any, process_group: Group = None, mesh: ParallelMesh | None = None, **options: Any
    ) -> None:
        super().__init__(*args, mesh=mesh or mesh_of(process_group), **options)
        self.register_state_dict_post_hook(_gather_state)
        self.register_load_state_dict_pre_hook(_shard_state)

    @classmethod
    def from_native_module(cls, module: torch.nn.Module, process_group: Group = None, **kwargs: Any) -> Self:
        """Take the parameters of a serial module, which has those of the layer afterwards.

        Args:
            module: The module; the same on all ranks.
            process_group: The ranks that shard it; by default those of the tp axis of the ambient mesh, or all.
            **kwargs: Further arguments of the layer.

        Returns:
            The layer. A full tensor is freed if nothing else refers to it.

        Raises:
            ConfigError: This layer cannot be made from such a module.
            UnsupportedError: An argument cannot be honored.
        """
        layer = cls.from_native(module, mesh_of(process_group), **kwargs)
        for name, parameter in layer.named_parameters(recurse=False):
            module.register_parameter(name, parameter)
        return layer


class GroupLinear(GroupLayer):
    """A linear layer of a group, whose tokens may be sharded over its ranks too."""

    def __init__(
        self,
        *args: Any,
        process_group: Group = None,
        seq_parallel: bool = False,
        seq_parallel_mode: str | None = None,
        seq_parallel_dim: int = 1,
        overlap: bool = False,
        fp8_communication: bool = False,
        use_zbv: bool = False,  # noqa: ARG002 (documented; the schedule delays gradients)
        **options: Any,
    ) -> None:
        refuse_options(self, fp8_communication=fp8_communication)
        mode = seq_parallel_mode or ("split_gather" if seq_parallel else None)
        if mode not in (None, "split_gather", "ring"):
            raise UnsupportedError(
                "The tokens of a linear layer are gathered or scattered in the modes 'split_gather' and 'ring'. Found "
                f"seq_parallel_mode={mode!r}. Leave it out: in the other modes attention alone communicates."
            )
        is_ring = mode == "ring" or (mode is not None and overlap)
        if is_ring and seq_parallel_dim != 1:
            raise UnsupportedError(
                "A ring sends tokens along dimension 1 of (samples, tokens, features). Found seq_parallel_dim="
                f"{seq_parallel_dim}. Pass seq_parallel_mode='split_gather' without overlap."
            )
        super().__init__(*args, process_group=process_group, **options)
        if mode is not None:
            shard_tokens(self, seq_parallel_dim, is_ring)


def _gather_state(layer: Any, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
    """Save full parameters. Communication: all_gather, tp, their bytes; all ranks must call."""
    for name in layer.layouts:
        if state_dict.get(prefix + name) is layer.get_parameter(name):
            return  # keep_vars=True: who asks wants the parameters themselves
        state_dict[prefix + name] = layer.full_parameter(name)


def _shard_state(layer: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load full parameters, or those of this rank."""
    rank = 0 if layer.mesh is None else layer.mesh.global_rank
    for name, layout in layer.layouts.items():
        full = state_dict.get(prefix + name)
        if isinstance(full, torch.Tensor) and tuple(full.shape) == layout.shape:
            state_dict[prefix + name] = shard(full.detach(), layout, rank)


def mesh_of(process_group: Group) -> ParallelMesh:
    """Return the mesh whose tp axis is a process group, or the only one in a list."""
    group = process_group
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if len(group) != 1:
            raise UnsupportedError(
                f"A layer is sharded over one process group. Found {len(group)}. Pass one, or a ParallelMesh with "
                "tp_mode='2d' to colossal.nn.Linear."
            )
        group = group[0]
    return grid_of_group(group)


def refuse_options(layer: object, **options: Any) -> None:
    """Refuse arguments that are not false."""
    for name, value in options.items():
        if value:
            raise UnsupportedError(
                f"{type(layer).__name__} communicates in the dtype of its tensors. Found {name}={value!r}. Leave it "
                "out, or pass it to a plugin."
            )


def check_padding(make_vocab_size_divisible_by: int) -> None:
    """Refuse to pad a vocabulary."""
    if make_vocab_size_divisible_by not in (1, 64):
        raise UnsupportedError(
            "Nothing is padded: ranks shard a vocabulary unevenly, which is exact. Found make_vocab_size_divisible_by="
            f"{make_vocab_size_divisible_by}. Leave it out, or call model.resize_token_embeddings(pad_to_multiple_of="
            "...) before."
        )


def sizes_of_blocks(features: int, split_sizes: Sequence[int] | None, n_fused: int | None) -> list[int] | None:
    """The lengths of the blocks of a packed layer, from either of the documented arguments."""
    if split_sizes is not None or n_fused is None:
        return None if split_sizes is None else list(split_sizes)
    return [features // n_fused] * n_fused
