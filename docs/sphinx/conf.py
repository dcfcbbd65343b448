"""Configuration of the Sphinx site; `python docs_build.py sphinx` writes its sources and builds it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "doctest")]

project = "colossal"
author = "The colossal authors"
copyright = author  # noqa: A001 (the name that Sphinx reads)

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_design",
    "pagebuild.sphinx.extension",
]
nitpicky = True
language = "en"

myst_enable_extensions = ["colon_fence", "dollarmath", "amsmath"]
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]  # authors write Markdown
myst_heading_anchors = 6

autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = "colossal"
html_math_renderer = "mathml"
templates_path = ["templates"]
locale_dirs = ["locale"]  # beside the generated sources
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/languages.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_context = {"languages": {"en": "English", "zh-Hans": "简体中文"}}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
