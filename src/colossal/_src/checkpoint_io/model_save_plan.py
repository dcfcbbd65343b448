"""What is written when a model is saved."""

from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from colossal._src.checkpoint_io.checkpoint_group import CheckpointGroup
from colossal._src.checkpoint_io.content import MIB, Content, Entry, plan_files
from colossal._src.checkpoint_io.destination import Destination, ShardedDestination, SingleFileDestination
from colossal._src.checkpoint_io.file_writers import (
    FileWriter,
    SafetensorsWriter,
    TorchFileWriter,
    copy_regions_to_host,
)
from colossal._src.checkpoint_io.index_and_names import ADAPTER_CONFIG_FILE, MODEL, adapter_folder
from colossal._src.checkpoint_io.model_config import model_config_files
from colossal._src.checkpoint_io.model_state import ModelState
from colossal._src.interface import unwrap_model
from colossal._src.tensor import Region, RegionLayout, full_tensor_of, local_regions_of


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
        config = configs.pop(ADAPTER_CONFIG_FILE, None)
        if self._state.has_adapters:
            from colossal._src.checkpoint_io.adapter_files import AdapterFiles

            adapters = AdapterFiles(self._path, adapter_folder(self._prefix), self._use_safetensors, config)
        kinds = list(self._kinds.values())
        return ShardedDestination(self._path, self._kinds[self._use_safetensors], kinds, configs, adapters=adapters)


def gather_full_tensor(entry: Entry, writers: CheckpointGroup) -> torch.Tensor | None:
    """Put a tensor together on the rank that writes; all ranks call together.

    Communication: that of `colossal.tensor.full_tensor_of`; if only some ranks have one, gather_object, the writers,
    the bytes of the tensor.
    """
    if not isinstance(entry.layout, RegionLayout):
        return full_tensor_of(entry.value).detach()
    own = _regions_to_send(entry, entry.layout, writers)
    parts = writers.gather_values(own)
    if not writers.is_first_rank:
        return None
    full = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    for region, values in (pair for each in parts for pair in each):
        full[region.slices] = values
    return full


def _regions_to_send(entry: Entry, layout: RegionLayout, writers: CheckpointGroup) -> list[tuple[Region, torch.Tensor]]:
    """Return copies of the regions that this rank sends, the first of the ranks that hold them."""
    if entry.value is None:
        return []
    own = dict(local_regions_of(entry.value, writers.rank))
    chosen = [region for region, ranks in layout.holders.items() if ranks[0] == writers.rank]
    return list(zip(chosen, copy_regions_to_host([own[region].detach() for region in chosen]), strict=True))
