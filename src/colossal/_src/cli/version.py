"""The version of the library, as the command line prints it."""

import sys

VERSION: str = sys.modules["colossal"].__version__
"""Read from the package around this one, which Python has imported first: no module imports the front door."""
