"""What a slip at the command line is called: one sentence, with what was most likely meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import cyclopts
from cyclopts import App

from p2pdiloco_node.config import nearest

# What a word without a flag most likely was meant for.
LEFT_OUT = {"tracker": "--run", "node": "--join"}
OFTEN_LEFT_OUT = {"run new": "--data"}  # which also works without
FREE_TEXT = ("--prompt", "--name")  # what comes behind is more of it, whatever flag is left out
KEPT = "a fork keeps its parent's model and tokenizer"
# Flags of `run new` that `run fork` lacks: kept, or the key of --set.
OF_NEW_ALONE = {
    "--model": KEPT, "--tokenizer": KEPT, "--seed": KEPT, "--seq-len": "model.seq_len",
    "--codec": "outer.codec", "--committee": "committee.size_max", "--admission": "run.admission",
    "--text-key": "data.text_key", "--eval-per-source": "data.eval_per_source",
}  # fmt: skip
MISSPELT = re.compile(r"Did you mean (?P<flag>\S+) instead of (?P<word>[^\s?]+)")


def slip(error: cyclopts.CycloptsError, app: App, arguments: Sequence[str]) -> str:
    """One sentence; an unknown flag or command comes with the nearest match."""
    if isinstance(error, cyclopts.UnknownOptionError) and error.token is not None:
        word = error.token.keyword or str(error.token.value)
        flags = [n for a in (error.argument_collection or ()) for n in a.names if n.startswith("--")]
        if _words(arguments) == "run fork" and (why := _not_in_a_fork(word, flags)):
            return f"there is no flag {word}: {why} (see {_help(arguments)})"
        return f"there is no flag {word}{nearest(word, [*flags, '--help'])} (see {_help(arguments)})"
    if isinstance(error, cyclopts.UnknownCommandError) and error.unused_tokens:
        word, chain = error.unused_tokens[0], error.command_chain or ()
        see = f"(see {' '.join(('p2pdiloco', *chain))} --help)"
        if word.startswith("-"):
            return f"there is no flag {word}{nearest(word, ['--help', '--version'])} {see}"
        return f"there is no command {word}{_command_like(word, app, chain)} {see}"
    if isinstance(error, cyclopts.UnusedCliTokensError) and error.unused_tokens:
        word = error.unused_tokens[0]
        command = " ".join(error.command_chain or ())
        meant = _meant(word, app, command, arguments, LEFT_OUT.get(command, ""))
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
        meant = _meant(alone, app, command, arguments, lacking) if alone and not unknown else ""
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


def _command_like(word: str, app: App, chain: Sequence[str]) -> str:
    """`; did you mean X?`, also of another group, whose name was left out; or nothing."""
    elsewhere: dict[str, str] = {}
    whole = "p2pdiloco " if chain else ""  # else it would be one more word of this group
    for name in (name for name in app if not name.startswith("-")):
        within = [] if chain == (name,) else [sub for sub in app[name] if not sub.startswith("-")]
        elsewhere |= {sub: f"{whole}{name} {sub}" for sub in within}
        if chain:
            elsewhere[name] = f"{whole}{name}"
    if word not in elsewhere and (near := nearest(word, list(_at(app, chain)))):
        return near
    close = word if word in elsewhere else _nearest_word(word, list(elsewhere))
    return f"; did you mean {elsewhere[close]!r}?" if close else ""


def _not_in_a_fork(word: str, flags: Sequence[str]) -> str:
    """Why a flag of `run new`, or what is nearest to one, is none of `run fork`; empty: another slip."""
    instead = OF_NEW_ALONE.get(_nearest_word(word, [*OF_NEW_ALONE, *flags, "--help"]), "")
    return instead if instead in ("", KEPT) else f"in a fork it is --set {instead}=VALUE"


def _nearest_word(word: str, words: Sequence[str]) -> str:
    return next(iter(get_close_matches(word, words, n=1)), "")


def _meant(word: str, app: App, command: str, arguments: Sequence[str], lacking: str) -> str:
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
    whole = _has_no_blanks(_at(app, command.split()), flag)
    often = OFTEN_LEFT_OUT.get(command, "")
    if often and not any(a.partition("=")[0] == often for a in arguments) and (whole or Path(word).exists()):
        return f"; did you mean {often} {shlex.quote(word)}?"
    if not before or whole:
        return ""
    return f'; quote a value with blanks: {flag}{" " if flag else ""}"{before} {word} ..."'


def _has_no_blanks(command: App, flag: str) -> bool:
    """Whether a value of the flag is a number, or one of a few words: nothing behind it belongs to it."""

    def kinds(hint: Any) -> set[Any]:
        if get_origin(hint) is Literal:
            return {Literal}
        return {hint}.union(*map(kinds, get_args(hint)))

    hints = [a.hint for a in command.assemble_argument_collection() if flag in a.names]
    return any(kinds(hint) & {int, float, Literal} for hint in hints)


def _help(arguments: Sequence[str]) -> str:
    return f"p2pdiloco {_words(arguments)} --help"


def _words(arguments: Sequence[str]) -> str:
    words = []
    for argument in arguments:
        if argument.startswith("-"):
            break
        words.append(argument)
    return " ".join(words[:2])
