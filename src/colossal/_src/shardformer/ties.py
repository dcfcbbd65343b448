"""Parameters with several names, of modules that a plan shards."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from colossal._src.tensor import ParallelPlan, base_model_of, find_modules, parameter_names, unwrap_adapters
from colossal.errors import PlanError


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Find parameters with several names."""
    return [names for names in parameter_names(model).values() if len(names) > 1]


def retie_parameters(model: nn.Module, ties: Sequence[Sequence[str]], sharded: Collection[nn.Module]) -> None:
    """Tie parameters again, after some of them were sharded."""
    for names in ties:
        places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        chosen = next((getattr(module, last) for module, last in places if module in sharded), None)
        if chosen is None:
            continue
        for name, (module, last) in zip(names, places, strict=True):
            found = getattr(module, last)
            if found.shape != chosen.shape and (module in sharded or not any(module.children())):
                raise PlanError(
                    f"Tied parameters are sharded in the same way. Found {tuple(chosen.shape)} and, of {name}, "
                    f"{tuple(found.shape)} on this rank. Give all of {', '.join(names)} a style that shards rows."
                )
            setattr(module, last, chosen)


def check_tied_styles(model: nn.Module, plan: ParallelPlan) -> None:
    """Reject a plan that shards tied parameters in different ways: each stage of a pipeline would see only its own."""
    styles: dict[nn.Module, str] = {}
    model = unwrap_adapters(model)
    for root, rows in ((base_model_of(model), plan.styles), (model, plan.head_styles)):
        for pattern, style in rows.items():
            styles |= {module: style for _, module in find_modules(root, f"?{pattern.removeprefix('?')}")}
    for names in find_tied_parameters(model):
        # a parameter of a module with layers, as the bias of a head of BERT, is only another name of that of a layer
        of_layers = [name for name in names if not any(model.get_submodule(name.rpartition(".")[0]).children())]
        found = {name: _style_of(model, name, styles) for name in of_layers}
        if len({_sharded_dim(style) for style in found.values()}) > 1:
            raise PlanError(
                "Tied parameters are sharded in the same way. Found "
                f"{', '.join(f'{name} by {style!r}' for name, style in found.items())}. Give all of them a style that "
                "shards rows, such as vocab and colwise_gather_output, or leave all of them out of the plan."
            )


def _style_of(model: nn.Module, name: str, styles: Mapping[nn.Module, str]) -> str:
    """Find the style of the module that has a parameter, or of one around it, as adapters put around layers."""
    while path := name.rpartition(".")[0]:
        if (module := model.get_submodule(path)) in styles:
            return styles[module]
        name = path
    return "replicate"


def _sharded_dim(style: str) -> int | None:
    """Return the dimension of a weight (rows, columns) that a style shards."""
    if style.startswith(("replicate", "split_input")):
        return None
    return 1 if style.startswith("rowwise") or style == "embedding_colwise" else 0
