"""An engine behind HTTP: the API of OpenAI, and the documented one of the OPT service. Needs the extra `serve`."""

from colossal._src.inference.server.config_file import read_config_file
from colossal._src.inference.server.load import load_engine
from colossal._src.inference.server.run import run_server
from colossal._src.inference.server.settings import ServerSettings

__all__ = ["ServerSettings", "load_engine", "read_config_file", "run_server"]
