"""A model that is split into stages, and what happens around its micro-batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import nn

from colossal._src.booster.plugin.ddp.torch_ddp import DDPConfig
from colossal._src.booster.plugin.hybrid.stage_adapters import (
    READ,
    SWITCHES,
    AdapterSpec,
    call_in_all,
    disabled_adapters,
)
from colossal._src.booster.plugin.replica_sync import GradientSync
from colossal._src.cluster import ParallelMesh
from colossal._src.comm import all_reduce_fp8, count_collective, fp8_nbytes, group_into_buckets
from colossal._src.interface import (
    SAVE_AND_GENERATE,
    SAVE_AND_MERGE,
    FullModelSpec,
    OptimizerWrapper,
    copy_module,
    model_without_adapters,
    refuse,
    stage_hint,
)
from colossal._src.pipeline import PipelineExecutor, RowExecutor, Stage, Timeline
from colossal._src.shardformer import switch_checkpointing
from colossal._src.tensor import Replicas, grad_of, replicas_of, set_grad
from colossal.errors import UnsupportedError

_REFUSED: Mapping[str, str] = {
    "generate": (
        "generate calls the full model for each token. Found a model in pipeline stages. Pass the boosted model to "
        f"colossal.inference.InferenceEngine, whose generate runs the stages. Or: {SAVE_AND_GENERATE}"
    ),
    "merge_and_unload": f"Merging takes adapters of all layers. Found a model in pipeline stages. {SAVE_AND_MERGE}",
    "unload": (
        "unload takes the adapters off a full model. Found a model in pipeline stages. Run it without them by "
        "model.unwrap().disable_adapter(), a context; or save it by booster.save_model(model, directory, shard=True, "
        "use_safetensors=True), and from_pretrained(directory) loads the base model."
    ),
}
_SUBSCRIPT = "The model is partitioned into pipeline stages: use modules of the model before it is boosted."
_CHECKPOINT_KWARGS: Mapping[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}


@final
class PipelinedModel(nn.Module):
    """The stages that a rank has of a model."""

    def __init__(
        self,
        stages: Sequence[Stage],
        run: PipelineExecutor,
        full_spec: FullModelSpec,
        adapters: Mapping[str, AdapterSpec] | None = None,
    ) -> None:
        super().__init__()
        self.full_spec, self.adapters = full_spec, dict(adapters or {})
        self.stages = nn.ModuleList(stages)
        for name, message in _REFUSED.items():
            own = [each for root in full_spec.roots for each in (root, model_without_adapters(root))]
            refuse([*own, *([self] if any(hasattr(each, name) for each in own) else [])], name, message)
        self._run = run  # the last one: from here on, attributes are set by the program

    def __deepcopy__(self, memo: dict[int, Any]) -> "PipelinedModel":
        """Copy the stages, whose parameters can be averaged and saved; only those of the original communicate."""
        memo[id(self._run)] = None
        return copy_module(self, memo)

    def row_executor(self) -> RowExecutor:
        """Make what runs the stages on rows of tokens; see `PipelineExecutor.row_executor`."""
        return self._run.row_executor()

    def record(self) -> AbstractContextManager[list[Timeline]]:
        """Measure when each pass of a step is; see `PipelineExecutor.record`."""
        return self._run.record()

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """Checkpoint the activations of all layers, as the method of a model of transformers does."""
        given = activation_checkpointing_kwargs or {}
        other = {name: value for name, value in given.items() if (name, value) not in _CHECKPOINT_KWARGS.items()}
        if other:
            raise UnsupportedError(
                f"Layers of a pipeline are checkpointed by {dict(_CHECKPOINT_KWARGS)}. Found {other}. Leave them out, "
                "or pass gradient_checkpoint_config=GradientCheckpointConfig(...) to the plugin for some layers only."
            )
        for stage in self._run.stages.values():
            switch_checkpointing(stage.module, enabled=True)

    def activation_checkpointing_disable(self) -> None:
        """Keep activations until the backward pass."""
        for stage in self._run.stages.values():
            switch_checkpointing(stage.module, enabled=False)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """Checkpoint the activations of all layers, by the older name of the method in transformers."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations until the backward pass, by the older name."""
        self.activation_checkpointing_disable()

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse: stages are called one by one, so nothing would be compiled."""
        raise UnsupportedError(
            "A model is compiled before it is partitioned into pipeline stages. Found a boosted one. Call "
            "model.compile() before boost."
        )

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse: no rank has the full model."""
        raise UnsupportedError(
            "The stages of a pipeline are run by booster.execute_pipeline. Found a call of the model. Call "
            "execute_pipeline(data_iter, model, criterion, optimizer), under torch.no_grad() to evaluate."
        )

    def __getitem__(self, _index: Any) -> Any:
        """Refuse: numbers of modules are those of the full model, of which this rank has some."""
        raise TypeError(f"{type(self).__name__!r} object is not subscriptable. {_SUBSCRIPT}")

    def __getattr__(self, name: str) -> Any:
        """Find the configuration of the full model, and the device, type and submodules of what this rank has of it."""
        if name in ("device", "dtype"):
            return getattr(next(self.parameters()), name)
        full_spec: FullModelSpec | None = vars(self).get("full_spec")
        if name == "config" and full_spec is not None and full_spec.config is not None:
            return full_spec.config
        if full_spec is not None and vars(self)["adapters"]:
            if name in SWITCHES:
                return partial(self._switch_adapters, name)
            if name in READ:
                return getattr(full_spec.roots[0], name)
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            stages = vars(self).get("_modules", {}).get("stages", ())
            own = getattr(stages[0].module, name, None) if len(stages) == 1 else None
            if isinstance(own, nn.Module) and next(own.parameters(), None) is not None:
                return own
            if full_spec is not None and (hint := stage_hint(full_spec.roots, name)):
                raise AttributeError(f"{error}. {hint}.") from None
            raise

    def _switch_adapters(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of peft in all stages; files then hold the active adapter under the names of peft's files."""
        roots: Any = self.full_spec.roots
        if name == "disable_adapter":
            return disabled_adapters(roots)
        call_in_all(roots, name, *args, **kwargs)
        self.full_spec = replace(self.full_spec, adapter_names=self.adapters[self.active_adapter].names)
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set what the full model has, such as its loss function: stages would not see it."""
        own = vars(self)
        is_new = "_run" in own and name not in own and name not in own["_modules"] and not hasattr(type(self), name)
        if is_new and (hint := stage_hint(own["full_spec"].roots, name)):
            raise UnsupportedError(
                f"Stages of a pipeline have what the model had at boost. Found that {name} is set afterwards. {hint}."
            )
        super().__setattr__(name, value)


@final
class GradientAverager:
    """Averages gradients over data-parallel ranks after the last micro-batch of a step."""

    def __init__(self, stages: Sequence[Stage], mesh: ParallelMesh, config: DDPConfig) -> None:
        self._parameters = list(dict.fromkeys(each for stage in stages for each in stage.parameters()))
        self._replicas = {each: replicas_of(each, mesh) for each in self._parameters}
        for parameter, replicas in self._replicas.items():
            replicas.scale_each_pass(parameter)
        self._shared = [each for each in dict.fromkeys(self._replicas.values()) if each.has_others]
        self._trained: dict[nn.Parameter, None] = {}
        self._config, self.sync = config, GradientSync(mesh)

    def watch(self, optimizer: OptimizerWrapper) -> None:
        """Refuse its steps by gradients that are not averaged."""
        optimizer.register_zero_grad_hook(self.sync.reset)
        optimizer.register_step_pre_hook(self.sync.check)

    def average(self) -> None:
        """Take the mean of the gradients of all ranks, of parameters that any rank has used.

        Communication: all_reduce, dp, the gradients' bytes, and 4 bytes for each parameter.
        """
        if not (self._shared and self.sync.record_pass()):
            return
        # what was frozen since may have a gradient, and what was thawed since has one
        self._trained |= dict.fromkeys(each for each in self._parameters if each.requires_grad)
        for replicas in self._shared:
            self._average([each for each in self._trained if self._replicas[each] == replicas], replicas)

    def _average(self, trained: Sequence[nn.Parameter], replicas: Replicas) -> None:
        channel = replicas.channel()
        is_used = [grad is not None for grad in map(grad_of, trained)]
        used_here = torch.tensor(is_used, dtype=torch.int32, device="cpu")
        # ranks may have used different parameters, but must all take part in the same reductions
        used = channel.all_reduce(used_here, "max").tolist()
        chosen = [each for each, is_used in zip(trained, used, strict=True) if is_used]
        for parameter in chosen:
            if grad_of(parameter) is None:
                set_grad(parameter, torch.zeros_like(parameter))
        grads = [grad for grad in map(grad_of, chosen) if grad is not None]
        for bucket in group_into_buckets(grads, self._config.bucket_cap_mb * 2**20):
            joined = torch.cat([grad.reshape(-1) for grad in bucket])
            if self._config.fp8_communication:
                total = all_reduce_fp8(joined, channel.group)
                num_bytes = 2 * fp8_nbytes(len(joined)) * (channel.size - 1) // channel.size
                count_collective("all_reduce", channel.axis, num_bytes)
            else:
                total = channel.all_reduce(joined)
            total.div_(replicas.size)
            for grad, mean in zip(bucket, total.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(mean.view_as(grad))


@final
class HybridExecutor:
    """Runs a batch through a pipeline, and then lets data-parallel ranks agree on gradients."""

    def __init__(
        self,
        run: PipelineExecutor,
        hold: Callable[[], AbstractContextManager[Any]],
        finish: Callable[[], None],
    ) -> None:
        self.run, self._hold, self._finish = run, hold, finish

    def __call__(
        self,
        data_iter: Iterator[Any],
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: OptimizerWrapper | None,
        return_loss: bool,
        return_outputs: bool,
    ) -> dict[str, Any]:
        """Run the next batch; see `PipelineExecutor`."""
        with self._hold():
            done = self.run(data_iter, criterion, optimizer, return_loss, return_outputs)
        if optimizer is not None and torch.is_grad_enabled():
            self._finish()
        return done
