"""What torch calls when it is imported, from the entry point ``torch.backends``."""


def register() -> None:
    """Make the device known, unless the import of torch was that of the device's own package, which does so itself."""
    import pretend_device

    if hasattr(pretend_device, "register"):
        pretend_device.register()
