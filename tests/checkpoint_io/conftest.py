"""The first optimizer of a process imports torch._dynamo, which sets an environment variable for good: do it early."""

import importlib

importlib.import_module("torch._dynamo")
