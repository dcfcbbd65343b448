"""Parts that a model and its training loop are made of.

* :mod:`colossal._src.nn.layer` - layers that follow the ambient mesh.
* :mod:`colossal._src.nn.loss` and :mod:`colossal._src.nn.metric` - losses and figures of merit for what they put out.
* :mod:`colossal.nn.lr_scheduler` - learning-rate schedules that know how many steps the training has.
* :mod:`colossal.nn.optimizer` - optimizers, for full parameters and for shards of them.
"""

from colossal._src.nn import layer, loss, lr_scheduler, metric, optimizer

__all__ = ["layer", "loss", "lr_scheduler", "metric", "optimizer"]
