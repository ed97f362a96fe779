"""The pages are true: links lead somewhere, commands and fields are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest

from p2pdiloco import exit_codes
from p2pdiloco.wire import log
from p2pdiloco.wire.messages import KINDS, LastAck, Outcome

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
WORDS = (
    "run", "RunSpec", "RunId", "node", "peer", "PeerId", "tracker", "announce", "inner step", "outer step",
    "version", "index", "pass", "full round", "pseudo-gradient", "delta", "adopt", "merge", "staleness",
    "aggregator", "voter", "witness", "committee", "term", "epoch", "body", "proposal", "ack", "certificate",
    "params", "weight", "blob", "digest", "envelope", "snapshot", "checkpoint",
)  # fmt: skip


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What a heading is called in a link, as GitHub makes it."""
    heads = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", head.replace("`", "")).strip().lower().replace(" ", "-") for head in heads
    }


def link_faults(page: Path, text: str) -> list[str]:
    wrong = []
    for target in LINK.findall(prose(text)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            wrong.append(f"{page.name}: {target} leads nowhere")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            wrong.append(f"{page.name}: {file.name} has no heading #{anchor}")
    return wrong


@pytest.fixture(scope="module")
def pages(root: Path, files: list[Path]) -> list[Path]:
    return [root / path for path in files if path.suffix == ".md"]


def test_links_lead_somewhere(pages: list[Path]) -> None:
    wrong = [fault for page in pages for fault in link_faults(page, page.read_text())]
    assert not wrong, "\n".join(wrong)


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[x](none.md) [y](#a-b-c) [z](#gone) [w](page.md#a-b-c)\n")
    assert link_faults(page, page.read_text()) == [
        "page.md: none.md leads nowhere",
        "page.md: page.md has no heading #gone",
    ]


def test_every_page_is_reachable_from_the_index(root: Path, pages: list[Path]) -> None:
    """A page that nobody links to is a page that nobody reads."""
    seen = set()
    todo = [root / "README.md", root / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = (target.partition("#")[0] for target in LINK.findall(prose(page.read_text())))
        todo += [(page.parent / name).resolve() for name in links if name and not re.match(r"\w+:", name)]
    lost = [str(page.relative_to(root)) for page in pages if page not in seen and "tests" not in page.parts]
    assert not lost, f"no link leads to {lost}"


def test_the_glossary_has_every_word(root: Path) -> None:
    text = (root / "docs/glossary.md").read_text()
    defined = re.findall(r"^\| \*\*([^*]+)\*\* \|", text, flags=re.MULTILINE)
    assert defined == sorted(defined, key=str.lower), "the glossary is in alphabetical order"
    missing = sorted(set(WORDS) - set(defined))
    assert not missing, f"words of the project without a definition: {missing}"


def test_the_wire_page_has_every_field_in_order(root: Path) -> None:
    page = (root / "docs/spec/wire.md").read_text() + (root / "docs/spec/log.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, flags=re.MULTILINE))
    kinds: dict[str, type[msgspec.Struct]] = {**KINDS, "LastAck": LastAck}
    names = "Committee Contribution Refused Left Scalars OuterStep Membership OwnerWord OwnerEntry Body"
    names += " Certificate Entry"
    kinds |= {name: getattr(log, name) for name in names.split()}
    wrong = [
        f"{name}: the code has {', '.join(fields)}; the page has {rows.get(name, 'nothing')}"
        for name, cls in kinds.items()
        if re.findall(r"`(\w+)`", rows.get(name, "")) != (fields := list(cls.__struct_fields__))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_outcome_is_explained(root: Path) -> None:
    page = (root / "docs/spec/wire.md").read_text()
    missing = [outcome for outcome in Outcome if f"| `{outcome}` |" not in page]
    assert not missing, f"docs/spec/wire.md does not explain {missing}"


def test_every_reason_of_a_refusal_is_explained(root: Path, sources: list[Path]) -> None:
    """NOT_CHOSEN stood in people's logs and on no page."""
    text = "".join((root / "docs/spec" / name).read_text() for name in ("http.md", "wire.md"))
    reasons = {
        reason
        for path in sources
        for reason in re.findall(r'(?:PeerError|Refused)\(\s*"([A-Z][A-Z_]+)"', path.read_text())
    }
    assert "NOT_CHOSEN" in reasons
    missing = sorted(reason for reason in reasons if not re.search(rf"\b{reason}\b", text))
    assert not missing, f"reasons that logs name and no page explains: {missing}"


def test_every_exit_code_is_documented(root: Path) -> None:
    codes = {code for name, code in vars(exit_codes).items() if name.isupper()}
    page = (root / "docs/exit-codes.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)}
    assert codes <= documented, (
        f"exit codes without a line in docs/exit-codes.md: {sorted(codes - documented)}"
    )


def bare_codes(source: str) -> list[int]:
    """Lines of an OperatorError whose exit code is a number."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("OperatorError", "ModelRefused")
        for value in (*node.args[1:], *(k.value for k in node.keywords if k.arg == "exit_code"))
        if isinstance(value, ast.Constant)
    ]


def test_exit_codes_have_names(root: Path, sources: list[Path]) -> None:
    wrong = [f"{path}:{line}" for path in sources for line in bare_codes((root / path).read_text())]
    assert not wrong, f"an exit code is one of p2pdiloco/exit_codes.py: {', '.join(wrong)}"
    assert bare_codes('raise OperatorError("no", 3)\nOperatorError("no", exit_code=3)') == [1, 2]


def test_decisions_are_numbered_and_complete(root: Path) -> None:
    records = sorted((root / "docs/adr").glob("[0-9]*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        text = path.read_text()
        absent = [part for part in ("Status:", "## Why", "## What", "## What follows") if part not in text]
        assert not absent, f"{path.name} lacks {absent}"


def test_every_citation_is_explained(root: Path, files: list[Path]) -> None:
    """A comment that says "scenario B1" helps only where somebody can look it up."""
    page = (root / "docs/design.md").read_text()
    rows = set(re.findall(r"^\| ([\w.]+(?: \d)?) \|", page, flags=re.MULTILINE))
    lost = set()
    for path in files:
        if path.suffix != ".py" or path.name == "test_docs.py":
            continue
        text = re.sub(r"\s*\n\s*#?\s*", " ", (root / path).read_text())
        cited = re.findall(
            r"\b((?:algorithm|protocol|architecture|product)\.md) (\d(?:(?:, | and )\d)*)", text
        )
        named = {f"{name} {digit}" for name, digits in cited for digit in re.findall(r"\d", digits)}
        for group in re.findall(r"\b(?:scenarios?|targets?) ([A-Z]\d+[a-z]?(?:, [A-Z]\d+[a-z]?)*)", text):
            named |= set(group.split(", "))
        lost |= {f"{path}: {name}" for name in named - rows}
    assert not lost, "docs/design.md does not explain:\n" + "\n".join(sorted(lost))
