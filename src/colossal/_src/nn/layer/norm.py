"""Normalization over features that are replicated, or sharded over the ranks of a grid."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.nn import functional

from colossal._src._dtypes import HALF_DTYPES
from colossal._src.cluster import ParallelMesh, TensorParallelMode
from colossal._src.nn.layer.tp.arguments import check_types
from colossal._src.nn.layer.tp.parallel_layer import ParallelLayer, native_of
from colossal._src.nn.layer.tp.sharding import (
    all_reduce_fwd_bwd,
    find_mesh,
    local_length,
    make_layout,
    sum_grad_over,
    tp_sharding_of,
)
from colossal.errors import ShapeError, UnsupportedError


class _Norm(ParallelLayer):
    """Implements what both norms have in common: parameters with the layout of the features."""

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        mesh: ParallelMesh | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        *,
        has_weight: bool,
        has_bias: bool,
    ) -> None:
        super().__init__(mesh)
        switches = {"elementwise_affine": has_weight, "bias": has_bias}
        check_types(self, dtype=dtype, device=device, switches=switches)
        self.normalized_shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(int(n) for n in normalized_shape)
        )
        if mesh is not None and len(self.normalized_shape) > 1:
            raise UnsupportedError(
                f"On a mesh only the last dimension is normalized. Found {self.normalized_shape}. Pass one length, "
                "or use torch.nn's layer where the input is not sharded."
            )
        self.eps: float | None = eps
        self._dtype, self._has_weight, self._has_bias = dtype, has_weight, has_bias
        layout = make_layout(
            mesh, self.normalized_shape, {len(self.normalized_shape) - 1: tp_sharding_of(mesh).features}
        )
        self._build({"weight": layout, "bias": layout}, device)

    def _check(self, x: torch.Tensor) -> None:
        assert self.mesh is not None
        length = local_length(self.normalized_shape[0], tp_sharding_of(self.mesh).features, self.mesh)
        if x.shape[-1:] != (length,):
            raise ShapeError(
                f"This layer normalizes {self.normalized_shape[0]} features, {length} of them on this rank. Found an "
                f"input of shape {tuple(x.shape)}. Gather the output of a column-parallel layer, and split a full "
                "input with colossal.nn.split_input."
            )

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        return sum_grad_over(parameter, tp_sharding_of(self.mesh).tokens, self.mesh)

    def _eps_of(self, x: torch.Tensor) -> float:
        return torch.finfo(x.dtype).eps if self.eps is None else self.eps

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over all features."""
        summed = all_reduce_fwd_bwd(x.sum(-1, keepdim=True), tp_sharding_of(self.mesh).features, self.mesh)
        return summed / self.normalized_shape[0]

    def extra_repr(self) -> str:
        """Name the size.

        Returns:
            What is printed between the parentheses.
        """
        return f"{self.normalized_shape}, eps={self.eps}" + (f" on {self.mesh}" if self.mesh else "")


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the features, on the ambient mesh.

    Half precision is normalized in float32.

    Args:
        normalized_shape: Features of the full input.
        eps: Added to the variance.
        dtype: Of the parameters.
        device: Of the parameters.
        elementwise_affine: Whether there are a weight and a bias; by its name, as in `torch.nn` it stands third.
        bias: Whether there is a bias.
        mesh: The mesh; the ambient one by default.
        tp_mode: The mode that the mesh must have; any by default.

    Raises:
        ConfigError: A value has the type of another argument, such as True in the third place.
        MeshError: The mesh has another mode.
        UnsupportedError: Several dimensions are normalized on a mesh.

    Communication: none in 1D. On a grid two all_reduces of a number for each token along its feature axis, and as many
    backward; backward all_reduce, its token axes, the bytes of weight and bias.

    Source: Ba et al., "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450.

    Example:
        >>> import torch
        >>> from colossal.nn import LayerNorm
        >>> LayerNorm(2)(torch.tensor([[1.0, 3.0]])).round().tolist()
        [[-1.0, 1.0]]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        mesh: ParallelMesh | None = None,
        tp_mode: TensorParallelMode | None = None,
    ) -> None:
        has_bias = elementwise_affine and bias
        found = find_mesh(mesh, tp_mode)
        super().__init__(normalized_shape, eps, found, dtype, device, has_weight=elementwise_affine, has_bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's local shard of an activation.

        Args:
            x: Its features last.

        Returns:
            The same shape and dtype.

        Raises:
            ShapeError: It has not the features of the layer.
        """
        if self.mesh is not None:
            self._check(x)
        if not tp_sharding_of(self.mesh).features:
            return functional.layer_norm(x, [*self.normalized_shape], *self._affine(), self._eps_of(x))
        exact = x.float() if x.dtype in HALF_DTYPES else x
        centred = exact - self._mean(exact)
        result = centred * torch.rsqrt(self._mean(centred.square()) + self._eps_of(exact))
        weight, bias = self._affine()
        result = result if weight is None else result * weight
        return (result if bias is None else result + bias).to(x.dtype)

    def _affine(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.weight is None or self.bias is None:
            return None if self.weight is None else self._own(self.weight), None
        weight, bias = self._own(torch.stack([self.weight, self.bias]))  # one message for both
        return weight, bias

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        norm = native_of(native, torch.nn.LayerNorm)
        return {
            "normalized_shape": norm.normalized_shape,
            "eps": norm.eps,
            "elementwise_affine": norm.elementwise_affine,
            "bias": norm.bias is not None,
        }

    def _make_native(self, device: torch.device | str | None) -> torch.nn.Module:
        assert self.eps is not None
        return torch.nn.LayerNorm(
            [*self.normalized_shape], self.eps, self._has_weight, self._has_bias, device=device, dtype=self._dtype
        )


@final
class RMSNorm(_Norm):
    """x / sqrt(mean of squares + eps) * weight over the features, on the ambient mesh.

    Half precision is normalized in float32.

    Args:
        normalized_shape: Features of the full input.
        eps: Added to the mean; by default the smallest step of the input's dtype.
        dtype: Of the weight.
        device: Of the weight.
        elementwise_affine: Whether there is a weight; by its name, as in `torch.nn` it stands third.
        mesh: The mesh; the ambient one by default.
        tp_mode: The mode that the mesh must have; any by default.

    Raises:
        ConfigError: A value has the type of another argument, such as True in the third place.
        MeshError: The mesh has another mode.
        UnsupportedError: Several dimensions are normalized on a mesh.

    Communication: none in 1D. On a grid all_reduce of a number for each token along its feature axis, and the same
    backward; backward all_reduce, its token axes, the bytes of the weight.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.

    Example:
        >>> import torch
        >>> from colossal.nn import RMSNorm
        >>> RMSNorm(2)(torch.tensor([[3.0, 3.0]])).round().tolist()
        [[1.0, 1.0]]
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        elementwise_affine: bool = True,
        mesh: ParallelMesh | None = None,
        tp_mode: TensorParallelMode | None = None,
    ) -> None:
        found = find_mesh(mesh, tp_mode)
        super().__init__(normalized_shape, eps, found, dtype, device, has_weight=elementwise_affine, has_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's local shard of an activation.

        Args:
            x: Its features last.

        Returns:
            The same shape and dtype.

        Raises:
            ShapeError: It has not the features of the layer.
        """
        if self.mesh is not None:
            self._check(x)
        weight = None if self.weight is None else self._own(self.weight)
        if not tp_sharding_of(self.mesh).features:
            return functional.rms_norm(x, [*self.normalized_shape], weight, self.eps)
        exact = x.float() if x.dtype in HALF_DTYPES else x
        result = exact * torch.rsqrt(self._mean(exact.square()) + self._eps_of(exact))
        return (result if weight is None else result * weight).to(x.dtype)

    @classmethod
    def _arguments_of(cls, native: torch.nn.Module) -> dict[str, Any]:
        norm = native_of(native, torch.nn.RMSNorm)
        return {
            "normalized_shape": norm.normalized_shape,
            "eps": norm.eps,
            "elementwise_affine": norm.elementwise_affine,
        }

    def _make_native(self, device: torch.device | str | None) -> torch.nn.Module:
        return torch.nn.RMSNorm([*self.normalized_shape], self.eps, self._has_weight, device=device, dtype=self._dtype)
