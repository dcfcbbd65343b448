"""Policies as users wrote them for the older ShardFormer, read into the plans of today."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from colossal._src.cluster import ParallelMesh, current_mesh
from colossal._src.legacy.notice import superseded
from colossal._src.nn.layer import (
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelClassifier,
    VocabParallelEmbedding,
)
from colossal._src.shardformer import Conv1DCol, Conv1DRow, ShardConfig
from colossal._src.tensor import ParallelPlan, base_model_of
from colossal.errors import PlanError

_STYLES: dict[Any, str] = {
    Linear1D_Col: "colwise",
    Linear1D_Row: "rowwise",
    Conv1DCol: "colwise",
    Conv1DRow: "rowwise",
    VocabParallelEmbedding: "vocab",
    VocabParallelClassifier: "lm_head",
}
_PACKED = {2: "packed_colwise(2)", 3: "packed_colwise(3)"}


@final
@dataclass
class SubModuleReplacementDescription:
    """A module that a parallel one replaces.

    Args:
        suffix: Its name within the module that the description belongs to.
        target_module: The class of the parallel module, of `colossal.shardformer.layer`.
        kwargs: What it is built with in addition.
        ignore_if_not_exist: Whether the module may be missing.

    Example:
        >>> from colossal.legacy.shardformer import SubModuleReplacementDescription
        >>> from colossal.nn import Linear1D_Col
        >>> SubModuleReplacementDescription("query", Linear1D_Col).ignore_if_not_exist
        False
    """

    suffix: str
    target_module: Any
    kwargs: Mapping[str, Any] | None = None
    ignore_if_not_exist: bool = False


@final
@dataclass
class ModulePolicyDescription:
    """What becomes of the modules of one class.

    Args:
        attribute_replacement: Attributes, by names that may have dots, and their values on a rank.
        param_replacement: Functions that change the module's own parameters; there is no counterpart.
        sub_module_replacement: The modules in it that are replaced.
        method_replacement: Methods of the module; there is no counterpart.

    Example:
        >>> from colossal.legacy.shardformer import ModulePolicyDescription
        >>> ModulePolicyDescription(attribute_replacement={"num_heads": 4}).sub_module_replacement
        []
    """

    attribute_replacement: Mapping[str, Any] = field(default_factory=dict[str, Any])
    param_replacement: Sequence[Callable[..., Any]] = field(default_factory=list[Callable[..., Any]])
    sub_module_replacement: Sequence[SubModuleReplacementDescription] = field(
        default_factory=list[SubModuleReplacementDescription]
    )
    method_replacement: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])


class Policy(ABC):
    """The base class of a policy of your own: which modules of a model are replaced by parallel ones.

    `colossal.shardformer.ShardFormer` and `HybridParallelPlugin` take it, and read the plan that `read_policy` makes.

    Attributes:
        model: The model; `set_model` sets it.
        shard_config: The options; `set_shard_config` sets them.

    Example:
        >>> from torch import nn
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.legacy.shardformer import ModulePolicyDescription as Description
        >>> from colossal.legacy.shardformer import Policy, SubModuleReplacementDescription, read_policy
        >>> from colossal.nn import Linear1D_Col, Linear1D_Row
        >>> from colossal.testing import fake_world
        >>> class Own(Policy):
        ...     def module_policy(self):
        ...         up = SubModuleReplacementDescription("0", Linear1D_Col)
        ...         down = SubModuleReplacementDescription("2", Linear1D_Row)
        ...         return {nn.Sequential: Description(sub_module_replacement=[up, down])}
        >>> with fake_world(2):
        ...     model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        ...     read_policy(Own(), model, ParallelMesh(tp=2)).styles
        {'0': 'colwise', '2': 'rowwise'}
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.shard_config: ShardConfig | None = None

    def __call__(self, model: nn.Module, mesh: ParallelMesh) -> ParallelPlan:
        """Make the plan that the policy describes, as `read_policy` does.

        Args:
            model: The full model.
            mesh: Whose tp axis will shard it.

        Returns:
            The plan.

        Raises:
            PlanError: No plan expresses it.
        """
        return read_policy(self, model, mesh)

    def set_model(self, model: nn.Module) -> None:
        """Keep the model.

        Args:
            model: It.
        """
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Keep the options.

        Args:
            shard_config: They.
        """
        self.shard_config = shard_config

    def config_sanity_check(self) -> None:  # noqa: B027 (a policy may have nothing to check)
        """Check the model's configuration; nothing by default."""

    def preprocess(self) -> nn.Module:
        """Change the model before it is sharded.

        Returns:
            The model; by default as it is.
        """
        return self.model

    @abstractmethod
    def module_policy(self) -> Mapping[type[nn.Module] | str, ModulePolicyDescription]:
        """Say what becomes of modules.

        Returns:
            Descriptions by the classes of modules, or by their names.
        """

    def postprocess(self) -> nn.Module:
        """Change the model after it was sharded; only the default can be honored.

        Returns:
            The model.
        """
        return self.model

    def get_held_layers(self) -> list[nn.Module]:
        """Say which modules the stage of this rank has; of one stage, which has all, only.

        Returns:
            The modules right below the model.
        """
        return list(self.model.children())

    def get_shared_params(self) -> list[dict[int, Any]]:
        """Say which parameters several stages share; `HybridParallelPlugin` finds them by itself.

        Returns:
            None of them.
        """
        return []

    def tie_weight_check(self) -> bool:
        """Look whether the embeddings of inputs and outputs are one parameter.

        Returns:
            Whether they are, as far as the model says which these are.
        """
        inputs, outputs = (
            getattr(self.model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output")
        )
        return inputs is not None and outputs is not None and inputs.weight is outputs.weight

    @staticmethod
    def append_or_create_method_replacement(
        description: Mapping[str, Callable[..., Any]], policy: dict[Any, ModulePolicyDescription], target_key: Any
    ) -> dict[Any, ModulePolicyDescription]:
        """Add methods to the description of a class; `read_policy` refuses them, as no plan replaces methods.

        Args:
            description: Methods by their names.
            policy: Descriptions by classes; changed in place.
            target_key: The class.

        Returns:
            `policy`.
        """
        known = policy.setdefault(target_key, ModulePolicyDescription())
        known.method_replacement = {**(known.method_replacement or {}), **description}
        return policy

    @staticmethod
    def append_or_create_submodule_replacement(
        description: SubModuleReplacementDescription | list[SubModuleReplacementDescription],
        policy: dict[Any, ModulePolicyDescription],
        target_key: Any,
    ) -> dict[Any, ModulePolicyDescription]:
        """Add replacements to the description of a class.

        Args:
            description: One replacement, or several.
            policy: Descriptions by classes; changed in place.
            target_key: The class.

        Returns:
            `policy`.
        """
        added = description if isinstance(description, list) else [description]
        known = policy.setdefault(target_key, ModulePolicyDescription())
        known.sub_module_replacement = [*(known.sub_module_replacement or ()), *added]
        return policy


def read_policy(policy: Policy, model: nn.Module, mesh: ParallelMesh | None = None) -> ParallelPlan:
    """Make the plan that a policy describes for a model.

    Args:
        policy: The policy.
        model: The model, not yet sharded; the same on all ranks.
        mesh: Whose tp axis will shard it; by default that in force.

    Returns:
        The plan: pass it to `ShardFormer.optimize`, or as `custom_policy` to `HybridParallelPlugin`.

    Raises:
        PlanError: The policy replaces parameters, methods or attributes in a way that no plan expresses, or modules by
            others than those of `colossal.shardformer.layer`, or names modules that the model does not have.

    Example:
        See `Policy`.

        >>> from colossal.legacy.shardformer import read_policy
        >>> read_policy.__name__
        'read_policy'
    """
    superseded("colossal.shardformer.policies.base_policy.Policy", "ParallelPlan(styles={...}) of colossal.tensor")
    mesh = mesh or current_mesh()
    policy.set_model(model)
    if policy.shard_config is None:
        policy.set_shard_config(ShardConfig(mesh))
    policy.config_sanity_check()
    if policy.preprocess() is not model or not _returns_the_model(policy):
        raise PlanError(
            "A plan says how the modules of a model are sharded. Found a preprocess that returns another model, or a "
            f"postprocess that does more than return it, in {type(policy).__name__}. Do that before and "
            "after ShardFormer.optimize."
        )
    found = _Reader(model, mesh.size("tp"))
    for kind, description in policy.module_policy().items():
        found.read(kind, description)
    return ParallelPlan(
        styles=found.styles,
        head_styles=found.head_styles,
        divide_by_tp=tuple(dict.fromkeys(found.sharded)),
    )


def _returns_the_model(policy: Policy) -> bool:
    """Whether the postprocess of a policy is the default, which the documented ones spell out."""
    codes: list[Any] = [getattr(kind.postprocess, "__code__", None) for kind in (type(policy), Policy)]
    own, default = ((code.co_code, code.co_names) if code is not None else None for code in codes)
    return own == default


@final
class _Reader:
    """Collects the rows of a plan from the descriptions of a policy."""

    def __init__(self, model: nn.Module, tp_size: int) -> None:
        self._model, self._tp_size = model, tp_size
        base = base_model_of(model)
        self._prefix = next((f"{name}." for name, each in model.named_modules() if each is base and name), "")
        self.styles, self.head_styles, self.sharded = dict[str, str](), dict[str, str](), list[str]()

    def read(self, kind: type[nn.Module] | str, description: ModulePolicyDescription) -> None:
        """Take the rows of one description."""
        label = kind if isinstance(kind, str) else kind.__name__
        for what in ("param_replacement", "method_replacement"):
            if getattr(description, what):
                raise PlanError(
                    f"A plan replaces modules and divides attributes. Found {what} for {label}. Make that change in "
                    "the model itself, before it is sharded."
                )
        modules = list(self._modules_of(kind))
        if not modules and (description.sub_module_replacement or description.attribute_replacement):
            raise PlanError(
                f"A policy describes modules of its model. Found none of the class {label} in "
                f"{type(self._model).__name__}. Correct the class, or leave it out."
            )
        for name, module in modules:
            for row in description.sub_module_replacement or ():
                self._replace(name, module, row)
            for attribute, value in (description.attribute_replacement or {}).items():
                self._divide(name, module, attribute, value)

    def _modules_of(self, kind: type[nn.Module] | str) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            if type(module) is kind or type(module).__name__ == kind:
                yield name, module

    def _replace(self, name: str, module: nn.Module, row: SubModuleReplacementDescription) -> None:
        path = f"{name}.{row.suffix}".lstrip(".")
        if row.suffix not in dict(module.named_modules(remove_duplicate=False)):
            if row.ignore_if_not_exist:
                return
            raise PlanError(
                f"A policy replaces modules that are there. Found no {path}. Correct the suffix {row.suffix!r}, or "
                "pass ignore_if_not_exist=True."
            )
        style = _style_of(path, row)
        if path.startswith(self._prefix):
            self.styles[path.removeprefix(self._prefix)] = style
        else:
            self.head_styles[path] = style

    def _divide(self, name: str, module: nn.Module, attribute: str, value: Any) -> None:
        path = f"{name}.{attribute}".lstrip(".")
        owner, _, last = attribute.rpartition(".")
        held: Any = getattr(module.get_submodule(owner), last)
        if value == held:
            return
        if not isinstance(held, int) or value * self._tp_size != held or not path.startswith(self._prefix):
            raise PlanError(
                "A plan divides numbers of the base model by the size of tp. Found that a policy replaces "
                f"{path}={held!r} by {value!r}, with tp={self._tp_size}. Set it in the model itself."
            )
        self.sharded.append(path.removeprefix(self._prefix))


def _style_of(path: str, row: SubModuleReplacementDescription) -> str:
    """The style of a plan that makes the module a policy names."""
    options = {key: value for key, value in (row.kwargs or {}).items() if value not in (None, False)}
    kinds = getattr(row.target_module, "__mro__", ())
    style = next((_STYLES[kind] for kind in kinds if kind in _STYLES), None)
    if style == "colwise":
        packed = options.pop("n_fused", None)
        if sizes := options.pop("split_sizes", None):
            packed = len(sizes) if len(set(sizes)) == 1 else None
            style = None if packed is None else style
        if style and packed not in (None, 1):
            style = _PACKED.get(packed)
        elif style and options.pop("gather_output", False):
            style = "colwise_gather_output"
    elif style == "rowwise":
        if row.kwargs and row.kwargs.get("parallel_input") is False:
            style = "rowwise_split_input"
        options.pop("parallel_input", None)
    if style is None or options:
        kind = getattr(row.target_module, "__name__", row.target_module)
        raise PlanError(
            "A policy replaces modules by Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D, VocabParallelLMHead1D, "
            "GPT2FusedLinearConv1D_Col or GPT2FusedLinearConv1D_Row, with the options gather_output, parallel_input, "
            f"n_fused and equal split_sizes. Found {kind} with {dict(row.kwargs or {})} for {path}. Write a "
            "ParallelPlan, whose styles colossal.shardformer.STYLES lists."
        )
    return style
