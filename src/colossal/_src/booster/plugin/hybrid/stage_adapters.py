"""Adapters of peft in a model that is split into stages: what switches them in all stages of a rank."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self, final

from torch import nn

from colossal._src.interface import AdapterNames, FullModelSpec, has_adapter_layers, is_peft_model

SWITCHES = ("set_adapter", "disable_adapter", "merge_adapter", "unmerge_adapter")
"""Methods of a `peft.PeftModel` that do the same in each layer, whatever layers there are."""
READ = ("active_adapter", "active_adapters", "peft_config")
"""Attributes of it that all stages have."""


@final
@dataclass(frozen=True)
class AdapterSpec:
    """What files hold of a full model while one of its adapters is active."""

    names: AdapterNames | None  # of the model's state
    adapters: FullModelSpec  # of the adapter alone

    @classmethod
    def of_all(cls, model: nn.Module) -> dict[str, Self]:
        """Look at each adapter of a full model; a model without any has none."""
        if not is_peft_model(model):
            return {}
        from colossal._src.checkpoint_io import adapter_tree

        adapted: Any = model
        return {
            name: cls(AdapterNames.of(model, name), FullModelSpec.of(adapter_tree(adapted, name)))
            for name in adapted.peft_config
        }


@contextmanager
def disabled_adapters(roots: Sequence[Any]) -> Iterator[None]:
    """Run stages without their adapters."""
    with ExitStack() as stack:
        for root in filter(has_adapter_layers, roots):  # peft asks the layers of a model, which a stage may not have
            stack.enter_context(root.disable_adapter())
        yield


def call_in_all(roots: Sequence[Any], name: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of all stages."""
    for root in roots:
        getattr(root, name)(*args, **kwargs)
