"""The process with torch: `python -m p2pdiloco_node.generation.worker`, a Request on stdin, Lines on stdout.

The folder is a stranger's work as far as this knows: only safetensors and configs of transformers' own
classes are read, no code of the folder's, and nothing is fetched.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from tokenizers.decoders import DecodeStream
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, RESOURCES
from p2pdiloco_node.generation.lines import Doing, Done, Failed, Line, Noticed, Request, Said
from p2pdiloco_node.tokenizer_json import TokenizerRefused, check_tokenizer, library_asked
from p2pdiloco_node.training.checkpoint_reader import difference
from p2pdiloco_node.training.model_choice import TOKENIZER, check_parts

FACTS = "p2pdiloco.json"


class Talk:
    """One model, ready to go on with any text."""

    def __init__(self, folder: Path, device: str) -> None:
        """Raises: OperatorError: the folder or the device cannot be used."""
        self.device = _device(device)
        try:
            _check_tokenizer(folder)
            with library_asked():
                self._text = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
            self._model = _model(folder)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, OperatorError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise OperatorError(f"{folder} does not load ({said}): export it again.", FILES) from None
        self._model.to(self.device).eval()
        self._end = _end_token(self._model)
        self.window = _window(folder, self._model)

    def go_on(
        self,
        prompt: str,
        tokens: int,
        *,
        temperature: float,
        top_p: float,
        seed: int,
        say: Callable[[Line], None],
    ) -> tuple[int, str]:
        """Say what follows `prompt`; how many tokens it took and why it ended ("end" or "tokens").

        Raises: OperatorError: the tokenizer cannot be used.

        Behind `window` tokens the older half is forgotten: the model has never seen longer sequences.
        """
        torch.manual_seed(seed)
        with library_asked():
            context: list[int] = self._text(prompt, add_special_tokens=False)["input_ids"]
        if not context:  # as behind the end of another document
            context = [self._end[0] if self._end else 0]
        if len(context) >= self.window:
            say(Noticed(f"only the last {self.window // 2} of {len(context)} tokens of the prompt are used"))
        chosen = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        speaker = _Speaker(self._text, say)
        while speaker.made < tokens:
            if len(context) >= self.window:
                context = context[-(self.window // 2) :]
            given = torch.tensor([context], device=self.device)
            count = min(tokens - speaker.made, self.window - len(context))
            with torch.inference_mode():
                found = self._model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=count,
                    streamer=speaker,
                    **(chosen if temperature > 0 else {"do_sample": False}),
                )
            context = found[0].tolist()
            if context[-1] in self._end:
                break
        speaker.finish()
        return speaker.made, "end" if context[-1] in self._end else "tokens"


class _Speaker:
    """A streamer as `generate` takes it: says text as soon as its characters are whole."""

    def __init__(self, text: Any, say: Callable[[Line], None]) -> None:
        self._text = text
        self._say = say
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._said = ""
        self._given = False  # whether the prompt of this call was passed over

    @property
    def made(self) -> int:
        return len(self._ids)

    def put(self, value: Any) -> None:
        if not self._given:
            self._given = True
            return
        for token in value.reshape(-1).tolist():
            self._ids.append(token)
            with library_asked():
                piece = self._stream.step(self._text.backend_tokenizer, token)
            if piece:
                self._said += piece
                self._say(Said(piece))

    def end(self) -> None:
        self._given = False

    def finish(self) -> None:
        """The rest: characters that the last tokens began and nothing ended."""
        with library_asked():
            whole = self._text.decode(self._ids, skip_special_tokens=True)
        if whole.startswith(self._said) and len(whole) > len(self._said):
            self._say(Said(whole[len(self._said) :]))


def _check_tokenizer(folder: Path) -> None:
    """Raises: OperatorError: its tokenizer.json has parts that are not let near text. OSError."""
    file = folder / TOKENIZER
    if not file.exists():
        return  # an older kind
    if file.stat().st_size > limits.tokenizer_bytes_max:
        raise TokenizerRefused(f"it has more than {limits.tokenizer_bytes_max >> 20} MiB")
    check_tokenizer(file.read_bytes())


def _model(folder: Path) -> Any:
    """The model, every param of which is in the folder's files.

    transformers makes up what is missing, in the sizes that the config asks for: both are looked at before.

    Raises: OperatorError; whatever transformers raises.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    asked, held = sum(p.numel() for p in outline.parameters()), _values(folder)
    # Quantised files hold several params in a value.
    if asked > held and getattr(config, "quantization_config", None) is None:
        raise OperatorError(f"its config makes {asked:,} params, and its files hold {held:,}", FILES)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True,
        dtype="auto", output_loading_info=True,
    )  # fmt: skip
    if found := difference(info):
        raise OperatorError(f"it {found}: it is another model", FILES)
    return model


def _values(folder: Path) -> int:
    """Of all tensors in the folder's files, by their heads. Raises: OperatorError."""
    found = 0
    for path in check_parts(folder):
        with safe_open(path, "pt") as file:
            found += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return found


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu":
        number = int(name.partition(":")[2] or 0)
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            raise OperatorError(
                f"--device {name}: torch sees no such GPU here; leave the flag out, or give cpu.", RESOURCES
            )
    return name


def _end_token(model: Any) -> list[int]:
    end = model.generation_config.eos_token_id
    return [end] if isinstance(end, int) else list(end or ())


def _window(folder: Path, model: Any) -> int:
    """Tokens of a training sequence; where nobody says, the positions that the model has."""
    positions = getattr(model.config, "max_position_embeddings", None) or 1024
    try:
        said = int(json.loads((folder / FACTS).read_text())["model"]["seq_len"])
    except (OSError, ValueError, KeyError, TypeError):
        said = positions
    return max(2, min(said, positions))


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no line of ours

    def say(line: Line) -> None:
        output.write(msgspec.json.encode(line) + b"\n")
        output.flush()

    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
    try:
        say(Doing("Opening the model"))
        talk = Talk(Path(request.folder), request.device)
        say(Doing("Reading the prompt"))
        began = time.monotonic()
        made, why = talk.go_on(
            request.prompt,
            request.tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            say=say,
        )
        say(Done(made, time.monotonic() - began, why, talk.device))
    except OperatorError as error:
        say(Failed(str(error), error.exit_code))
    except torch.OutOfMemoryError:
        say(Failed("the model does not fit into this GPU's memory: give --device cpu.", RESOURCES))
    except BrokenPipeError:
        os._exit(0)  # nobody listens any more


if __name__ == "__main__":
    main()
