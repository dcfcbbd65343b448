"""The exempt pages: those that a run of all pages leaves out on a device, by what their front matter says."""

from pagetest.model.page import Page
from pagetest.run.device import CPU, CUDA, Device


def why_exempt(page: Page, device: Device) -> str:
    """Why the page is left out on the device; empty if it is not. A page that is named runs all the same."""
    if device.requested in ("", CPU) or page.front is None or CUDA in page.front.devices:
        return ""
    return f"its front matter names only {', '.join(page.front.devices)}"
