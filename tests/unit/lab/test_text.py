"""Whose text a node reads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.sim.lab.experiment import Data, Experiment, Model, Swarm
from p2pdiloco_node.lab.text import Feed, Text, load_text

MODEL = Model(seq_len=16)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, ...]:
    """Three kinds, each with letters of its own."""
    rng = np.random.default_rng(5)
    for kind, letters in enumerate((b"abcd", b"efgh", b"ijkl")):
        (tmp_path / str(kind)).mkdir()
        for number in range(4):
            text = rng.choice(np.frombuffer(letters, np.uint8), 100_000 + 10_000 * kind)
            (tmp_path / str(kind) / f"{number}.txt").write_bytes(text.tobytes())
    return tuple(f"{tmp_path}/{kind}/*.txt" for kind in range(3))


def experiment(folders: tuple[str, ...], *, nodes: int = 3, mixed: bool = False) -> Experiment:
    return Experiment(
        swarm=Swarm(nodes=nodes), model=MODEL, data=Data(files=folders, by_kind=True, mixed=mixed)
    )


def kinds_in(tokens: np.ndarray) -> set[int]:
    """Numbers of the kinds whose letters occur; zero bytes end files."""
    return {(int(t) - ord("a")) // 4 for t in np.unique(tokens) if t}


def feed_of(e: Experiment, node: int) -> Feed:
    return load_text(e).feed(e, 1, node)


def test_each_node_reads_its_own_kind(folders: tuple[str, ...]) -> None:
    e = experiment(folders)
    for node in range(5):
        assert kinds_in(feed_of(e, node).next_batch(200)) == {node % 3}
    # Of one kind, in another order.
    assert not np.array_equal(feed_of(e, 0).next_batch(4), feed_of(e, 3).next_batch(4))


def test_the_control_reads_all_kinds_in_equal_parts(folders: tuple[str, ...]) -> None:
    feed = feed_of(experiment(folders, mixed=True), 1)
    batches = [feed.next_batch(4) for _ in range(30)]
    assert all(kinds_in(batch) == {0, 1, 2} for batch in batches)
    rows = [next(iter(kinds_in(row))) for batch in batches for row in batch]
    assert [rows.count(kind) for kind in range(3)] == [40, 40, 40]


def test_held_out_is_an_equal_share_of_the_kinds_that_are_read(folders: tuple[str, ...]) -> None:
    two = load_text(experiment(folders, nodes=2))
    assert [k.name for k in two.kinds] == list(folders[:2])
    tokens = two.held_out(seq_len=16, tokens=6400)
    assert tokens.shape == (400, 17)
    assert [kinds_in(tokens[:200]), kinds_in(tokens[200:])] == [{0}, {1}]
    joining = experiment(folders, nodes=2)
    joining = msgspec.structs.replace(joining, swarm=Swarm(nodes=2, joins=((0.5, 4),)))
    assert len(load_text(joining).kinds) == 3
    control = load_text(experiment(folders, nodes=2, mixed=True))
    assert np.array_equal(control.held_out(seq_len=16, tokens=6400), tokens)


def test_nothing_that_is_held_out_is_trained_on(folders: tuple[str, ...]) -> None:
    for kind in load_text(experiment(folders)).kinds:
        training = kind.training.tobytes()
        held_out = kind.held_out.tobytes()
        assert len(held_out) > 10_000
        assert all(held_out[at : at + 40] not in training for at in range(0, len(held_out) - 40, 500))


def test_an_epoch_holds_every_sequence_once(folders: tuple[str, ...]) -> None:
    e = experiment(folders)
    (kind, *_) = load_text(e).kinds
    blocks = sum((tokens - 1) // 16 for tokens in kind.shards)
    rows = feed_of(e, 0).next_batch(blocks)
    assert len({row.tobytes() for row in rows}) == blocks


def test_the_digest_names_the_bytes(folders: tuple[str, ...]) -> None:
    first = load_text(experiment(folders))
    assert first.digest == load_text(experiment(folders, mixed=True)).digest
    assert first.digest != load_text(experiment(folders, nodes=2)).digest


def test_kinds_of_this_python_share_no_text() -> None:
    text: Text = load_text(Experiment(swarm=Swarm(nodes=8), data=Data(by_kind=True)))
    assert len(text.kinds) >= 2
    assert text.kinds[0].name == "library"
    # Pieces that are rare enough to name their file, looked for in the kinds before.
    shared = [
        sum(bytes(kind.training[at : at + 200]) in before.training.tobytes() for at in places)
        for i, kind in enumerate(text.kinds)
        for before in text.kinds[:i]
        for places in [range(0, len(kind.training), len(kind.training) // 12)]
    ]
    assert max(shared) <= 1  # a licence's text may well stand in two files


def test_too_few_kinds_are_refused(folders: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="two kinds of text"):
        load_text(experiment(folders[:1]))
    with pytest.raises(OperatorError, match="of its own"):  # all taken by the first glob
        load_text(experiment((folders[0], folders[0])))
