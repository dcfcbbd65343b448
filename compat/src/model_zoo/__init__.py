"""The models of the older documentation, under the name of the package that they were in."""

from colossalai import _alias

_alias.install("model_zoo", ("colossal.legacy.model_zoo", "colossal.model_zoo"))
