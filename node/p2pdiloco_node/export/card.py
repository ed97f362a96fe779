"""README.md of an exported model: what it is, where it comes from, how to use it. For people, in Markdown.

Names are strangers' texts: every mark that Markdown or HTML would act on is escaped, so they stay text.
"""

from __future__ import annotations

import json
import string
from typing import Any

from p2pdiloco import limits
from p2pdiloco.words import count_of
from p2pdiloco_node.export.facts import Facts

_ESCAPED = str.maketrans({mark: f"\\{mark}" for mark in string.punctuation})
# A backslash before < or & is text in CommonMark; entities are text in every reader besides.
_ESCAPED |= str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def model_card(facts: Facts) -> str:
    """Markdown, with the metadata block that model hubs read."""
    run, model, data = facts["run"], facts["model"], facts["data"]
    name = text(run["name"])
    kind = "bytes" if data["tokenizer"]["kind"] == "bytes" else "tokenizer.json"
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"model_name: {json.dumps(run['name'])}",
        "tags: [p2pdiloco, diloco]",
        "# license: for the run's owner to fill in; it depends on the data, too",
        "---",
        "",
        f"# {name}, version {facts['version']:,}",
        "",
        (
            f"A {text(model['family'])} model of {model['params']:,} parameters, trained with p2pdiloco "
            f"{_where(facts)}."
        ),
        "",
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'prompt = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))",
        "```",
        "",
        f"It was trained on sequences of {model['seq_len']:,} tokens; longer ones it has never seen.",
        "",
        "## Where it comes from",
        "",
        "| | |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in _rows(facts)),
        "",
        (
            "Version, tokens, contributors and digests are from the run's certified log and signed RunSpec; "
            "the params hash to the root that a majority of the run's committee certified. Names and the "
            "evaluation are what the run's tracker said."
        ),
        "",
        "## Data",
        "",
        f"- {data['tokens']:,} training tokens in {count_of(data['shards'], 'shard')}",
        f"- Merkle root of the shards' digests: `{data['shards_root']}`",
        *_held_out(data),
        f"- tokenizer: {kind}, {data['tokenizer']['vocab_size']:,} tokens"
        + "".join(f", `{digest}`" for digest in data["tokenizer"]["digests"]),
        "",
        "## Contributors",
        "",
        *_contributors(facts["contributors"]),
        "",
        "All of this for programs: `p2pdiloco.json`.",
        "",
    ]
    return "\n".join(lines)


def text(untrusted: object) -> str:
    """One line that any Markdown reader shows as it is."""
    return " ".join(str(untrusted).split()).translate(_ESCAPED)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    run, log, evaluation = facts["run"], facts["log"], facts["evaluation"]
    rows = [
        ("RunId", f"`{run['id']}`"),
        ("owner's key", f"`{run['owner_key']}`"),
        ("version", f"{facts['version']:,} (log entry {log['index']:,}, `{log['head']}`)"),
        ("params root", f"`{log['params_root']}`"),
        ("tokens", f"{facts['tokens']:,}"),
        ("the run's end", _end(facts)),
        ("contributors", f"{len(facts['contributors']):,}"),
        ("version 0", text(run["origin"]) or "initialised at random"),
        ("weights", f"{facts['weights']['dtype']}, {_bytes(facts['weights']['files'])}"),
    ]
    if run["parent"] is not None:
        parent = run["parent"]
        rows.append(("continues", f"version {parent['version']:,} of run `{parent['run']}`"))
    if evaluation is not None:
        at = f"at version {evaluation['version']:,}"
        rows += [
            ("held-out loss", f"{evaluation['loss']:.4f} nats per token {at}"),
            ("perplexity", f"{evaluation['perplexity']:.2f} {at}"),
            ("bits per byte", f"{evaluation['bits_per_byte']:.4f} {at}"),
        ]
        rows += [
            (
                f"held-out loss, {text(held['name'])}",
                f"{held['loss']:.4f} nats per token, {held['bits_per_byte']:.4f} bits per byte {at}",
            )
            for held in evaluation["sets"][1:]
        ]
    return rows


def _where(facts: Facts) -> str:
    n = len(facts["contributors"])
    nodes = count_of(n, "node")
    if n == 0:
        return "by nobody yet"
    if facts["run"]["admission"] == "local":
        return f"by {nodes} of one machine or private network"
    return f"by {nodes} over the ordinary internet"


def _end(facts: Facts) -> str:
    tokens, version = f"{facts['target_tokens']:,} tokens", facts["target_version"]
    planned = tokens if version is None else f"version {version:,}, or {tokens} if that comes first"
    if not facts["ended_by_owner"]:
        return planned
    return f"ended by its owner at {facts['tokens']:,} tokens; planned were {planned}"


def _bytes(files: list[dict[str, Any]]) -> str:
    return f"{sum(file['size'] for file in files) / 1e6:,.1f} MB"


def _held_out(data: Facts) -> list[str]:
    return [
        f"- held out, {text(held['name'])}: {held['tokens']:,} tokens, `{held['digest']}`"
        for held in data["held_out"]
    ]


def _contributors(contributors: list[dict[str, Any]]) -> list[str]:
    if not contributors:
        return ["Nobody yet: this is the version from which the run starts."]
    shown = contributors[: limits.card_contributors_max]
    lines = ["| who | fingerprint | tokens merged | deltas |", "|---|---|---:|---:|"]
    for one in shown:
        who = text(one["name"]) or "(name not known here)"
        lines.append(f"| {who} | `{one['peer'][:8]}` | {one['tokens']:,} | {one['deltas']:,} |")
    if len(contributors) > len(shown):
        rest = contributors[len(shown) :]
        lines.append(f"| {len(rest):,} more | | {sum(one['tokens'] for one in rest):,} | |")
    return lines
