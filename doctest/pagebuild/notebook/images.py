"""Images inside a notebook: a file that is downloaded alone has no folder of images beside it."""

import base64
from pathlib import Path
from urllib.parse import unquote

TYPES = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}


def data_url(page: Path, target: str) -> str | None:
    """The content of an image as an address, which JupyterLab shows for every type; None for what is no image.

    Args:
        page: The page's file.
        target: The image as the page names it.
    """
    file = page.parent / unquote(target)
    kind = TYPES.get(file.suffix.lower())
    if kind is None or not file.is_file():
        return None
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
