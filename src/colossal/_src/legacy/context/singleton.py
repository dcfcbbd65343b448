"""Classes with one object."""

from typing import Any


class SingletonMeta(type):
    """The metaclass of a class whose first call makes its object, which later calls return.

    Example:
        >>> from colossal.legacy.context import SingletonMeta
        >>> class Settings(metaclass=SingletonMeta): ...
        >>> Settings() is Settings()
        True
    """

    _objects: dict[type, Any] = {}  # noqa: RUF012 (one for all classes)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the only object of the class, which the first call makes.

        Args:
            *args: What the class takes.
            **kwargs: What the class takes.

        Returns:
            The object.
        """
        if cls not in SingletonMeta._objects:
            SingletonMeta._objects[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._objects[cls]
