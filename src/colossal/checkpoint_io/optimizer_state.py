"""The state of an optimizer under the names of its parameters, so that their order may change between runs."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch.optim import Optimizer

from colossal.checkpoint_io.naming import listing
from colossal.checkpoint_io.shards import Unit
from colossal.errors import CheckpointError
from colossal.interface import OptimizerWrapper

ParamId = int | str


@final
class OptimizerState:
    """The state of an optimizer by parameter.

    A parameter is known by its name if the wrapper or the parameter groups say it, else by its position among all
    parameters of the optimizer, as in torch.

    Args:
        optimizer: A torch optimizer, boosted or not.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(2, 1)
        >>> OptimizerState(torch.optim.SGD(linear.named_parameters(), lr=0.1)).ids
        ['weight', 'bias']
    """

    def __init__(self, optimizer: Optimizer | OptimizerWrapper) -> None:
        names: Mapping[torch.nn.Parameter, str] = {}
        scaler = None
        if isinstance(optimizer, OptimizerWrapper):
            optimizer, scaler, names = optimizer.unwrap(), optimizer.scaler, optimizer.param_names
        self._optim, self._scaler = optimizer, scaler
        self._params = _identify(self._optim, names)
        remaining = iter(self._params)
        self._groups: list[list[ParamId]] = [
            list(islice(remaining, len(group["params"]))) for group in self._optim.param_groups
        ]

    @property
    def ids(self) -> list[ParamId]:
        """Name or position of every parameter, in the optimizer's order."""
        return list(self._params)

    def units(self) -> list[Unit]:
        """Return the state of each parameter that has one."""
        state = self._optim.state_dict()["state"]
        by_id = {id_: state[position] for position, id_ in enumerate(self.ids) if position in state}
        return [Unit({id_: entry}, sum(tensor.nbytes for tensor in _tensors(entry))) for id_, entry in by_id.items()]

    def header(self) -> dict[str, Any]:
        """Return everything but the state of the parameters: groups, shapes of the parameters, loss scaler."""
        groups = self._optim.state_dict()["param_groups"]
        return {
            "param_groups": [
                {key: value for key, value in group.items() if key != "param_names"} | {"params": ids}
                for group, ids in zip(groups, self._groups, strict=True)
            ],
            "param_shapes": {id_: list(parameter.shape) for id_, parameter in self._params.items()},
            "scaler": {} if self._scaler is None else self._scaler.state_dict(),
        }

    def prepare(self, header: Mapping[str, Any], state: Mapping[Any, Any], source: object) -> Callable[[], None]:
        """Check what `header` and `units` returned, and match it by name; a saved position stands for itself.

        Args:
            header: The groups, and what else `header` returned if it is there.
            state: State of each parameter, by its saved id.
            source: Where the checkpoint is, for the message.

        Returns:
            What changes the optimizer.

        Raises:
            CheckpointError: The groups are not of the same parameters, or shapes differ.
        """
        groups = _valid_groups(header, source)
        saved = self._saved_ids(groups)
        self._check_shapes(header.get("param_shapes", {}), saved, source)
        positions = {id_: position for position, id_ in enumerate(self.ids)}
        content = {
            "state": {positions[id_]: state[saved[id_]] for id_ in self.ids if saved[id_] in state},
            "param_groups": [
                self._restored_group(number, self._matching_group(ids, groups, saved, source), positions)
                for number, ids in enumerate(self._groups)
            ],
        }
        return lambda: self._restore(content, dict(header.get("scaler", {})))

    def _restore(self, content: dict[str, Any], scaler: dict[str, Any]) -> None:
        self._optim.load_state_dict(content)
        for entry in self._optim.state.values():
            entry.update(_own(entry))
        if self._scaler is not None:
            self._scaler.load_state_dict(scaler)

    def _saved_ids(self, groups: list[dict[str, Any]]) -> dict[ParamId, ParamId]:
        """Return, for each parameter, the id under which it was saved: its name if that is there, else its position."""
        saved = {id_ for group in groups for id_ in group["params"]}
        return {id_: id_ if id_ in saved else position for position, id_ in enumerate(self.ids)}

    def _check_shapes(self, shapes: Mapping[Any, Any], saved: dict[ParamId, ParamId], source: object) -> None:
        wrong = [
            f"{id_} (file {list(shapes[saved[id_]])}, model {list(parameter.shape)})"
            for id_, parameter in self._params.items()
            if list(shapes.get(saved[id_], parameter.shape)) != list(parameter.shape)
        ]
        if wrong:
            raise CheckpointError(
                f"Loading needs an optimizer of the same parameters. Found in {source} other shapes for "
                f"{len(wrong)} of them: {listing(wrong)}. Nothing was loaded. Build the model that was saved."
            )

    def _matching_group(
        self, ids: list[ParamId], groups: list[dict[str, Any]], saved: dict[ParamId, ParamId], source: object
    ) -> dict[str, Any]:
        """Return the saved group of the same parameters; their order, and that of the groups, may differ."""
        wanted = {saved[id_] for id_ in ids}
        for group in groups:
            if set(group["params"]) == wanted and len(groups) == len(self._groups):
                return group
        known = {id_ for group in groups for id_ in group["params"]}
        absent = listing(id_ for id_ in ids if saved[id_] not in known) or "none"
        foreign = listing(sorted(known - set(saved.values()), key=str)) or "none"
        raise CheckpointError(
            f"Loading needs {len(self._groups)} parameter groups of the same parameters. Found in {source} "
            f"{len(groups)} groups of {[len(group['params']) for group in groups]} parameters, none of which is "
            f"the group of {listing(ids)}; not in the file at all: {absent}; only in the file: {foreign}. "
            "Nothing was loaded. Split the parameters as for saving."
        )

    def _restored_group(self, number: int, group: dict[str, Any], positions: Mapping[ParamId, int]) -> dict[str, Any]:
        """Return a saved group as torch takes it for the optimizer's group `number`."""
        restored = {**group, "params": [positions[id_] for id_ in self._groups[number]]}
        restored.pop("param_names", None)
        own = self._optim.param_groups[number]
        return restored | ({"param_names": own["param_names"]} if "param_names" in own else {})


def _identify(optim: Optimizer, names: Mapping[torch.nn.Parameter, str]) -> dict[ParamId, torch.nn.Parameter]:
    """Return the parameters in order, under their names; under their positions where a name is unknown or shared."""
    params = [parameter for group in optim.param_groups for parameter in group["params"]]
    known = [
        names.get(parameter) or own_name
        for group in optim.param_groups
        for parameter, own_name in zip(
            group["params"], group.get("param_names") or [None] * len(group["params"]), strict=True
        )
    ]
    uses = Counter(known)
    return {
        name if name and uses[name] == 1 else position: parameter
        for position, (name, parameter) in enumerate(zip(known, params, strict=True))
    }


def _valid_groups(header: Mapping[str, Any], source: object) -> list[dict[str, Any]]:
    groups = header.get("param_groups")
    if isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups):
        return groups
    raise CheckpointError(
        f"Loading an optimizer needs its parameter groups. Found none in {source}, which holds {listing(header)}. "
        "Pass a checkpoint that save_optimizer wrote; a model is loaded by load_model."
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


def _own(value: Any) -> Any:
    """Copy tensors on the CPU, which may lie in a mapped file, inside nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.device.type == "cpu" else value
    if isinstance(value, dict):
        return {key: _own(inner) for key, inner in value.items()}
    return [_own(inner) for inner in value] if isinstance(value, list) else value
