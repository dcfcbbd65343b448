"""What a plugin that supports LoRA hands out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from colossal._src.booster.lora.adapter_directory import (
    adapter_weights_path,
    check_same_adapters,
    read_adapter_config,
)
from colossal._src.booster.lora.adapter_injection import inject_adapters, require_peft, restore_on_error
from colossal._src.checkpoint_io import (
    CheckpointGroup,
    CheckpointIO,
    adapter_tree,
    full_path,
)
from colossal._src.cluster import Axis, ParallelMesh, current_mesh
from colossal._src.comm import Channel
from colossal._src.interface import ModelWrapper, is_peft_model, unwrap_compiled
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

# [Note: the random generator of the first rank]
# The initial values of adapters are random. Ranks with different seeds would start from different adapters; shards of
# these form an adapter that no seed gives, without an error. With the random generator of the first rank, any number
# of ranks starts where one process with that seed starts. Afterwards each rank restores its own generator.


@contextmanager
def rng_of_first_rank(axes: Sequence[Axis], device: torch.device, mesh: ParallelMesh | None = None) -> Iterator[None]:
    """Give all ranks along some axes the state of the first rank's random generators."""
    if not axes:
        yield
        return
    accelerator = get_accelerator(device.type)
    states = {torch.set_rng_state: torch.get_rng_state(), accelerator.set_rng_state: accelerator.get_rng_state()}
    local_states = {restore: state for restore, state in states.items() if state is not None}
    # the broadcast overwrites it, and this rank's own state is needed afterwards
    first = [state.clone() for state in local_states.values()]
    for axis in axes:
        Channel(axis, mesh or current_mesh()).broadcast(first)
    for restore, state in zip(local_states, first, strict=True):
        restore(state)
    try:
        yield
    finally:
        for (restore, mine), theirs in zip(local_states.items(), first, strict=True):
            # ranks that had the state of the first go on where the adapters left it, as one process does
            if not torch.equal(mine, theirs):
                restore(mine)


@final
class Lora:
    """Adds low-rank adapters to a model, and saves them for peft.

    The frozen weights stay as they are; next to each chosen layer, two low-rank matrices are trained instead.
    They start from the same values on all ranks: every rank draws them from the random generator of the first one.

    Args:
        writers: Who writes the files and how the ranks agree.
        axes: The axes of the mesh whose ranks start from the same adapters; none for a single process.
        quantizer: Takes the model, the device and the configuration, and stores the frozen weights in few bits, in
            place; None where the plugin cannot train next to such weights.
        mesh: The mesh; the ambient one by default.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, https://arxiv.org/abs/2106.09685.

    Example:
        >>> import torch
        >>> from peft import LoraConfig
        >>> from colossal.booster import Lora
        >>> from colossal.checkpoint_io import SingleProcessIO
        >>> net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 2))
        >>> config = LoraConfig(r=2, target_modules=["0"])
        >>> model = Lora(SingleProcessIO()).enable(net, torch.device("cpu"), lora_config=config)
        >>> sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)[0]
        'base_model.model.0.lora_A.default.weight'
    """

    def __init__(
        self,
        writers: CheckpointGroup,
        axes: Sequence[Axis] = (),
        quantizer: Callable[[nn.Module, torch.device, Any], None] | None = None,
        mesh: ParallelMesh | None = None,
    ) -> None:
        self._writers = writers
        self._axes, self._mesh = axes, mesh
        self._quantizer = quantizer
        self._io = CheckpointIO(writers)

    def enable(
        self,
        model: nn.Module,
        device: torch.device,
        pretrained_dir: str | Path | None = None,
        lora_config: "LoraConfig | None" = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> "PeftModel":
        """Freeze a model and add adapters to it, in place.

        Args:
            model: The model, before it is boosted.
            device: Where the model will be trained.
            pretrained_dir: A directory with adapters to continue from, instead of `lora_config`, which may repeat their
                configuration.
            lora_config: Which layers get new adapters, and of which rank.
            bnb_quantization_config: How to quantize the frozen weights; 4 bits by default.
            quantize: Quantize the frozen weights.

        Returns:
            The model inside of a `peft.PeftModel`.

        Raises:
            ConfigError: The arguments contradict each other, the model is boosted or has adapters already, or
                `lora_config` names layers that it does not have. The model is as it was then.
            CheckpointError: `pretrained_dir` holds no adapters, or those of another model; on all ranks. The
                model is as it was then.
            UnsupportedError: peft is not installed, or the weights cannot be quantized here.

        Communication: broadcast, the axes, 5 KB: the state of the random generator; and all_gather_object, a few bytes,
        twice or more: all learn whether it succeeded.
        """
        require_peft()
        self._check(model, pretrained_dir, lora_config, bnb_quantization_config, quantize)
        config = self._writers.read(lambda: self._config(pretrained_dir, lora_config))
        with restore_on_error(model):
            if quantize:
                self._quantize(model, device, bnb_quantization_config)
            with rng_of_first_rank(self._axes, device, self._mesh):
                adapted = self._writers.read(lambda: inject_adapters(model, config))
            if pretrained_dir is not None:
                weights = self._writers.read(lambda: adapter_weights_path(full_path(pretrained_dir)))
                self._io.load_model(adapter_tree(adapted), weights)
        return adapted

    def save(self, model: nn.Module, checkpoint: str | Path, use_safetensors: bool = False) -> None:
        """Write the adapters of a model into a directory that peft loads.

        Args:
            model: The model, boosted or not.
            checkpoint: The directory; it is created. Adapters that are there already are replaced.
            use_safetensors: Write safetensors rather than PyTorch's own format.

        Raises:
            ConfigError: The model has no adapters.
            CheckpointError: A file cannot be written; on all ranks.
            UnsupportedError: peft is not installed, or safetensors is asked for and not installed.

        Communication: that of `CheckpointIO.save_model` with the adapters alone, and twice all_gather_object, a few
        bytes.
        """
        require_peft()
        self._io.save_lora_as_pretrained(model, checkpoint, use_safetensors)

    def _check(
        self, model: nn.Module, pretrained_dir: object, lora_config: object, bnb_config: object, quantize: bool
    ) -> None:
        from peft import LoraConfig

        is_boosted = isinstance(unwrap_compiled(model), ModelWrapper)
        if is_boosted or is_peft_model(model):
            state = "is boosted" if is_boosted else "has adapters"
            raise ConfigError(
                f"enable_lora takes a plain model, before boost. Found one that {state} already. "
                "Call enable_lora once, on the model that you built, and boost what it returns."
            )
        if pretrained_dir is None and lora_config is None:
            raise ConfigError(
                "enable_lora needs lora_config for new adapters, or pretrained_dir to continue from saved ones. "
                "Found neither. Pass one: saved adapters bring their own configuration."
            )
        if lora_config is not None and not isinstance(lora_config, LoraConfig):
            raise ConfigError(
                f"lora_config is a peft.LoraConfig. Found {type(lora_config).__name__}. Pass for example "
                "peft.LoraConfig(r=8, target_modules=['q_proj', 'v_proj'])."
            )
        if bnb_config is not None and not quantize:
            raise ConfigError(
                "bnb_quantization_config says how to quantize, which quantize=True asks for. Found it with "
                "quantize=False. Pass quantize=True, or leave the configuration out."
            )

    def _config(self, pretrained_dir: str | Path | None, lora_config: "LoraConfig | None") -> "LoraConfig":
        if pretrained_dir is None:
            assert lora_config is not None
            return lora_config
        saved = read_adapter_config(full_path(pretrained_dir))
        if lora_config is not None:
            check_same_adapters(saved, lora_config)
        return saved

    def _quantize(self, model: nn.Module, device: torch.device, config: Any) -> None:
        if self._quantizer is None:
            raise UnsupportedError(
                "Quantized weights have to stay unsharded on each rank. Found quantize=True under a plugin that shards "
                "them. Pass quantize=False, or use TorchDDPPlugin, LowLevelZeroPlugin, or GeminiPlugin or "
                "HybridParallelPlugin without tensor and pipeline parallelism."
            )
        self._quantizer(model, device, config)
