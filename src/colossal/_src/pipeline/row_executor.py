"""Forward-only passes of rows of tokens through stages, which need no micro-batches of one shape, and no optimizer."""

from collections.abc import Sequence
from typing import Any, final

import torch

from colossal._src.cluster import ParallelMesh
from colossal._src.pipeline.p2p import make_links, peer_pairs
from colossal._src.pipeline.row_link import RowLink
from colossal._src.pipeline.schedule.stage_placement import StagePlacement
from colossal._src.pipeline.stage import Stage


@final
class RowExecutor:
    """Runs the stages of its rank: hidden states pass from stage to stage, and results to the ranks that want them.

    Sends do not wait. So a stage can compute the next rows while later ones still compute these.

    Args:
        stages: Those of this rank, in order.
        placement: Which rank has which stage.
        mesh: On whose pp axis they are.
        receivers: The indices on that axis of the ranks that want results; the same on all of its ranks.

    Attributes:
        mesh: On whose pp axis they are.
        has_results: Whether the last stage is here.
        wants_results: Whether this rank receives results of the last stage on another one.

    Communication: as of `make_links`.
    """

    def __init__(
        self, stages: Sequence[Stage], placement: StagePlacement, mesh: ParallelMesh, receivers: Sequence[int]
    ) -> None:
        self.mesh, self._rank = mesh, mesh.rank("pp")
        self._stages, self._placement = stages, placement
        source = placement.rank_of(placement.num_stages - 1)
        receivers = [each for each in receivers if each != source]
        pairs = {(min(each, source), max(each, source)) for each in receivers}
        links = make_links(mesh, pairs | set(peer_pairs(placement)))
        # two for each, as results have other features than hidden states
        self._hidden, self._results = ({rank: RowLink(link) for rank, link in links.items()} for _ in range(2))
        self._source, self._receivers = source, receivers
        self.has_results, self.wants_results = self._rank == source, self._rank in receivers

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Run all stages of this rank on tokens, (rows, length); return what the last stage does, elsewhere None.

        Communication: send, pp, of hidden states at each border between stages.
        """
        outputs = None
        for stage in self._stages:
            if not stage.is_first and (before := self._placement.rank_of(stage.index - 1)) != self._rank:
                outputs = self._hidden[before].receive(*input_ids.shape)
            outputs = stage(outputs, {"input_ids": input_ids, **arguments})
            if not stage.is_last and (behind := self._placement.rank_of(stage.index + 1)) != self._rank:
                self._hidden[behind].send(outputs)
        return outputs if self.has_results else None

    def send_results(self, rows: torch.Tensor) -> None:
        """Where the last stage is: let the others have results, (..., features).

        Communication: send, pp, the bytes of the rows, to each of them.
        """
        for receiver in self._receivers:
            self._results[receiver].send(rows)

    def receive_results(self, *sizes: int) -> torch.Tensor:
        """Wait for results; `sizes` are all sizes but the last."""
        return self._results[self._source].receive(*sizes)
