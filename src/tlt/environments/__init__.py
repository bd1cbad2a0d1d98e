"""Environments, which reply to the model's turns in episodes, and give the reward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tlt.config import Config
from tlt.data.prompts import reply_encoder
from tlt.environments.call_reader import call_reader
from tlt.environments.episodes import Episodes, Turns
from tlt.environments.instances import TurnText, open_environments
from tlt.rewards.isolated import IsolatedScore
from tlt.rewards.score_pool import ScorePool
from tlt.spelling import Detokenizer


def make_turns(config: Config, tokenizer: Any, log: Path | None = None) -> Turns:
    """Return the object that continues responses after each turn: `Episodes` if the recipe has an environment, else
    `Turns` itself. Output that environments print goes to the file `log`, or to the terminal if `log` is None. Raises
    RewardError, or DataError if the tokenizer's chat template cannot show a reply."""
    if not config.reward.environment:
        return Turns()
    encode = reply_encoder(tokenizer, config.data)
    opens = partial(open_environments, call_reader=call_reader(encode))
    pool = ScorePool(partial(IsolatedScore, config, log, (), opens))
    return Episodes(pool, encode, partial(turn_text, tokenizer), config.reward.turns)


def turn_text(tokenizer: Any, token_ids: Sequence[int]) -> TurnText:
    """Return the text of a turn of the model, without and with special tokens."""
    both = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return TurnText(Detokenizer(tokenizer)(token_ids), both)
