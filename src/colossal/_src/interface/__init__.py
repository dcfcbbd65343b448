"""What `Booster.boost` hands back: a model and an optimizer with the same verbs under every plugin."""

import importlib
from typing import TYPE_CHECKING

from colossal._src.interface.adapter_names import (
    AdapterNames,
    active_adapter,
    has_adapter_layers,
    is_peft_model,
    model_without_adapters,
    saved_copies,
)
from colossal._src.interface.boost_types import (
    Boosted,
    BoostResult,
    Capabilities,
    Criterion,
    Executor,
    Parts,
    reduce_in_each_pass,
)
from colossal._src.interface.copies import copy_module, copy_refusal, refuse_copy
from colossal._src.interface.flat_values import is_program
from colossal._src.interface.full_spec import FullModelSpec, FullOptimizerSpec, Peers, full_spec_of
from colossal._src.interface.guarded_params import (
    ClippedByOptimizer,
    WorkingParameter,
    has_master_weight,
    lift_guards,
)
from colossal._src.interface.model import (
    ModelWrapper,
    copy_written,
    forward_contexts_of,
    has_adapters,
    prepare_passes,
    random_streams_of,
    set_random_streams,
    unwrap_compiled,
    unwrap_model,
)
from colossal._src.interface.nonfinite_check import NonFiniteCheck
from colossal._src.interface.optimizer import OptimizerWrapper, num_boosted_steps
from colossal._src.interface.optimizer_check import check_optimizer
from colossal._src.interface.refusal import (
    SAVE_AND_GENERATE,
    SAVE_AND_MERGE,
    lift_refusals,
    refuse,
    refuse_tracing,
    stage_hint,
)
from colossal._src.interface.scaled_params import any_scaled, kind_of_shard

if TYPE_CHECKING:
    from colossal._src.interface.full_state_dict import full_items, full_state
    from colossal._src.interface.gradient_checks import (
        check_dense_gradients,
        check_equal_rounding,
        check_equal_writes,
        check_unwritten_weights,
    )
    from colossal._src.interface.keywords import (
        Clipping,
        FixedOptions,
        Keywords,
        check_known,
        keywords_for,
        refuse_misspelled,
        refuse_unsupported,
    )
    from colossal._src.interface.loaded_states import another_algorithm, check_algorithm
    from colossal._src.interface.option_types import is_integer, is_number
    from colossal._src.interface.param_groups import has_uniform_state, rebind_param_groups, uniform_state_like
    from colossal._src.interface.pass_writes import digests_of, is_watched, refuse_lost_writes
    from colossal._src.interface.pretrained import get_pretrained_path, set_pretrained_path
    from colossal._src.interface.token_weighting import TokenWeighting

_MODULE_OF = {
    "Clipping": "colossal._src.interface.keywords",
    "FixedOptions": "colossal._src.interface.keywords",
    "Keywords": "colossal._src.interface.keywords",
    "TokenWeighting": "colossal._src.interface.token_weighting",
    "another_algorithm": "colossal._src.interface.loaded_states",
    "check_algorithm": "colossal._src.interface.loaded_states",
    "check_dense_gradients": "colossal._src.interface.gradient_checks",
    "check_equal_rounding": "colossal._src.interface.gradient_checks",
    "check_equal_writes": "colossal._src.interface.gradient_checks",
    "check_known": "colossal._src.interface.keywords",
    "check_unwritten_weights": "colossal._src.interface.gradient_checks",
    "digests_of": "colossal._src.interface.pass_writes",
    "is_watched": "colossal._src.interface.pass_writes",
    "full_items": "colossal._src.interface.full_state_dict",
    "full_state": "colossal._src.interface.full_state_dict",
    "get_pretrained_path": "colossal._src.interface.pretrained",
    "keywords_for": "colossal._src.interface.keywords",
    "is_integer": "colossal._src.interface.option_types",
    "is_number": "colossal._src.interface.option_types",
    "has_uniform_state": "colossal._src.interface.param_groups",
    "rebind_param_groups": "colossal._src.interface.param_groups",
    "refuse_misspelled": "colossal._src.interface.keywords",
    "refuse_lost_writes": "colossal._src.interface.pass_writes",
    "refuse_unsupported": "colossal._src.interface.keywords",
    "set_pretrained_path": "colossal._src.interface.pretrained",
    "uniform_state_like": "colossal._src.interface.param_groups",
}  # which few programs need

__all__ = [
    "SAVE_AND_GENERATE",
    "SAVE_AND_MERGE",
    "AdapterNames",
    "BoostResult",
    "Boosted",
    "Capabilities",
    "ClippedByOptimizer",
    "Clipping",
    "Criterion",
    "Executor",
    "FixedOptions",
    "FullModelSpec",
    "FullOptimizerSpec",
    "Keywords",
    "ModelWrapper",
    "NonFiniteCheck",
    "OptimizerWrapper",
    "Parts",
    "Peers",
    "TokenWeighting",
    "WorkingParameter",
    "active_adapter",
    "another_algorithm",
    "any_scaled",
    "check_algorithm",
    "check_dense_gradients",
    "check_equal_rounding",
    "check_equal_writes",
    "check_known",
    "check_optimizer",
    "check_unwritten_weights",
    "copy_module",
    "copy_refusal",
    "copy_written",
    "digests_of",
    "forward_contexts_of",
    "full_items",
    "full_spec_of",
    "full_state",
    "get_pretrained_path",
    "has_adapter_layers",
    "has_adapters",
    "has_master_weight",
    "has_uniform_state",
    "is_integer",
    "is_number",
    "is_peft_model",
    "is_program",
    "is_watched",
    "keywords_for",
    "kind_of_shard",
    "lift_guards",
    "lift_refusals",
    "model_without_adapters",
    "num_boosted_steps",
    "prepare_passes",
    "random_streams_of",
    "rebind_param_groups",
    "reduce_in_each_pass",
    "refuse",
    "refuse_copy",
    "refuse_lost_writes",
    "refuse_misspelled",
    "refuse_tracing",
    "refuse_unsupported",
    "saved_copies",
    "set_pretrained_path",
    "set_random_streams",
    "stage_hint",
    "uniform_state_like",
    "unwrap_compiled",
    "unwrap_model",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colossal._src.interface' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
