"""One table of what the documented keywords of plugins and wrappers mean.

A keyword is a field of the options that it concerns, such as `ScalerConfig` or `ZeroConfig`, under the same name unless
`FIELDS` has another one; or it is in `REFUSED`, with what to use instead.
"""

import inspect
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, final

from colossal._src.interface.flat_values import is_program
from colossal.errors import ConfigError, UnsupportedError

_MEBI = 1 << 20
_OF_EVERY_GROUP = {"params", "param_names"}
_Options = TypeVar("_Options")


class Field(NamedTuple):
    """The field that a keyword of another name, or in another unit, sets."""

    name: str  # of the field
    unit: int | None = None  # what the field counts, in one of the keyword's units
    # the field has a keyword of its own name as well, or elsewhere; that counts where this one is None
    is_alias: bool = False

    def value_of(self, value: Any) -> Any:
        """Translate a value."""
        return value if self.unit is None else int(value * self.unit)


class Refused(NamedTuple):
    """A documented keyword that has one effect only, or none."""

    accepted: tuple[Any, ...]  # the values that need no more than that
    required: str  # what is required
    instead: Mapping[str, str]  # the nearest that works, by the class that was asked


FIELDS: Mapping[str, Field] = {
    "initial_scale": Field("init_scale"),
    "reduce_bucket_size": Field("bucket_numel"),
    "reduce_bucket_size_in_m": Field("bucket_numel", unit=_MEBI),
    "zero_bucket_size_in_m": Field("bucket_numel", unit=_MEBI),
    "enable_async_reduce": Field("overlap_communication", is_alias=True),
    "ddp_bucket_cap_mb": Field("bucket_cap_mb"),
    "search_range_mb": Field("search_range_m", is_alias=True),
    "min_chunk_size_mb": Field("min_chunk_size_m", is_alias=True),
}

_STATIC = "placement_policy='static' with an offload_optim_frac of 0, which keeps all of it on the device, or below 1"
REFUSED: Mapping[str, Refused] = {
    "use_fp8": Refused(
        (False,),
        "Matrix products are in 16 bits or more here",
        {
            "LowLevelZeroPlugin": "precision='bf16', or TorchDDPPlugin with mixed_precision='fp8'",
            "HybridParallelPlugin": "precision='bf16'",
            "GeminiPlugin": "precision='bf16', or TorchDDPPlugin with mixed_precision='fp8'",
            "GeminiDDP": "mixed_precision=torch.bfloat16",
        },
    ),
    "gpu_margin_mem_ratio": Refused(
        (0.0,),
        "The placement policy says where the optimizer is: under the auto policy, or offloaded, in host memory",
        {"GeminiPlugin": _STATIC, "GeminiOptimizer": _STATIC},
    ),
    "param_init_fn": Refused(
        (None,),
        "A model is sharded whose parameters have values, or get them from LazyInitContext",
        {
            "TorchFSDPPlugin": "to build it inside of LazyInitContext; sync_module_states=True then takes rank 0's "
            "values"
        },
    ),
    "make_vocab_size_divisible_by": Refused(
        (1, 64),
        "Nothing is padded: ranks divide a vocabulary unevenly, which is exact",
        {
            "HybridParallelPlugin": "1 or 64, which divide a vocabulary as it is, or "
            "model.resize_token_embeddings(pad_to_multiple_of=...) before"
        },
    ),
    "overlap_p2p": Refused(
        (True,),
        "A pipeline computes while it sends and receives",
        {"HybridParallelPlugin": "overlap_p2p=True: point-to-point communication always overlaps with computation"},
    ),
}


def refuse_unsupported(owner: str, given: Mapping[str, Any], honored: Container[str] = ()) -> None:
    """Reject documented keywords with values that are not implemented, unless the others fulfill them anyway."""
    for name, refused in REFUSED.items():
        if name in given and name not in honored and given[name] not in refused.accepted:
            value: Any = given[name]
            found = getattr(value, "__qualname__", repr(value))  # a function by its name
            raise UnsupportedError(
                f"{refused.required}. Found {name}={found} of {owner}, which is not supported. The nearest "
                f"that works is {refused.instead[owner]}."
            )


@final
class Keywords:
    """The keywords that a plugin or a wrapper was given, to be read by concern."""

    def __init__(self, owner: str, given: Mapping[str, Any], honored: Container[str] = ()) -> None:
        refuse_unsupported(owner, given, honored)
        self._values = {name: value for name, value in given.items() if name not in FIELDS}
        for name, field in FIELDS.items():
            if name in given and not (field.is_alias and given[name] is None):
                self._values[field.name] = field.value_of(given[name])

    @classmethod
    def of(cls, owner: Any, honored: Container[str] = ()) -> Self:
        """Take the fields of a dataclass as keywords."""
        given = {each.name: getattr(owner, each.name) for each in fields(owner) if each.init}
        return cls(type(owner).__name__, given, honored)

    def read(self, concern: type[_Options], **known: Any) -> _Options:
        """Make the options of one concern."""
        kind: Any = concern
        named = {each.name: self._values[each.name] for each in fields(kind) if each.name in self._values}
        return concern(**named | known)


def keywords_for(front: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Take the keywords that a function or a class has as well, to pass them on."""
    return {name: given[name] for name in inspect.signature(front).parameters if name in given}


def check_known(owner: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse keywords of a dictionary that nothing reads."""
    if unknown := given.keys() - set(known):
        raise ConfigError(
            f"{owner} accepts {', '.join(known)}. Found {', '.join(sorted(unknown))}. Remove or correct it."
        )


def refuse_misspelled(owner: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse hyperparameters that nothing reads and that almost have the name of one that is read.

    Others may be of the program: groups of parameters hold what it likes.
    """
    from colossal._src._closest import closest_name

    names = set(known)
    for name in given.keys() - names - _OF_EVERY_GROUP:
        if close := closest_name(name, names, typing_errors_only=True):
            raise ConfigError(
                f"{owner} reads {', '.join(sorted(names))}. Found {name}={given[name]!r}, which it would ignore. Did "
                f"you mean {close}? If it is the program's own, choose another name."
            )


@final
@dataclass(frozen=True, kw_only=True)
class Clipping:
    """The norm to which a step clips the gradients of all parameters together."""

    max_norm: float = 0.0  # the largest norm; 0 does not clip
    norm_type: float = 2.0  # the p of the norm; greater than 0

    def __post_init__(self) -> None:
        if self.max_norm < 0 or not self.norm_type > 0:
            raise ConfigError(
                "Gradients are clipped to a norm of at least 0 (which does not clip), of a p greater than 0. Found "
                f"max_norm={self.max_norm} and norm_type={self.norm_type}. The defaults are 0.0 and 2.0."
            )


class FixedOptions:
    """Refuses options of other types than the constructor takes, and that a program sets one afterwards."""

    if not TYPE_CHECKING:  # a type checker reports what a class does not have, unless it has these methods

        def __new__(cls, *args: Any, **options: Any) -> Self:
            """Look at the options before the constructor takes them.

            Args:
                *args: The first ones.
                **options: The others, by their names.

            Returns:
                The object to be initialized.

            Raises:
                ConfigError: One is of another type; the message says what to pass.
                TypeError: There is none of such a name; the message has the closest one.
            """
            _check_given(cls, args, options)
            return super().__new__(cls)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute.

            Raises:
                ConfigError: It is an option, set by a program; the message says what to do.
            """
            if is_program(sys._getframe(1)):  # noqa: SLF001 (the only way to find the caller)
                _check(type(self), name, value)
            super().__setattr__(name, value)


def _check(kind: type, name: str, value: Any) -> None:
    if name in _options_of(kind):
        raise ConfigError(
            f"The options of a {kind.__name__} are those that its constructor got. Found {name}={value!r} set "
            f"afterwards, which nothing would read. Pass {kind.__name__}({name}=...), and boost with that; to change "
            "it during a run, save by booster.save, and load the checkpoint into what is boosted with it."
        )


def _check_given(kind: type, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    from colossal._src._closest import closest_name
    from colossal._src.interface.option_types import option_type

    classes = _with_constructors(kind)
    if not classes or classes[0] is not next(each for each in kind.__mro__ if "__init__" in vars(each)):
        return  # it is a program's own class, which passes on what it likes
    parameters = inspect.signature(classes[0]).parameters
    for name in options.keys() - parameters.keys():
        if close := closest_name(name, parameters):
            raise TypeError(f"{kind.__name__} takes no option {name!r}. Did you mean {close!r}?")
    for name, value in {**dict(zip(parameters, args, strict=False)), **options}.items():
        required = option_type(parameters[name].annotation) if name in parameters else None
        if required is not None and not required.fits(value):
            raise ConfigError(
                f"{kind.__name__} takes {name} as {required.noun}. Found {name}={value!r}, of type "
                f"{type(value).__name__}. {required.advice(name, value)}"
            )


def _with_constructors(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if "__init__" in vars(each) and each.__module__.startswith("colossal.")]


@cache
def _options_of(kind: type) -> frozenset[str]:
    """Return what constructors of this library take: a subclass of a program may keep what its own one takes."""
    return frozenset(name for each in _with_constructors(kind) for name in inspect.signature(each).parameters)
