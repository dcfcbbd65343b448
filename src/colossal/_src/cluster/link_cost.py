"""What it costs to send bytes along an axis of the mesh.

The model has two numbers for a link: a message of n bytes takes ``alpha + beta * n`` seconds. A collective among p
ranks takes a number of messages in a row that depends on its algorithm:

==============  =================  =======================  ================================================
operation       messages in a row  bytes in a row           algorithm
==============  =================  =======================  ================================================
all_reduce      2 (p - 1)          2 (p - 1) / p n          ring: reduce-scatter, then all-gather
all_gather      p - 1              (p - 1) / p n            ring
reduce_scatter  p - 1              (p - 1) / p n            ring
all_to_all      p - 1              (p - 1) / p n            pairwise exchange
broadcast       ceil(log2 p)       ceil(log2 p) n           binomial tree
p2p             1                  n                        one message
==============  =================  =======================  ================================================

n is the size of the full tensor: the one that all-gather returns on each rank, that reduce-scatter takes, that the
others take and return.

Source: Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994 (the model); Thakur, Rabenseifner,
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 (the algorithms); Patarasuk, Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (the ring).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast, final, get_args

import numpy as np

from colossal._src.cluster.axes import AXES, Axis
from colossal.errors import ConfigError, MeshError

LinkOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]


"""The operations that have a cost."""


LINK_OPS: tuple[LinkOp, ...] = get_args(LinkOp)


"""The names of all operations that have a cost."""


ENVIRONMENT_VARIABLE = "COLOSSAL_LINK_COST"


FORMAT, FORMAT_VERSION = "colossal.link_cost", 1


@final
@dataclass(frozen=True)
class Link:
    """A link between ranks, as one operation sees it.

    Args:
        alpha: Seconds that a message takes however short it is.
        beta: Seconds that each byte adds.
        error: The median relative deviation of the model from the measured times.
        timings: Pairs of bytes and seconds, what was measured.

    Raises:
        ConfigError: A number is negative or not finite.

    Example:
        >>> from colossal.cluster import Link
        >>> link = Link(alpha=2e-6, beta=1e-9)
        >>> round(1e6 * (link.alpha + 8000 * link.beta))  # microseconds for a message of 8000 bytes
        10
    """

    alpha: float
    beta: float
    error: float = 0.0
    timings: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "error"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(
                    f"A link's {name} is a number, at least 0 and finite. Found {value!r}. Measure it again."
                )


@final
@dataclass(frozen=True)
class AxisCost:
    """The links along one axis of the mesh.

    Args:
        size: Number of ranks on the axis when it was measured.
        link: The link that explains all operations best.
        ops: The link as each measured operation sees it, by the operation's name: implementations differ.

    Raises:
        ConfigError: The size is less than 2, or an operation is unknown.

    Example:
        >>> from colossal.cluster import AxisCost, Link
        >>> AxisCost(2, Link(1e-5, 1e-9)).size
        2
    """

    size: int
    link: Link
    ops: Mapping[LinkOp, Link] = field(default_factory=dict[LinkOp, Link])

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 2:  # noqa: PLR2004 (one rank sends nothing)  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"An axis has a cost from 2 ranks on. Found {self.size!r}. Leave it out.")
        for op in self.ops:
            _check_op(op)


@final
@dataclass(frozen=True)
class LinkOrigin:
    """Where links were measured.

    Args:
        hosts: Names of the hosts.
        backend: Communication backend.
        device: ``"cpu"`` or ``"cuda"``.
        world_size: Number of ranks.
        torch: Version of torch.
        measured_at: Date and time, in UTC.

    Example:
        >>> from colossal.cluster import LinkOrigin
        >>> LinkOrigin(("node0",), "gloo", "cpu", 4, "2.13.0", "2026-01-01T00:00:00+00:00").hosts
        ('node0',)
    """

    hosts: tuple[str, ...]
    backend: str
    device: str
    world_size: int
    torch: str
    measured_at: str


@final
@dataclass(frozen=True)
class LinkCost:
    """What it costs to send bytes along the axes of a mesh: measured, or assumed.

    ``colossal benchmark --collectives`` measures it and writes a file; a mesh reads that file.

    Args:
        axes: The axes that were measured, by their names.
        origin: Where; None if the numbers are assumed.

    Raises:
        ConfigError: There is no such axis.

    Source: Hockney 1994; Thakur, Rabenseifner, Gropp 2005.

    Example:
        >>> from colossal.cluster import AxisCost, Link, LinkCost
        >>> costs = LinkCost({"tp": AxisCost(size=4, link=Link(alpha=1e-5, beta=1e-9))})
        >>> seconds = costs.seconds("all_reduce", "tp", num_bytes=1_000_000)
        >>> round(1e6 * seconds)  # 6 messages of 10 microseconds, 1.5 MB of 1 nanosecond a byte
        1560
    """

    axes: Mapping[Axis, AxisCost]
    origin: LinkOrigin | None = None

    def __post_init__(self) -> None:
        for axis in self.axes:
            if axis not in AXES:
                raise ConfigError(f"The axes of a mesh are {', '.join(AXES)}. Found {axis!r}. Measure again.")

    def seconds(self, op: LinkOp, axis: Axis, num_bytes: float, size: int | None = None) -> float:
        """Predict how long an operation takes.

        Args:
            op: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"`` or
                ``"p2p"``.
            axis: The axis along which it runs.
            num_bytes: Size of the full tensor, whatever part of it a rank sends.
            size: Number of ranks on the axis; by default as many as were measured.

        Returns:
            Seconds; 0 for one rank.

        Raises:
            ConfigError: There is no such operation, or the number of bytes is negative.
            MeshError: The axis was not measured.
        """
        _check_op(op)
        if num_bytes < 0:
            raise ConfigError(f"A tensor has 0 bytes or more. Found num_bytes={num_bytes}. Pass its size.")
        if size == 1:
            return 0.0
        if axis not in self.axes:
            raise MeshError(
                f"The cost of an axis must be measured before it is asked for. Found {', '.join(self.axes) or 'none'}, "
                f"and not {axis!r}. Measure it: colossal benchmark --collectives --{axis} <size>"
            )
        measured = self.axes[axis]
        link = measured.ops.get(op, measured.link)
        messages, fraction = collective_cost_factors(op, measured.size if size is None else size)
        return link.alpha * messages + link.beta * fraction * num_bytes

    def save(self, path: str | Path) -> None:
        """Write a file that `load` reads, atomically.

        Args:
            path: The file; its folder must exist.

        Raises:
            ConfigError: The file cannot be written.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        content = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(content, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"The costs of links are written to a file. Found that {target} cannot be written: {error.strerror}. "
                "Name a file in a folder that exists and may be written to."
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Args:
            path: The file.

        Returns:
            The costs.

        Raises:
            ConfigError: The file is missing, or is not such a file.
        """
        try:
            return cls(**_parse(json.loads(Path(path).read_text(encoding="utf-8"))))
        except OSError as error:
            reason = error.strerror
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"The costs of links are read from a file of colossal benchmark --collectives. Found {path}: {reason} "
            "Measure again, or name another file."
        )


def collective_cost_factors(op: LinkOp, size: int) -> tuple[float, float]:
    """Return how many successive messages an operation among `size` ranks takes, and which fraction of the bytes."""
    ring = float(size - 1)
    tree = float(math.ceil(math.log2(size)))
    return {
        "all_reduce": (2 * ring, 2 * ring / size),
        "broadcast": (tree, tree),
        "p2p": (1.0, 1.0) if size > 1 else (0.0, 0.0),
    }.get(op, (ring, ring / size))


def link_cost_from_environment() -> LinkCost | None:
    """Read the file that the environment variable names; None without one."""
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    return LinkCost.load(path) if path else None


def _parse(content: Any) -> dict[str, Any]:
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    if fields.get("format") != FORMAT:
        raise ValueError("it holds something else.")
    if fields.get("version") != FORMAT_VERSION:
        raise ValueError(f"its version is {fields.get('version')!r}, this library reads {FORMAT_VERSION}.")
    axes = {
        axis: AxisCost(part["size"], _link(part["link"]), {op: _link(link) for op, link in part["ops"].items()})
        for axis, part in fields["axes"].items()
    }
    origin = fields["origin"]
    return {"axes": axes, "origin": origin and LinkOrigin(**_origin(origin))}


def _origin(part: Mapping[str, Any]) -> dict[str, Any]:
    return {**part, "hosts": tuple(part["hosts"])}


def _link(part: Mapping[str, Any]) -> Link:
    timings = tuple((num_bytes, seconds) for num_bytes, seconds in part["timings"])
    return Link(part["alpha"], part["beta"], part["error"], timings)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_op(op: str) -> None:
    if op not in LINK_OPS:
        raise ConfigError(f"An operation is one of {', '.join(LINK_OPS)}. Found {op!r}. Pass one of them.")


Timings = Sequence[tuple[int, float]]

# [Note: a fit that outliers cannot bend]
# Times range over four decades, and a scheduler now and then stops a rank for milliseconds, never the other way round.
# So each size is measured often and the lower quartile of its times counts, which holds although three of four are
# disturbed. The line through these points minimizes the sum of *relative* deviations, which neither the largest size
# nor one odd size can dominate. At the minimum of such a sum the line passes through two of the points, or through one
# of them and the origin of an axis, so that trying all of these finds it exactly.


def typical(samples: Sequence[float]) -> float:
    """Return what undisturbed measurements take: the lower quartile of all."""
    return float(np.quantile(np.asarray(samples), 0.25))


def fit_axis(size: int, timings: Mapping[LinkOp, Timings]) -> AxisCost:
    """Fit the links of one axis."""
    ops: dict[LinkOp, Link] = {
        op: fit_link([_point(op, size, pair) for pair in pairs], pairs) for op, pairs in timings.items()
    }
    together = [_point(op, size, pair) for op, pairs in timings.items() for pair in pairs]
    return AxisCost(size, fit_link(together), ops)


def fit_link(points: Iterable[tuple[float, float, float]], timings: Timings = ()) -> Link:
    """Find the alpha and beta, neither negative, that predict times best."""
    table = np.array(list(points), dtype=np.float64)
    design, seconds = table[:, :2], table[:, 2]
    candidates = _candidates(design, seconds)
    deviations = np.abs(candidates @ design.T / seconds - 1)
    best = int(deviations.sum(axis=1).argmin())
    alpha, beta = candidates[best]
    return Link(float(alpha), float(beta), float(np.median(deviations[best])), tuple(timings))


def _candidates(design: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Every (alpha, beta) that meets two points, or one point with the other number 0."""
    # A sum of absolute deviations is smallest where two of them are zero, or one at a bound.
    first, second = np.triu_indices(len(seconds), 1)
    determinants = design[first, 0] * design[second, 1] - design[second, 0] * design[first, 1]
    first, second, determinants = (part[determinants != 0] for part in (first, second, determinants))
    alphas = (seconds[first] * design[second, 1] - seconds[second] * design[first, 1]) / determinants
    betas = (design[first, 0] * seconds[second] - design[second, 0] * seconds[first]) / determinants
    both = np.stack([alphas, betas], axis=1)
    zero = np.zeros(len(seconds))
    only_alpha = np.stack([seconds / design[:, 0], zero], axis=1)
    only_beta = np.stack([zero, seconds / design[:, 1]], axis=1)
    return np.concatenate([both[(both >= 0).all(axis=1)], only_alpha, only_beta])


def _point(op: LinkOp, size: int, pair: tuple[int, float]) -> tuple[float, float, float]:
    num_bytes, seconds = pair
    messages, fraction = collective_cost_factors(op, size)
    return messages, fraction * num_bytes, seconds
