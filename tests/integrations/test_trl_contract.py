"""TRL's documented interface of a rollout_func and its arguments, in a fake of TRL. `test_trl.py` uses the real one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from tiny import EOS, tiny_model
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tlt.cluster.idle import IdleWork
from tlt.cluster.worker import Worker
from tlt.config import DrafterTrainConfig
from tlt.draft.eagle import EagleLayer, eagle_options, save_drafter
from tlt.integrations import trl_terms
from tlt.integrations.trl import Rollout
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.models.model_folder import ModelError
from tlt.spot.saving import write
from tlt.spot.spot import SpotTrainer
from tlt.types import SamplingParams

PROMPTS = ["two and two"] * 3 + ["why?"] * 3


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.16.0")


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    return tiny_model(home / "model")


class FakeAccelerator:
    device, process_index, num_processes = torch.device("cpu"), 0, 1
    state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=None)

    def unwrap_model(self, model: Any, keep_torch_compile: bool) -> Any:
        return model

    def autocast(self) -> Any:
        return nullcontext()


class FakeTrainer:
    """The parts of a GRPOTrainer of TRL 1.16 that tlt uses."""

    tools: tuple[Any, ...] = ()
    environment_factories = chat_template = None
    eos_token_ids: tuple[int, ...] = (EOS,)

    def __init__(self, folder: Path, process: int = 0, **changes: Any) -> None:
        plain = {
            **{"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0},
            **dict.fromkeys(("generation_kwargs", "cache_implementation")),
            **dict.fromkeys(("use_vllm", "use_transformers_continuous_batching", "bf16", "fp16"), False),
            **{"bf16_full_eval": False, "fp16_full_eval": False, "max_completion_length": 12, "seed": 42},
            "output_dir": str(folder / "out"),
        }
        self.args = SimpleNamespace(**plain | changes)
        self.state = SimpleNamespace(global_step=0)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
        self.model_wrapped = self.model
        self.processing_class = AutoTokenizer.from_pretrained(folder)
        self.chat_template_kwargs: dict[str, Any] = {}
        self.accelerator = FakeAccelerator()
        self.accelerator.process_index = process
        self.callbacks: list[Any] = []
        self.logged: dict[str, list[float]] = defaultdict(list)

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def evaluate(self, mine: Rollout, *batches: list[str]) -> list[Any]:
        self.model.eval()
        said = [mine(batch, self)["completion_ids"] for batch in batches]
        self.model.train()
        for callback in self.callbacks:
            callback.on_evaluate(self.args, self.state, None, metrics={})
        return said

    def _log_metric(self, name: str, value: float) -> None:
        self.logged[name].append(value)


def off() -> Rollout:
    return Rollout(speculation={"drafter": "off"})


def test_it_returns_what_trl_requires_and_logs_its_metrics(folder: Path) -> None:
    trainer = FakeTrainer(folder)
    found = Rollout(speculation={"drafter": "suffix"})(PROMPTS, trainer)
    assert found.keys() == {"prompt_ids", "completion_ids", "logprobs"}
    assert found["prompt_ids"] == [trainer.processing_class(text)["input_ids"] for text in PROMPTS]
    assert [len(ids) for ids in found["completion_ids"]] == [len(logprobs) for logprobs in found["logprobs"]]
    for ids in found["completion_ids"]:
        assert 1 <= len(ids) <= 12
        assert len(ids) == 12 or ids[-1] == EOS, "the end token is kept"
        assert EOS not in ids[:-1]
    assert len({tuple(ids) for ids in found["completion_ids"]}) == len(PROMPTS), "each has a seed of its own"
    assert {f"tlt/{name}" for name in ("accept_length", "tokens_per_second", "seen_ahead")} <= trainer.logged.keys()
    assert all(len(values) == 1 for values in trainer.logged.values())
    assert trainer.logged["tlt/seconds/rollout"][0] > 0


def test_logprobs_are_those_of_trl_with_any_top_k_and_top_p(folder: Path) -> None:
    trainer = FakeTrainer(folder, top_k=3)
    found = off()(PROMPTS[:1], trainer)
    prompt, tokens = found["prompt_ids"][0], torch.tensor(found["completion_ids"][0])
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    own = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert found["logprobs"][0] == pytest.approx(own.tolist(), abs=1e-4)


def test_the_engine_has_the_given_options_and_trls_dtype(folder: Path) -> None:
    for bf16, dtype in ((True, torch.bfloat16), (False, torch.float64)):
        mine = Rollout(speculation={"drafter": "off"}, engine={"max_rows": 2})
        mine(PROMPTS, FakeTrainer(folder, bf16=bf16))
        engine = mine._process.worker.engine
        assert engine.config.max_rows == 2
        assert engine.memory.longest == 1024 + 12
        assert mine._process.target.dtype == dtype


def test_the_end_tokens_are_those_of_trl_and_the_update_gets_the_memory_of_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    monkeypatch.setattr(Worker, "release", lambda worker: released.append(worker.engine.busy))
    trainer = FakeTrainer(folder)
    said = off()(PROMPTS, trainer)["completion_ids"]
    trainer.eos_token_ids = (EOS, said[0][1])
    assert off()(PROMPTS, trainer)["completion_ids"][0] == said[0][: said[0].index(said[0][1]) + 1]
    assert released == [False, False]


def test_the_sampling_parameters_are_the_trainers(folder: Path) -> None:
    args = FakeTrainer(folder, temperature=0.3, top_k=5, top_p=0.9).args
    found = trl_terms.to_sampling_params(SimpleNamespace(args=args, eos_token_ids=[1, 2]))
    assert found == SamplingParams(0.3, 5, 0.9, 12, (1, 2))
    assert off()(PROMPTS, FakeTrainer(folder)) != off()(PROMPTS, FakeTrainer(folder, seed=43)), "TRL's own seed"
    args.top_k = None  # off, as 0 is
    assert trl_terms.to_sampling_params(SimpleNamespace(args=args, eos_token_ids=[1])).top_k == 0


def test_messages_are_rendered_with_the_trainers_template(folder: Path) -> None:
    trainer = FakeTrainer(folder)
    trainer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ mark }}{% endfor %}"
    trainer.chat_template_kwargs = {"mark": "!"}
    go = [[{"role": "user", "content": "go"}]]
    assert off()(go, trainer)["prompt_ids"] == [trainer.processing_class("go!")["input_ids"]]
    trainer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    assert off()(go, trainer)["prompt_ids"] == [trainer.processing_class("go>")["input_ids"]]
    picture = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "go"}]}]]
    with pytest.raises(ValueError, match="does not support images"):
        off()(picture, trainer)


def test_generations_of_a_step_differ_and_evaluations_are_equal_whenever_they_come(folder: Path) -> None:
    trainer, mine = FakeTrainer(folder), off()
    train = [mine(PROMPTS, trainer)["completion_ids"]]
    first = trainer.evaluate(mine, PROMPTS, PROMPTS)
    assert first[0] != first[1], "two batches"
    for step in (0, 1):
        trainer.state.global_step = step
        train.append(mine(PROMPTS, trainer)["completion_ids"])
        assert trainer.evaluate(mine, PROMPTS, PROMPTS) == first
    assert all(one != other for one, other in combinations([*train, *first], 2)), "each has noise of its own"
    with_others = trainer.evaluate(mine, [PROMPTS[0], PROMPTS[-1]])[0]
    assert with_others[0] == first[0][0]
    trainer.model.eval()
    seeds = []
    for texts in (["a"], ["b"]):
        mine._process.counter.evaluated()
        seeds += [request.seed for request in mine._process._requests(texts)]
    assert len(set(seeds)) == 2, "the same place in another data set"


def test_a_group_may_span_processes(folder: Path) -> None:
    alone = off()(PROMPTS, FakeTrainer(folder))["completion_ids"]
    assert off()(PROMPTS[:4], FakeTrainer(folder))["completion_ids"] == alone[:4]
    second = off()(PROMPTS[3:], FakeTrainer(folder, process=1))["completion_ids"]
    assert second == alone[3:], "a row is numbered over all processes"


def an_update(trainer: FakeTrainer) -> list[int]:
    """Take a step of transformers' default optimizer. Return the version counters before and after."""
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.05, fused=True)
    parameter = next(trainer.model.parameters())
    for each in trainer.model.parameters():
        each.grad = torch.ones_like(each)
    before = parameter._version
    optimizer.step()
    return [before, parameter._version]


def test_new_weights_are_noticed_without_version_counters(folder: Path) -> None:
    """The step is the same too."""
    trainer, mine = FakeTrainer(folder), off()
    mine(PROMPTS, trainer)
    before, after = an_update(trainer)
    assert before == after, "else this is no trap any more"
    now = mine(PROMPTS, trainer)["completion_ids"]
    fresh, other = FakeTrainer(folder), off()
    fresh.model.load_state_dict(trainer.model.state_dict())
    other(PROMPTS, fresh)
    assert now == other(PROMPTS, fresh)["completion_ids"], "the second generation of its step"


def test_a_change_too_small_for_a_norm_in_bfloat16_is_noticed(folder: Path) -> None:
    trainer, mine = FakeTrainer(folder), off()
    trainer.model.bfloat16()
    mine(PROMPTS, trainer)
    before = [parameter.norm() for parameter in trainer.model.parameters()]
    with torch.no_grad():
        trainer.model.model.layers[0].mlp.up_proj.weight[0, 0] *= 1.25
    assert before == [parameter.norm() for parameter in trainer.model.parameters()], "else this is no trap any more"
    for _ in range(2):
        mine(PROMPTS, trainer)
        assert mine._process.updates == 2, "unchanged weights are not loaded again"


def test_a_rollout_of_another_trainer_is_refused(folder: Path) -> None:
    """It would decode with the weights of that trainer."""
    mine = off()
    mine(PROMPTS, FakeTrainer(folder))
    with pytest.raises(trl_terms.UnsupportedError, match="make a Rollout"):
        mine(PROMPTS, FakeTrainer(folder))


@pytest.mark.parametrize("resumed", [False, True])
def test_only_a_resumed_run_continues_with_its_drafters(folder: Path, tmp_path: Path, resumed: bool) -> None:
    published = tmp_path / "tlt" / "0" / "drafter"
    trainer = FakeTrainer(folder, output_dir=str(tmp_path))
    trainer.state.global_step = 8 * resumed
    speculation = {"drafter": "adaptive", "window": 32, "training": {"extra": 0.1}}
    options = decoder_options(trainer.model.config)
    torch.manual_seed(5)
    layer = EagleLayer(eagle_options(options, "eagle1", 32))
    target = Decoder(options, torch.float64, torch.device("cpu"))
    target.load(trainer.model.state_dict(), 0)
    write(published, layer.options, 7, SpotTrainer(layer, target, DrafterTrainConfig(), 0).state(), 0.5)
    mine = Rollout(speculation=speculation)
    mine(PROMPTS, trainer)
    assert trainer.logged["tlt/drafter_version"] == [7.0]
    in_use = mine._process.worker.spot.trainer.in_use
    same = [torch.equal(a, b) for a, b in zip(in_use.parameters(), layer.parameters(), strict=True)]
    assert all(same) == resumed


def test_training_modes_and_torchs_global_generator_are_not_changed(folder: Path, tmp_path: Path) -> None:
    """The two models are compared without dropout. TRL shuffles with the generator, and loading a drafter draws from
    it."""
    trainer = FakeTrainer(folder)
    save_drafter(EagleLayer(eagle_options(decoder_options(trainer.model.config), "eagle1", 32)), tmp_path)
    trainer.model.model.layers[0].eval()
    modes, state = [module.training for module in trainer.model.modules()], torch.get_rng_state()
    Rollout(speculation={"drafter": "eagle", "path": str(tmp_path)})(PROMPTS, trainer)
    assert [module.training for module in trainer.model.modules()] == modes
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_that_differs_from_its_config_is_refused(folder: Path) -> None:
    trainer = FakeTrainer(folder)
    trainer.model.config.rms_norm_eps = 0.5  # the modules have the old one
    with pytest.raises(ModelError, match="not one model"):
        off()(PROMPTS, trainer)


def add_adapters(trainer: FakeTrainer, **changes: Any) -> None:
    torch.manual_seed(0)
    shape = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **changes)
    trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, shape)


def test_adapters_of_lora_are_merged(folder: Path) -> None:
    trainer, plain = FakeTrainer(folder), FakeTrainer(folder)
    add_adapters(trainer)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    said = off()(PROMPTS, trainer)["completion_ids"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    assert said != off()(PROMPTS, plain)["completion_ids"]
    plain.model = plain.model_wrapped = trainer.model.merge_and_unload()
    assert said == off()(PROMPTS, plain)["completion_ids"]


def test_several_processes_train_while_they_wait_and_one_for_its_extra_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done, polls = list[str](), iter([False, True] * 2)
    work = SimpleNamespace(is_completed=lambda: next(polls), wait=lambda: done.append("wait"))

    def train(idle: IdleWork, left: Callable[[], float]) -> None:
        done.append("train")
        while left() > 0:
            pass

    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: backend)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group, async_op: work)
    monkeypatch.setattr(IdleWork, "train_for", train)
    monkeypatch.setattr(SpotTrainer, "target_moved", lambda trainer: done.append("moved"))
    for processes, extra, waits in ((1, 0.1, []), (2, 0.0, ["wait"])):
        trainer = FakeTrainer(folder, output_dir=str(tmp_path))
        trainer.accelerator.num_processes = processes
        mine = Rollout(speculation={"drafter": "adaptive", "window": 32, "training": {"extra": extra}})
        mine(PROMPTS, trainer)
        an_update(trainer)
        mine(PROMPTS, trainer)
        assert done == ["train", *waits, "moved", "train", *waits]
        done.clear()
    assert next(polls, None) is None, "it trains until all have ended"


def test_the_last_responses_to_a_prompt_are_kept_and_their_seeds_are_repeated_by_evaluations_alone(
    folder: Path,
) -> None:
    trainer, mine = FakeTrainer(folder), Rollout(speculation={"drafter": "suffix"})

    def kept() -> set[int]:
        return set(mine._process.rollout.coordinator.idle.ahead.history._kept)

    mine(PROMPTS, trainer)
    first = kept()
    an_update(trainer)
    mine(PROMPTS, trainer)
    assert len(first) == len(kept()) == len(PROMPTS)
    assert first.isdisjoint(kept())
    trainer.evaluate(mine, PROMPTS)
    first = kept()
    trainer.evaluate(mine, PROMPTS)
    assert kept() == first


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda trainer: trainer.model.half(), "fp16"),
        *(
            (lambda trainer, option=option, value=value: add_adapters(trainer, **{option: value}), option)
            for option, value in (
                *[("lora_bias", True), ("use_dora", True), ("trainable_token_indices", [1, 2])],
                ("kasa_config", peft.tuners.lora.config.KasaConfig()),  # newer than this code
            )
        ),
        (lambda trainer: setattr(trainer.model, "is_quantized", True), "quantized"),  # as bitsandbytes has it
        (lambda trainer: setattr(trainer, "tools", (print,)), "tools in this TRL, .* has no _generate_single_turn"),
        *(
            (lambda trainer, plugin=plugin: setattr(trainer.accelerator, "state", SimpleNamespace(**plugin)), name)
            for plugin, name in (
                ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "ZeRO-3"),
                ({"fsdp_plugin": SimpleNamespace(fsdp_version=1)}, "FSDP version 1"),
                ({"fsdp_plugin": SimpleNamespace(fsdp_version=2, cpu_offload=CPUOffloadPolicy())}, "cpu_offload"),
            )
        ),
        *(
            (lambda trainer, name=name, value=value: setattr(trainer.args, name, value), f"does not support {name}")
            for name, value in (
                *[("min_p", 0.05), ("repetition_penalty", 1.1), ("generation_kwargs", {"num_beams": 2})],
                *[("cache_implementation", "static"), ("fp16", True), ("temperature", 0)],
                *[("use_transformers_continuous_batching", True), ("cast_lm_head_to_fp32", True)],
                *[("max_completion_length", None), ("bf16_full_eval", True)],  # this casts the model behind training
            )
        ),
    ],
)
def test_an_unsupported_setting_is_refused(folder: Path, change: Callable[[FakeTrainer], Any], name: str) -> None:
    trainer = FakeTrainer(folder)
    change(trainer)
    with pytest.raises(trl_terms.UnsupportedError, match=name):
        off()(PROMPTS, trainer)


@pytest.mark.parametrize(("text", "said"), [("", "drop empty prompts"), ("x" * 600, "lower max_completion_length")])
def test_a_prompt_that_is_too_long_is_refused_with_trls_option(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        off()(["why?", text], FakeTrainer(folder))


def test_invalid_settings_of_tlt_are_refused(folder: Path) -> None:
    with pytest.raises(trl_terms.UnsupportedError, match="backend"):
        Rollout(engine={"backend": "vllm"})(PROMPTS, FakeTrainer(folder))
    with pytest.raises(ValueError, match="did you mean drafter"):
        Rollout(speculation={"draftr": "off"})


def test_versions_of_trl_are_checked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.24.0")
    with pytest.raises(trl_terms.UnsupportedError, match=r"TRL 0\.24\.0 is too old, tlt supports 1\.\d+ to 1\.16"):
        Rollout()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.19.0")
    Rollout()
    assert "TRL 1.19.0 is newer than the tested" in caplog.text
