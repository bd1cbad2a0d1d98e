"""`tlt export`: exports can be loaded by other programs, and their cards name the command that serves them."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import qwen3, save_tokenizer, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tlt.commands.export import Facts, check_export, export
from tlt.config import Config, DrafterTrainConfig
from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import EagleLayer, checkpoint_tensors, eagle_options, load_drafter, save_drafter
from tlt.files import read_json
from tlt.models.families import decoder_options, read_config
from tlt.models.loading import make_target
from tlt.models.model_folder import ModelError
from tlt.models.weights import read_safetensors
from tlt.run.train import train
from tlt.spot.saving import write
from tlt.spot.spot import SpotTrainer
from tlt.store.checkpoint import policy_in


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with eight layers, a chat template, two end tokens, and a disabled cache."""
    folder = tmp_path_factory.mktemp("model")
    made = qwen3(vocab_size=257, num_hidden_layers=8, use_cache=False, eos_token_id=256).float()
    made.generation_config = GenerationConfig(eos_token_id=[256, 7], temperature=0.6, do_sample=True, use_cache=False)
    made.save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return folder


def a_drafter(model: Path, folder: Path, kind: Any = "eagle1", window: int = 64) -> EagleLayer:
    torch.manual_seed(1)
    layer = EagleLayer(eagle_options(decoder_options(read_config(model)), kind, window))
    layer.acceptance_rate = 0.75
    save_drafter(layer, folder)
    return layer


def test_an_exported_model_can_be_loaded_whole(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(model, out, "vllm", "float32") == [f"the model is in {out}"]
    mine, its = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (model, out))
    assert its.config.use_cache is True
    text = AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "go"}], tokenize=True)
    ids = torch.tensor([text["input_ids"]])
    with torch.no_grad():
        assert torch.equal(mine(ids).logits, its(ids).logits)
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.eos_token_id, generation.temperature) == ([256, 7], 0.6)
    assert generation.use_cache is not False
    assert f"vllm serve {out}" in (out / "README.md").read_text()
    (tmp_path / "mine").touch()
    modes = {path.stat().st_mode for path in out.rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "mine").stat().st_mode}, "who serves it may be another user"


@pytest.mark.parametrize("to", ["hf", "vllm", "sglang"])
def test_the_dtype_in_a_config_is_that_of_its_tensors(model: Path, tmp_path: Path, to: Any) -> None:
    source = model
    if to != "hf":
        a_drafter(model, source := tmp_path / "drafter")
    export(source, tmp_path / "out", to, "bfloat16", None if to == "hf" else model)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    name = "dtype" if to == "hf" else "torch_dtype"
    assert json.loads((tmp_path / "out" / "config.json").read_text())[name] == "bfloat16"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return the recipe of a run that has ended."""
    train(config := tiny_config(tmp_path_factory.mktemp("trained")))
    return config


def run_with(trained: Config, folder: Path, drafter: Path) -> Path:
    """Return a copy of the run whose recipe names this drafter."""
    run = shutil.copytree(trained.run.folder, folder / "run", symlinks=True)
    edit(run / "config.json", speculation=trained.speculation.model_dump(mode="json") | {"path": str(drafter)})
    return run


def test_a_run_leaves_its_policy_and_its_drafter(trained: Config, tmp_path: Path) -> None:
    layer = a_drafter(Path(trained.model.path), tmp_path / "drafter")
    run, out = run_with(trained, tmp_path, tmp_path / "drafter"), tmp_path / "out"
    said = export(run, out, "vllm", "float32")
    assert said == [f"the model is in {out}", f"the drafter is in {out / 'drafter'}"]
    policy = read_safetensors(policy_in(run))
    assert all(torch.equal(tensor, policy[name].float()) for name, tensor in read_safetensors(out).items())
    tensors = load_file(out / "drafter" / "model.safetensors")
    ours = checkpoint_tensors(layer)
    assert tensors.keys() == ours.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in ours.items())
    card = (out / "README.md").read_text()
    assert "after 2 steps of reinforcement learning" in card
    assert "Its drafter is in `drafter/`" in card


@pytest.mark.parametrize(
    ("to", "kind", "command"),
    [
        ("vllm", "eagle1", '"method": "eagle", "model": "{out}"'),
        ("vllm", "eagle3", '"method": "eagle3", "model": "{out}"'),
        ("sglang", "eagle1", "--speculative-algorithm EAGLE --speculative-draft-model-path {out} "),
        ("sglang", "eagle3", "--speculative-algorithm EAGLE3 --speculative-draft-model-path {out} "),
    ],
)
def test_a_drafters_card_names_its_command(model: Path, tmp_path: Path, to: str, kind: str, command: str) -> None:
    a_drafter(model, tmp_path / "drafter", kind)
    (tmp_path / "drafter" / "training.json").write_text(json.dumps({"harvest_tokens": 1234}))
    out = tmp_path / "what's out"  # quoted for a shell
    export(tmp_path / "drafter", out, to, "float32", model)  # type: ignore[arg-type]
    card = (out / "README.md").read_text()
    served = " ".join(shlex.split(card.split(f"Served by {to}:")[1].split("\n\n")[1]))
    assert command.replace("{out}", str(out)) in served
    numbers = ("the last 64 tokens", "first draft token: 0.75", "1,234 tokens")
    assert [words for words in numbers if words not in card] == []
    if kind == "eagle3":
        head = load_file(out / "model.safetensors")["lm_head.weight"]
        assert torch.equal(head, read_safetensors(model)["lm_head.weight"].float())


def test_sources_that_cannot_be_exported_are_refused(model: Path, tmp_path: Path) -> None:
    a_drafter(model, tmp_path / "drafter")
    (tmp_path / "file").touch()
    drafter, out = tmp_path / "drafter", tmp_path / "out"
    for source, to, form, of, said in (
        (drafter, out, "vllm", None, "give the model that it drafts for with --model"),
        (drafter, out, "hf", model, "a drafter alone cannot be exported to hf"),
        (model, tmp_path, "hf", None, "is not empty"),
        (model, tmp_path / "file", "hf", None, "is a file: give a folder"),
        (model, out, "hf", model, "is not a drafter"),
        (tmp_path / "nowhere", out, "hf", None, "there is no folder"),
    ):
        with pytest.raises(ValueError, match=said):
            export(source, to, form, "float32", of)  # type: ignore[arg-type]


def test_a_missing_drafter_is_an_error(trained: Config, tmp_path: Path) -> None:
    run = run_with(trained, tmp_path, tmp_path / "moved")
    with pytest.raises(DrafterError, match=r"moved, which is missing: restore it, or .* --to hf"):
        export(run, tmp_path / "out", "vllm", "float32")
    assert not (tmp_path / "out").exists()
    assert export(run, tmp_path / "out", "hf", "float32") == [f"the model is in {tmp_path / 'out'}"]


def test_an_export_says_that_a_run_has_no_drafter_and_names_an_unwritable_folder(
    trained: Config, tmp_path: Path
) -> None:
    run = Path(trained.run.folder)
    said = export(run, tmp_path / "out", "vllm", "float32")
    assert said[1:] == [f"there is no drafter in {run}, so the model is served without one (tlt draft train makes one)"]
    with pytest.raises(ModelError, match=r"/proc/out cannot be written \(.*\): give another folder"):
        export(run, Path("/proc/out"), "hf", "float32")


def test_a_published_drafter_is_preferred_to_that_of_the_recipe(trained: Config, tmp_path: Path) -> None:
    old = a_drafter(Path(trained.model.path), tmp_path / "drafter")
    run = run_with(trained, tmp_path, tmp_path / "drafter")
    layer = EagleLayer(old.options)
    target = make_target(trained.model)
    target.load(read_safetensors(trained.model.path), 0)
    state = SpotTrainer(layer, target, DrafterTrainConfig(), 0).state()
    assert state
    write(run / "drafter", layer.options, 3, state, 0.5)
    export(run, tmp_path / "out", "vllm", "float32")
    tensors = load_file(tmp_path / "out" / "drafter" / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in checkpoint_tensors(layer).items())
    (tmp_path / "drafter" / "config.json").unlink()
    (run / "drafter" / "drafter_00000003" / "model.safetensors").write_bytes(b"")
    said = export(run, tmp_path / "without", "vllm", "float32")
    assert said[1:] == [f"all drafters in {run / 'drafter'} are damaged: the model is served without a drafter"]


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def untie(out: Path) -> None:
    weights = load_file(out / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1e-3
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


ROPE = {"rope_theta": 1234.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lambda out: edit(out / "config.json", rope_parameters=ROPE, rope_theta=1234.0), "next-token distributions"),
        (lambda out: edit(out / "config.json", rms_norm_eps=0.5), "next-token distributions"),
        (lambda out: edit(out / "config.json", dtype="bfloat16", torch_dtype="bfloat16"), "the dtype"),
        (untie, "weights"),
        (lambda out: edit(out / "config.json", model_type="none such"), r"cannot be loaded by transformers \("),
    ],
)
def test_an_export_that_differs_is_refused_and_leaves_nothing_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None], named: str
) -> None:
    def spoiled(out: Path, facts: Facts) -> None:
        fault(out)
        check_export(out, facts)

    monkeypatch.setattr("tlt.commands.export.check_export", spoiled)
    with pytest.raises(ModelError, match=named if "transformers" in named else f"differs from .*: .*{named}"):
        export(model, tmp_path / "out", "hf", "float32")
    assert list(tmp_path.iterdir()) == []


def test_another_distribution_is_another_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All recorded facts may be equal although the model computes something else."""

    def spoiled(out: Path, facts: Facts) -> None:
        facts[1][-1, :2] += torch.tensor([1e-3, -1e-3])
        check_export(out, facts)

    monkeypatch.setattr("tlt.commands.export.check_export", spoiled)
    with pytest.raises(ModelError, match=r"the total variation distance of next-token distributions is 0\.001"):
        export(model, tmp_path / "out", "hf", "float32")


def test_an_export_may_go_into_the_empty_working_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert export(model, Path("."), "hf", "float32") == [f"the model is in {here}"]
    assert Path("model.safetensors").is_file(), "the working directory is the same folder as before"
    assert not Path(".partial").exists()
    assert list(tmp_path.iterdir()) == [here]
    with pytest.raises(ValueError, match=r"is not empty"):
        export(model, Path("."), "hf", "float32")


HUGE = ("nan", "beyond float32")


def spoil(source: Path, fault: str) -> None:
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    match fault:
        case "lack":
            del weights[name]
        case "hold":
            weights[name.replace("weight", "bias")] = torch.zeros(48)
        case "nan":
            weights[name][0, 0] = torch.nan
        case "beyond float32":
            weights = {key: tensor.double() for key, tensor in weights.items()}
            weights[name][0, 0] = 1e39
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("lack", r"weights in .* lack model\.layers\.1\.mlp\.up_proj\.weight, and do not fit its config\.json: fetch"),
        ("hold", r"weights in .* hold model\.layers\.1\.mlp\.up_proj\.bias, and do not fit"),
        *((fault, r"1\.mlp\.up_proj\.weight of .* has values that are not finite in torch\.float32") for fault in HUGE),
    ],
)
def test_incomplete_weights_are_not_exported(model: Path, tmp_path: Path, fault: str, said: str) -> None:
    """transformers would draw missing tensors at random, and ignore unknown ones."""
    source = shutil.copytree(model, tmp_path / "model")
    spoil(source, fault)
    with pytest.raises(ModelError, match=said):
        export(source, tmp_path / "out", "hf", "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_in_several_files_are_one_model(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "model")
    (source / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(source, max_shard_size="40KB")
    assert len(list(source.glob("model-*.safetensors"))) > 1
    export(source, tmp_path / "out", "hf", "float32")
    whole, found = (read_safetensors(folder) for folder in (model, tmp_path / "out"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in whole.items())
    next(source.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"has no weights file model-0000"):
        export(source, tmp_path / "again", "hf", "float32")


def test_an_export_into_a_link_goes_to_its_target(model: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert export(model, tmp_path / "out", "hf", "float32") == [f"the model is in {tmp_path / 'disk'}"]
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "out" / "model.safetensors").is_file()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "yet")
    export(model, tmp_path / "dangling", "hf", "float32")
    assert (tmp_path / "dangling" / "model.safetensors").is_file()


def test_an_untied_head_is_written_even_if_the_config_ties_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    source = Path(config.model.path)
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    export(source, tmp_path / "out", "hf", "float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(read_safetensors(tmp_path / "out")["lm_head.weight"], weights["lm_head.weight"].float())


def test_a_published_drafter_is_no_drafter_of_tlt(model: Path, tmp_path: Path) -> None:
    a_drafter(model, tmp_path / "drafter")
    export(tmp_path / "drafter", tmp_path / "out", "vllm", "float32", model)
    with pytest.raises(DrafterError, match=r"no readable drafter .*is not that of a drafter; .*: train one"):
        load_drafter(tmp_path / "out", decoder_options(read_config(model)))


def test_training_and_export_keep_the_files_of_the_model(tmp_path: Path) -> None:
    """transformers would refuse to write these generation defaults, and write the config with names of its own."""
    config = tiny_config(tmp_path, train={"steps": 1})
    source = Path(config.model.path)
    defaults = {"eos_token_id": 256, "top_k": 20, "min_p": 0.1, "num_beams": 1, "early_stopping": True}
    (source / "generation_config.json").write_text(json.dumps(defaults))
    published = {key: value for key, value in read_json(source / "config.json").items() if key != "rope_parameters"}
    (source / "config.json").write_text(json.dumps(published | {"rope_theta": 5e5, "transformers_version": "4.51.0"}))
    train(config)
    export(Path(config.run.folder), tmp_path / "out", "hf", "float32")
    for folder, dtype in ((policy_in(config.run.folder), "float64"), (tmp_path / "out", "float32")):
        for name in ("generation_config.json", "tokenizer.json"):
            assert (folder / name).read_bytes() == (source / name).read_bytes()
        kept = read_json(source / "config.json") | {"dtype": dtype, "torch_dtype": dtype}
        assert read_json(folder / "config.json") == kept


def test_an_export_ends_where_training_ended(model: Path, tmp_path: Path) -> None:
    """The tokenizer may name an end token that neither config has. `generate` does not read the tokenizer."""
    source = shutil.copytree(model, tmp_path / "model")
    edit(source / "tokenizer_config.json", eos_token="!")
    (end,) = AutoTokenizer.from_pretrained(source)("!")["input_ids"]
    export(source, tmp_path / "out", "hf", "float32")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == sorted([7, end, 256])
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6
    (source / "generation_config.json").unlink()
    export(source, tmp_path / "again", "hf", "float32")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").generation_config.eos_token_id == [end, 256]
    edit(source / "tokenizer_config.json", eos_token="<eos>")
    export(source, tmp_path / "alike", "hf", "float32")
    assert not (tmp_path / "alike" / "generation_config.json").exists()


def test_generation_defaults_that_transformers_cannot_read_are_refused_before_the_first_step(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    (Path(config.model.path) / "generation_config.json").write_text('{"num_return_sequences": 4}')
    said = r"generation_config\.json cannot be used .*num_return.*: correct it, or remove"
    with pytest.raises(ModelError, match=said):
        train(config)
    assert not (Path(config.run.folder) / "metrics.jsonl").exists()
