"""The plugin and the precision that a config calls for, and the boosting of a model and its optimizer by them."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast

from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossal._src._cached import cached_by_rank
from colossal._src.booster import Booster
from colossal._src.booster.mixed_precision import MixedPrecision
from colossal._src.booster.plugin import HybridParallelPlugin, Plugin, TorchDDPPlugin
from colossal._src.cluster import current_mesh
from colossal._src.interface import Criterion, OptimizerWrapper, check_known
from colossal._src.legacy.amp import AMP_TYPE, mixed_precision_from, split_clipping
from colossal._src.legacy.engine.config_entries import check_entries
from colossal._src.legacy.pipeline import stage_modules_of
from colossal._src.legacy.utils import sync_model_param
from colossal._src.legacy.zero import convert_to_zero_v2
from colossal.errors import ConfigError, UnsupportedError

_GRIDS = ("1d", "2d", "2.5d", "3d")
_REDUCED_INSIDE = ("ZeROGradientHandler",)


class StageArguments:
    """Makes the arguments of a stage as the schedule says that the engine has when it runs."""

    make: Callable[[Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]

    def __call__(self, stage_output: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.make(stage_output, batch)


class Features:
    """What a config says about training; without one, a single process in the precision of the model."""

    def __init__(self, config: Mapping[str, Any] | None = None, handlers: tuple[Any, ...] = ()) -> None:
        self._config = config or {}
        self._mesh = current_mesh() if config is not None and dist.is_initialized() else None
        self.handlers = handlers
        self.reduces_in_handlers = bool(handlers)
        self.stage_arguments = StageArguments()
        self.is_boosted = False
        self._check()

    @property
    def uses_pipeline(self) -> bool:
        """Whether the model is in stages."""
        return self._size("pp") > 1

    @property
    def num_microbatches(self) -> int | None:
        """Number of micro-batches of a batch; None without a pipeline."""
        return self._config.get("NUM_MICRO_BATCHES") if self.uses_pipeline else None

    @property
    def num_model_chunks(self) -> int:
        """Number of chunks of the model on each rank."""
        model = self._config.get("model")
        inner = cast("Mapping[str, Any]", model).get("num_chunks") if isinstance(model, Mapping) else None
        return self._config.get("NUM_CHUNKS") or inner or 1

    @property
    def max_norm(self) -> float:
        """The norm that gradients are clipped to; 0 does not clip."""
        norms = {norm for norm in (self._config.get("clip_grad_norm") or 0.0, self._fp16_and_norm()[1]) if norm}
        if len(norms) > 1:
            raise ConfigError(
                f"Gradients are clipped to one norm. Found {sorted(norms)}: of clip_grad_norm, and of fp16. Write it "
                "once."
            )
        return next(iter(norms), 0.0)

    @cached_by_rank
    def booster(self) -> Booster:
        """What boosts the model."""
        plugin, precision = self._plugin(), self._precision()
        mode = self._tensor_mode()
        # of a sequence, and in modes of the program's own, ranks of a replica may get different inputs
        checked = 2 if mode is None or mode in _GRIDS else 0
        return Booster(mixed_precision=None if self.uses_pipeline else precision, plugin=plugin, check_batches=checked)

    def boost(
        self, model: nn.Module, optimizer: Optimizer, criterion: Criterion | None
    ) -> tuple[nn.Module, OptimizerWrapper, Criterion | None]:
        """Make model and optimizer parallel.

        Communication: that of `Booster.boost`, and for gradient handlers broadcast, dp, the model's bytes.
        """
        zero = self._config.get("zero")
        if zero is not None:
            check_known("zero=dict(...)", dict(zero), ("model_config", "optimizer_config"))
            return (
                *convert_to_zero_v2(model, optimizer, zero.get("model_config"), zero.get("optimizer_config")),
                criterion,
            )
        if self.uses_pipeline:
            group = None if self._mesh is None else self._mesh.group("pp")
            model = stage_modules_of(model, self.stage_arguments, group)
        elif self.reduces_in_handlers and self._mesh is not None:
            sync_model_param(model)
        folds = self._mesh is not None and self._size("sp") > 1 and not self.uses_pipeline
        # these ranks have the same parameters, and average gradients as data-parallel ones do
        with self._mesh.fold_sp_into_dp() if folds and self._mesh is not None else nullcontext():
            boosted, wrapped, criterion, _, _ = self.booster.boost(model, optimizer, criterion)
        self.is_boosted = True
        return boosted, wrapped, criterion

    def _size(self, axis: Any) -> int:
        return 1 if self._mesh is None else self._mesh.size(axis)

    def _tensor_mode(self) -> str | None:
        parallel = self._config.get("parallel")
        tensor = cast("Mapping[str, Any]", parallel).get("tensor") if isinstance(parallel, Mapping) else None
        return cast("Mapping[str, Any]", tensor).get("mode") if isinstance(tensor, Mapping) else None

    def _plugin(self) -> Plugin | None:
        options = dict(self._config.get("torch_ddp") or {})
        if self.uses_pipeline:
            return self._pipeline_plugin(options)
        if self.reduces_in_handlers or self._size("dp") * self._size("sp") == 1:
            return None
        check_known("torch_ddp=dict(...)", options, tuple(inspect.signature(TorchDDPPlugin).parameters))
        return TorchDDPPlugin(**options)

    def _pipeline_plugin(self, options: dict[str, Any]) -> HybridParallelPlugin:
        if "bucket_cap_mb" in options:
            options["ddp_bucket_cap_mb"] = options.pop("bucket_cap_mb")
        # a broadcast before each micro-batch would change running means that earlier ones need in their backward pass
        options.setdefault("broadcast_buffers", False)
        naive = self._naive_options()
        return HybridParallelPlugin(
            tp_size=self._size("tp"),
            pp_size=self._size("pp"),
            sp_size=self._size("sp"),
            precision="fp32" if naive is None else "fp16",
            num_microbatches=self.num_microbatches,
            pp_style="interleaved" if self.num_model_chunks > 1 else "1f1b",
            num_model_chunks=self.num_model_chunks,
            **(naive or {}),
            **options,
        )

    def _naive_options(self) -> dict[str, Any] | None:
        """The options of the loss scale of a pipeline; None in the precision of the model."""
        fp16 = self._fp16()
        if not fp16:
            return None
        self._precision()  # which refuses what is unknown or outside its range
        options = {name: value for name, value in fp16.items() if name != "mode"}
        if options.pop("verbose", False) or options.pop("log_num_zeros_in_grad", False):
            raise UnsupportedError(
                "The loss scale of a pipeline is not logged. Found verbose or log_num_zeros_in_grad in fp16. Leave "
                "them out."
            )
        scale = options.setdefault("initial_scale", 2.0**32)
        if not options.pop("dynamic_grad_scale", True):
            options["min_scale"] = options["max_scale"] = scale
        if options.get("max_scale") is None:
            options["max_scale"] = float("inf")
        return options

    def _precision(self) -> MixedPrecision | None:
        options = self._fp16()
        return mixed_precision_from(options.pop("mode", None), options) if options else None

    def _fp16(self) -> dict[str, Any]:
        """The options of mixed precision; none without it, which ``fp16=dict(mode=None)`` says too."""
        return self._fp16_and_norm()[0]

    def _fp16_and_norm(self) -> tuple[dict[str, Any], float]:
        fp16 = dict(self._config.get("fp16") or {})
        return split_clipping(fp16.get("mode"), fp16) if fp16.get("mode", ...) is not None else ({}, 0.0)

    def _check(self) -> None:
        """Reject features that exclude each other, on all ranks."""
        check_entries(self._config)
        fp16, zero = self._fp16(), self._config.get("zero")
        if fp16 and zero is not None:
            raise ConfigError("ZeRO casts the model by itself. Found both fp16 and zero in the config. Leave fp16 out.")
        if zero is not None and self.uses_pipeline:
            raise UnsupportedError(
                "ZeRO of a config shards parameters, which the stages of a pipeline do not. Found zero and a pipeline "
                f"of {self._size('pp')} stages. Use HybridParallelPlugin(zero_stage=1, pp_size=...)."
            )
        if self.uses_pipeline and self._size("sp") > 1:
            raise UnsupportedError(
                "Stages of a config train on full sequences. Found a pipeline of "
                f"{self._size('pp')} stages next to sequences that are sharded over {self._size('sp')} ranks. Leave "
                "one of them out, or use HybridParallelPlugin(pp_size=..., sp_size=..., "
                "enable_sequence_parallelism=True) with a model of transformers."
            )
        if zero is not None and self._size("sp") > 1:
            raise UnsupportedError(
                "ZeRO of a config trains replicas. Found zero and mode='sequence'. Use HybridParallelPlugin("
                "zero_stage=1, sp_size=...)."
            )
        names = [str(handler.get("type")) for handler in self.handlers]
        if zero is not None and any(name not in _REDUCED_INSIDE for name in names):
            raise UnsupportedError(
                "ZeRO reduces gradients into shards during the backward pass, and leaves none to other handlers. Found "
                f"{', '.join(names)} next to zero. Leave gradient_handler out, or train without zero."
            )
        if self.uses_pipeline and fp16 and fp16.get("mode") is not AMP_TYPE.NAIVE:
            raise ConfigError(
                "A pipeline trains in float16 by AMP_TYPE.NAIVE only. Found "
                f"{fp16.get('mode')!r}. Write fp16=dict(mode=AMP_TYPE.NAIVE)."
            )
        if self.uses_pipeline and not isinstance(self.num_microbatches, int):
            raise ConfigError(
                "A pipeline takes a batch in micro-batches. Found no NUM_MICRO_BATCHES in the config. Write "
                f"NUM_MICRO_BATCHES={2 * self._size('pp')}, or another number that divides the batch."
            )
