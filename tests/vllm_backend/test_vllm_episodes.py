"""Episodes with vLLM: each turn is a request of its own. Tokens and sha256 are those of our engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fake_vllm
import pytest

from tlt.build import open_engine, open_target, open_workplace
from tlt.config import Config
from tlt.data.prompts import reply_encoder
from tlt.draft.eagle import load_drafter
from tlt.draft.features import Harvest
from tlt.engine.engine import Engine
from tlt.environments.episodes import Episodes
from tlt.sampling import make_requests
from tlt.spelling import Detokenizer
from tlt.types import Response

sys.path.insert(0, str(Path(__file__).parent.parent / "cluster"))

from pools import rollout_of
from test_episodes import AtOnce
from test_turns import config_of, train, two
from test_vllm_engine import learned
from tiny_environments import Echo


def home(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def played(engine: Any, place: Any, config: Config) -> list[Response]:
    """Return the episodes of all groups, in the order of their seeds."""
    encode = reply_encoder(place.tokenizer, config.data)
    turns = Episodes(AtOnce(Echo), encode, Detokenizer(place.tokenizer), None)  # type: ignore[arg-type]
    requests = make_requests(place.prompts, 4, place.sampling, 1)
    responses, _ = rollout_of(engine, turns).generate(requests, lambda response: None)
    return sorted(responses, key=lambda response: response.request.seed)


@pytest.mark.parametrize("drafter", ["off", "adaptive"])
def test_episodes_are_those_of_our_engine(drafter: str, started: Any, tmp_path: Path) -> None:
    config = fake_vllm.by_vllm(config_of(tmp_path, speculation={"drafter": drafter}))
    place = open_workplace(config)
    ours = played(Engine(place.target, config.engine, detokenize=Detokenizer(place.tokenizer)), place, config)
    vllm = played(open_engine(config, open_target(config, config.model.path)), place, config)
    assert max(len(response.replies) for response in ours) > 1
    for mine, theirs in zip(ours, vllm, strict=True):
        for name in ("token_ids", "replies", "finish_reason", "text", "reward"):
            assert getattr(theirs, name) == getattr(mine, name)
        for name in ("logprobs", "full_logprobs"):
            assert getattr(theirs, name) == pytest.approx(getattr(mine, name), abs=1e-6)
        assert len(theirs.proposed) == (len(mine.token_ids) if drafter == "adaptive" else 0), "unknown without drafts"
    assert started[0].runner.live == {}


def test_the_drafter_is_trained_on_the_turns_of_the_model(started: Any, tmp_path: Path) -> None:
    """Its last window of a turn begins after the reply, as with our engine."""
    config = fake_vllm.by_vllm(config_of(tmp_path, speculation={"drafter": "eagle", "path": str(learned(tmp_path))}))
    place = open_workplace(config)
    layer = load_drafter(str(config.speculation.path), place.target.options)
    given: list[set[Any]] = []
    for ours in (False, True):
        found = list[Harvest]()
        target = place.target if ours else open_target(config, config.model.path)
        settings = config.model_copy(update={"engine": config.engine.ours}) if ours else config
        played(open_engine(settings, target, layer, found.append), place, config)
        given.append({(item.prompt_id, item.start, tuple(item.tokens.tolist())) for item in found})
    assert given[0] == given[1]


def test_a_run_ends_with_the_same_sha256_with_any_lost_worker(started: Any, tmp_path: Path) -> None:
    ours = train(two(home(tmp_path, "ours"), speculation={"drafter": "off"}))
    calls = iter(range(100))
    config = fake_vllm.by_vllm(two(home(tmp_path, "vllm"), speculation={"drafter": "adaptive"}))
    assert train(config, lambda i, m: "after" if i and m == "decode" and next(calls) == 2 else "") == ours
    assert next(calls) > 2
