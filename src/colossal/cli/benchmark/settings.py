"""What a benchmark was asked to do: plain data, which the ranks get as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self, final

DTYPES = ("float32", "bfloat16", "float16")


class _Plain:
    """A dataclass of numbers and texts."""

    def as_word(self) -> str:
        """Write it as one word of a command line."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def of_word(cls, word: str) -> Self:
        """Read what `as_word` wrote."""
        return cls(**json.loads(word))


@final
@dataclass(frozen=True)
class Settings(_Plain):
    """The model and the measurement of ``colossal benchmark``.

    Attributes:
        ranks: Largest number of ranks.
        batch_size: Samples in a batch, of all ranks together.
        seq_len: Length of a sample.
        hidden_dim: Width of a layer.
        layers: Number of blocks of two linear layers.
        dtype: One of `DTYPES`.
        device: ``"cpu"``, or an accelerator such as ``"cuda"``.
        warmup_steps: Steps before the measured ones.
        profile_steps: Measured steps.
    """

    ranks: int
    batch_size: int
    seq_len: int
    hidden_dim: int
    layers: int
    dtype: str
    device: str
    warmup_steps: int
    profile_steps: int


@final
@dataclass(frozen=True)
class LinkSettings(_Plain):
    """The mesh and the measurement of ``colossal benchmark --collectives``.

    Attributes:
        shape: The size of each axis, by its name.
        ops: The operations.
        sizes: Bytes.
        seconds: How long to measure one operation with one size, about.
        device: ``"cpu"``, or an accelerator such as ``"cuda"``.
        output: The file to write.
    """

    shape: dict[str, int]
    ops: list[str]
    sizes: list[int]
    seconds: float
    device: str
    output: str

    def arguments(self) -> dict[str, Any]:
        """Return what `measure_link_cost` takes beside the mesh."""
        return {"ops": self.ops, "sizes": self.sizes, "seconds": self.seconds}
