"""What a recipe asks for is the same whoever builds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_config

from tlt.build import load_tokenizer, open_workplace
from tlt.data import DataError
from tlt.parts import make_parts


def test_a_bench_decodes_the_prompts_that_training_sees(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no chat template"):
        open_workplace(tiny_config(tmp_path, data={"chat": True}))
    config = tiny_config(tmp_path, data={"template": "Q: {question}"})
    parts, _ = make_parts(config, load_tokenizer(config.model.path))
    assert open_workplace(config).prompts == parts.prompts
    assert open_workplace(config).sampling == parts.sampling
