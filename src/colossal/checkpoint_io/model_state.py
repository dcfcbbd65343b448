"""The state of a model by name: which names are one tensor, what a checkpoint must hold, and how it is filled in."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossal.checkpoint_io.naming import listing
from colossal.checkpoint_io.shards import Unit, merge
from colossal.errors import CheckpointError
from colossal.interface import ModelWrapper


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's own model, without `ModelWrapper` and `DistributedDataParallel`."""
    while isinstance(model, (ModelWrapper, DistributedDataParallel)):
        model = model.module
    return model


@final
class ModelState:
    """The parameters, persistent buffers and extra state of a model, by name.

    Args:
        model: The user's own model.

    Raises:
        CheckpointError: A tensor is on the meta device: it has no values.

    Example:
        >>> import torch
        >>> state = ModelState(torch.nn.Linear(2, 1))
        >>> [list(unit.content) for unit in state.units(keep_aliases=True)]
        [['weight'], ['bias']]
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state: dict[str, Any] = model.state_dict()
        self._metadata = getattr(self._state, "_metadata", OrderedDict())
        self._ties = list(_group_aliases(self._state))
        empty = [name for name, value in self._state.items() if getattr(value, "is_meta", False)]
        if empty:
            raise CheckpointError(
                f"Saving and loading need a model that has its values. Found on the meta device: {listing(empty)}. "
                "Create the model on a real device, or materialise it first."
            )

    def units(self, keep_aliases: bool) -> list[Unit]:
        """Return the state in order, with all names of one tensor in one unit.

        Args:
            keep_aliases: Keep all names; otherwise only the one that Hugging Face expects.
        """
        return [self._unit(names if keep_aliases else [self._leading(names)]) for names in self._ties]

    def _unit(self, names: list[str]) -> Unit:
        value = self._state[names[0]]
        if not isinstance(value, torch.Tensor):
            return Unit(dict.fromkeys(names, value), 0)
        return Unit(dict.fromkeys(names, value.detach()), value.nbytes)

    def _leading(self, names: list[str]) -> str:
        """Return the name that is not tied to another one by the model's own list; the first if there is none."""
        tied: Any = getattr(self._model, "all_tied_weights_keys", None)
        tied = tied or getattr(self._model, "_tied_weights_keys", None) or ()
        return next((name for name in names if not any(re.search(pattern, name) for pattern in tied)), names[0])

    def full(self) -> OrderedDict[str, Any]:
        """Return the whole state with all names, as `torch.nn.Module.load_state_dict` takes it."""
        values = merge(self.units(keep_aliases=True))
        state = OrderedDict((name, values[name]) for name in self._state)
        state._metadata = self._metadata  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own convention
        return state

    def check(self, shapes: Mapping[str, Any], strict: bool, source: object) -> None:
        """Compare the names and shapes of a checkpoint with the model's, before any value is written.

        A tensor with several names needs one of them only.

        Args:
            shapes: Shape of each tensor of the checkpoint, None for what is not a tensor.
            strict: Require that the names agree.
            source: Where the checkpoint is, for the message.

        Raises:
            CheckpointError: A shape differs, or, if `strict`, a name is missing or unexpected.
        """
        problems = {
            "with another shape": [
                f"{name} (file {_shape(shape)}, model {_shape(shape_of(self._state[name]))})"
                for name, shape in shapes.items()
                if name in self._state and shape != shape_of(self._state[name])
            ]
        }
        if strict:
            problems["missing from the file"] = [
                names[0] for names in self._ties if not any(name in shapes for name in names)
            ]
            problems["unexpected in the file"] = [name for name in shapes if name not in self._state]
        found = [f"{len(names)} {what}: {listing(names)}" for what, names in problems.items() if names]
        if found:
            raise CheckpointError(
                f"Loading needs a checkpoint of the same model. Found in {source} {'; '.join(found)}. "
                "Nothing was loaded. Build the model with the configuration that was saved"
                + (", or pass strict=False to load the names that agree." if strict else ".")
            )

    def fill(self, content: Mapping[str, Any]) -> None:
        """Write the values of one file into the model, in the model's dtypes and on its devices.

        Args:
            content: Part of a state that passed `check`.

        Raises:
            CheckpointError: A module refused its values.
        """
        part = OrderedDict(content)
        part._metadata = self._metadata  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own convention
        try:
            self._model.load_state_dict(part, strict=False)
        except RuntimeError as error:
            raise CheckpointError(
                f"Loading needs values that the model's modules accept. Found that one did not: {error}. "
                "Build the model with the configuration that was saved."
            ) from error


def shape_of(value: object) -> torch.Size | None:
    """Return the shape of a tensor, None for anything else."""
    return value.shape if isinstance(value, torch.Tensor) else None


def _group_aliases(state: Mapping[str, Any]) -> Iterable[list[str]]:
    """Return the names of each distinct tensor, in the order of the first ones."""
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        key: Any = name
        if isinstance(value, torch.Tensor) and value.numel() > 0:
            key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        groups.setdefault(key, []).append(name)
    return groups.values()


def _shape(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(list(shape))
