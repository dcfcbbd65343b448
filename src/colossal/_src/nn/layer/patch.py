"""Patches of images as tokens."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch.nn import functional

from colossal._src import comm
from colossal._src.cluster import Axis, ParallelMesh, TensorParallelMode
from colossal._src.nn.layer.tp.arguments import Initializer, check_types
from colossal._src.nn.layer.tp.parallel_layer import ParallelLayer, native_of
from colossal._src.nn.layer.tp.sharding import find_mesh, gather_param, make_layout, sum_grad_over, tp_sharding_of
from colossal._src.tensor import Layout
from colossal.errors import ConfigError, ShapeError

_POSITION_STD = 0.02


class PatchEmbedding(ParallelLayer):
    """Splits images into square patches and makes a token of each, on the ambient mesh.

    A learned class token comes first, and learned positions are added. On a grid the images of a batch are sharded
    as by `colossal.nn.split_input` with ``features=False``, and the features of tokens as those of any activation.

    Args:
        img_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch; it divides the former.
        in_chans: Channels of the images.
        embed_size: Features of the tokens.
        flatten: Make a sequence of tokens. If not, a map of patches, without class token and positions.
        dtype: Of the parameters.
        device: Of the parameters.
        weight_initializer: Fills the full weight in place: `f(tensor)`, or `f(tensor, fan_in, fan_out)`, whose fans
            are channels and features times the pixels of a patch; as `torch.nn.Conv2d` does by default.
        bias_initializer: Fills the full bias in place, and gets the same fans.
        position_embed_initializer: Fills the full position embeddings in place, and gets the same fans; by default a
            normal distribution with standard deviation 0.02, truncated at two standard deviations.
        mesh: The mesh; the ambient one by default.
        tp_mode: The mode that the mesh must have; any by default.

    Attributes:
        num_patches: Number of patches of an image.
        weight: This rank's local shard of the weight, (features, channels, height, width) of a patch.
        bias: This rank's local shard of the bias, (features,).
        cls_token: This rank's local shard of the class token, (1, 1, features); None for a map.
        pos_embed: This rank's local shard of the position embeddings, (1, 1 + patches, features); None for a map.

    Raises:
        ConfigError: The patches do not divide the image.
        MeshError: The mesh has another mode.

    Communication: 1D: all_gather, tp, the output's bytes. On a grid all_gather, its inner token axes, the bytes of the
    weight's features on this rank; backward reduce_scatter, the same, and all_reduce, its token axes, the bytes of the
    other parameters; for 2.5D also of the weight, along depth. If the images need a gradient, all_reduce, tp or the
    feature axis, their bytes.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, https://arxiv.org/abs/2010.11929.

    Example:
        >>> import torch
        >>> from colossal.nn import PatchEmbedding
        >>> PatchEmbedding(8, 4, in_chans=1, embed_size=16)(torch.ones(2, 1, 8, 8)).shape
        torch.Size([2, 5, 16])
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter
    cls_token: torch.nn.Parameter | None
    pos_embed: torch.nn.Parameter | None

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_size: int,
        flatten: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        position_embed_initializer: Initializer | None = None,
        mesh: ParallelMesh | None = None,
        tp_mode: TensorParallelMode | None = None,
    ) -> None:
        if img_size % patch_size:
            raise ConfigError(
                f"Patches tile an image. Found patch_size={patch_size} for img_size={img_size}. Pass a divisor of it."
            )
        super().__init__(find_mesh(mesh, tp_mode))
        check_types(self, dtype=dtype, device=device, switches={"flatten": flatten})
        self.img_size, self.patch_size, self.in_chans = img_size, patch_size, in_chans
        self.embed_size, self.flatten, self._dtype = embed_size, flatten, dtype
        self.num_patches = (img_size // patch_size) ** 2
        initializers = {
            "weight": weight_initializer,
            "bias": bias_initializer,
            "pos_embed": position_embed_initializer,
        }
        area = patch_size * patch_size
        self._build(self._make_layouts(), device, initializers, (in_chans * area, embed_size * area))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Make tokens of this rank's images.

        Args:
            images: (images, channels, height, width).

        Returns:
            This rank's tokens, (images, 1 + patches, local features); or (images, local features, rows, columns).

        Raises:
            ShapeError: The images have another size.
        """
        expected = (self.in_chans, self.img_size, self.img_size)
        if images.dim() != 1 + len(expected) or tuple(images.shape[1:]) != expected:
            raise ShapeError(
                f"This layer takes images of the shape (images, {', '.join(map(str, expected))}). Found "
                f"{tuple(images.shape)}. Resize them, and split a batch with split_input(..., features=False)."
            )
        mesh, plan = self.mesh, tp_sharding_of(self.mesh)
        features = plan.features or plan.vocabulary  # in 1D the axis tp
        images = sum_grad_over(images, features, mesh)  # of which each rank makes some features
        weight = gather_param(self.weight, 0, self.embed_size, (plan.features, plan.inner), mesh)
        weight = sum_grad_over(weight, plan.replica_axes, mesh)
        found = functional.conv2d(images, weight, sum_grad_over(self.bias, plan.tokens, mesh), self.patch_size)
        if mesh is not None and not plan.features:
            found = comm.gather(found, "tp", 1, mesh, length=self.embed_size)
        if self.cls_token is None or self.pos_embed is None:
            return found
        ahead = sum_grad_over(self.cls_token, plan.tokens, mesh).expand(found.shape[0], -1, -1)
        tokens = torch.cat([ahead, found.flatten(2).transpose(1, 2)], 1)
        return tokens + sum_grad_over(self.pos_embed, plan.tokens, mesh)

    def _make_layouts(self) -> Mapping[str, Layout]:
        plan, size = tp_sharding_of(self.mesh), self.embed_size
        features: tuple[Axis, ...] = plan.features or plan.vocabulary  # in 1D the axis tp
        return {
            "weight": make_layout(
                self.mesh, (size, self.in_chans, self.patch_size, self.patch_size), {0: (*features, *plan.inner)}
            ),
            "bias": make_layout(self.mesh, (size,), {0: features}),
            "cls_token": make_layout(self.mesh, (1, 1, size), {2: plan.features}),
            "pos_embed": make_layout(self.mesh, (1, 1 + self.num_patches, size), {2: plan.features}),
        }

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        patches = native_of(native, Patches)
        return {
            "img_size": patches.img_size,
            "patch_size": patches.patch_size,
            "in_chans": patches.in_channels,
            "embed_size": patches.out_channels,
            "flatten": patches.cls_token is not None,
        }

    def _make_native(self, device: torch.device | str | None) -> torch.nn.Module:
        return Patches(
            self.img_size,
            self.patch_size,
            self.in_chans,
            self.embed_size,
            flatten=self.flatten,
            device=device,
            dtype=self._dtype,
        )


@final
class Patches(torch.nn.Conv2d):
    """The serial module that a `PatchEmbedding` is made from, and makes."""

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_size: int,
        *,
        flatten: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_chans, embed_size, patch_size, patch_size, device=device, dtype=dtype)
        self.img_size, self.patch_size = img_size, patch_size
        self.cls_token: torch.nn.Parameter | None = None
        self.pos_embed: torch.nn.Parameter | None = None
        if flatten:
            number = 1 + (img_size // patch_size) ** 2
            made = [torch.zeros(1, length, embed_size, device=device, dtype=dtype) for length in (1, number)]
            self.cls_token, self.pos_embed = map(torch.nn.Parameter, made)
            torch.nn.init.trunc_normal_(self.pos_embed, std=_POSITION_STD, a=-2 * _POSITION_STD, b=2 * _POSITION_STD)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (the name in torch.nn.Conv2d)
        """Make tokens of images."""
        found = super().forward(input)
        if self.cls_token is None or self.pos_embed is None:
            return found
        tokens = torch.cat([self.cls_token.expand(found.shape[0], -1, -1), found.flatten(2).transpose(1, 2)], 1)
        return tokens + self.pos_embed
