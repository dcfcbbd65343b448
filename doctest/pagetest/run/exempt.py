"""The exempt pages: which of them a run of all pages leaves out on a device, and why."""

from collections.abc import Mapping

from pagetest.run.device import PRETEND, Device

EXEMPT: Mapping[str, Mapping[str, str]] = {
    PRETEND: {
        "basics/command_line_tool": "it starts programs that stay on the CPU, and says so to the reader",
        "contributing/documentation": "it runs the harness on a page that computes on no device",
        "features/cpu_collectives": "it is about collectives in the memory of one host",
        "features/fault_tolerance": "it loses ranks on the CPU of one machine, and says so to the reader",
    }
}
"""By device and page; a page that is named runs all the same."""


def exempt_pages(device: Device) -> Mapping[str, str]:
    """The pages that say nothing about a device, each with the reason."""
    return EXEMPT.get(device.requested, {})
