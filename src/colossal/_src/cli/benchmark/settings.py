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
    """The model and the measurement of ``colossal benchmark``."""

    ranks: int  # largest number of ranks
    batch_size: int  # samples in a batch, of all ranks together
    seq_len: int  # length of a sample
    hidden_dim: int  # width of a layer
    layers: int  # number of blocks of two linear layers
    dtype: str  # one of `DTYPES`
    device: str  # ``"cpu"``, or an accelerator such as ``"cuda"``
    warmup_steps: int  # steps before the measured ones
    profile_steps: int  # measured steps


@final
@dataclass(frozen=True)
class LinkSettings(_Plain):
    """The mesh and the measurement of ``colossal benchmark --collectives``."""

    shape: dict[str, int]  # the size of each axis, by its name
    ops: list[str]  # the operations
    sizes: list[int]  # bytes
    seconds: float  # how long to measure one operation with one size, about
    device: str  # ``"cpu"``, or an accelerator such as ``"cuda"``
    output: str  # the file to write

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `measure_link_cost` other than the mesh."""
        return {"ops": self.ops, "sizes": self.sizes, "seconds": self.seconds}
