"""What a slip at the command line is called: one sentence, with what was most likely meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import cyclopts
from cyclopts import App

from p2pdiloco_node.config import nearest

# What a word without a flag most likely was meant for.
LEFT_OUT = {"tracker": "--run", "node": "--join"}
FREE_TEXT = ("--prompt", "--name")  # what comes behind is more of it, whatever flag is left out
MISSPELT = re.compile(r"Did you mean (?P<flag>\S+) instead of (?P<word>[^\s?]+)")


def slip(error: cyclopts.CycloptsError, app: App, arguments: Sequence[str]) -> str:
    """One sentence; an unknown flag or command comes with the nearest match."""
    if isinstance(error, cyclopts.UnknownOptionError) and error.token is not None:
        word = error.token.keyword or str(error.token.value)
        flags = [n for a in (error.argument_collection or ()) for n in a.names if n.startswith("--")]
        return f"there is no flag {word}{nearest(word, [*flags, '--help'])} (see {_help(arguments)})"
    if isinstance(error, cyclopts.UnknownCommandError) and error.unused_tokens:
        word, group = error.unused_tokens[0], _at(app, error.command_chain)
        what, known = ("flag", ["--help", "--version"]) if word.startswith("-") else ("command", list(group))
        chain = " ".join(("p2pdiloco", *(error.command_chain or ())))
        return f"there is no {what} {word}{nearest(word, known)} (see {chain} --help)"
    if isinstance(error, cyclopts.UnusedCliTokensError) and error.unused_tokens:
        word = error.unused_tokens[0]
        command = " ".join(error.command_chain or ())
        meant = _meant(word, command, arguments, LEFT_OUT.get(command, ""))
        return f"{word!r} stands alone, without a flag before it{meant} (see p2pdiloco {command} --help)"
    text = " ".join(str(error).split())
    # A slip in the name of a flag that is needed: cyclopts speaks of the flag that is missing.
    if isinstance(error, cyclopts.MissingArgumentError) and (slip := MISSPELT.search(text)):
        word = slip["word"].rstrip(".").split("=")[0]
        return f"there is no flag {word}; did you mean {slip['flag']!r}? (see {_help(arguments)})"
    if isinstance(error, cyclopts.MissingArgumentError) and error.argument is not None:
        command, lacking = " ".join(error.command_chain or ()), error.argument.names[0]
        others = _lacking(_at(app, error.command_chain), arguments, lacking)
        if any(word.partition("=")[0] in error.argument.names for word in arguments):
            return f"{lacking} stands without a value (an unset variable?; see {_help(arguments)})"
        unknown = next((w for w in error.unused_tokens or () if w.startswith("--")), "")
        slip_too = f"there is no flag {unknown.split('=')[0]}, and " if unknown else ""
        alone = next((w for w in error.unused_tokens or () if not w.startswith("-")), "")
        meant = _meant(alone, command, arguments, lacking) if alone and not unknown else ""
        needed = " and ".join(", ".join([lacking, *others]).rsplit(", ", 1))
        return f"{slip_too}{command} needs {needed}{meant} (see p2pdiloco {command} --help)"
    return f"{text[:1].lower()}{text[1:]}" if text else "the command line was not understood; see --help"


def _at(app: App, chain: Sequence[str] | None) -> App:
    for word in chain or ():
        app = app[word]
    return app


def _lacking(command: App, arguments: Sequence[str], first: str) -> list[str]:
    """The other flags that a command needs: else they would be asked for one by one."""
    given = {first, *(argument.partition("=")[0] for argument in arguments)}
    needed = [a.names for a in command.assemble_argument_collection() if a.required]
    return [names[0] for names in needed if names[0].startswith("--") and given.isdisjoint(names)]


def _meant(word: str, command: str, arguments: Sequence[str], lacking: str) -> str:
    """What a word that stands alone most likely is: more of a value, or the value of the flag that lacks."""
    before, flag = "", ""  # the value in front of the word, and the flag in front of that
    for argument in arguments[len(command.split()) :]:
        if argument == word and before:
            break
        if argument.startswith("--"):
            flag, _, before = argument.partition("=")
        else:
            before = argument
    else:
        before, flag = "", ""
    if lacking and not any(a.partition("=")[0] == lacking for a in arguments) and flag not in FREE_TEXT:
        return f"; did you mean {lacking} {shlex.quote(word)}?"
    if command == "export" and before and not flag:  # from left to right, as cp has it
        source = "--join" if "://" in before else "--run"
        return f"; did you mean {source} {shlex.quote(before)} {shlex.quote(word)}?"
    if not before:
        return ""
    return f'; quote a value with blanks: {flag}{" " if flag else ""}"{before} {word} ..."'


def _help(arguments: Sequence[str]) -> str:
    return f"p2pdiloco {_words(arguments)} --help"


def _words(arguments: Sequence[str]) -> str:
    words = []
    for argument in arguments:
        if argument.startswith("-"):
            break
        words.append(argument)
    return " ".join(words[:2])
