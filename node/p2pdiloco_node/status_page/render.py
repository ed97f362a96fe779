"""RunStatus to HTML. Jinja2 with autoescape and StrictUndefined: texts from strangers are text, and a
misspelt field is an error in a test instead of a blank on the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from p2pdiloco import limits
from p2pdiloco.status.read_model import RunStatus
from p2pdiloco_node.status_page import formats
from p2pdiloco_node.status_page.charts import line_chart

# Live sections in the order of the page; each is a template of its own and replaced as a whole.
SECTIONS = (
    "notice", "summary", "figures", "curves", "evaluation", "nodes", "join", "checkpoints", "swarm", "events",
    "health",
)  # fmt: skip


class Rendering(NamedTuple):
    status: RunStatus
    sections: Mapping[str, str]


@cache
def _environment() -> Environment:
    env = Environment(
        loader=PackageLoader("p2pdiloco_node.status_page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (
        "count",
        "big",
        "size",
        "number",
        "times",
        "percent",
        "duration",
        "ago",
        "clock",
        "moment",
        "iso",
    ):
        env.filters[name] = getattr(formats, name)
    env.globals["line_chart"] = line_chart
    env.globals["limits"] = limits
    return env


def render_sections(status: RunStatus) -> Rendering:
    """Every live section as HTML. Milliseconds for a hundred nodes: call it in a thread."""
    env = _environment()
    return Rendering(
        status,
        {name: env.get_template(f"sections/{name}.html").render(s=status, f=formats) for name in SECTIONS},
    )


def render_page(rendering: Rendering, assets: Mapping[str, str], *, inline_css: str | None = None) -> str:
    """The whole page.

    Args:
        assets: addresses of the static files by name.
        inline_css: for a snapshot that is read without a server: the style sheet's text; no script then.
    """
    # Rendered above with autoescape; the style sheet is a file of this package.
    sections = {name: Markup(html) for name, html in rendering.sections.items()}  # noqa: S704
    css = None if inline_css is None else Markup(inline_css)  # noqa: S704
    return (
        _environment()
        .get_template("page.html")
        .render(s=rendering.status, sections=sections, assets=assets, inline_css=css)
    )
