"""What the experts of a program have in common: over which ranks they are, and the losses that balance them."""

from typing import Any, final

import torch
from torch import nn

from colossal._src.cluster import ambient_mesh
from colossal._src.legacy.utils import set_seed
from colossal._src.nn.moe import num_experts_of_rank
from colossal.errors import MeshError


@final
class MoeContext:
    """Collects the auxiliary losses of the layers of a forward pass, and knows over how many ranks experts are sharded.

    `MOE_CONTEXT` is the one of a program, and ``moe_env`` the same.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import MoeContext
        >>> context = MoeContext()
        >>> context.add_loss(torch.tensor(1.5))
        >>> context.add_loss(torch.tensor(1.0))
        >>> float(context.get_loss()), context.model_parallel_size
        (2.5, 1)
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    @property
    def model_parallel_size(self) -> int:
        """Over how many ranks experts are sharded: ``parallel=dict(moe=dict(size=...))`` of the config."""
        mesh = ambient_mesh()
        return 1 if mesh is None else mesh.size("ep")

    @property
    def model_parallel_rank(self) -> int:
        """The index of this rank among these."""
        mesh = ambient_mesh()
        return 0 if mesh is None else mesh.rank("ep")

    @property
    def data_parallel_size(self) -> int:
        """How many ranks hold the same experts."""
        mesh = ambient_mesh()
        return 1 if mesh is None else mesh.size("edp")

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank among these."""
        mesh = ambient_mesh()
        return 0 if mesh is None else mesh.rank("edp")

    def setup(self, seed: int, use_kernel_optim: bool = True, max_ep_size: int = 8) -> None:
        """Seed the program; the ranks of experts are those of the config.

        Args:
            seed: The seed, the same on all ranks.
            use_kernel_optim: Accepted as documented: there is one implementation.
            max_ep_size: The most ranks over which experts are sharded.

        Raises:
            MeshError: They are sharded over more by the config.
        """
        del use_kernel_optim
        if self.model_parallel_size > max_ep_size:
            raise MeshError(
                f"Experts are sharded over at most max_ep_size={max_ep_size} ranks. Found {ambient_mesh()}. Write "
                f"parallel=dict(moe=dict(size={max_ep_size})) in the config, or pass a larger max_ep_size."
            )
        moe_set_seed(seed)

    def get_info(self, num_experts: int) -> tuple[int, int]:
        """Divide experts by ranks.

        Args:
            num_experts: The number of experts of a layer.

        Returns:
            How many of them this rank has, and how many ranks have the same ones.

        Raises:
            PlanError: They do not divide.
        """
        mesh = ambient_mesh()
        return num_experts if mesh is None else num_experts_of_rank(num_experts, mesh), self.data_parallel_size

    def reset_loss(self) -> None:
        """Forget the losses of earlier passes."""
        self._losses.clear()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a layer; not while activation checkpointing computes the layer again.

        Args:
            loss: A scalar.
        """
        if not computes_again():
            self._losses.append(loss)

    @property
    def losses(self) -> list[torch.Tensor]:
        """The losses since the last reset, one for each layer."""
        return list(self._losses)

    def get_loss(self) -> torch.Tensor | float:
        """Return the sum of the losses since the last reset.

        Returns:
            A scalar; 0.0 if there are none.
        """
        return torch.stack(self._losses).sum() if self._losses else 0.0


MOE_CONTEXT = MoeContext()
"""The context of the layers of experts of this program."""


def computes_again() -> bool:
    """Whether this is a backward pass, in which activation checkpointing computes layers again."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 (no public function says it)


def drops_graph() -> bool:
    """Whether reentrant checkpointing computes layers again: of the new graph it keeps only what they return.

    The other implementation packs what the new graph saves; packing by the program may hide that this one does not.
    """
    backend: Any = torch._C  # noqa: SLF001 (no public function returns what follows)
    packing = backend._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 (no public one)
    node = backend._current_autograd_node()  # noqa: SLF001 (nor here)
    return computes_again() and (packing is None or "CheckpointFunction" in node.name())


def moe_set_seed(seed: int) -> None:
    """Seed the generators of all ranks alike.

    All ranks then draw the same experts and keep different ones: a model starts from the values of one process, over
    whatever number of ranks its experts are sharded.

    Args:
        seed: The seed, the same on all ranks.

    Example:
        >>> import torch
        >>> from colossal.legacy.context.random import moe_set_seed
        >>> moe_set_seed(42)
        >>> first = torch.rand(1)
        >>> moe_set_seed(42)
        >>> torch.equal(torch.rand(1), first)
        True
    """
    set_seed(seed)


class MoeLoss(nn.Module):
    """A loss, and the auxiliary losses of all layers of experts since it was computed last.

    Args:
        aux_weight: The weight of the auxiliary losses.
        loss_fn: The class of the loss.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import MoeLoss
        >>> criterion = MoeLoss(aux_weight=0.01, loss_fn=torch.nn.CrossEntropyLoss, label_smoothing=0.1)
        >>> criterion(torch.zeros(2, 4), torch.tensor([0, 3])).shape
        torch.Size([])
    """

    def __init__(self, aux_weight: float, loss_fn: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.aux_weight, self.loss_fn = aux_weight, loss_fn(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the loss; the auxiliary losses are then taken.

        Args:
            *args: Those of the loss.
            **kwargs: Its keyword arguments.

        Returns:
            The sum, a scalar.
        """
        aux_loss = MOE_CONTEXT.get_loss()
        MOE_CONTEXT.reset_loss()
        return self.loss_fn(*args, **kwargs) + self.aux_weight * aux_loss


class MoeCrossEntropyLoss(MoeLoss):
    """`MoeLoss` of cross-entropy.

    Args:
        aux_weight: The weight of the auxiliary losses.
        **kwargs: Keyword arguments of `torch.nn.CrossEntropyLoss`.

    Example:
        >>> import torch
        >>> from colossal.legacy.moe import MoeCrossEntropyLoss
        >>> round(float(MoeCrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([0, 3]))), 4)
        1.3863
    """

    def __init__(self, aux_weight: float = 0.01, **kwargs: Any) -> None:
        super().__init__(aux_weight, nn.CrossEntropyLoss, **kwargs)
