"""What is written when a model is saved."""

from pathlib import Path
from typing import Any, final

from torch import nn

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.content import Content
from colossal._src.checkpoint_io.destination import Destination, ShardedDestination, SingleFileDestination
from colossal._src.checkpoint_io.entries import MIB, plan_files
from colossal._src.checkpoint_io.file_writers import FileWriter, SafetensorsWriter, TorchFileWriter
from colossal._src.checkpoint_io.gather_full import gather_full_tensor
from colossal._src.checkpoint_io.model_config import model_config_files
from colossal._src.checkpoint_io.model_state import ModelState
from colossal._src.checkpoint_io.naming import ADAPTER_CONFIG, MODEL, adapter_folder
from colossal._src.interface import unwrap_model


@final
class ModelSavePlan:
    """The three steps of a `SaveQueue`, of a model."""

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        shard: bool,
        prefix: str | None,
        size_per_shard: float,
        use_safetensors: bool,
        writers: CheckpointGroup,
    ) -> None:
        self._model, self._path, self._shard, self._prefix = unwrap_model(model), path, shard, prefix
        self._size_per_shard, self._writers = size_per_shard, writers
        self._use_safetensors = use_safetensors or (not shard and path.suffix == ".safetensors")
        self._kinds = {key: kind.with_prefix(prefix) for key, kind in MODEL.items()}
        self._configs: dict[str, Any] = {}
        self._state: ModelState | None = None

    def collect_content(self) -> Content:
        """Find out what there is to save; each time anew."""
        self._state = ModelState(self._model, self._writers.rank)
        if self._shard and self._writers.is_first_rank:
            self._configs = dict(model_config_files(self._model))
        return self._state.content(self._writers.ranks, for_safetensors=self._use_safetensors)

    def make_writer(self, content: Content, save_id: str) -> FileWriter:
        """Say which files there will be."""
        assert self._state is not None
        files = [content.entries]
        if self._shard:
            base, adapters = self._state.split(content.entries)
            own = [adapters] if self._state.has_adapters else []
            files = [*plan_files(base, self._size_per_shard * MIB), *own]
        if self._use_safetensors:
            return SafetensorsWriter(files, save_id, self._writers.rank)
        return TorchFileWriter(files, gather_full_tensor, dict if self._shard else self._state.in_order)

    def destination(self) -> Destination:
        """Say where they go."""
        assert self._state is not None
        if not self._shard:
            return SingleFileDestination(self._path)
        configs, adapters = dict(self._configs), None
        config = configs.pop(ADAPTER_CONFIG, None)
        if self._state.has_adapters:
            from colossal._src.checkpoint_io.adapter_files import AdapterFiles

            adapters = AdapterFiles(self._path, adapter_folder(self._prefix), self._use_safetensors, config)
        kinds = list(self._kinds.values())
        return ShardedDestination(self._path, self._kinds[self._use_safetensors], kinds, configs, adapters=adapters)
