"""The names of the groups that a process is in."""

from collections.abc import Callable
from enum import Enum, EnumMeta
from typing import Any, cast


class _Extensible(EnumMeta):
    """Lets a program add members: ``ParallelMode.NEW_MODE = "new_mode"``."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("_") or not isinstance(value, str):
            super().__setattr__(name, value)
            return
        members = cast("dict[str, Enum]", cls._member_map_)
        if name in members or value in cls._value2member_map_:
            raise ValueError(
                f"A parallel mode has a name and a value of its own. Found {name}={value!r} next to "
                f"{', '.join(members)}. Choose another name and another value."
            )
        make = cast("Callable[[type], Enum]", object.__new__)
        member = make(cls)
        member._name_, member._value_ = name, value
        members[name] = cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        type.__setattr__(cls, name, member)


class ParallelMode(Enum, metaclass=_Extensible):
    """The groups that a process can be in; a program adds its own by assignment.

    Example:
        >>> from colossal.legacy.context import ParallelMode
        >>> ParallelMode.DATA.value
        'data'
        >>> ParallelMode.OWN_GROUP = "own_group"
        >>> ParallelMode("own_group")
        <ParallelMode.OWN_GROUP: 'own_group'>

    Attributes:
        GLOBAL: All processes.
        DATA: The replicas of a part of the model.
        MODEL: The processes of a replica.
        PIPELINE: The stages of a pipeline.
        TENSOR: The ranks over which layers are sharded; in the mode ``sequence``, those of a sequence.
        SEQUENCE: The ranks over which a sequence is sharded.
        SEQUENCE_DP: Those and the replicas, over which gradients are summed.
        PARALLEL_1D: The ranks of 1D tensor parallelism.
        PARALLEL_2D_ROW: A row of a 2D grid.
        PARALLEL_2D_COL: A column of it.
        PARALLEL_2P5D_ROW: A row of one layer of a 2.5D grid.
        PARALLEL_2P5D_COL: A column of one layer.
        PARALLEL_2P5D_DEP: The same place in all layers.
        PARALLEL_2P5D_XZ: A column in all layers.
        PARALLEL_3D_INPUT: The line of a 3D grid along which inputs are gathered.
        PARALLEL_3D_WEIGHT: That along which weights are gathered.
        PARALLEL_3D_OUTPUT: That along which outputs are summed.
        PARALLEL_3D_INPUT_X_WEIGHT: The plane of inputs and weights.
        PARALLEL_3D_OUTPUT_X_WEIGHT: The plane of outputs and weights.
    """

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    SEQUENCE_DP = "sequence_dp"
    PARALLEL_1D = "1d"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_2P5D_XZ = "2p5d_xz"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"
    PARALLEL_3D_INPUT_X_WEIGHT = "3d_input_x_weight"
    PARALLEL_3D_OUTPUT_X_WEIGHT = "3d_output_x_weight"
