# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Tensor-parallel and pipeline plans: tables of how the models of a family are sharded."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, final

from torch import nn

from colossal.errors import PlanError

_OPTIONAL = "?"


@final
@dataclass(frozen=True)
class HeadCounts:
    """The attributes of a model's configuration that say how many heads its attention has.

    Args:
        heads: Heads of the queries; with dots, of a configuration in that of the model.
        key_value_heads: Heads of keys and values, where there may be fewer.
        attention: The modules of the base model that stay unsharded, with all heads, where the heads do not divide; by
            default such a number of ranks is an error.
        is_sharded: Whether tp shards the heads; where queries are gathered, each rank computes attention with all of
            them, and only sequences divide by their number.

    Example:
        >>> from colossal.tensor import HeadCounts
        >>> HeadCounts("n_head").heads
        'n_head'
    """

    heads: str = "num_attention_heads"
    key_value_heads: str | None = None
    attention: str | None = None
    is_sharded: bool = True


@final
@dataclass(frozen=True)
class Stages:
    """How a model is partitioned into the stages of a pipeline.

    What comes before the layers belongs to the stage of the first of them, the layers are shared out, and everything
    else that has parameters belongs to the last stage. What has none, such as rotary positions, is on every stage.

    An encoder-decoder has two lists of layers. They are shared out as if they were one, and the result of the encoder
    travels with the hidden states of the decoder.

    Args:
        layers: The list of layers, in the base model. Each takes hidden states as its first argument, and these are
            just what the layer before has returned; other inputs of the first layer of a stage, and losses that depend
            on what earlier stages compute besides, raise `PlanError` in the first step.
        pre_layers: Modules and parameters of the base model that make hidden states of the inputs, in the order in
            which they are used. On later stages these modules return NaN in the shape of the hidden states.
        layer_outputs: If a layer returns several values: which arguments of the next layer they become, hidden states
            first; an empty name for a value that no other layer needs.
        result: The module around the layers whose result layers of a later list use: a tensor, or an output of
            Hugging Face whose first value is one. What else has parameters in it belongs to the stage of the last
            layer. Needed where another list follows.
        previous: The list that is called before this one.
        may_be_missing: Whether there are models of the family without this list, such as an encoder by itself.
        reshapes: Whether the model gives hidden states the shape of its inputs after the layers.

    Example:
        >>> from colossal.tensor import Stages
        >>> encoder = Stages("encoder.layers", pre_layers=("encoder.embed_tokens",), result="encoder")
        >>> both = Stages("decoder.layers", pre_layers=("decoder.embed_tokens",), previous=encoder)
        >>> [each.layers for each in both.lists]
        ['encoder.layers', 'decoder.layers']
    """

    layers: str
    pre_layers: tuple[str, ...]
    layer_outputs: tuple[str, ...] = ()
    result: str = ""
    previous: "Stages | None" = None
    may_be_missing: bool = False
    reshapes: bool = False

    @property
    def lists(self) -> tuple["Stages", ...]:
        """All lists of layers, in the order in which they are called."""
        return (*(() if self.previous is None else self.previous.lists), self)

    def lists_in(self, base: nn.Module) -> tuple["Stages", ...]:
        """Find the lists that a model has.

        Args:
            base: The base model.

        Returns:
            Those of `lists` that are there, in their order. What the last returns is the result of the model.

        Raises:
            PlanError: One that has to be there is missing, or all are; or a list that another follows has no result.

        Example:
            >>> from torch import nn
            >>> from colossal.tensor import Stages
            >>> model = nn.ModuleDict({"encoder": nn.ModuleList([nn.Identity()])})
            >>> encoder = Stages("encoder", pre_layers=(), result="encoder")
            >>> both = Stages("decoder", pre_layers=(), previous=encoder, may_be_missing=True)
            >>> [(each.layers, each.result) for each in both.lists_in(model)]
            [('encoder', '')]
        """
        here = dict(base.named_modules(remove_duplicate=False))
        found = [each for each in self.lists if isinstance(here.get(each.layers), nn.ModuleList)]
        for each in self.lists:
            if each not in found and not (each.may_be_missing and found and each.layers not in here):
                kind = type(here[each.layers]).__name__ if each.layers in here else "missing"
                raise PlanError(
                    f"A plan with stages names lists of layers. Found {each.layers!r}, which is {kind} in "
                    f"{type(base).__name__}. Name an nn.ModuleList of the base model."
                )
        for each in found[:-1]:
            if not each.result:
                raise PlanError(
                    "A list of layers that another list follows has a result, which its layers use. Found none for "
                    f"{each.layers!r}. Name the module around it that returns it, such as result='encoder'."
                )
        return (*found[:-1], replace(found[-1], result=""))


@final
@dataclass(frozen=True)
class ParallelPlan:
    """How the modules of a model are sharded along the tp axis.

    A row names modules by a pattern: parts between dots are matched by themselves, as shells match names, so that ``*``
    stands for one part or a substring of it. A row that matches no module is an error, unless it begins with ``?``.

    Args:
        styles: For modules of the base model, the style of each: see `colossal.shardformer.STYLES`.
        head_styles: The same for modules outside the base model, such as heads; each may be missing.
        divide_by_tp: Attributes of modules of the base model that hold a number which tp divides, such as of heads.
        counts: Which numbers of the configuration must divide.
        split_inputs: For modules of the base model, the argument that holds something for each head, such as a bias of
            positions, of shape (batch x heads, ...).
        nested: Modules of the base model that are models by themselves, each sharded by the plan of its own family.
        stages: How it is partitioned into pipeline stages; None if it cannot be.
        attention: The modules of the base model in which tokens see each other: those that split them into heads.
        compare_blocks: Whether, unless the plan is the table of a family, a block of each kind, such as the first
            attention and the first MLP, is computed in its first training pass as it was before it was sharded too, and
            must be the same: outputs, and gradients of inputs and of replicated parameters. In this pass, weights of
            sharded layers are to be used by these only, and sharded outputs not to be returned. Nothing is compared
            with sequence parallelism, nor if torch.compile wraps what boost returned.

    Example:
        >>> from torch import nn
        >>> from colossal.tensor import ParallelPlan
        >>> plan = ParallelPlan(styles={"*.up": "colwise", "*.down": "rowwise"})
        >>> block = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        >>> [name for name, _, _ in plan.rows(nn.ModuleList([block, block]))]
        ['0.up', '1.up', '0.down', '1.down']
    """

    styles: Mapping[str, str]
    head_styles: Mapping[str, str] = field(default_factory=dict[str, str])
    divide_by_tp: tuple[str, ...] = ()
    counts: tuple[HeadCounts, ...] = ()
    split_inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    nested: tuple[str, ...] = ()
    stages: Stages | None = None
    attention: str = ""
    compare_blocks: bool = True

    def for_stage(self) -> "ParallelPlan":
        """Make the plan of a stage, on which some of the modules are missing.

        Returns:
            The same plan, in which every row may match nothing.

        Example:
            >>> from colossal.tensor import ParallelPlan
            >>> ParallelPlan({"up": "colwise"}).for_stage().styles
            {'?up': 'colwise'}
        """
        return replace(
            self,
            styles={_optional(row): style for row, style in self.styles.items()},
            divide_by_tp=tuple(map(_optional, self.divide_by_tp)),
            split_inputs={_optional(row): names for row, names in self.split_inputs.items()},
            nested=tuple(map(_optional, self.nested)),
        )

    def rows(self, base: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
        """Go through the modules that have a style.

        Args:
            base: The base model.

        Yields:
            The name of each module, the module, and its style.

        Raises:
            PlanError: A row matches nothing.
        """
        for pattern, style in self.styles.items():
            for name, module in find_modules(base, pattern):
                yield name, module, style


def _optional(row: str) -> str:
    return _OPTIONAL + row.removeprefix(_OPTIONAL)


def base_model_of(model: nn.Module) -> nn.Module:
    """Find the part of a model of Hugging Face that its heads have in common."""
    model = unwrap_adapters(model)
    found = getattr(model, getattr(model, "base_model_prefix", None) or "base_model", None)
    return found if isinstance(found, nn.Module) else model


def unwrap_adapters(model: nn.Module) -> nn.Module:
    """Find the model that adapters of peft stand in."""
    find: Any = getattr(model, "get_base_model", None)
    return model if find is None else find()


def find_modules(root: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Find the modules that a row of a plan names."""
    names = pattern.removeprefix(_OPTIONAL).split(".")
    found: list[tuple[str, nn.Module]] = [
        (name, module)
        # A row may use any of the names of a module that has several.
        for name, module in root.named_modules(remove_duplicate=False)
        if len(parts := name.split(".")) == len(names) and all(map(fnmatchcase, parts, names))
    ]
    if not found and not pattern.startswith(_OPTIONAL):
        known = dict.fromkeys(re.sub(r"(?<=\.)\d+|^\d+", "*", name) for name, _ in root.named_modules() if name)
        raise PlanError(
            f"Each row of a plan names modules of its model. Found no module of {type(root).__name__} for {pattern!r}. "
            f"Mark a row that may be missing by a question mark in front; the modules are {', '.join(known)}."
        )
    return found
