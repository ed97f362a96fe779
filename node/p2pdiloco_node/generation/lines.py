"""What the command and its process with torch say to each other: JSON, a line each."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, frozen=True):
    """The one line to the process."""

    folder: str  # a Hugging Face folder
    prompt: str
    tokens: int  # to make at most
    temperature: float  # 0: greedy
    top_p: float  # likeliest tokens that together have so much
    seed: int
    device: str  # auto, cpu, cuda, cuda:N


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """What takes time before the first piece of text."""

    what: str


class Said(msgspec.Struct, frozen=True, tag="said"):
    """The next piece of text."""

    text: str


class Noticed(msgspec.Struct, frozen=True, tag="noticed"):
    """For the person who asked, beside the text."""

    text: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    tokens: int
    seconds: float  # of making them, without loading the model
    why: str  # end: of the text, as the model sees it; tokens: as many as were asked for
    device: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The person can mend it."""

    why: str
    exit_code: int


Line = Doing | Said | Noticed | Done | Failed
