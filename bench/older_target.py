"""Two targets for look-ahead benchmarks: the present policy, and an older version that decodes the drafts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tlt.build import load_detokenizer
from tlt.config import ClusterConfig, Config
from tlt.data.tokenizer import load_tokenizer
from tlt.draft.ahead import Ahead, AheadStore
from tlt.engine.engine import Engine
from tlt.environments.tools import with_tools
from tlt.loop import Watcher, one_step
from tlt.models.decoder import Decoder
from tlt.models.loading import make_target
from tlt.run.opening import make_parts
from tlt.types import Request

_FIRST_STEPS = 2  # steps before the older weights are copied: the optimizer's first steps differ from later ones
_MOST_ROWS = 64

Weights = dict[str, Tensor]


def trained(config: Config, steps: int) -> tuple[Weights, Weights]:
    """Train the recipe's policy with one worker in this process. Return its weights, and its weights before the last
    `steps` updates."""
    changes = {
        "speculation": config.speculation.model_copy(update={"drafter": "off"}),
        "train": config.train.model_copy(update={"shard": False}),
        "cluster": ClusterConfig(),
        "engine": config.engine.ours,
        "eval": config.eval.model_copy(update={"every": 0}),
    }
    config = with_tools(config.model_copy(update=changes))
    parts, policy = make_parts(config, load_tokenizer(config.model.path))
    older: Weights = {}
    try:
        for step in range(_FIRST_STEPS + steps):
            if step == _FIRST_STEPS:
                older = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
            one_step(parts, config, Watcher(), step)
    finally:
        parts.rollout.close()
        parts.reward.close()
    return dict(policy.state_dict()), older


def older_and_present(config: Config, steps: int) -> tuple[Decoder, Decoder]:
    """Train the policy with `trained`. Return two targets with its older and its present weights."""
    older, present = make_target(config.model), make_target(config.model)
    now, before = trained(config, steps)
    older.load(before, version=_FIRST_STEPS)
    present.load(now, version=_FIRST_STEPS + steps)
    return older, present


def decode_ahead(older: Decoder, config: Config, requests: Sequence[Request]) -> list[Ahead]:
    """Decode these requests with the older target. Return its responses as look-ahead drafts."""
    store = AheadStore()
    rows = config.engine.model_copy(update={"max_rows": _MOST_ROWS})
    engine = Engine(older, rows, detokenize=load_detokenizer(config.model), store=store)
    engine.look_ahead(requests)
    while engine.looks_ahead:
        engine.round()
    engine.release()
    return [ahead for request in requests if (ahead := store.get(request))]
