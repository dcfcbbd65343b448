"""What ``colossal estimate`` is asked for: plain data."""

from dataclasses import dataclass
from typing import final

from colossal.errors import ConfigError, UnsupportedError

PLUGINS = ("ddp", "zero1", "zero2", "fsdp", "gemini", "hybrid")
PRECISIONS = ("fp32", "bf16", "fp16")


@final
@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """A training step."""

    plugin: str = "ddp"  # one of `PLUGINS`
    ranks: int = 1  # all ranks
    tp: int = 1  # ranks of each axis; data-parallel ranks are the rest
    pp: int = 1
    sp: int = 1
    zero_stage: int = 0  # of the plugin hybrid
    precision: str = "fp32"  # one of `PRECISIONS`
    batch_size: int | None = None  # samples of all ranks; None for one on each data-parallel rank
    num_microbatches: int | None = None  # of a pipeline; None for as many as a data-parallel rank has samples
    length: int | None = None  # tokens of a sample; None for 2048, or the most that the model takes
    offload: bool = False  # whether what the plugin can keep in host memory is there
    recompute: bool = False  # whether layers compute their activations again

    def __post_init__(self) -> None:
        split = {axis: getattr(self, axis) for axis in ("tp", "pp", "sp") if getattr(self, axis) > 1}
        allowed = {"hybrid": ("tp", "pp", "sp"), "gemini": ("tp",)}.get(self.plugin, ())
        if wrong := [axis for axis in split if axis not in allowed]:
            raise UnsupportedError(
                f"The plugin {self.plugin} splits {' and '.join(allowed) or 'nothing but the batch'}. Found "
                f"--{wrong[0]} {split[wrong[0]]}. Leave it out, or pass --plugin hybrid."
            )
        if self.zero_stage and self.plugin != "hybrid":
            raise UnsupportedError(
                f"--zero-stage belongs to the plugin hybrid. Found it with {self.plugin}. Leave it out, or pass "
                "--plugin zero1, --plugin zero2 or --plugin hybrid."
            )
        if self.ranks % (self.tp * self.pp * self.sp):
            raise ConfigError(
                f"--tp, --pp and --sp divide the ranks. Found {self.tp} x {self.pp} x {self.sp} for {self.ranks} "
                "ranks. Change one of them, or --ranks."
            )
        if self.batch_size is not None and self.batch_size % self.replicas:
            raise ConfigError(
                f"The data-parallel ranks divide a batch. Found --batch-size {self.batch_size} for {self.replicas} of "
                f"them. Pass a multiple of {self.replicas}."
            )
        if self.num_microbatches is not None and (self.pp == 1 or self.samples % self.num_microbatches):
            raise ConfigError(
                f"A pipeline splits the samples of a data-parallel rank into micro-batches. Found --num-microbatches "
                f"{self.num_microbatches} for {self.samples} and --pp {self.pp}. Pass a number that divides "
                f"{self.samples}, and --pp of at least 2, or leave it out."
            )
        if self.offload and not self.can_offload:
            raise UnsupportedError(
                f"The plugin {self.plugin} keeps everything on the device. Found --offload. Pass --plugin zero1, zero2,"
                " fsdp or gemini, or --plugin hybrid with a --zero-stage."
            )

    @property
    def replicas(self) -> int:
        """Ranks that see different samples."""
        return self.ranks // (self.tp * self.pp * self.sp)

    @property
    def samples(self) -> int:
        """Samples of a data-parallel rank, in a step."""
        return 1 if self.batch_size is None else self.batch_size // self.replicas

    @property
    def can_offload(self) -> bool:
        """Whether the plugin can keep something in host memory."""
        return self.plugin != "ddp" and (self.plugin != "hybrid" or self.zero_stage > 0)

    @property
    def stage_of_zero(self) -> int:
        """What is partitioned by ZeRO."""
        return {"zero1": 1, "zero2": 2, "gemini": 2}.get(self.plugin, self.zero_stage)
