"""Turns after tool calls, alone and inside the installed TRL (`make test-trl`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from twin import make_model

from tlt.config import EngineConfig
from tlt.engine.engine import Engine
from tlt.integrations import UnsupportedError
from tlt.integrations.trl import Rollout
from tlt.integrations.trl_terms import ToolTurns, refuse_other_methods
from tlt.types import Prompt, Request, Response, SamplingParams

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
RESULT = (3, 1)  # tokens of a tool's result
MOST = 20  # max_completion_length


class Generation:
    """First turn of three rows, two of which have the same prompt."""

    def __init__(self) -> None:
        self.engine = Engine(make_model().decoder, EngineConfig())
        self.asked: list[Request] = []
        self.trainer = SimpleNamespace()
        self.turns = ToolTurns(self.trainer, self.decode)
        sampling = SamplingParams(max_new_tokens=MOST)
        prompts = [(1, 2), (1, 2), (4, 5, 6)]
        self.first = first = [Request(Prompt(0, "", ids), i, 0, 100 + i, sampling) for i, ids in enumerate(prompts)]
        short = [Request(r.prompt, r.index, 0, r.seed, SamplingParams(max_new_tokens=4)) for r in first]
        self.responses = responses = self.decode(short)
        self.turns.begin(first, responses)
        pairs = zip(first, responses, strict=True)
        self.texts = [[*r.prompt.token_ids, *response.token_ids, *RESULT] for r, response in pairs]

    def decode(self, requests: Sequence[Request]) -> list[Response]:
        self.asked = list(requests)
        found = {response.request.seed: response for response in self.engine.generate(requests)}
        return [found[request.seed] for request in requests]

    def next_turn(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        return self.trainer._generate_single_turn(texts, None, {}, num_generations=1)[0]


def test_a_turn_does_not_depend_on_which_rows_continue() -> None:
    """A turn's tokens are the same in one process and in two."""
    all_, some = Generation(), Generation()
    whole = all_.next_turn(all_.texts)
    assert some.next_turn([some.texts[0], some.texts[2]]) == [whole[0], whole[2]]
    assert len(set(map(tuple, whole))) == 3, "each has noise of its own"


def test_each_turn_has_noise_of_its_own() -> None:
    generation, seeds = Generation(), {100}
    text = generation.texts[0]
    for _ in range(3):
        (tokens,) = generation.next_turn([text])
        seeds.add(generation.asked[0].seed)
        text = [*text, *tokens[:2], *RESULT]
        generation.turns._rows[0].text = tuple(text[:-2])
    assert len(seeds) == 4


def test_turns_are_numbered_from_the_first_of_their_generation() -> None:
    """So a resumed run has the turns of one that was not interrupted."""
    generation = Generation()
    before = generation.next_turn(generation.texts)
    generation.turns.begin(generation.first, generation.responses)
    assert generation.next_turn(generation.texts) == before


def test_rows_with_equal_first_turns_are_distinguished_by_later_turns() -> None:
    """The third turn of a row is the same whether the other row has a third turn or not."""

    def third_turn(which: Sequence[int]) -> list[list[int]]:
        generation = Generation()
        rows = generation.turns._rows
        rows[1].text = rows[0].text
        second = generation.next_turn([generation.texts[0]] * 2)
        assert second[0] != second[1], "each row has its own seed"
        for row in rows[:2]:
            row.text = row.text[:-10]  # so that there is room for a third turn
        texts = [[*generation.texts[0], *tokens[:-10], *RESULT] for tokens in second]
        return generation.next_turn([texts[k] for k in which])

    assert third_turn([1])[0] == third_turn([0, 1])[1]


def test_a_row_may_use_the_rest_of_max_completion_length() -> None:
    """TRL would cut longer ones. The first turn took 4 tokens."""
    generation = Generation()
    (tokens,) = generation.next_turn(generation.texts[:1])
    assert generation.asked[0].sampling.max_new_tokens == MOST - 4 - len(RESULT)
    assert len(tokens) == MOST - 4 - len(RESULT)
    assert generation.next_turn([[*generation.texts[0], *tokens]]) == [[]], "nothing is left"


def test_a_turn_whose_tokens_have_changed_and_images_are_refused() -> None:
    """Some chat templates leave out the reasoning of earlier turns."""
    generation = Generation()
    with pytest.raises(UnsupportedError, match=r"tokens have changed: use a chat template"):
        generation.next_turn([generation.texts[0][:2] + generation.texts[0][3:]])
    with pytest.raises(UnsupportedError, match="images"):
        generation.trainer._generate_single_turn(generation.texts, ["picture"], {}, 1)


def test_an_unsupported_trl_is_refused_with_the_missing_method() -> None:
    def other(prompts: Any) -> None: ...

    trainer = SimpleNamespace(_generate_single_turn=other, _tokenize_prompts=other, _tool_call_loop=other)
    with pytest.raises(UnsupportedError, match="_generate_single_turn with the arguments prompt_ids, images"):
        refuse_other_methods(trainer)
    del trainer._tool_call_loop
    with pytest.raises(UnsupportedError, match="no _tool_call_loop: install"):
        refuse_other_methods(trainer)


CHAT = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
LONG = {"max_completion_length": 60, "temperature": 0.7}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Counter:
    """Environment that counts its calls."""

    def reset(self, **columns: Any) -> str:
        self.total = 0
        return " (count)"

    def increase(self, a: int, b: int) -> str:
        """Increase the total.

        Args:
            a: A number.
            b: Not used.
        """
        self.total += a
        return f"total {self.total}"

    def get_reward(self) -> float:
        return float(self.total % 7)


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set up TRL so that a turn makes a tool call if its first token is even. TRL's own generation raises."""
    pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
    from integrations import real_trl
    from trl.trainer import grpo_trainer

    def parse(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> dict[str, Any]:
        said = {"role": "assistant", "content": tokenizer.decode(ids)}
        if ids[0] % 2:
            return said
        function = {"name": tools[0].__name__, "arguments": {"a": len(ids), "b": 1}}
        return said | {"tool_calls": [{"type": "function", "function": function}]}

    def with_template(tokenizer: Any) -> Any:
        tokenizer.response_template = "of the stand-in"
        return tokenizer

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    monkeypatch.setattr(grpo_trainer, "add_response_schema", with_template)
    monkeypatch.setattr(real_trl, "CHAT", CHAT)
    monkeypatch.setattr(real_trl, "PROMPTS", [{"prompt": [{"role": "user", "content": text}]} for text in ("a", "go")])
    return real_trl


class Watched:
    """Results of TRL's loop over tool calls."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], list[int], list[int], list[float]]] = []

    def __call__(self, trainer: Any) -> None:
        def never(*_: Any, **__: Any) -> None:
            raise AssertionError("TRL generated")

        loop, trainer.model.generate = trainer._tool_call_loop, never
        trainer.eos_token_ids = list(range(200, 257))  # so that turns are short

        def watched(prompts: Any, prompt_ids: Any, *rest: Any) -> Any:
            found = loop(prompts, prompt_ids, *rest)
            mask, _, tokens, logprobs = found[:4]
            self.rows += zip(map(list, prompt_ids), tokens, mask, logprobs, strict=True)
            self.check(trainer)
            return found

        trainer._tool_call_loop = watched

    def check(self, trainer: Any) -> None:
        """Check that log-probs of all turns are those of the trainer's model. Tool results have none."""
        for prompt, tokens, mask, logprobs in self.rows[-4:]:
            with torch.no_grad():
                logits = trainer.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            own = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert logprobs == pytest.approx((own * torch.tensor(mask)).tolist(), abs=1e-4)


@pytest.mark.parametrize("given", [{"tools": [add]}, {"environment_factory": Counter}])
def test_tools_and_environments_end_the_same_with_any_drafter(trl: Any, tmp_path: Path, given: dict[str, Any]) -> None:
    found = []
    for drafter in ("off", "suffix"):
        watched = Watched()
        result = trl.run(tmp_path, Rollout(speculation={"drafter": drafter}), watched, given=given, **LONG)
        found.append(([row[:3] for row in watched.rows], result.sha256))
        assert any(log.get("tools/call_frequency", 0) > 0 for log in result.logs)
    assert found[0] == found[1]
    rows = found[0][0]
    assert any(sum(after < before for before, after in pairwise(mask)) > 1 for _, _, mask in rows), "several results"


def test_prompts_name_the_tools(trl: Any, tmp_path: Path) -> None:
    mine = Rollout(speculation={"drafter": "off"})
    trainer = trl.make(tmp_path, mine, given={"tools": [add]}, **LONG)
    prompts = [row["prompt"] for row in trl.PROMPTS]
    ids = mine(prompts, trainer)["prompt_ids"]
    assert trainer.processing_class.decode(ids[0]) == "[add]<user>a<a>"
