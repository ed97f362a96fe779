"""Slips at the command line: one sentence, the documented exit code, and nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco_node.cli import node, run_app, run_command, tracker
from p2pdiloco_node.commands.slips import KEPT, OF_NEW_ALONE
from p2pdiloco_node.config import NodeConfig, TrackerConfig, in_a_line
from p2pdiloco_node.demo.command import STEPS_MIN, steps_of_a_pass
from p2pdiloco_node.run.file import TABLES

ROOT = Path(__file__).parents[3]


def test_a_misspelt_flag_that_is_needed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "new", "--nme", "x", "--model", "llama:tiny", "--out", "x"]) == 2
    assert capsys.readouterr().err == (
        "p2pdiloco: there is no flag --nme; did you mean '--name'? (see p2pdiloco run new --help)\n"
    )


INTERRUPTED_IMPORT = """
import signal, sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[3]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
from importlib.metadata import EntryPoint
EntryPoint(sys.argv[1], sys.argv[2], "console_scripts").load()()
"""


@pytest.mark.parametrize("module", ["msgspec", "cyclopts"])
def test_ctrl_c_while_python_imports_is_no_traceback(module: str) -> None:
    """The first third of a second of every command."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["p2pdiloco"]
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, "p2pdiloco", script, module],
        capture_output=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "new", "--name", "caf\udce9", "--out", "x"],
        ["run", "new", "--prompt", "caf\udce9", "--out", "x"],
        ["run", "new", "--text-key", "caf\udce9", "--out", "x"],
        ["node", "--name", "caf\udce9", "--join", "http://127.0.0.1:1/", "--data-dir", "x"],
    ],
)
def test_what_is_no_utf_8_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(arguments) == 2
    assert capsys.readouterr().err.startswith("p2pdiloco: 'caf\\udce9' is no UTF-8")
    monkeypatch.setenv("P2PDILOCO_NAME", "caf\udce9")
    assert run_command(["node", "--join", "http://127.0.0.1:1/", "--data-dir", "x"]) == 3
    assert capsys.readouterr().err.startswith("p2pdiloco: P2PDILOCO_NAME is no UTF-8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nod", "there is no command nod; did you mean 'node'? (see p2pdiloco --help)"),
        ("run nw", "there is no command nw; did you mean 'new'? (see p2pdiloco run --help)"),
        ("inspect X", "there is no command inspect; did you mean 'run inspect'? (see p2pdiloco --help)"),
        ("new", "there is no command new; did you mean 'run new'? (see p2pdiloco --help)"),
        ("show", "there is no command show; did you mean 'config show'? (see p2pdiloco --help)"),
        ("inspct x", "there is no command inspct; did you mean 'run inspect'? (see p2pdiloco --help)"),
        ("run node", "there is no command node; did you mean 'p2pdiloco node'? (see p2pdiloco run --help)"),
        ("run show",
         "there is no command show; did you mean 'p2pdiloco config show'? (see p2pdiloco run --help)"),
        ("run new --out o --memory-gb 8GB",
         "invalid value for --memory-gb: '8GB' is not a number: give it without a unit, as 8"),
        ("run new --out o --lr 3,5", "invalid value for --lr: '3,5' is not a number"),
        ("run pause x --wait-s 20.5s",
         "invalid value for --wait-s: '20.5s' is not a number: give it without a unit, as 20.5"),
        ("run fork R --out o --model x",
         ("there is no flag --model: a fork keeps its parent's model and tokenizer (see p2pdiloco run fork "
          "--help)")),
        ("run fork R --out o --modle x",
         ("there is no flag --modle: a fork keeps its parent's model and tokenizer (see p2pdiloco run fork "
          "--help)")),
        ("run fork R --out o --codec int4",
         "there is no flag --codec: in a fork it is --set outer.codec=VALUE (see p2pdiloco run fork --help)"),
        ("run fork R --out o --nam q",
         "there is no flag --nam; did you mean '--name'? (see p2pdiloco run fork --help)"),
        ("--verison", "there is no flag --verison; did you mean '--version'? (see p2pdiloco --help)"),
        ("run --hepl", "there is no flag --hepl; did you mean '--help'? (see p2pdiloco run --help)"),
        ("help", "there is no command help; did you mean '--help'? (see p2pdiloco --help)"),
        ("demo --hlep", "there is no flag --hlep; did you mean '--help'? (see p2pdiloco demo --help)"),
        ("run fork --hlep",
         "there is no flag --hlep; did you mean '--help'? (see p2pdiloco run fork --help)"),
        ("status --no-json",
         "there is no flag --no-json; did you mean '--json'? (see p2pdiloco status --help)"),
        ("ranks", "ranks needs --nnodes, --node-rank and --rdzv (see p2pdiloco ranks --help)"),
        ("ranks --rdzv x", "ranks needs --nnodes and --node-rank (see p2pdiloco ranks --help)"),
        ("run new --out x",
         ("run new needs --name and --model: give them, or write name under [run] and model under [model] in "
          "the file of --config.")),
        ("run new --out x --model llama:tiny",
         "run new needs --name: give it, or write name under [run] in the file of --config."),
    ],
)  # fmt: skip
def test_the_first_slips_of_a_newcomer(capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    assert run_command(line.split()) == 2
    assert capsys.readouterr().err == f"p2pdiloco: {said}\n"


def test_a_fork_says_of_every_flag_of_a_new_run_where_it_is() -> None:
    """`--jobs` is of this machine alone."""
    new, fork = (
        {name for argument in run_app[command].assemble_argument_collection() for name in argument.names}
        for command in ("new", "fork")
    )
    assert {name for name in new - fork if name.startswith("--")} - {"--no-eval-per-source"} == {
        *OF_NEW_ALONE, "--jobs",
    }  # fmt: skip
    for place in set(OF_NEW_ALONE.values()) - {KEPT}:
        table, _, key = place.partition(".")
        assert key in TABLES[table]


@pytest.mark.parametrize(("command", "settings"), [(node, NodeConfig), (tracker, TrackerConfig)])
def test_the_help_says_the_defaults_that_hold(command: Any, settings: Any) -> None:
    """Of these two the flags have none of their own."""
    said = dict(
        re.findall(r"^    (\w+):\n(?:        .*\n)*?.*Left\sout: (\S+)\.$", command.__doc__, re.MULTILINE)
    )
    assert len(said) >= 4
    defaults = settings()
    assert said == {key: in_a_line(getattr(defaults, key)) for key in said}


@pytest.mark.parametrize("command", ["node", "tracker", "config show"])
def test_a_slip_in_a_variable_ends_what_reads_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("P2PDILOCO_DATADIR", "x")
    assert run_command(command.split()) == 3
    assert "did you mean 'P2PDILOCO_DATA_DIR'?" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["version", "simulate --seeds 1 --jobs 1"])
def test_a_slip_in_a_variable_is_nothing_to_what_reads_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.setenv("P2PDILOCO_DATADIR", "x")
    assert run_command(line.split()) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "extend", "x"], "run extend needs --tokens"),
        (["run", "extend", "x", "--outer-steps", "12"],
         "there is no flag --outer-steps, and run extend needs --tokens"),
        (["run", "fork", "--out", "x"], "run fork needs RUN"),
        (["run", "extend"], "run extend needs RUN and --tokens"),
        (["run", "new", "--nam", "x"], "there is no flag --nam, and run new needs --out"),
        # `--peers $UNSET`: the shell leaves nothing of it (scenario G1).
        (["run", "pause", "x", "--peers"], "--peers stands without a value"),
        (["run", "pause", "x", "--peers", "--json"], "--peers stands without a value"),
        (["run", "extend", "x", "--tokens"], "--tokens stands without a value"),
    ],
)  # fmt: skip
def test_what_a_command_lacks_is_said_with_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run_command(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"p2pdiloco: {said} (")
    assert "see p2pdiloco run" in told


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate --prompt It is a truth --from x",
         '\'is\' ALONE; QUOTE: --prompt "It is ..."'),
        ("generate --prompt=It is a truth --from=x",
         '\'is\' ALONE; QUOTE: --prompt "It is ..."'),
        ("generate --prompt It is", 'generate needs --from; QUOTE: --prompt "It is ..."'),
        ("node --name my node",
         '\'node\' ALONE; QUOTE: --name "my node ..."'),
        ("run new --out o --admission local books", "'books' ALONE; did you mean --data books?"),
        ("run new --out o --lr 1 books", "'books' ALONE; did you mean --data books?"),
        ("run new --out my tests", "'tests' ALONE; did you mean --data tests?"),  # it is there
        ("run new --out my run", '\'run\' ALONE; QUOTE: --out "my run ..."'),
        ("run new --out o --data a --seed 4 b", "'b' ALONE"),
        ("run pause a b", '\'b\' ALONE; QUOTE: "a b ..."'),
        ("generate exp4", "generate needs --from and --prompt; did you mean --from exp4?"),
        ("generate --prompt-tokens exp4",
         "there is no flag --prompt-tokens, and generate needs --from and --prompt"),
        ("generate --tokens 5 exp4", "generate needs --from and --prompt; did you mean --from exp4?"),
        ("run extend x 5M", "run extend needs --tokens; did you mean --tokens 5M?"),
        ("tracker --listen h:1 runs", "'runs' ALONE; did you mean --run runs?"),
        ("export austen exp4",
         "'exp4' ALONE; did you mean --run austen exp4?"),
        ("export http://h:1/ exp4",
         "'exp4' ALONE; did you mean --join http://h:1/ exp4?"),
    ],
)  # fmt: skip
def test_a_word_that_stands_alone_comes_with_what_it_may_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert run_command(line.split()) == 2
    said = said.replace("ALONE", "stands alone, without a flag before it")
    said = said.replace("QUOTE", "quote a value with blanks")
    told = capsys.readouterr().err
    command = " ".join(line.split()[: 2 if line.startswith("run ") else 1])
    assert told == f"p2pdiloco: {said} (see p2pdiloco {command} --help)\n"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["node", "--data-dir", "n"], 2, "No tracker is named"),
        (["node", "--data-dir", "n", "--device", "gpu"], 3, "give auto, cpu, cuda or cuda:N"),
        (
            ["run", "new", "--name", "x", "--model", "llama:tiny", "--data", "small.txt", "--out", "n"],
            3,
            "the corpus is too small",
        ),
    ],
)
def test_a_command_that_is_refused_leaves_nothing_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("small.txt").write_text("small")
    assert run_command(arguments) == code
    assert sentence in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["small.txt"]


def test_a_pass_of_the_demo_has_enough_inner_steps_however_busy_the_machine() -> None:
    assert steps_of_a_pass(0.1, None) == 40
    assert steps_of_a_pass(3.0, None) == STEPS_MIN
    assert steps_of_a_pass(3.0, 2) == 2, "as asked for"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("run inspect EMPTY", "RUN"),
        ("run pause EMPTY", "RUN"),
        ("run finish EMPTY --yes", "RUN"),
        ("run revoke EMPTY dave --yes", "RUN"),
        ("run revoke x EMPTY --yes", "PEER"),
        ("run fork EMPTY --out x", "RUN"),
        ("run new --name n --model llama:tiny --out EMPTY", "--out"),
        ("run new --name n --model EMPTY --out x", "--model"),
        ("run new --name n --model llama:tiny --data a.txt --data EMPTY --out x", "--data"),
        ("run new --name n --model llama:tiny --owner-key EMPTY --out x", "--owner-key"),
        ("run pause x --owner-key EMPTY", "--owner-key"),
        ("node --join EMPTY", "--join"),
        ("node --join http://127.0.0.1:1/ --data-dir EMPTY", "--data-dir"),
        ("tracker --run EMPTY", "--run"),
        ("tracker --run x --config EMPTY", "--config"),
        ("export EMPTY --run x", "OUT"),
        ("export x --run EMPTY", "--run"),
        ("generate --prompt It --from EMPTY", "--from"),
        ("verify EMPTY", "FOLDER"),
        ("simulate EMPTY", "EXPERIMENT"),
        ("simulate x --json EMPTY", "--json"),
        ("demo --keep EMPTY", "--keep"),
        ("status --url EMPTY", "--url"),
        ("config show --config EMPTY", "--config"),
    ],
)
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_word_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str,
    what: str, empty: str,
) -> None:  # fmt: skip
    """`"$UNSET"` in a script."""
    monkeypatch.chdir(tmp_path)
    assert run_command([empty if word == "EMPTY" else word for word in line.split()]) == 2
    told = capsys.readouterr().err
    assert told == f"p2pdiloco: {what} is empty (an unset variable?): say which is meant.\n"
    assert not list(tmp_path.iterdir())


def test_an_equals_sign_with_nothing_behind_it_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "fork", "x", "--out="]) == 2
    assert capsys.readouterr().err.startswith("p2pdiloco: --out is empty")


def test_an_empty_prompt_is_a_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["generate", "--prompt", "", "--from", str(tmp_path / "none")]) == 3
    assert "neither a folder nor a link" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "key"),
    [("node", "data_dir"), ("node", "tensorboard"), ("tracker", "run"), ("tracker", "tensorboard")],
)
def test_an_empty_folder_in_a_variable_or_a_file_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str,
    key: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'{key} = ""\n')
    assert run_command([command, "--config", str(settings)]) == 3
    assert f"settings.toml: {key} is empty" in capsys.readouterr().err
    monkeypatch.setenv(f"P2PDILOCO_{key.upper()}", "")
    assert run_command([command]) == 3
    assert f"P2PDILOCO_{key.upper()}: {key} is empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["settings.toml"]
