"""Models of transformers with the weights of a checkpoint, each read when it is materialized.

[Note: the detour] `from_pretrained` of transformers builds a model on the meta device. It hands the model and the files
of the checkpoint to one function, which maps names, and converts and assigns tensors; then it ties weights, and draws
what was missing. While a context is open, a detour stands in the place of that function. It hands on lazy tensors
instead of files. All that transformers does with them is written down, as anything is in the context.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, cast, final

import torch
from torch import nn

from colossal._src.lazy.recipe import Recipe, RecordedOperation, View
from colossal._src.lazy.stored_tensor import StoredTensor, opened, stamp_of
from colossal._src.lazy.tensor import LazyTensor, make_lazy_tensor
from colossal.errors import CheckpointError, UnsupportedError

_LOAD = "_load_pretrained_model"
_PATH = "_pretrained_path"
_ELSE = "Call from_pretrained outside of LazyInitContext."


@final
class FromPretrainedPatch:
    """Stands in the place of the function of transformers that loads weights, for as many contexts as are open."""

    _lock: ClassVar = Lock()

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._num_contexts = 0

    @classmethod
    def enter(cls) -> Callable[[], None] | None:
        """Take the place, as soon as transformers is there."""
        owner: type[nn.Module] | None = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        if owner is None or _LOAD not in vars(owner):
            return None
        with cls._lock:
            if not isinstance(vars(owner)[_LOAD], cls):
                setattr(owner, _LOAD, cls(vars(owner)[_LOAD]))
            detour: FromPretrainedPatch = vars(owner)[_LOAD]
            detour._num_contexts += 1
        return lambda: detour._leave(owner)

    def _leave(self, owner: type[nn.Module]) -> None:
        with self._lock:
            self._num_contexts -= 1
            if not self._num_contexts and vars(owner)[_LOAD] is self:
                setattr(owner, _LOAD, self._original)

    def __call__(
        self,
        model: nn.Module,
        state_dict: Mapping[str, torch.Tensor] | None,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load weights: lazily, where the thread that calls is inside of a context."""
        # the patch holds for all threads, a context only for the one that opened it
        lazily = state_dict is None and isinstance(torch.empty(0, device="cpu"), LazyTensor)
        if lazily:
            _check_request(checkpoint_files or (), load_config)
            found = [stored_tensors(Path(file)) for file in checkpoint_files or ()]
            state_dict = {name: tensor for tensors in found for name, tensor in tensors.items()}
        result = self._original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        if lazily:
            from colossal._src.tensor import log_experts

            info, path = result[0], str(load_config.pretrained_model_name_or_path)
            _check_result(info, load_config)
            shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
            log_experts(shapes, shapes.keys() - info.missing_keys, path)
            vars(model).setdefault(_PATH, _file_to_load(checkpoint_files or (), path))
        return result


def pretrained_path(model: nn.Module) -> str | None:
    """Return the path of the weights of a model."""
    return vars(model).get(_PATH)


def remember_path(model: nn.Module, path: str) -> None:
    """Remember the path of the weights of a model."""
    vars(model)[_PATH] = path


def _file_to_load(files: Sequence[str], name: str) -> str:
    """Find the file that `Booster.load_model` takes: the weights, or the index of several files of them.

    What `from_pretrained` was called with may be the name of a repository, or lack the subfolder and the variant.
    """
    if len(files) == 1:
        return str(files[0])
    # `model.variant-00001-of-00002.safetensors` has the index `model.safetensors.index.variant.json`
    parts = {Path(file) for file in files}
    for index in sorted({index for part in parts for index in part.parent.glob("*.index*.json")}):
        if {
            index.parent / part for part in json.loads(index.read_text("utf-8")).get("weight_map", {}).values()
        } == parts:
            return str(index)
    return name


def _check_request(files: Sequence[str], load_config: Any) -> None:
    for found, advice in _obstacles(files, load_config):
        raise UnsupportedError(
            "Inside of LazyInitContext, from_pretrained leaves weights in safetensors files, to be read later, to the "
            f"CPU, as they are. Found {found} for {load_config.pretrained_model_name_or_path}. {advice}"
        )


def _obstacles(files: Sequence[str], load_config: Any) -> Iterator[tuple[str, str]]:
    if load_config.hf_quantizer is not None:
        yield f"weights that {type(load_config.hf_quantizer).__name__} quantizes", _ELSE
    if any(str(device) != "cpu" for device in cast("Mapping[str, Any]", load_config.device_map or {}).values()):
        yield f"device_map={load_config.device_map}", "Leave it out, and let Booster.boost move the model."
    if load_config.device_mesh is not None:
        yield "a plan of transformers to distribute the model", "Leave it out, and let Booster.boost shard the model."
    if load_config.disable_mmap:
        yield "disable_mmap=True", "Leave it out: no more than one tensor is mapped at a time."
    if other := next((file for file in files if not file.endswith(".safetensors")), None):
        yield f"the file {Path(other).name}", f"{_ELSE} What save_pretrained writes from there can be read lazily."


def _check_result(info: Any, load_config: Any) -> None:
    """Raise errors that name the parameter, before transformers raises some that do not."""
    if info.conversion_errors:
        name, error = next(iter(info.conversion_errors.items()))
        raise UnsupportedError(
            "Inside of LazyInitContext, weights of a checkpoint are converted by operations that can run later. Found "
            f"{name}, whose conversion failed: {' '.join(error.splitlines()[-2:])}. {_ELSE}"
        )
    if info.mismatched_keys and not load_config.ignore_mismatched_sizes:
        name, stored, expected = min(info.mismatched_keys)
        raise CheckpointError(
            f"A checkpoint must fit its model. Found {name} of shape {tuple(stored)} in "
            f"{load_config.pretrained_model_name_or_path}, where the model has {tuple(expected)}. Load it with its "
            "own config, or pass ignore_mismatched_sizes=True to draw such weights anew."
        )


def stored_tensors(path: Path) -> dict[str, LazyTensor]:
    """Find the tensors of a safetensors file, without reading more than its header."""
    with opened(path, str(path)) as file:
        stamp = stamp_of(path)
        return {name: _recalled(StoredTensor(path, name, stamp), file.get_tensor(name)) for name in list(file.keys())}


def _recalled(stored: StoredTensor, mapped: torch.Tensor) -> LazyTensor:
    meta = torch.empty(mapped.shape, dtype=mapped.dtype, device="meta")
    recipe, read = Recipe(meta.nbytes, torch.device("cpu")), RecordedOperation(stored, (), {}, (), None)
    read.made[0] = View(recipe, meta)
    recipe.writes.append(read)
    return make_lazy_tensor(read.made[0], torch.device("cpu"))
