"""The public page: RunStatus as HTML, as JSON, as metrics, and live (product.md 4).

`routes` is what the tracker mounts; `render` makes HTML from templates; `charts` draws; `formats` writes
numbers for people; `metrics` speaks Prometheus. Nothing here decides anything about the run.
"""

from p2pdiloco_node.status_page.routes import StatusPage, add_status_routes

__all__ = ["StatusPage", "add_status_routes"]
