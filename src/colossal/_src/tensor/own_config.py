"""A configuration of its own for a model whose configuration is going to change."""

import copy
from typing import Any

from torch import nn

_KINDS = {"PreTrainedConfig", "PretrainedConfig"}  # of transformers, which need not be there


def copy_config(model: nn.Module) -> None:
    """Replace the configuration of a model of transformers by a copy, in all of its modules.

    Programs build several models of one configuration, such as a student and its teacher: the attention function and
    the cache that are chosen for one of them must not reach the others.
    """
    memo: dict[int, Any] = {}  # one for all, so that parts of a configuration stay parts of it
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if any(kind.__name__ in _KINDS for kind in type(value).__mro__):
                setattr(module, name, copy.deepcopy(value, memo))
