"""The documentation site: `make docs` writes it to build/docs.

Sphinx reads the repository itself, so that pages link to each other as they do there: README.md is the front page, the
others are in docs/, ffi/ and notebooks/. Notebooks are shown with the outputs that they were saved with. The reference
(docs/api) comes from the docstrings, which are of Google's style with Markdown's code spans.
"""

import inspect
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

import jaxmoe
import jaxmoe.convert
import jaxmoe.linen
import jaxmoe.nnx
import jaxmoe.plan

ROOT = Path(__file__).parents[1]
NAME_PATTERN = r"jaxmoe(?:\.[a-zA-Z]\w*)+"  # jaxmoe._cuda is not in every build

project = "jaxmoe"
release = jaxmoe.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_nb"]

root_doc = "README"
include_patterns = ["README.md", "docs/*.md", "docs/api/*.md", "docs/performance/*.md", "ffi/*.md", "notebooks/*.ipynb"]
# Folders, which Sphinx would look through otherwise.
exclude_patterns = [".*", "build", "demo_output", "dist", "examples", "jaxmoe", "tests", "tools"]

html_theme = "furo"
html_title = "jaxmoe"
html_copy_source = False
html_show_sourcelink = False
nitpicky = True

nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# What links in pages are: those of the repository, and of the web.
myst_url_schemes = ["http", "https"]

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
maximum_signature_line_length = 100
python_display_short_literal_types = True

# ---------------------------------------------------------------- the front page

# The README has no table of contents: it is to be read as it lies in the repository, too.
CONTENTS = """

```{toctree}
:hidden:
:caption: Guide
docs/recipe
docs/exchange
docs/losses
docs/scaling
docs/reliability
docs/what_works_where
docs/performance
```

```{toctree}
:hidden:
:caption: Use it in
docs/use_in_maxtext
docs/use_in_levanter
docs/use_in_easydel
docs/beside_transformer_engine
```

```{toctree}
:hidden:
:caption: Notebooks
notebooks/moe_in_twenty_lines
notebooks/train_a_tiny_moe
notebooks/load_a_checkpoint
notebooks/experts_in_few_bits
notebooks/experts_of_your_own
```

```{toctree}
:hidden:
:caption: Measured
docs/performance/forward
docs/performance/backward
docs/performance/eight_bits
docs/performance/four_bits
docs/performance/beside
docs/performance/scans
docs/performance/exchange
docs/performance/timeline
docs/performance/xla
```

```{toctree}
:hidden:
:caption: Reference
docs/api/layer
docs/api/routing
docs/api/weights
docs/api/exchange
docs/api/checkpoints
docs/api/flax
docs/api/plans
docs/api/testing
```

```{toctree}
:hidden:
:caption: Inside
ffi/README
ffi/kernel
ffi/memory
ffi/build
```
"""


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the table of contents to the front page."""
    if docname == root_doc:
        source[0] += CONTENTS


def write_index(app: Sphinx, exception: Exception | None) -> None:
    """Writes the front page a second time, where web servers look for it."""
    if exception is None and app.builder.format == "html":
        shutil.copyfile(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


class PlainFileLinks(SphinxTransform):
    """Shows links to files of the repository that are no pages, such as sources, as their text: the site has no files.

    MyST has made a download of each file by then, and of a folder a link that it would look for among the pages.
    """

    default_priority = 5  # before links are resolved

    def apply(self, **kwargs: Any) -> None:
        """Replaces the links of one page."""
        folder = (ROOT / self.env.docname).parent
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("reftype") == "myst" and (folder / link["reftarget"]).is_dir():
                link.replace_self(link[0].children)
        for link in list(self.document.findall(addnodes.download_reference)):
            link.replace_self(link[0].children)


class NamesInPages(SphinxTransform):
    """Links the library's names in code spans of pages to the reference; one that there is not is a warning."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Wraps the code spans of one page."""
        for literal in list(self.document.findall(nodes.literal)):
            name = re.fullmatch(rf"({NAME_PATTERN})(?:\(.*\))?", literal.astext())
            if name and not isinstance(literal.parent, nodes.reference | addnodes.pending_xref | nodes.title):
                link = addnodes.pending_xref(refdomain="py", reftype="obj", reftarget=name[1], refdoc=self.env.docname)
                literal.replace_self(link)
                link += literal


class DoubleQuotes(SphinxTransform):
    """Writes strings in signatures, shapes most of all, as the sources do."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Replaces the quotes of one page."""
        literals = list(self.document.findall(addnodes.desc_sig_literal_string))
        defaults = [each for each in self.document.findall(nodes.inline) if "default_value" in each["classes"]]
        for literal in literals + defaults:
            literal[:] = [nodes.Text(re.sub(r"^'(.*)'$", r'"\1"', literal.astext()))]


# ---------------------------------------------------------------- docstrings

# Where each name is documented, by where it is defined, which annotations have. Of several modules the last counts.
PUBLIC_NAMES = {
    f"{value.__module__}.{value.__qualname__}": f"{module.__name__}.{name}"
    for module in (jaxmoe.plan, jaxmoe.convert, jaxmoe)
    for name in module.__all__
    if hasattr(value := getattr(module, name), "__qualname__")
}


class Expression(str):
    """A default as it stands in the source, where its value has no short form."""

    __repr__ = str.__str__


DEFAULTS = {
    "param_dtype": Expression("jnp.float32"),
    "kernel_init": Expression("default_init"),
    "router_init": Expression("default_init"),
    "partitioning": Expression("nn.with_partitioning"),
}


def signature_of(function: Any, left_out: set[str]) -> inspect.Signature:
    """Returns the signature of a layer's class, which Flax makes one for every class or lengthens by its own fields."""
    parameters = [
        parameter.replace(default=DEFAULTS.get(name, parameter.default))
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in left_out
    ]
    return inspect.Signature(parameters)


jaxmoe.nnx.MoE.__signature__ = signature_of(jaxmoe.nnx.MoE.__init__, {"self"})
jaxmoe.linen.MoE.__signature__ = signature_of(jaxmoe.linen.MoE, {"parent", "name"})


def as_restructured_text(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turns what differs between the docstrings' Markdown and reStructuredText."""
    # No letter may follow a code span, as one does in a plural. Each span is looked at, so that none is taken to begin
    # where another one ends.
    spans = re.compile(r"(`[^`]+`)(\w?)")
    lines[:] = spans.sub(lambda span: span[1] + (f"\\ {span[2]}" if span[2] else ""), "\n".join(lines)).split("\n")


def link_public_name(app: Sphinx, env: Any, node: addnodes.pending_xref, content: nodes.Element) -> nodes.Node | None:
    """Links a name of the library to where it is documented, and shows every other code span as it is.

    Nothing is returned, which is a warning, where `jaxmoe.` stands before a name that there is not.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if public := PUBLIC_NAMES.get(target):
        return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, content)
    if re.fullmatch(NAME_PATTERN, target):
        try:
            pkgutil.resolve_name(target)
        except (AttributeError, ImportError):
            return None
    return content


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the functions above."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", write_index)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("missing-reference", link_public_name)
    app.add_transform(PlainFileLinks)
    app.add_transform(NamesInPages)
    app.add_transform(DoubleQuotes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
