"""What the ranks do that neither schedule nor sample: compute what the messages of the first rank say."""

from typing import TYPE_CHECKING

from colossal._src.inference.peers import Message, Peers, failure_of
from colossal._src.inference.requests import RequestOutput
from colossal._src.inference.step_record import StepRecord
from colossal.errors import ConfigError

if TYPE_CHECKING:
    from colossal._src.inference.runner import ModelRunner


def follow(peers: Peers, runner: "ModelRunner") -> None:
    """Compute until the first rank takes no more requests; what it generates for is up to that one."""
    while True:
        kind, values = peers.receive()
        if kind is Message.END:
            return
        if kind is Message.FAILURE:
            raise failure_of(values)
        if kind is Message.GENERATE:
            peers.check_prompts(None)
        elif kind is Message.OUTPUTS:
            peers.share(None)
        elif kind is Message.LOGITS:
            runner.prompt_logits(values.tolist())
        else:
            runner.run(StepRecord.from_integers(values))


def follow_generate(peers: Peers, runner: "ModelRunner", requests: str) -> list[RequestOutput]:
    """Compute until the first rank has generated for prompts that this one has too."""
    kind, values = peers.receive()
    if kind is not Message.GENERATE:
        raise ConfigError(
            f"All ranks that shard a model call generate. Found that the first one called something else ({kind.name})."
            " Call generate on all ranks, or follow on those behind the first."
        )
    peers.check_prompts(requests)
    while True:
        kind, values = peers.receive()
        if kind is Message.FAILURE:
            raise failure_of(values)
        if kind is Message.OUTPUTS:
            return peers.share(None)
        runner.run(StepRecord.from_integers(values))
