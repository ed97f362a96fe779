"""Experiment files: arms, overrides, seeds, and slips of the pen."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import outer_defaults
from p2pdiloco.sim.lab.experiment import Experiment, Outer
from p2pdiloco_node.lab.study import Study, choose_arms, make_study, read_study


def study(text: str) -> Study:
    return make_study(tomllib.loads(text), where="x.toml")


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    return file


def test_an_empty_file_is_one_arm_named_after_it_with_every_default(tmp_path: Path) -> None:
    found = read_study(written(tmp_path, ""))
    assert found.name == "plan"
    assert found.seeds == (1,)
    assert found.arms == (Experiment(name="plan"),)


def test_arms_override_single_keys_of_the_rest_in_the_files_order() -> None:
    found = study(
        """
        question = "Which?"
        seeds = [3, 5]
        [outer]
        codec = "int4"
        mu = 0.5
        [arms.quorum]
        [arms.barrier.outer]
        policy = "barrier"
        mu = 0.9
        [arms.alone.swarm]
        nodes = 1
        """
    )
    quorum, barrier, alone = found.arms
    assert [a.name for a in found.arms] == ["quorum", "barrier", "alone"]
    assert (quorum.outer.policy, quorum.outer.mu, quorum.outer.codec) == ("quorum", 0.5, "int4")
    assert (barrier.outer.policy, barrier.outer.mu, barrier.outer.codec) == ("barrier", 0.9, "int4")
    assert (alone.swarm.nodes, alone.outer.mu) == (1, 0.5)
    assert (found.question, found.seeds) == ("Which?", (3, 5))


def test_lambda_may_be_spelt_as_people_do(tmp_path: Path) -> None:
    assert study("[outer]\nlambda = 0.2").arms[0].outer.lambda_ == 0.2
    assert study("[outer]\nlambda_ = 0.2").arms[0].outer.lambda_ == 0.2
    file = written(tmp_path, "[outer]\nlambda = 0.2")
    assert read_study(file, changes=["outer.lambda_=0.1"]).arms[0].outer.lambda_ == 0.1
    with pytest.raises(OperatorError, match="twice"):
        study("[outer]\nlambda = 0.2\nlambda_ = 0.2")


@pytest.mark.parametrize(
    ("change", "section", "key", "value"),
    [
        ("outer.policy=barrier", "outer", "policy", "barrier"),
        ('outer.policy="barrier"', "outer", "policy", "barrier"),
        ("swarm.speeds=[1.0, 0.3]", "swarm", "speeds", (1.0, 0.3)),
        ("swarm.joins=[[0.5, 8]]", "swarm", "joins", ((0.5, 8),)),
        ("outer.dylu=false", "outer", "dylu", False),
        ("inner.lr=1e-3", "inner", "lr", 1e-3),
        ("run.hours=12", "run", "hours", 12),
        ('data.files=["a/*.txt"]', "data", "files", ("a/*.txt",)),
    ],
)
def test_a_change_is_a_toml_value_or_a_word(
    tmp_path: Path, change: str, section: str, key: str, value: object
) -> None:
    arm = read_study(written(tmp_path, ""), changes=[change]).arms[0]
    assert getattr(getattr(arm, section), key) == value


def test_a_change_holds_for_all_arms_that_say_nothing_else(tmp_path: Path) -> None:
    file = written(tmp_path, "[run]\nrounds = 200\n[arms.a]\n[arms.b.run]\nrounds = 50\n")
    assert [a.run.rounds for a in read_study(file, changes=["run.rounds=10"]).arms] == [10, 50]
    both = ["run.rounds=10", "arms.b.run.rounds=20"]
    assert [a.run.rounds for a in read_study(file, changes=both).arms] == [10, 20]


def test_seeds_of_the_command_line_win(tmp_path: Path) -> None:
    assert read_study(written(tmp_path, 'seeds = "1..3"'), seeds="7,9").seeds == (7, 9)
    assert read_study(written(tmp_path, 'seeds = "1..3"')).seeds == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[outr]\n", "there is no key outr; did you mean 'outer'?"),
        ("[outer]\npolcy = 1", "there is no key outer.polcy; did you mean 'policy'?"),
        ("[outer]\nnodes = 1", "there is no key outer.nodes; did you mean 'swarm.nodes'?"),
        ("[arms.a.outer]\npolcy = 1", "there is no key arms.a.outer.polcy; did you mean 'policy'?"),
        ("[arms.a]\nrounds = 1", "there is no key arms.a.rounds; did you mean 'run.rounds'?"),
        ("[swarm]\nnodes = 'four'", "'four' is not possible: expected a whole number, not a word"),
        ("[swarm]\nnodes = 0", "swarm.nodes = 0 is not possible: expected a whole number >= 1 (default: 4)"),
        ("[swarm]\nnodes = 2.5", "2.5 is not possible: expected a whole number, not one with a fraction"),
        ("[outer]\npolicy = 'fence'", "it is one of barrier, data_parallel, immediate, quorum"),
        ("[arms.a.swarm]\ndelta_loss = 2", "arms.a.swarm.delta_loss = 2 is not possible"),
        ("outer = 3", "outer is a table: write [outer]"),
        ("arms = 3", "arms is a table of tables"),
        ("[arms]\na = 3", "write [arms.a.outer]"),
        ("seeds = true", "write \"1..3\" or [1, 2, 3]"),
        ("seeds = []", "write \"1..3\" or [1, 2, 3]"),
        ("question = 3", "question is one line"),
        ("[outer]\noptimizer = 'textbook'", 'set outer.policy = "immediate"'),
        ("seeds = '1..5000'", "4096 are the most"),
        ("seeds = [18446744073709551616]", "a seed is at most 18446744073709551615"),
        ("seeds = '18446744073709551616'", "a seed is at most 18446744073709551615"),
        ("seeds = [0x" + "f" * 5000 + "]", "a seed is at most"),
        ("swarm.nodes = 0x" + "f" * 5000, "a number of thousands of digits is not possible"),
        ("swarm.nodes" + ".a" * 3000 + " = 1", "swarm.nodes = {'a': {'a': {'a': {...}}}} is not possible"),
        ("[outer]\ncodec = 'zip'", "it is one of fp16, int4, topk128, topk32, topk64"),
    ],
)  # fmt: skip
def test_slips_are_named_with_the_way_out(text: str, sentence: str) -> None:
    with pytest.raises(OperatorError) as refused:
        study(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("outer.policy", "write SECTION.KEY=VALUE"),
        ("swarm.joins=" + "[" * 3000, "nested too deep"),
        ("swarm.nodes=" + "9" * 5000, "text of at most 4000 characters"),
        ("data.files=['\udcff']", "text of at most"),
        ("=3", "write SECTION.KEY=VALUE"),
        ("swarm.nodse=3", "did you mean 'nodes'?"),
        ("swam.nodes=3", "did you mean 'swarm.nodes'?"),
        ("a.b.c=3", "there is no key 'a.b.c'"),
        ("arms.c.outer.mu=0.5", "the file has the arms a, b"),
        (
            "outer.mu=1.5",
            f"--set outer.mu = 1.5 is not possible: expected a number <= 1.0 (default: {Outer().mu})",
        ),
    ],
)
def test_slips_in_a_change_name_the_flag_and_are_usage(tmp_path: Path, change: str, sentence: str) -> None:
    with pytest.raises(OperatorError) as refused:
        read_study(written(tmp_path, "[arms.a]\n[arms.b]"), changes=[change])
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("--set")
    assert refused.value.exit_code == 2


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(OperatorError, match="a pipe or a device"):
            read_study(file)
    with pytest.raises(OperatorError, match="it is a folder"):
        read_study(tmp_path)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for text, sentence in (
        (b"[outer", "not valid TOML"),
        (b"seeds = " + b"[" * 5000, "nested too deep"),
        (b"seeds = " + b"9" * 5000, "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
        (b"#" * 2**20 + b"#", "bytes"),
    ):
        (tmp_path / "bad.toml").write_bytes(text)
        with pytest.raises(OperatorError, match=sentence):
            read_study(tmp_path / "bad.toml")


def test_topk_has_the_outer_loop_of_a_run_with_topk(tmp_path: Path) -> None:
    """A person plans with what `run new` would start; what the file says holds."""
    text = """
        [arms.plain]
        [arms.sparse]
        outer.codec = "topk64"
        [arms.own]
        outer.codec = "topk64"
        outer.mu = 0.3
    """
    plain, sparse, own = read_study(written(tmp_path, text)).arms
    assert (plain.outer.codec, plain.outer.mu, plain.outer.eta_alone) == ("int4", 0.5, 0.5)
    wanted = outer_defaults("topk64")
    assert wanted
    for key, value in wanted.items():
        assert getattr(sparse.outer, key) == value
    assert (own.outer.mu, own.outer.error_feedback_beta) == (0.3, 0.95)


def test_arms_and_their_reference_are_chosen(tmp_path: Path) -> None:
    study = read_study(written(tmp_path, "[arms.a]\n[arms.b]\n[arms.c]"))
    assert [x.name for x in choose_arms(study, None, "c").arms] == ["c", "a", "b"]
    assert [x.name for x in choose_arms(study, "b,a", None).arms] == ["b", "a"]
    assert [x.name for x in choose_arms(study, "b", "c").arms] == ["c", "b"]
    for flags, words in (
        ((None, "d"), "--against 'd': there is no such arm. The file"),
        (("a,x", None), "--arms 'x'"),
    ):
        with pytest.raises(OperatorError, match=words) as error:
            choose_arms(study, *flags)
        assert error.value.exit_code == 2


def test_a_slip_is_blamed_on_where_it_stands(tmp_path: Path) -> None:
    def said(text: str, *changes: str, seeds: str | None = None) -> str:
        with pytest.raises(OperatorError) as error:
            read_study(written(tmp_path, text), changes=changes, seeds=seeds)
        return str(error.value)

    assert "plan.toml: seeds 3..1 names no seed" in said('seeds = "3..1"')
    assert said("", seeds="3..1").startswith("--seeds 3..1 names no seed")
    assert "--set arms.a.outer.policy = 'quroum'" in said("[arms.a]", "arms.a.outer.policy=quroum")
    wrong = said("[swarm]\njoins = [0.3, 8]")
    assert "expected a list, not one with a fraction; write it like joins = [[0.5, 8]] (default: [])" in wrong
    assert "expected a list, not a word; write it like speeds = [1.0, 0.5]" in said("", "swarm.speeds=1,0.5")
    assert "latency_s = 50 is not possible: expected a number <= 10" in said("[swarm]\nlatency_s = 50")
