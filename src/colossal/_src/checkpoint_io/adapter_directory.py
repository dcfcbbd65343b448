"""The adapters of a model, in a directory of their own that peft loads."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import nn

from colossal._src.checkpoint_io import model_config
from colossal._src.checkpoint_io.index_and_names import ADAPTER_WEIGHTS_FILES
from colossal._src.checkpoint_io.staging import Staging, prepare_directory
from colossal._src.interface import AdapterNames, full_spec_of, is_peft_model, unwrap_model
from colossal.errors import CheckpointError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from peft import PeftModel


@final
class AdapterDirectory:
    """A directory that gets the adapters of a model, whose weights wait next to it until all is there.

    Raises:
        ConfigError: The model has no adapters.
        UnsupportedError: It has prompts of peft instead.
    """

    def __init__(self, model: nn.Module, path: Path, use_safetensors: bool) -> None:
        self.adapters, self._adapted = adapters_of(model)
        self._path, self._use_safetensors = path, use_safetensors
        self.aside = path / f".{ADAPTER_WEIGHTS_FILES[use_safetensors]}.aside"

    def prepare(self) -> None:
        """Create the directory."""
        if self._path.is_file():
            raise CheckpointError(
                f"save_lora_as_pretrained writes a directory. Found the file {self._path}. Choose another path."
            )
        prepare_directory(self._path)

    def publish(self) -> None:
        """Move weights and configuration into place, and remove weights in the other format: peft would prefer them."""
        try:
            with Staging() as staging:
                staging.add(self._path / ADAPTER_WEIGHTS_FILES[self._use_safetensors], self.aside.replace)
                for name, write in model_config.adapter_config_file(self._adapted).items():
                    staging.add(self._path / name, write)
                staging.commit()
            # last: a crash at any moment leaves one complete file of adapters
            (self._path / ADAPTER_WEIGHTS_FILES[not self._use_safetensors]).unlink(missing_ok=True)
        finally:
            self.aside.unlink(missing_ok=True)


def adapters_of(model: nn.Module) -> "tuple[nn.Module, PeftModel]":
    """Return this rank's adapters of a model, and its `peft.PeftModel`, or that of one of its stages."""
    found: Any = unwrap_model(model)
    full_spec = full_spec_of(found)
    roots: list[Any] = [found] if full_spec is None else list(full_spec.roots)
    if not is_peft_model(roots[0]):
        raise ConfigError(
            f"save_lora_as_pretrained needs a model with adapters. Found {type(found).__name__} without any. "
            "Call booster.enable_lora(model, lora_config=...) before boost."
        )
    if roots[0].active_peft_config.is_prompt_learning:
        raise UnsupportedError(
            "save_lora_as_pretrained writes the adapters of layers. Found a model of peft with "
            f"{type(roots[0].active_peft_config).__name__}, which trains prompts. Save it by booster.save_model, which "
            "has them as well, or train adapters: LoraConfig of peft."
        )
    trees: list[Any] = [adapter_tree(root) for root in roots]
    tree = trees[0]
    if full_spec is not None:
        tree = nn.Module()
        tree.full_spec = replace(
            found.adapters[found.active_adapter].adapters, roots=tuple(trees), ranks=full_spec.ranks
        )
    return tree, roots[0]


def adapter_tree(adapted: "PeftModel", adapter: str | None = None) -> nn.Module:
    """Return modules whose state is the adapters alone, under the names that peft's files use.

    By default they are those of the active one.
    What is in the tree is in the model: loading into it changes the model, and shards stay shards.
    """
    names = AdapterNames.of(adapted, adapter)
    state = adapted.state_dict(keep_vars=True)
    tree = nn.Module()
    # a stage of a pipeline whose layers have no adapters has nothing to save, and takes part
    for name, full in () if names is None else names.adapters.items():
        tensor = state[full]
        path, _, leaf = name.rpartition(".")
        node = _descend(tree, path.split(".")) if path else tree
        if isinstance(tensor, nn.Parameter):
            node.register_parameter(leaf, tensor)
        else:
            node.register_buffer(leaf, tensor)
    return tree


def _descend(node: nn.Module, path: list[str]) -> nn.Module:
    for name in path:
        if name not in dict(node.named_children()):
            node.add_module(name, nn.Module())
        node = node.get_submodule(name)
    return node
