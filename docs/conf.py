"""The documentation site: `python -m sphinx -W docs BUILD_FOLDER`, with the extra `docs`.

Pages are those that read well on GitHub; the reference is made of docstrings.
"""

import inspect

from sphinx.util import logging

import jaxops
from jaxops.flax import linen, nnx

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
copybutton_exclude = ".linenos, .gp, .go"  # prompts, and what examples print
autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "code"  # docstrings have names of code between single backticks
napoleon_google_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True


def _check_reference(app, env):
    """Warns of public names that the reference lacks: autodoc leaves out what has no docstring."""
    found = env.domaindata["py"]["objects"]
    public = [f"jaxops.{name}" for name in jaxops.__all__]
    for module in (linen, nnx):
        public += [
            f"{module.__name__}.{name}"
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
        ]
    for name in public:
        if name not in found:
            logging.getLogger(__name__).warning("%s has no documentation", name)


def setup(app):
    """Called by Sphinx."""
    app.connect("env-check-consistency", _check_reference)
