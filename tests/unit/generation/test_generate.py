"""`generate`: the text that transformers itself would make, as it comes; flags that change it; slips."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import BYTES
from p2pdiloco_node.export.tokenizer_files import tokenizer_files
from p2pdiloco_node.generation import command
from p2pdiloco_node.generation.command import Options, print_generated
from p2pdiloco_node.generation.lines import Doing, Done, Failed, Line, Noticed, Said
from p2pdiloco_node.generation.worker import Talk

WINDOW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that nobody trained writes every byte there is; its text ends at 0."""
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=WINDOW, bos_token_id=None, eos_token_id=0,
        initializer_range=1.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    for name, data in tokenizer_files(BYTES, b"", WINDOW).items():
        (made / name).write_bytes(data)
    facts = {"run": {"id": "ab" * 32}, "version": 3, "model": {"seq_len": WINDOW}}
    (made / "p2pdiloco.json").write_text(json.dumps(facts))
    return made


@pytest.fixture(scope="module")
def talk(folder: Path) -> Talk:
    return Talk(folder, "cpu")


def go_on(talk: Talk, prompt: str, tokens: int, **options: Any) -> tuple[str, list[Line], str]:
    lines: list[Line] = []
    options = {"temperature": 0.0, "top_p": 1.0, "seed": 1, **options}
    _, why = talk.go_on(prompt, tokens, say=lines.append, **options)
    return "".join(line.text for line in lines if isinstance(line, Said)), lines, why


def test_greedy_text_is_what_transformers_makes(talk: Talk, folder: Path) -> None:
    text, lines, _ = go_on(talk, "once ", 12)
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = torch.tensor([list(b"once ")])
    ids = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
    expected = bytes(ids[0, given.shape[1] :].tolist()).decode(errors="replace").replace("\x00", "")
    assert text.replace("\x00", "") == expected
    assert len(lines) > 1, "it comes in pieces"


def test_longer_than_a_sequence_the_older_half_is_forgotten(talk: Talk) -> None:
    made = [go_on(talk, "a", 3 * WINDOW, temperature=1.0, seed=seed) for seed in range(6)]
    whole = [text for text, _, why in made if why == "tokens"]
    assert whole, "not every text ends early"
    assert all(len(text.encode()) > 2 * WINDOW for text in whole)
    long, lines, _ = go_on(talk, "x" * 40 + "tail of the prompt", 6)
    assert isinstance(lines[0], Noticed)
    short, lines, _ = go_on(talk, "of the prompt"[-(WINDOW // 2) :], 6)
    assert long == short, "what was forgotten changes nothing"
    assert not any(isinstance(line, Noticed) for line in lines)


def test_seed_temperature_and_top_p_change_the_text(talk: Talk) -> None:
    def text(**options: Any) -> str:
        return go_on(talk, "once upon", 15, **options)[0]

    assert text(temperature=1.0, seed=1) == text(temperature=1.0, seed=1)
    assert text(temperature=1.0, seed=1) != text(temperature=1.0, seed=2)
    assert text(temperature=1.0, seed=1) != text()
    assert text(temperature=1.0, top_p=1e-6, seed=7) == text(), "only the likeliest token is left"


def test_a_text_ends_where_the_model_ends_it(talk: Talk) -> None:
    texts = (go_on(talk, "z", 200, temperature=2.0, seed=seed) for seed in range(16))
    text = next(text for text, _, why in texts if why == "end")  # one byte in 256 is the end
    assert "\x00" not in text[:-1]


def test_an_empty_prompt_begins_a_document(talk: Talk) -> None:
    assert go_on(talk, "", 5)[0] == go_on(talk, "\x00", 5)[0]


def test_a_folder_that_is_no_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(OperatorError, match="does not load"):
        Talk(tmp_path, "cpu")


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def test_params_that_are_not_in_the_files_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    made = copied(folder, tmp_path)
    tensors = load_file(made / "model.safetensors")
    extra = dict(list(tensors.items())[:1]) | {"elsewhere": torch.zeros(10**5)}
    for kept, why in (
        (dict(list(tensors.items())[:1]), "its config makes .* params, and its files hold"),
        (extra, "lacks"),
        (tensors | {"elsewhere": torch.zeros(3)}, "has, unknown to its config, elsewhere"),
    ):
        save_file(kept, made / "model.safetensors", {"format": "pt"})
        with pytest.raises(OperatorError, match=why):
            Talk(made, "cpu")


def test_a_config_that_asks_for_all_memory_is_refused_before_it_gets_any(
    folder: Path, tmp_path: Path
) -> None:
    made = copied(folder, tmp_path)
    config = json.loads((made / "config.json").read_text()) | {"intermediate_size": 2**34}
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(OperatorError, match="its config makes 1,"):
        Talk(made, "cpu")


def test_a_tokenizer_that_could_eat_memory_is_not_opened(folder: Path, tmp_path: Path) -> None:
    made = copied(folder, tmp_path)
    opened = json.loads((made / "tokenizer.json").read_text())
    ten = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    opened["normalizer"] = {"type": "Sequence", "normalizers": [ten] * 6}
    (made / "tokenizer.json").write_text(json.dumps(opened))
    with pytest.raises(OperatorError, match="may make text 2,000,000 times as long"):
        Talk(made, "cpu")


def test_a_tokenizer_whose_library_panics_is_the_files_fault(folder: Path, tmp_path: Path) -> None:
    made = copied(folder, tmp_path)
    opened = json.loads((made / "tokenizer.json").read_text())
    opened["normalizer"] = {"type": "Prepend", "prepend": ""}
    (made / "tokenizer.json").write_text(json.dumps(opened))
    with pytest.raises(OperatorError, match=r"the tokenizer\.json cannot be used") as caught:
        go_on(Talk(made, "cpu"), "ab", 3)
    assert caught.value.exit_code == 3


def test_a_gpu_that_is_not_there_is_said(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(OperatorError, match="no such GPU"):
        Talk(folder, "cuda:3")


# The command, with a process in between where that is what is tested.


def test_the_command_streams_what_the_process_says(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: Any
) -> None:
    monkeypatch.setattr(command, "SILENT_S", 0.0)
    options = Options(str(folder), "once ", tokens=6, device="cpu")
    assert print_generated(options) == 0
    text, _, _ = go_on(Talk(folder, "cpu"), "once ", 6)
    told = capsys.readouterr()
    assert told.out == f"once {text}\n"
    steps = [line for line in told.err.splitlines() if line.endswith("...")]
    assert steps == ["Starting torch ...", "Opening the model ...", "Reading the prompt ..."]


def process_saying(*lines: str) -> tuple[str, ...]:
    """A process in the model's place."""
    return (sys.executable, "-c", f"import sys; sys.stdin.readline(); {'; '.join(lines)}")


def test_json_is_one_object_with_what_was_said(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: Any
) -> None:
    said = [Said("one "), Noticed("half is forgotten"), Said("two"), Done(2, 0.5, "tokens", "cpu")]
    lines = [f"print({msgspec.json.encode(line).decode()!r})" for line in said]
    monkeypatch.setattr(command, "WORKER", process_saying(*lines))
    print_generated(Options(str(folder), "p", temperature=0.5, seed=9, as_json=True))
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "prompt": "p", "text": "one two", "tokens": 2, "ended": "tokens", "seconds": 0.5, "device": "cpu",
        "seed": 9, "run": "ab" * 32, "version": 3,
    }  # fmt: skip
    assert "half is forgotten" in shown.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_quick_answer_comes_alone_and_a_slow_one_with_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: Any, as_json: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    said = [Doing("Opening the model"), Said("words"), Doing("more"), Done(1, 0.5, "end", "cpu")]
    lines = [f"print({msgspec.json.encode(line).decode()!r})" for line in said]
    monkeypatch.setattr(command, "WORKER", process_saying(*lines))
    monkeypatch.setattr(command, "SILENT_S", 3600.0)
    options = Options(str(folder), "p ", as_json=as_json)
    print_generated(options)
    alone = capsys.readouterr()
    assert alone.err == ""
    assert "words" in alone.out
    assert alone.out == "p words\n" or as_json
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    print_generated(options)
    assert "Starting torch" in terminal.getvalue()
    # How long it took differs; nothing of what goes on is in it.
    assert "Starting" not in capsys.readouterr().out


def test_nothing_goes_on_any_more_behind_the_first_word(capsys: Any) -> None:
    """Also where the seconds are over in that moment."""
    beginning = command._Beginning()
    assert beginning.ends()
    assert not beginning.ends()
    beginning._begin()
    beginning.at("late")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("lines", "sentence", "code"),
    [
        ((f"print({msgspec.json.encode(Failed('export it again', 3)).decode()!r})",), "export it again", 3),
        (("sys.exit('killed by the cold')",), "ended without a result .*killed by the cold", 6),
    ],
)
def test_what_the_process_says_last_reaches_the_person(
    monkeypatch: pytest.MonkeyPatch, folder: Path, lines: tuple[str, ...], sentence: str, code: int
) -> None:
    monkeypatch.setattr(command, "WORKER", process_saying(*lines))
    with pytest.raises(OperatorError, match=sentence) as caught:
        print_generated(Options(str(folder), "x"))
    assert caught.value.exit_code == code


def test_a_terminal_is_not_obeyed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What moves a cursor or sets a title is shown as a mark; to a file it goes as it is."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    said = [Said("a\x1b]0;b\x07\x9b\n"), Done(1, 0.0, "end", "cpu")]
    lines = [f"print({msgspec.json.encode(line).decode()!r})" for line in said]
    monkeypatch.setattr(command, "WORKER", process_saying(*lines))
    for stream, expected in ((Terminal(), "pa�]0;b��\n\n"), (io.StringIO(), "pa\x1b]0;b\x07\x9b\n\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        print_generated(Options(str(folder), "p"))
        assert stream.getvalue() == expected


def test_without_torch_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(OperatorError, match=r"pip install 'p2pdiloco\[node\]'") as caught:
        print_generated(Options("http://127.0.0.1:1", "x"))
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tokens": 0}, "--tokens is 1 to"),
        ({"temperature": -1.0}, "--temperature is 0"),
        ({"top_p": 0.0}, "--top-p is more than 0"),
        ({"top_p": 1.5}, "--top-p is more than 0"),
        ({"seed": -1}, "--seed is 0 to"),
        ({"device": "gpu"}, "--device is auto"),
        ({"prompt": "x" * 1_048_577}, "the prompt has more than"),
        ({"source": "no-such-folder"}, "neither a folder nor a link"),
    ],
)
def test_slips(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OperatorError, match=sentence):
        print_generated(Options("x", "y")._replace(**changed))


def test_a_prompt_may_come_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert command._checked(Options("x", "-")).prompt == "from a pipe"


def test_a_prompt_that_is_no_utf_8_is_read_as_far_as_it_is_text() -> None:
    asked = command._checked(Options("x", os.fsdecode(b"caf\xe9 \xc3\xa9")))
    assert asked.prompt == "caf\ufffd é"
    assert msgspec.json.encode(asked.prompt)


def test_a_run_s_folder_is_exported_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "export", lambda options, _told: asked.append(options))
    with command._folder_of(str(tmp_path)) as made:
        assert not made.exists()
    with command._folder_of("http://127.0.0.1:7474/#" + "ab" * 32):
        pass
    assert [(o.run, o.join) for o in asked] == [
        (tmp_path, None),
        (None, "http://127.0.0.1:7474/#" + "ab" * 32),
    ]


def test_sigterm_leaves_no_exported_model_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it exported and while it wrote, `kill` left a folder as large as the model."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()

    def killed(*_: object) -> None:
        assert list(tmp_path.glob("p2pdiloco-generate-*"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(command, "export", killed)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        print_generated(Options(str(tmp_path / "run"), "a"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_model_that_kill_9_left_goes_with_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    script = f"""
import os, signal
from p2pdiloco_node.generation import command
def killed(options, _told):
    options.out.mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
command.export = killed
command.print_generated(command.Options({str(tmp_path / "run")!r}, "a"))
"""
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", script], env=env, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    subprocess.run(
        [sys.executable, "-m", "p2pdiloco_node.cli", "--version"],
        env=env, check=True, timeout=60, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
