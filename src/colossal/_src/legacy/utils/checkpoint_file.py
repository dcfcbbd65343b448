"""One file for the epoch, the model, its optimizer and its schedule, which any other strategy loads."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossal._src.checkpoint_io import (
    CheckpointGroup,
    CheckpointIO,
    ProcessGroupIO,
    SingleProcessIO,
    Staging,
    prepare_directory,
    read_torch,
    write_torch,
)
from colossal._src.cluster import current_mesh
from colossal._src.comm import equal_on_all_ranks, gather_objects, int64_digest
from colossal._src.interface import OptimizerWrapper, full_spec_of, unwrap_model
from colossal._src.legacy.notice import superseded
from colossal._src.legacy.utils.parallel_state import axis_size
from colossal.errors import CheckpointError, ConfigError

# [Note: one file out of several] The model, and the optimizer by the names of its parameters, are written by
# `CheckpointIO`, which puts the shards of all ranks together under any strategy. The first rank then moves them into
# one file of PyTorch's format, so that `torch.load(file, weights_only=True)` gives the documented dictionary.


def save_checkpoint(
    file: str | Path,
    epoch: int,
    model: nn.Module,
    optimizer: Optimizer | OptimizerWrapper | None = None,
    lr_scheduler: LRScheduler | None = None,
) -> None:
    """Save what a run needs to go on, in one file: full tensors, whatever ranks hold of them.

    All ranks call together, also those whose ``is_dp_rank_0()`` is false. The file is the dictionary
    ``{"epoch": ..., "model": ..., "optimizer": ..., "lr_scheduler": ...}``, the latter two if they are given, in the
    format of PyTorch. `Booster.save` keeps several steps, writes in parallel and in the background.

    Args:
        file: Path of the file. Its folder is created. A process that is killed leaves the earlier file as it was.
        epoch: The epoch that is finished.
        model: The model, boosted or not, or that of an engine.
        optimizer: Its optimizer, boosted or not, or that of an engine.
        lr_scheduler: Its schedule.

    Raises:
        CheckpointError: The file cannot be written; on all ranks.
        ConfigError: The optimizer itself is given where ranks hold shards of it, instead of what wraps it; or the
            module of one stage of a pipeline, instead of the model of the engine.

    Communication: that of `Booster.save_model` and `Booster.save_optimizer`.

    Example:
        >>> import tempfile, torch
        >>> from colossal.legacy.utils import load_checkpoint, save_checkpoint
        >>> path, model = tempfile.mkdtemp() + "/epoch.pt", torch.nn.Linear(2, 1)
        >>> save_checkpoint(path, 3, model)
        >>> list(torch.load(path, weights_only=True)), load_checkpoint(path, torch.nn.Linear(2, 1))
        (['epoch', 'model'], 3)
    """
    superseded("colossal.utils.save_checkpoint", "booster.save(checkpoint, model, optimizer, lr_scheduler, step)")
    _refuse_unnamed_stage(model)
    target, writers = Path(file), _writers()
    io, parts = CheckpointIO(writers), target.with_name(f".{target.name}.parts")
    named = None if optimizer is None else _named(model, optimizer)
    try:
        writers.read(partial(_make_folder, parts, is_first_rank=writers.is_first_rank))
        io.save_model(model, parts / "model")
        if named is not None:
            io.save_optimizer(named, parts / "optimizer")
        others: dict[str, Any] = {} if lr_scheduler is None else {"lr_scheduler": lr_scheduler.state_dict()}
        writers.write(partial(_join, target, epoch, parts, has_optimizer=named is not None, others=others))
    finally:
        if writers.is_first_rank:
            shutil.rmtree(parts, ignore_errors=True)


def load_checkpoint(
    file: str | Path,
    model: nn.Module,
    optimizer: Optimizer | OptimizerWrapper | None = None,
    lr_scheduler: LRScheduler | None = None,
    strict: bool = True,
) -> int:
    """Load what `save_checkpoint` wrote, under any strategy; no pickle is executed.

    All ranks call together; each reads its shards only.

    Args:
        file: Path of the file.
        model: The model, boosted or not, or that of an engine; without an optimizer also the module of one stage, whose
            parameters have the names of the full model.
        optimizer: Its optimizer, boosted or not, or that of an engine.
        lr_scheduler: Its schedule.
        strict: Names in the file and in the model must be the same.

    Returns:
        The epoch that was saved.

    Raises:
        CheckpointError: The file is missing, damaged, of another model, or without what is asked for; on all ranks.
        ConfigError: The optimizer itself is given where ranks hold shards of it, instead of what wraps it; or the
            module of one stage of a pipeline, instead of the model of the engine.

    Communication: that of `Booster.load_model` and `Booster.load_optimizer`.

    Example:
        >>> import tempfile, torch
        >>> from colossal.legacy.utils import load_checkpoint, save_checkpoint
        >>> path, saved, fresh = tempfile.mkdtemp() + "/epoch.pt", torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> save_checkpoint(path, 3, saved)
        >>> load_checkpoint(path, fresh), torch.equal(fresh.weight, saved.weight)
        (3, True)
    """
    superseded("colossal.utils.load_checkpoint", "booster.load(checkpoint, model, optimizer, lr_scheduler)")
    stage_names = _names_of_stages(model, strict=strict)
    if stage_names is not None and optimizer is not None:
        raise _unnamed_stage(model)
    writers = _writers()
    wanted = ["epoch", "model"]
    wanted += ["optimizer"] * (optimizer is not None) + ["lr_scheduler"] * (lr_scheduler is not None)
    content = writers.read(partial(_read, Path(file), wanted))
    named = None if optimizer is None else _named(model, optimizer)
    if stage_names is not None and strict:
        _check_names(stage_names, set(content["model"]), file)
    strict = strict and stage_names is None
    CheckpointIO(writers, member="model").load_model(model, file, strict=strict)
    if named is not None:
        CheckpointIO(writers, member="optimizer").load_optimizer(named, file)
    if lr_scheduler is not None:
        CheckpointIO(writers, member="lr_scheduler").load_lr_scheduler(lr_scheduler, file)
    return int(content["epoch"])


def gather_pipeline_parallel_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Put the state dict of a model together from those of the stages of a pipeline.

    Superseded by `Booster.save_model`, which names the parameters of all stages.

    Args:
        state_dict: That of the stage on this rank, with full tensors, under the names that the full model has.

    Returns:
        That of all stages, on all ranks of the pipeline.

    Raises:
        ConfigError: It is what a module under tensor parallelism returned, on any rank of the pipeline.

    Communication: all_gather_object, pp, the state dict's bytes, and a few before.

    Example:
        >>> import torch
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.testing import run_threads
        >>> from colossal.utils.checkpointing import gather_pipeline_parallel_state_dict
        >>> def program():
        ...     with ParallelMesh(pp=2) as mesh:
        ...         return sorted(gather_pipeline_parallel_state_dict({f"{mesh.rank('pp')}.weight": torch.ones(1)}))
        >>> run_threads(program, 2)
        [['0.weight', '1.weight'], ['0.weight', '1.weight']]
    """
    superseded("colossal.utils.checkpointing.gather_pipeline_parallel_state_dict", "booster.save_model(model, path)")
    groups = [current_mesh().group("pp")]
    # What `Module.state_dict` returns has metadata, a dict that the program made of full tensors has none.
    has_shards = axis_size("tp") > 1 and hasattr(state_dict, "_metadata")
    if any(gather_objects(has_shards, groups)):
        raise ConfigError(
            "Stages are put together from full tensors. Found what state_dict() of a module returns, with tensors of "
            f"this rank, where tensor parallelism has {axis_size('tp')}. Call save_checkpoint(file, epoch, model) on "
            "all ranks: torch.load(file, weights_only=True)['model'] then has the full tensors of all stages. Or pass "
            "a dict of layer.full_parameter(name)."
        )
    return {name: value for stage in gather_objects(dict(state_dict), groups) for name, value in stage.items()}


def _refuse_unnamed_stage(model: nn.Module) -> None:
    """Refuse the module of one stage: those of two stages may have the same names, and one would be lost."""
    if axis_size("pp") > 1 and full_spec_of(unwrap_model(model)) is None:
        groups = [current_mesh().group("pp")]
        names = gather_objects(list(model.state_dict()), groups)
        if any(each != names[0] for each in names) or not all(equal_on_all_ranks(_digests(model), groups)):
            raise _unnamed_stage(model)


def _digests(model: nn.Module) -> list[int]:
    """Of what a model has: the same full model may be on all stages."""
    return [int64_digest(name, value) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)]


def _names_of_stages(model: nn.Module, *, strict: bool) -> set[str] | None:
    """The names of all stages, of which this module is one; None for a full model, or one that knows its names."""
    if axis_size("pp") == 1 or full_spec_of(unwrap_model(model)) is not None:
        return None
    stages = gather_objects(list(model.state_dict()), [current_mesh().group("pp")])
    if strict and all(each == stages[0] for each in stages):
        return None
    names = {name for stage in stages for name in stage}
    if len(names) < sum(map(len, stages)):
        raise _unnamed_stage(model)
    return names


def _check_names(names: set[str], saved: set[str], file: str | Path) -> None:
    """Refuse a file whose names are not those of all stages together."""
    if names != saved:
        raise CheckpointError(
            f"The stages of a pipeline have the names of the file together. Found {file} without "
            f"{sorted(names - saved)}, and with {sorted(saved - names)} in addition. Pass strict=False to load what "
            "both have."
        )


def _unnamed_stage(model: nn.Module) -> ConfigError:
    return ConfigError(
        "A checkpoint of a pipeline has the names of the full model. Found a mesh with pp="
        f"{axis_size('pp')}, and a {type(model).__name__} that is the module of one stage, or not boosted yet. "
        "Pass the model of the engine, or the one that Booster.boost returned."
    )


def _make_folder(parts: Path, *, is_first_rank: bool) -> None:
    if is_first_rank:
        prepare_directory(parts)


def _writers() -> CheckpointGroup:
    return ProcessGroupIO() if dist.is_initialized() else SingleProcessIO()


def _named(model: nn.Module, optimizer: Optimizer | OptimizerWrapper) -> OptimizerWrapper:
    """Wrap an optimizer of full parameters, so that its state is known by their names; refuse what is not one."""
    if isinstance(optimizer, OptimizerWrapper):
        return optimizer
    names = {parameter: name for name, parameter in unwrap_model(model).named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(parameter not in names for parameter in held)
    if foreign or full_spec_of(unwrap_model(model)) is not None:
        found = f"{foreign} of {len(held)} parameters that the model does not have: shards or master weights"
        raise ConfigError(
            f"The state of an optimizer is saved by the names of its model's parameters. Found a "
            f"{type(optimizer).__name__} itself, with {found if foreign else 'the parameters of one pipeline stage'}. "
            "Pass the optimizer of the engine, or the one that Booster.boost returned."
        )
    return OptimizerWrapper(optimizer, param_names=names)


def _join(target: Path, epoch: int, parts: Path, *, has_optimizer: bool, others: Mapping[str, Any]) -> None:
    """Put the states together in one file."""
    content: dict[str, Any] = {"epoch": epoch, "model": torch.load(parts / "model", weights_only=True, mmap=True)}
    if has_optimizer:
        content["optimizer"] = CheckpointIO().load_plain(parts / "optimizer")
    with Staging() as staging:
        staging.add(target, partial(write_torch, content=content | dict(others)))
        staging.commit()


def _read(path: Path, wanted: list[str]) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"Loading needs the file of save_checkpoint. Found none at {path}. Check the path.")
    content = read_torch(path, mmap=True)
    if missing := [name for name in wanted if name not in content]:
        raise CheckpointError(
            f"Loading needs a file of save_checkpoint with {', '.join(wanted)}. Found {path} without "
            f"{', '.join(missing)}. Pass the same arguments as for saving, or load a model alone by Booster.load_model."
        )
    return content
