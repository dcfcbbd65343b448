"""The API reference: every public object of the library, and what its docstring says, as data."""
