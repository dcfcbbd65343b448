"""Process groups along the axes of a grid and by names, meshes by names, and a block that one rank runs first."""

from colossal._src.legacy.mesh import (
    DeviceMeshInfo,
    DeviceMeshManager,
    ProcessGroupManager,
    ProcessGroupMesh,
    priority_execution,
)

__all__ = ["DeviceMeshInfo", "DeviceMeshManager", "ProcessGroupManager", "ProcessGroupMesh", "priority_execution"]
