"""The documentation site: `python -m sphinx -W docs BUILD_FOLDER`, with the extra `docs`.

Pages are those that read well on GitHub; the reference is made of docstrings.
"""

import jaxops

project = "jaxops"
copyright = "the jaxops authors"
author = "the jaxops authors"
release = jaxops.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "sphinx_book_theme"
html_title = "jaxops"
html_theme_options = {"show_toc_level": 2}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True


def _complete(app, what, name, obj, options, lines):
    """Fails the build at a public name that has no documentation."""
    if what in ("function", "class") and name.startswith("jaxops") and not any(lines):
        raise ValueError(f"{name} has no documentation")


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _complete)
