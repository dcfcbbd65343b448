"""Parts that a model and its training loop are made of.

* :mod:`colossal.nn.lr_scheduler` - learning-rate schedules that know how many steps the training has.
"""

from colossal.nn import lr_scheduler

__all__ = ["lr_scheduler"]
