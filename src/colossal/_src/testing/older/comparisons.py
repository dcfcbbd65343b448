"""Comparisons by the names of the older documentation."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import distributed as dist

from colossal._src.testing.asserts import assert_close, assert_same_on_all_ranks

_LOOSE = 1e-3


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check that all elements of two tensors are equal.

    Args:
        a: A tensor.
        b: Another one, of a shape that it can be compared with.

    Raises:
        AssertionError: Some differ.

    Example:
        >>> import torch
        >>> from colossal.legacy.testing import assert_equal
        >>> assert_equal(torch.tensor([1, 2]), torch.tensor([1, 2])) is None
        True
    """
    if not bool((a == b).all()):
        raise AssertionError(f"All elements must be equal. Found {a} and {b}.")


def assert_not_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check that some elements of two tensors differ.

    Args:
        a: A tensor.
        b: Another one, of a shape that it can be compared with.

    Raises:
        AssertionError: All are equal.

    Example:
        >>> import torch
        >>> from colossal.legacy.testing import assert_not_equal
        >>> assert_not_equal(torch.tensor([1, 2]), torch.tensor([1, 3])) is None
        True
    """
    if bool((a == b).all()):
        raise AssertionError(f"Some elements must differ. Found {a} twice.")


def assert_close_loose(a: torch.Tensor, b: torch.Tensor, rtol: float = _LOOSE, atol: float = _LOOSE) -> None:
    """Check that two tensors differ by no more than half precision does.

    Args:
        a: A tensor.
        b: Another one, of the same shape and dtype.
        rtol: Relative tolerance.
        atol: Absolute tolerance.

    Raises:
        AssertionError: They differ by more.

    Example:
        >>> import torch
        >>> from colossal.legacy.testing import assert_close_loose
        >>> assert_close_loose(torch.tensor([1.0]), torch.tensor([1.001])) is None
        True
    """
    assert_close(a, b, rtol=rtol, atol=atol)


def assert_equal_in_group(tensor: torch.Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks of a group have the same values.

    Args:
        tensor: That of this rank.
        process_group: The ranks; all of them by default.

    Raises:
        AssertionError: A rank has others.

    Communication: all_gather, the group, the tensor's bytes from each rank.

    Example:
        >>> import torch
        >>> from colossal.legacy.testing import assert_equal_in_group
        >>> from colossal.testing import run_threads
        >>> run_threads(lambda: assert_equal_in_group(torch.ones(2)), 2)
        [None, None]
    """
    assert_same_on_all_ranks(tensor, process_group)


def assert_hf_output_close(
    out1: Any,
    out2: Any,
    ignore_keys: Collection[str] | None = None,
    track_name: str = "",
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> None:
    """Check that two outputs of a model have the same structure, and tensors that are close.

    Args:
        out1: An output: a tensor, a mapping or sequence of outputs, or another value.
        out2: Another one.
        ignore_keys: Entries of mappings that are not compared.
        track_name: Where the outputs are in those around them; named in the error.
        atol: Absolute tolerance of tensors.
        rtol: Relative tolerance of tensors.

    Raises:
        AssertionError: They differ, or have another structure.

    Example:
        >>> import torch
        >>> from colossal.legacy.testing import assert_hf_output_close
        >>> assert_hf_output_close({"loss": torch.ones(1), "id": 1}, {"loss": torch.ones(1), "id": 2}, ["id"]) is None
        True
    """
    ignored = set(ignore_keys or ())
    for name, first, second in _leaves(out1, out2, track_name, ignored):
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            _require(first.shape == second.shape, name, tuple(first.shape), tuple(second.shape))
            assert_close(first, second, name or "output", rtol=rtol, atol=atol)
        else:
            _require(type(first) is type(second) and first == second, name, first, second)


def check_state_dict_equal(
    d1: Mapping[str, Any], d2: Mapping[str, Any], ignore_device: bool = True, ignore_dtype: bool = False
) -> None:
    """Check that two state dicts have the same entries.

    Args:
        d1: A state dict, of a model or of an optimizer.
        d2: Another one.
        ignore_device: Whether tensors may be on different devices.
        ignore_dtype: Whether tensors may have different dtypes; those that have are compared loosely.

    Raises:
        AssertionError: An entry is missing, or differs.

    Example:
        >>> import torch
        >>> from colossal.legacy.testing import check_state_dict_equal
        >>> check_state_dict_equal(torch.nn.LayerNorm(2).state_dict(), torch.nn.LayerNorm(2).state_dict()) is None
        True
    """
    for name, first, second in _leaves(d1, d2, "", set()):
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            _require(ignore_device or first.device == second.device, name, first.device, second.device)
            _require(ignore_dtype or first.dtype == second.dtype, name, first.dtype, second.dtype)
            _require(first.shape == second.shape, name, tuple(first.shape), tuple(second.shape))
            if first.dtype == second.dtype:
                assert_equal(first, second.to(first.device))
            else:
                assert_close_loose(first.to(second), second)
        else:
            _require(type(first) is type(second) and first == second, name, first, second)


def _leaves(first: Any, second: Any, name: str, ignored: set[str]) -> list[tuple[str, Any, Any]]:
    """The values of two structures, pair by pair, with their names."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        one, two = cast("Mapping[Any, Any]", first), cast("Mapping[Any, Any]", second)
        keys, others = ([key for key in each if key not in ignored] for each in (one, two))
        _require(set(keys) == set(others), name, keys, others)
        return [leaf for key in keys for leaf in _leaves(one[key], two[key], f"{name}.{key}".lstrip("."), ignored)]
    if _is_sequence(first) and _is_sequence(second):
        _require(len(first) == len(second), name, f"{len(first)} values", f"{len(second)}")
        pairs = zip(first, second, strict=True)
        return [leaf for i, pair in enumerate(pairs) for leaf in _leaves(*pair, f"{name}[{i}]", ignored)]
    return [(name, first, second)]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _require(condition: bool, name: str, first: Any, second: Any) -> None:
    if not condition:
        raise AssertionError(f"Both must be the same{name and f' at {name}'}. Found {first} and {second}.")
