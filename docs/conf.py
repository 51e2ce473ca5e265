"""Sphinx settings: furo, Markdown by MyST, the API from docstrings; built strictly by `make docs`."""

import re

from docutils import nodes
from latex2mathml.converter import convert

import shippo_ssm

project = "SHiPPO"
copyright = "The SHiPPO developers"
release = shippo_ssm.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# Formulas become MathML when the pages are built, so that they are there without a network.
html_math_renderer = "mathml"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"SHiPPO {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Attributes of a named tuple are described once.
napoleon_use_ivar = True


def plain_text(app, what, name, obj, options, lines):
    """Docstrings are plain text with equations: `|V|`, `a * b` and `x_` are not reST markup, and `width: P.` begins no list."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            line = re.sub(r"(^\s*|: )(\w)\.(?=\s|$)", r"\1\\\2.", line)
            lines[number] = re.sub(r"(?<!\\)([|*])", r"\\\1", re.sub(r"(\w)_(?=\W|$)", r"\1\\_", line))


def skip_fields(app, what, name, obj, skip, options):
    """Fields of a named tuple are described by its class; what Python says of them is "Alias for field number 0"."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def keep_numbers_whole(app, doctree, name):
    """1.3e-05 or ≤ 1.2 in a table: a line must not end inside, so hyphen and space are those that do not break."""
    for entry in doctree.findall(nodes.entry):
        for text in list(entry.findall(nodes.Text)):
            whole = re.sub(r"(?<=\de)-(?=\d)", "\N{NON-BREAKING HYPHEN}", text)
            text.parent.replace(text, nodes.Text(re.sub(r"(?<=[≤≥±]) (?=\d)", "\N{NO-BREAK SPACE}", whole)))


def render_inline(self, node):
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def render_block(self, node):
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(convert(node.astext(), display="block"))
    self.body.append("</div>")
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=(render_inline, None), block_renderers=(render_block, None))
    app.connect("autodoc-process-docstring", plain_text, priority=400)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("doctree-resolved", keep_numbers_whole)
