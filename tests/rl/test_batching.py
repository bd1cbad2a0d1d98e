"""Rows of sequences: each response is there once, after its prompt, with its own positions and within the budget."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.rl.batching import by_prompt, pack, plan

CPU = torch.device("cpu")
DRAWN = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 99), max_size=12)), min_size=1, max_size=20)
PROMPTS = [tuple([k] * (3 * k + 1)) for k in range(4)]


@settings(max_examples=100, deadline=None)
@given(DRAWN, st.integers(0, 60))
def test_responses_have_one_place_after_their_prompt_within_the_budget(
    drawn: list[tuple[int, list[int]]], most: int
) -> None:
    prompts, responses = [PROMPTS[k] for k, _ in drawn], [response for _, response in drawn]
    layouts = plan(by_prompt(range(len(drawn)), prompts), prompts, responses, most)
    assert sorted(i for layout in layouts for group in layout for i in group) == list(range(len(drawn)))
    for layout in layouts:
        assert all(len({prompts[i] for i in group}) == 1 for group in layout)
        assert len({prompts[group[0]] for group in layout}) == len(layout), "a prompt is there once"
        micro = pack(layout, prompts, responses, CPU)
        assert micro.input_ids.numel() <= most or len(micro.sequences) == 1
        assert (micro.row is None) == (len(micro.sequences) == 1)


@settings(max_examples=100, deadline=None)
@given(DRAWN)
def test_a_row_is_each_prompt_and_the_responses_to_it(drawn: list[tuple[int, list[int]]]) -> None:
    prompts, responses = [PROMPTS[k] for k, _ in drawn], [response for _, response in drawn]
    layout = by_prompt(range(len(drawn)), prompts)
    micro = pack(layout, prompts, responses, CPU)
    expected, predicting = list[tuple[int, int]](), list[tuple[int, int]]()  # (position, token)
    for group in layout:
        prompt = prompts[group[0]]
        expected += enumerate(prompt)
        for i in group:
            whole = [*enumerate([*prompt, *responses[i]])]
            expected += whole[len(prompt) :]
            predicting += whole[len(prompt) - 1 : -1]
    row = list(zip(micro.position_ids[0].tolist(), micro.input_ids[0].tolist(), strict=True))
    assert row == expected
    assert [row[place] for place in micro.predicts.tolist()] == predicting
    assert micro.targets.tolist() == [token for i in micro.sequences for token in responses[i]]
