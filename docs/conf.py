"""The documentation site, which ``make docs`` builds; CONTRIBUTING.md says how, and why with Sphinx."""

from pathlib import Path
from types import FunctionType

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from fp8graph import face
from fp8graph.version import __version__

project = "fp8graph"
version = release = __version__

# The sources are the whole repository, and not docs/ alone: a relative link between its Markdown files then means the
# same here and on a Git forge. Nothing but these pages is read.
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/results/README.md",
    "examples/README.md",
    "notebooks/*",
]
exclude_patterns = [".*", "build", "dist", "*.egg-info", "fp8graph", "models", "passes", "tests"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]

# --- Markdown -------------------------------------------------------------------------------------------------------
myst_heading_anchors = 4  # "page.md#a-heading", with the slugs of Git forges

# --- notebooks ------------------------------------------------------------------------------------------------------
# Each is run whenever its page is built: a cache would know its cells, but not the fp8graph that they call.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds per cell
nb_merge_streams = True
# Logs and progress bars of other libraries, with paths of this machine. Warnings of Python are errors where the tests
# run the same cells (tests/docs/test_notebooks.py).
nb_output_stderr = "remove"

# --- the pages of docs/api ------------------------------------------------------------------------------------------
autodoc_default_options = {"undoc-members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # "Format.HYBRID", as in the source
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88  # longer signatures take a line per argument
toc_object_entries_show_parents = "hide"

# Every reference must lead somewhere: `-W` makes an error of one that does not. The exceptions are names of other
# libraries, whose inventories would come from a network, and what signatures name of the inside.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|transformers|lightning|collections|contextlib|pathlib|re|typing|os|enum)\..*"),
    (
        "py:class",
        r"fp8graph\.(backend|hardware|libraries|recipes\.base|recipes\.rules|runtime)\..*",
    ),
    (
        "py:class",
        r"(.*\.)?(_Model|_T|Path|PolicyLike|RecipeLike|AmaxAlgorithm|BackwardOverride|ScaleAlgorithm|ScaleFormat"
        r"|InitialScale|Scope|ErrorMode|HasConfig)",
    ),
]

# --- how it looks ---------------------------------------------------------------------------------------------------
html_theme = "furo"  # light and dark, wide and narrow; it loads nothing from a network
html_title = f"fp8graph {release}"
pygments_dark_style = "github-dark"  # without underlined names
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]  # an index.html that leads to docs/index.html
html_copy_source = False
html_show_copyright = False


def read_google_style(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Read a docstring in Google's style, and a property's as a function's: napoleon itself takes what is before the
    first colon of a property for its type."""
    kind = "function" if what in ("property", "attribute") else what
    lines[:] = str(GoogleDocstring(lines, Config(), app, kind, name, found, options)).splitlines()


def leave_plain(app: Sphinx, _name: str, _source: list[str]) -> None:
    """A fence without a language holds output, or a command: no Python."""
    app.env.temp_data["highlight_language"] = "none"


def leave_files(app: Sphinx, page: nodes.document) -> None:
    """A link to a Python file that is no notebook leads to the file: MyST takes it for a page, too."""
    for link in list(page.findall(addnodes.pending_xref)):
        name, file = link["reftarget"], f"{link['reftarget']}.py"
        if link["refdomain"] == "doc" and name not in app.env.found_docs and Path(app.srcdir, file).is_file():
            link.replace_self(addnodes.download_reference("", "", *link.children, reftarget=f"/{file}"))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    for value in map(vars(face).get, face.__all__):  # Sphinx reads defaults in a source, which has **kwargs
        if isinstance(value, FunctionType):
            vars(value).pop("__signature__", None)
    app.connect("source-read", leave_plain)
    app.connect("doctree-read", leave_files, priority=400)  # before Sphinx collects the files that links lead to
    app.connect("autodoc-process-docstring", read_google_style)
