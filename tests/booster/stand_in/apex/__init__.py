"""A stand-in for NVIDIA's apex, which needs a GPU and a compiler: the part of it that its documentation describes."""
