"""Distributed tensors of the older API: each a layout over the ranks of a group."""

from colossal._src.legacy.tensor.colo_parameter import ColoParameter, convert_to_colo_parameter
from colossal._src.legacy.tensor.colo_tensor import ColoTensor
from colossal._src.legacy.tensor.d_tensor import (
    compute_global_numel,
    distribute_tensor,
    get_device_mesh,
    get_global_shape,
    get_layout,
    get_sharding_spec,
    init_as_dtensor,
    is_distributed_tensor,
    redistribute,
    sharded_tensor_to_param,
    to_global,
)
from colossal._src.legacy.tensor.d_tensor_1d import (
    customized_distributed_tensor_to_param,
    distribute_tensor_with_customization,
    get_shard_dim_1d,
    init_tensor_as_customization_distributed,
    is_customized_distributed_tensor,
    is_sharded,
    shard_colwise,
    shard_rowwise,
    sharded_tensor_to_existing_param,
    to_global_for_customized_distributed_tensor,
)
from colossal._src.legacy.tensor.d_tensor_layout import DimSpec, DTensorLayout, ShardingSpec
from colossal._src.legacy.tensor.init_context import ColoInitContext
from colossal._src.legacy.tensor.layout_converter import LayoutConverter
from colossal._src.legacy.tensor.mesh_sharding import CollectiveCommPattern, CommSpec, MeshShardingSpec
from colossal._src.legacy.tensor.process_group import ProcessGroup
from colossal._src.legacy.tensor.shape_consistency import ShapeConsistencyManager
from colossal._src.legacy.tensor.sharded_parameters import (
    clear_layout_converter,
    gather_distributed_param,
    getattr_,
    init_as_padded_tensor,
    is_padded_tensor,
    setattr_,
    to_padded_tensor,
    to_unpadded_tensor,
)
from colossal._src.legacy.tensor.specs import (
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    DistPlacementPattern,
    DistSpec,
    ReplicaSpec,
    ShardSpec,
)

__all__ = [
    "CollectiveCommPattern",
    "ColoInitContext",
    "ColoParameter",
    "ColoTensor",
    "ColoTensorSpec",
    "CommSpec",
    "ComputePattern",
    "ComputeSpec",
    "DTensorLayout",
    "DimSpec",
    "DistPlacementPattern",
    "DistSpec",
    "LayoutConverter",
    "MeshShardingSpec",
    "ProcessGroup",
    "ReplicaSpec",
    "ShapeConsistencyManager",
    "ShardSpec",
    "ShardingSpec",
    "clear_layout_converter",
    "compute_global_numel",
    "convert_to_colo_parameter",
    "customized_distributed_tensor_to_param",
    "distribute_tensor",
    "distribute_tensor_with_customization",
    "gather_distributed_param",
    "get_device_mesh",
    "get_global_shape",
    "get_layout",
    "get_shard_dim_1d",
    "get_sharding_spec",
    "getattr_",
    "init_as_dtensor",
    "init_as_padded_tensor",
    "init_tensor_as_customization_distributed",
    "is_customized_distributed_tensor",
    "is_distributed_tensor",
    "is_padded_tensor",
    "is_sharded",
    "redistribute",
    "setattr_",
    "shard_colwise",
    "shard_rowwise",
    "sharded_tensor_to_existing_param",
    "sharded_tensor_to_param",
    "to_global",
    "to_global_for_customized_distributed_tensor",
    "to_padded_tensor",
    "to_unpadded_tensor",
]
