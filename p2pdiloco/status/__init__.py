"""What people see of a run, as plain values: RunStatus, and the builder that keeps it up to date.

`read_model` is the shape (also of the JSON twin), `builder` keeps it, `words` decides the status words and
their reasons, `curve` holds the history by version, `traffic` counts bytes, `names` makes hostile texts
harmless, `join` writes the line that newcomers paste.
"""

from p2pdiloco.status.builder import StatusBuilder
from p2pdiloco.status.join import LOOPBACK, join_hint
from p2pdiloco.status.names import clean_name, clean_text
from p2pdiloco.status.read_model import NodeView, RunStatus, to_json

__all__ = [
    "LOOPBACK",
    "NodeView",
    "RunStatus",
    "StatusBuilder",
    "clean_name",
    "clean_text",
    "join_hint",
    "to_json",
]
