"""What the files of an optimizer say, in one tree, whichever format they have.

[Note: other optimizer files] The shards in PyTorch's format that are read hold the state by parameter, each under the
position or the name of its parameter. The file that the index calls ``param_groups`` holds the list of groups, as in
the state dict of an optimizer, or a dict with that list in it.
"""

from pathlib import Path
from typing import Any

from colossal._src.checkpoint_io.plain_data import extract_tensors, insert_tensors
from colossal._src.checkpoint_io.source import Source, in_memory
from colossal.errors import CheckpointError


def optimizer_tree(source: Source) -> dict[str, Any]:
    """Return the groups, the state by parameter, and what else was saved, an `Item` in the place of each tensor."""
    if source.plain is not None:
        return insert_tensors(source.plain, source.item)
    skeleton, tensors = extract_tensors(_torch_tree(source))
    return insert_tensors(skeleton, lambda name: in_memory(tensors[name]))


def _torch_tree(source: Source) -> dict[str, Any]:
    values = {name: item.value for name, item in source.items.items()}
    if source.index is None:
        return values
    groups = source.index.get_param_group_filename()
    if groups is None:
        raise CheckpointError(
            f"The index of an optimizer must name its file of groups as param_groups. Found the metadata "
            f"{source.index.metadata} in {source.index.root_path}. Pass a checkpoint that save_optimizer wrote."
        )
    header = set(source.files[Path(groups)])
    return {name: values[name] for name in header} | {
        "state": {name: value for name, value in values.items() if name not in header}
    }
