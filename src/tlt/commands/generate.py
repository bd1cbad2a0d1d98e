"""`tlt generate`: answers prompts with a model folder, using the engine that training uses."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tlt import progress
from tlt.build import backend_of, load_engine
from tlt.config import DataConfig, GenerationConfig, parse_section
from tlt.data.limits import refuse_foreign_tokens, sampling_params
from tlt.data.prompts import DataError, Encode, encoder, load_prompts, shown_to_model
from tlt.data.tokenizer import load_tokenizer
from tlt.engine.exactness import check_exactness
from tlt.files import is_text, read_json, refuse_to_overwrite
from tlt.models.families import decoder_options, read_config
from tlt.sampling import make_requests
from tlt.store.checkpoint import policy_in
from tlt.store.hub import local_data, local_model
from tlt.types import Prompt, Response
from tlt.wording import counted

OURS = ("row", "index", "response", "finish_reason")
"""fields of a response in a line of the --out file, after the columns of the prompt's row in the data"""
_SHOWN, _CHAT = ("prompt_column", "template", "prefill"), ("system", "chat_arguments", "now")
"""fields of the section [data] that determine how the model sees a prompt: those that always apply (`_SHOWN`), and
those that apply only with the chat template (`_CHAT`)"""


class Asked(NamedTuple):
    """Prompts given on the command line, and how they become messages."""

    prompts: Sequence[str]
    file: str | None
    """file with more prompts, like `data.path`"""
    fields: Mapping[str, Any]
    """given fields of [data]. Others are those of the run that trained the model, if a run trained it. Without `chat`
    in both, the chat template is used if the tokenizer has one."""


def generate(config: GenerationConfig, asked: Asked, samples: int, out: Path | None) -> None:
    """Generate `samples` responses to each prompt. As each ends, print it or write it to the JSONL file `out`. Print
    the speed at the end. Raises DataError, and ValueError if the file is not empty."""
    if out:
        refuse_to_overwrite(out)
    console = progress.console()
    model = config.model.model_copy(update={"path": str(policy_in(local_model(config.model.path)[0]))})
    tokenizer = load_tokenizer(model.path)
    prompts = _prompts(asked, tokenizer, _data_of_the_run(Path(model.path)))
    if out:
        refuse_our_columns(prompts, asked.file)
    refuse_foreign_tokens(prompts, decoder_options(read_config(model.path)).vocab_size)
    params = sampling_params(config.rollout, model.path, tokenizer)
    if note := backend_of(config.engine).start_note:
        console.print(note, style="dim")
    longest = max(len(prompt.token_ids) for prompt in prompts) + params.max_new_tokens
    engine = load_engine(model, config.speculation, config.engine, longest)
    requests = make_requests(prompts, samples, params, config.run.seed)
    start = time.perf_counter()
    with _shown(out, console) as show, progress.working("generate", len(requests), "responses") as work:
        for response in engine.generate(requests):
            show(response)
            work.advance()
    seconds = time.perf_counter() - start
    stats = engine.stats
    speed = f"{counted(stats.tokens, 'token')} in {seconds:.1f} s ({stats.tokens / seconds:,.0f} tokens/s)"
    console.rule(style="dim")
    if out:
        console.print(f"{counted(len(requests), 'response')} written to {out}", soft_wrap=True)
    console.print(f"{speed}, accept length {stats.accept_length:.2f}", style="dim")
    console.print(check_exactness(engine.target).meaning, style="dim", soft_wrap=True)


def _data_of_the_run(policy: Path) -> Mapping[str, Any]:
    """Return the section [data] of the run whose checkpoint contains this policy. If the policy is not from a
    checkpoint, return an empty dictionary."""
    state = policy.parent / "state.json"
    return read_json(state).get("config", {}).get("data", {}) if state.is_file() else {}


def _prompts(asked: Asked, tokenizer: Any, trained_on: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of the command. They are encoded with `trained_on`, the section [data] of the policy's
    training run. If it is empty, defaults are used."""
    config = _shown_as_in(trained_on, asked, tokenizer)
    encode = encoder(tokenizer, config)
    typed = [_typed(i, text, config, encode) for i, text in enumerate(asked.prompts)]
    if not asked.file:
        return typed
    return typed + [replace(p, prompt_id=len(typed) + p.prompt_id) for p in load_prompts(config, encode)]


def _shown_as_in(trained_on: Mapping[str, Any], asked: Asked, tokenizer: Any) -> DataConfig:
    given = {"chat": trained_on.get("chat", bool(getattr(tokenizer, "chat_template", None))), **asked.fields}
    kept = _SHOWN + _CHAT * (given["chat"] is True)
    shown = {name: trained_on[name] for name in kept if name in trained_on}
    path = local_data(asked.file)[0] if asked.file else "-"
    tree = {**shown, **given, "path": path, "max_prompt_tokens": sys.maxsize}
    return parse_section(DataConfig, tree, "[data] of the command line")


def _typed(number: int, text: str, config: DataConfig, encode: Encode) -> Prompt:
    """Return the encoded prompt of one --prompt option. Raises DataError."""
    if not is_text(text):
        raise DataError(f"--prompt is not UTF-8 text: {text[:80]!a}")
    token_ids = tuple(encode(shown_to_model(text, config))) if text else ()
    if not token_ids:
        raise DataError(f"--prompt {text!r} is empty: it needs at least one token")
    return Prompt(number, text, token_ids, {config.prompt_column: text}, prefill=config.prefill)


def refuse_our_columns(prompts: Sequence[Prompt], file: str | None) -> None:
    """Raise DataError if a column of the data has a name that --out uses for a field of the response."""
    if taken := [name for name in OURS if any(name in prompt.data for prompt in prompts)]:
        raise DataError(f"{file} has columns with names that --out uses for responses: rename {', '.join(taken)}")


@contextmanager
def _shown(out: Path | None, console: Console) -> Iterator[Callable[[Response], None]]:
    def print_it(response: Response) -> None:
        request = response.request
        console.rule(f"prompt {request.prompt.prompt_id}, response {request.index}", align="left")
        console.print(response.text, soft_wrap=True)

    if out is None:
        yield print_it
        return
    try:
        file = out.open("w", encoding="utf-8", errors="backslashreplace")  # JSON escapes of lone surrogates
    except OSError as error:
        raise DataError(f"{out} cannot be written ({error.strerror}): give another --out") from None
    with file:

        def write(response: Response) -> None:
            file.write(_line(response))
            file.flush()

        yield write


def _line(response: Response) -> str:
    """Return a JSON line with the columns of the data row, followed by the response."""
    request = response.request
    generated = (request.prompt.prompt_id, request.index, response.text, response.finish_reason)
    line = {**request.prompt.data, **dict(zip(OURS, generated, strict=True))}
    return json.dumps(line, ensure_ascii=False, default=str) + "\n"
