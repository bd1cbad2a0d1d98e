"""Checks that prompts fit the model. Errors of other prompts are in test_bad_input.py."""

from __future__ import annotations

from pathlib import Path

from tiny import tiny_config

from tlt.data.limits import refuse_misfits


def test_the_length_of_evaluated_responses_does_not_matter_without_held_out_prompts(tmp_path: Path) -> None:
    refuse_misfits(tiny_config(tmp_path, eval={"max_new_tokens": 512}), [], held_out=True)
