# pyright: reportUnknownMemberType=false
"""What the link between each two devices costs, measured, and the grid that suits these links."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal, final

import torch
from torch import distributed as dist

from colossal._src.cluster import LinkOp, collective_cost_factors
from colossal._src.comm import Channel, gather_objects
from colossal._src.legacy.mesh.rank_grid import RankGrid, form_further_group, form_group
from colossal._src.legacy.notice import superseded
from colossal.accelerator import get_accelerator
from colossal.errors import ConfigError, MeshError

Pair = tuple[int, int]
_OPS: Mapping[str, LinkOp] = {"a": "all_reduce", "b": "broadcast"}
_SMALL, _LARGE = 4, 4 << 20  # bytes
_LEAST_BETA = 1e-15  # seconds for a byte: a link is never infinitely fast


@final
class AlphaBetaProfiler:
    """Measures the links between devices: a message of n bytes takes ``alpha + beta * n`` seconds.

    Superseded by `colossal.cluster.measure_link_cost`, which measures every operation along each axis of a mesh.

    Args:
        physical_devices: The global ranks; all of them must make it, and call its methods, together.
        alpha_beta_dict: What is known of each pair of ranks, in both orders; measured by default.
        ctype: What is timed: ``"a"`` for all-reduce, ``"b"`` for broadcast.
        warmup: Calls before any is timed.
        repeat: Calls of a large message that are timed.
        latency_iters: Calls of a small message that are timed.
        homogeneous_tolerance: How much slower than the fastest a link may be to count as equally fast, as a fraction.

    Attributes:
        alpha_beta_dict: For each pair of ranks, in both orders, its alpha in seconds and beta in seconds per byte.

    Raises:
        ConfigError: An option makes no sense, or a pair is missing in `alpha_beta_dict`.
        MeshError: There is one device only, or this rank is none of them.

    Communication: without `alpha_beta_dict`, all_reduce or broadcast between each pair of ranks, of 4 bytes and of a
    large message; all_gather of what was measured.

    Example:
        >>> from colossal.legacy.device import AlphaBetaProfiler
        >>> fast, slow = (1e-6, 1e-10), (1e-5, 1e-9)
        >>> links = {(a, b): fast if a // 2 == b // 2 else slow for a in range(4) for b in range(4) if a != b}
        >>> profiler = AlphaBetaProfiler([0, 1, 2, 3], links)
        >>> profiler.search_best_logical_mesh(), profiler.extract_alpha_beta_for_device_mesh()
        ([[0, 1], [2, 3]], ([1e-05, 1e-06], [1e-09, 1e-10]))
    """

    def __init__(
        self,
        physical_devices: Sequence[int],
        alpha_beta_dict: Mapping[Pair, tuple[float, float]] | None = None,
        ctype: Literal["a", "b"] = "a",
        warmup: int = 5,
        repeat: int = 25,
        latency_iters: int = 5,
        homogeneous_tolerance: float = 0.1,
    ) -> None:
        superseded("colossal.device.AlphaBetaProfiler", "measure_link_cost(mesh)")
        self.physical_devices = list(physical_devices)
        if ctype not in _OPS or warmup < 0 or min(repeat, latency_iters) < 1 or homogeneous_tolerance < 0:
            raise ConfigError(
                "Links are timed by all-reduce (ctype='a') or broadcast ('b'), once at least. Found "
                f"ctype={ctype!r}, {warmup=}, {repeat=}, {latency_iters=}, {homogeneous_tolerance=}. Change one."
            )
        if len(set(self.physical_devices)) < 2 or len(set(self.physical_devices)) < len(self.physical_devices):  # noqa: PLR2004
            raise MeshError(f"Links are between different devices. Found {self.physical_devices}. Pass at least two.")
        self.ctype, self.warmup, self.repeat = ctype, warmup, repeat
        self.latency_iters, self.homogeneous_tolerance = latency_iters, homogeneous_tolerance
        self.alpha_beta_dict = self.profile_ab() if alpha_beta_dict is None else dict(alpha_beta_dict)
        pairs = list(combinations(self.physical_devices, 2))
        if missing := [pair for pair in pairs if pair not in self.alpha_beta_dict]:
            raise ConfigError(
                f"alpha_beta_dict has every pair of {self.physical_devices}. Found none for {missing}. Measure them, "
                "or leave it out."
            )

    def profile_latency(self, process_group: Sequence[int], pg_handler: dist.ProcessGroup) -> float:
        """Measure how long a message of a few bytes takes.

        Args:
            process_group: The global ranks of the group.
            pg_handler: The group.

        Returns:
            Seconds of a message.

        Communication: the operation `warmup` and `latency_iters` times, of 4 bytes.
        """
        messages, _ = collective_cost_factors(_OPS[self.ctype], len(process_group))
        return self._time(process_group, pg_handler, _SMALL, self.latency_iters) / messages

    def profile_bandwidth(
        self, process_group: Sequence[int], pg_handler: dist.ProcessGroup, maxbytes: int = _LARGE
    ) -> float:
        """Measure how many bytes a second a large message has.

        Args:
            process_group: The global ranks of the group.
            pg_handler: The group.
            maxbytes: Bytes of the message.

        Returns:
            Bytes a second.

        Communication: the operation `warmup` and `repeat` times, of `maxbytes`.
        """
        _, fraction = collective_cost_factors(_OPS[self.ctype], len(process_group))
        return fraction * maxbytes / self._time(process_group, pg_handler, maxbytes, self.repeat)

    def profile_ab(self) -> dict[Pair, tuple[float, float]]:
        """Measure the link of each pair, one after the other.

        Returns:
            For each pair in both orders, alpha in seconds and beta in seconds per byte; the same on all ranks.

        Raises:
            MeshError: This rank is none of the devices.

        Communication: per pair that of `profile_latency` and `profile_bandwidth`; all_gather_object of the results.
        """
        if dist.get_rank() not in self.physical_devices:
            raise MeshError(
                f"The ranks that are measured do it. Found rank {dist.get_rank()} and {self.physical_devices}. Call on "
                "these ranks only."
            )
        everyone = form_group(self.physical_devices)
        found: dict[Pair, tuple[float, float]] = {}
        for pair in combinations(self.physical_devices, 2):
            measured: tuple[float, float] | None = None
            group = form_further_group(pair)
            if dist.get_rank() in pair:
                alpha = self.profile_latency(pair, group)
                messages, _ = collective_cost_factors(_OPS[self.ctype], len(pair))
                # What is left of a large message's time without its latency.
                beta = 1 / self.profile_bandwidth(pair, group) - messages * alpha / _LARGE
                measured = alpha, max(beta, _LEAST_BETA)
            # Gathered after each pair, so that no other pair sends meanwhile.
            results = [each for each in gather_objects(measured, [everyone]) if each is not None]
            slower = max(alpha for alpha, _ in results), max(beta for _, beta in results)
            first, second = pair
            found[first, second] = found[second, first] = slower
        return found

    def search_best_logical_mesh(self) -> list[list[int]]:
        """Arrange the devices so that fast links are along the last axis.

        Returns:
            The rows of the grid: groups whose links are equally fast, if all are of one size; otherwise, if all links
            are, a grid that is as square as possible; otherwise a single row.
        """
        groups = self._fast_groups()
        if len(groups) > 1 and len({len(group) for group in groups}) == 1:
            return groups
        if len(groups) > 1:
            return [self.physical_devices]
        number = len(self.physical_devices)
        rows = max(each for each in range(1, math.isqrt(number) + 1) if number % each == 0)
        return [self.physical_devices[row * number // rows :][: number // rows] for row in range(rows)]

    def extract_alpha_beta_for_device_mesh(self) -> tuple[list[float], list[float]]:
        """Find what the axes of the grid of `search_best_logical_mesh` cost.

        Returns:
            The alpha of each axis in seconds, and the beta in seconds per byte: those of its slowest link; 0 for an
            axis of one device.
        """
        rows = self.search_best_logical_mesh()
        columns = [list(column) for column in zip(*rows, strict=True)]
        alphas, betas = [], []
        for groups in (columns, rows):
            links = [self.alpha_beta_dict[pair] for group in groups for pair in combinations(group, 2)]
            alphas.append(max((alpha for alpha, _ in links), default=0.0))
            betas.append(max((beta for _, beta in links), default=0.0))
        return alphas, betas

    def _fast_groups(self) -> list[list[int]]:
        """Partition the devices into groups in which every link is about as fast as the fastest."""
        betas = {pair: self.alpha_beta_dict[pair][1] for pair in combinations(self.physical_devices, 2)}
        limit = min(betas.values()) * (1 + self.homogeneous_tolerance)
        groups: list[list[int]] = []
        for device in self.physical_devices:
            own_group = next((each for each in groups if all(betas[other, device] <= limit for other in each)), None)
            if own_group is None:
                groups.append([device])
            else:
                own_group.append(device)
        return groups

    def _time(self, ranks: Sequence[int], group: dist.ProcessGroup, num_bytes: int, count: int) -> float:
        """Return the typical seconds of a call."""
        accelerator = get_accelerator()
        tensor = torch.zeros(math.ceil(num_bytes / 4), device=accelerator.get_current_device())
        grid = RankGrid(torch.tensor(list(ranks), device="cpu"))
        grid.set_group("tp", group)
        channel = Channel("tp", grid.as_mesh())
        samples: list[float] = []
        for _ in range(self.warmup + count):
            accelerator.synchronize()
            started = time.perf_counter()
            if self.ctype == "a":
                channel.all_reduce(tensor)
            else:
                # From each in turn: a root alone does not wait for the others.
                for root in range(len(ranks)):
                    work = channel.start_broadcast(tensor, root)
                    if work is not None:
                        work.wait()
            accelerator.synchronize()
            samples.append((time.perf_counter() - started) / (1 if self.ctype == "a" else len(ranks)))
        return statistics.median(samples[self.warmup :])
