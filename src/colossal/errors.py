"""The exceptions that colossal raises on purpose.

.. code-block:: text

    ColossalError
    ├── ConfigError       (ValueError)           an argument, or two that contradict each other
    ├── LaunchError       (RuntimeError)         the world of processes could not be formed
    ├── MeshError         (ValueError)           sizes and axes that do not fit the world size
    ├── PlanError         (ValueError)           a parallel plan that does not fit its model
    ├── ShapeError        (ValueError)           a tensor of the wrong shape, dtype or device
    ├── CommunicationError (RuntimeError)        a peer that is lost, late, or does something else
    ├── NonFiniteError    (FloatingPointError)   a loss or a gradient that is infinite or NaN
    ├── CheckpointError   (RuntimeError)         a file that is missing, damaged or of another model
    └── UnsupportedError  (NotImplementedError)  a valid request that this plugin, model or device does not support

Every message says three things: what was required, what was found, and what to do.
Each class is also the built-in exception that a PyTorch user would have expected.
"""


class ColossalError(Exception):
    """Base of every exception that colossal raises on purpose."""


class ConfigError(ColossalError, ValueError):
    """An argument has a value that cannot work, or contradicts another one."""


class LaunchError(ColossalError, RuntimeError):
    """The world of processes could not be formed: a variable, a port or a peer is missing."""


class MeshError(ColossalError, ValueError):
    """The sizes of the mesh axes do not fit the world size, or an axis does not exist."""


class PlanError(ColossalError, ValueError):
    """A parallel plan does not fit the model that it is applied to."""


class ShapeError(ColossalError, ValueError):
    """A tensor has a shape, dtype or device that an operation cannot take."""


class CommunicationError(ColossalError, RuntimeError):
    """Ranks that should communicate do not: one is lost, late, or calls something else."""


class NonFiniteError(ColossalError, FloatingPointError):
    """A loss or a gradient is infinite or NaN, where that was not to happen."""


class CheckpointError(ColossalError, RuntimeError):
    """A checkpoint is missing, damaged, or was written by another model."""


class UnsupportedError(ColossalError, NotImplementedError):
    """A valid request that the plugin, model or device in use does not support."""
