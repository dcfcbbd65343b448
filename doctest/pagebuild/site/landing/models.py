"""The matrix of model families: read from the library, once it has families."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagebuild.site.edition import BrokenInputError
from pagetest.finding import Finding

FAMILIES = "colossal.shardformer"


def model_matrix(package: str = FAMILIES) -> dict[str, Any]:
    """The matrix; without rows as long as any `torch.nn.Module` is trained in one and the same way.

    Args:
        package: Where the library keeps the plans of its model families.

    Raises:
        BrokenInputError: The library has families, and nothing here reads them.
    """
    if find_spec(package) is not None:
        message = f"{package} is there: make a row of each of its model families here, and a column of each method"
        raise BrokenInputError(Finding(Path(__file__), 1, message))
    return {"columns": [], "rows": []}
