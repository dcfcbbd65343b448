"""The data of the landing page: an example, the pages, the choice of a plugin, and what the library can do."""
