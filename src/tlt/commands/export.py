"""`tlt export`: writes the results of a run as folders for transformers, vLLM and SGLang.

A policy is written as a Hugging Face folder, which all of these can load. A drafter is written in the format of one
engine (`draft/formats.py`). Each folder has a README.md with the command that serves it."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from tlt.data.limits import stop_token_ids
from tlt.data.tokenizer import PROBES, load_tokenizer, model_files, write_files
from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import EagleLayer, load_drafter
from tlt.draft.formats import Format, method, write_drafter
from tlt.files import errors_as, first_line, read_json, refuse_to_overwrite, share
from tlt.models.families import decoder_options, read_config
from tlt.models.hugging_face import load_model, save_model
from tlt.models.model_folder import ModelError, model_folder
from tlt.models.weights import read_safetensors, sha256
from tlt.progress import working
from tlt.rl.lora import FILE as ADAPTERS
from tlt.rl.lora import whole_model
from tlt.spot.saving import load_latest, newest_number
from tlt.store.checkpoint import policy_in
from tlt.store.hub import local_model

To = Literal["hf", "vllm", "sglang"]
_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # maximum total variation distance of next-token distributions
_DRAFT_TOKENS = 4  # number of draft tokens per pass in the commands that serve a model


def export(source: Path, out: Path, to: To, dtype: str, model: Path | None = None) -> list[str]:
    """Write `source` (a run, a model folder or a drafter) to the folder `out`. Return sentences that say what was
    written.

    `model` is the target of a drafter. A run's newest drafter goes into `out`/drafter, unless `to` is `hf`. Raises
    ModelError, DrafterError or CheckpointError.

    The export is written to a temporary folder, compared with the source, and moved. An existing folder `out` is not
    replaced, because it may be the working directory or a mounted disk."""
    refuse_to_overwrite(out)
    source = Path(local_model(str(source))[0])
    if out.is_file():
        raise ModelError(f"{out} is a file: give a folder")
    out = out.resolve()  # the path `.` has no name
    draft = out / ".partial" if out.is_dir() else out.parent / f".{out.name}.partial"
    shutil.rmtree(draft, ignore_errors=True)
    with errors_as(ModelError, f"{out} cannot be written", "give another folder"):
        draft.mkdir(parents=True)
    try:
        with working(f"export {source}"):
            written = _export(source, draft, out, to, getattr(torch, dtype), model)
        share(draft)
        _put_in_place(draft, out)
    except SafetensorError as error:
        raise ModelError(f"{out} cannot be written ({error}): free disk space, or give another folder") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return written


def _put_in_place(draft: Path, out: Path) -> None:
    if draft.parent != out:
        draft.rename(out)
        return
    # config.json comes last, because it makes the folder a model
    for path in sorted(draft.iterdir(), key=lambda path: path.name == "config.json"):
        path.rename(out / path.name)


def _export(source: Path, draft: Path, out: Path, to: To, dtype: torch.dtype, model: Path | None) -> list[str]:
    """Write the export to the temporary folder `draft`, which later becomes `out`. Return a report in sentences."""
    if _is_drafter(source):
        if model is None:
            raise DrafterError(f"{source} is a drafter: give the model that it drafts for with --model FOLDER")
        _drafter(source, policy_in(local_model(str(model))[0]), draft, to, dtype, Served(model, out))
        return [f"the drafter is in {out}"]
    if model is not None:
        raise ModelError(f"{source} is not a drafter, and --model is only for drafters: remove it")
    policy = policy_in(source)
    named = None if to == "hf" else _named_drafter(source)
    _policy(policy, draft, dtype)
    written, drafter = [f"the model is in {out}"], None if to == "hf" else _published_drafter(source, draft) or named
    if drafter:
        _drafter(drafter, draft, draft / "drafter", to, dtype, Served(out, out / "drafter"))
        written.append(f"the drafter is in {out / 'drafter'}")
    elif to != "hf" and newest_number(source / "drafter"):
        written.append(f"all drafters in {source / 'drafter'} are damaged: the model is served without a drafter")
    elif to != "hf" and (source / "checkpoints").is_dir():
        written.append(
            f"there is no drafter in {source}, so the model is served without one (tlt draft train makes one)"
        )
    (draft / "README.md").write_text(_policy_card(policy, out, to, drafter is not None), encoding="utf-8")
    return written


def _is_drafter(folder: Path) -> bool:
    file = folder / "config.json"
    return file.is_file() and "tlt_drafter" in read_json(file)


def _published_drafter(run: Path, policy: Path) -> Path | None:
    """Return the folder of the newest undamaged drafter that a run trained and used; None if there is none. `policy` is
    the drafter's target."""
    saved = load_latest(run / "drafter", decoder_options(read_config(policy)))
    return run / "drafter" / f"drafter_{saved.number:08d}" if saved else None


def _named_drafter(run: Path) -> Path | None:
    """Return the folder of the drafter that a run's recipe names; None if it names none. If that folder is missing,
    return None if the run trained and saved a drafter itself, else raise DrafterError."""
    recipe = run / "config.json"
    named = (read_json(recipe).get("speculation") or {}).get("path") if recipe.is_file() else None
    if not named or _is_drafter(Path(named)):
        return Path(named) if named else None
    if newest_number(run / "drafter"):
        return None
    raise DrafterError(f"{run} used the drafter {named}, which is missing: restore it, or export without it by --to hf")


# -- the policy --------------------------------------------------------------------------------------------------------


def _policy(folder: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the policy to the folder `out`: config, weights, tokenizer, chat template and generation config. Compare
    the result with the policy."""
    if (folder / ADAPTERS).is_file():
        whole = whole_model(folder, dtype)
    else:
        whole = load_model(model_folder(folder), dtype, torch.device("cpu"))
    if wrong := [name for name, tensor in whole.state_dict().items() if not tensor.isfinite().all()]:
        raise ModelError(f"{wrong[0]} of {folder} has values that are not finite in {dtype}: export another checkpoint")
    tokenizer = load_tokenizer(folder)
    save_model(whole, out)
    write_files(model_files(folder, tokenizer), out)
    _complete(out, stop_token_ids(out, tokenizer))
    before = _facts(whole, tokenizer)
    del whole  # the comparison needs the memory
    check_export(out, before)


Facts = tuple[dict[str, Any], Tensor]
"""facts that an export must have in common with the model: values by name, and next-token distributions [N, V]"""


@torch.no_grad()
def _facts(model: Any, tokenizer: Any) -> Facts:
    config, logits = model.config, []
    for text in PROBES[:4]:
        tokens = [token for token in tokenizer(text)["input_ids"] if token < config.vocab_size] or [0]
        logits.append(model(torch.tensor([tokens[: config.max_position_embeddings]]), use_cache=False).logits[0])
    values = {"the dtype": str(model.dtype), "the sha256 of the weights": sha256(model.state_dict())}
    return values, torch.cat(logits).float().softmax(-1)


def check_export(folder: Path, before: Facts) -> None:
    """Load an export with transformers. Raise ModelError, which names the first difference, if it cannot be loaded or
    differs from the model that was exported."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa").eval()
        found, probs = _facts(model, load_tokenizer(folder))
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelError(f"the export cannot be loaded by transformers ({first_line(error)})") from error
    said = "the export differs from the trained model:"
    for name, value in before[0].items():
        if found[name] != value:
            raise ModelError(f"{said} {name} was {value} and is {found[name]}")
    worst = 0.5 * (probs - before[1]).abs().sum(-1).max().item()
    if not worst <= _ALLOWED[model.dtype]:  # true for NaN too
        raise ModelError(f"{said} the total variation distance of next-token distributions is {worst:.2g}")


def _complete(out: Path, ends: Sequence[int]) -> None:
    """Turn on `use_cache`, which training may have turned off. Write the end tokens of training (`ends`) to
    generation_config.json, because `generate` and vLLM do not read all files that may name one."""
    config, generation = out / "config.json", out / "generation_config.json"
    named = read_json(generation if generation.is_file() else config).get("eos_token_id")
    if not set(ends) <= set(named if isinstance(named, list) else [named]):
        _edit(generation, eos_token_id=list(ends))
    for file in (config, generation):
        if file.is_file() and read_json(file).get("use_cache") is False:
            _edit(file, use_cache=True)


def _edit(file: Path, **entries: Any) -> None:
    """Set entries of a JSON file, which need not exist."""
    found = read_json(file) if file.is_file() else {}
    file.write_text(json.dumps(found | entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- the drafter -------------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """Final folders of the exported model and its drafter, which READMEs and configs name."""

    model: Path
    drafter: Path


def _drafter(source: Path, model: Path, out: Path, to: To, dtype: torch.dtype, served: Served) -> None:
    if to == "hf":
        raise DrafterError("a drafter alone cannot be exported to hf: use --to vllm or sglang")
    config = read_config(model)
    options = decoder_options(config)
    layer = load_drafter(source, options)
    weights = read_safetensors(model)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    write_drafter(layer.to(dtype), config.to_dict(), out, to, head)
    training = source / "training.json"
    facts = read_json(training) if training.is_file() else {}
    (out / "README.md").write_text(_drafter_card(layer, facts, served, to), encoding="utf-8")


# -- cards -------------------------------------------------------------------------------------------------------------


def serve_command(to: To, model: Path, drafter: Path | None, kind: str) -> str:
    """Return the shell command, in one line, that serves a model with its drafter, or alone if `drafter` is None.
    `kind` is `eagle` or `eagle3`."""
    folder = shlex.quote(str(model))
    plain = f"python -m sglang.launch_server --model-path {folder}" if to == "sglang" else f"vllm serve {folder}"
    if drafter is None:
        return plain
    if to == "sglang":
        return (
            f"{plain} --speculative-algorithm {'EAGLE3' if kind == 'eagle3' else 'EAGLE'} "
            f"--speculative-draft-model-path {shlex.quote(str(drafter))} --speculative-num-steps {_DRAFT_TOKENS} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {_DRAFT_TOKENS + 1}"
        )
    speculation = {"method": kind, "model": str(drafter), "num_speculative_tokens": _DRAFT_TOKENS}
    return f"{plain} --speculative-config {shlex.quote(json.dumps(speculation))}"


def _policy_card(policy: Path, out: Path, to: To, has_drafter: bool) -> str:
    """Return the README.md of an exported policy: that of the checkpoint, with the command that serves the export."""
    card = policy / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {out.name}\n"
    serve = "" if to == "hf" else f"\nServed by {to}:\n\n    {serve_command(to, out, None, '')}\n"
    drafter = "\nIts drafter is in `drafter/`, with a README.md of its own.\n" if has_drafter and to != "hf" else ""
    return f"{text}{serve}{drafter}"


def _drafter_card(layer: EagleLayer, facts: Mapping[str, Any], served: Served, to: Format) -> str:
    options, (model, out) = layer.options, served
    rows = [("drafts for", f"`{model}`"), ("kind", f"{options.kind}, one layer, with the model's embedding and head")]
    if facts:
        rows.append(("trained on", f"{facts['harvest_tokens']:,} tokens of the model's own responses"))
    if options.taps:
        rows.append(("reads", f"`hidden_states` {', '.join(map(str, options.taps))} of the model"))
    rows.append(("attends to", f"the last {options.window:,} tokens, in training"))
    first = layer.acceptance_rate
    accepted = f"\nAcceptance rate of the first draft token: {first:.2f}.\n" if first else ""
    table = "\n".join(f"| {name} | {fact} |" for name, fact in rows)
    return f"""---
tags: [tlt, speculative-decoding, eagle]
---
# A drafter for {model.name}

| | |
|---|---|
{table}
{accepted}
Served by {to}:

    {serve_command(to, model, out, method(options))}

A drafter changes the speed, and not the distribution of the responses.
"""
