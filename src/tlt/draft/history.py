"""History: the last responses to each prompt, such as those of the last epoch. They are drafts when the prompt returns.

(Drafts from the responses of the last epoch are from RhymeRL, arXiv 2508.18588.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tlt.draft.ahead import Ahead, AheadStore
from tlt.types import Response

_FILE = "history.safetensors"


class History(AheadStore):
    """Store of the last responses to each prompt, in the driver."""

    # The noise of an earlier epoch is not used again, although its responses would then be nearly exact drafts. The
    # weights were trained on samples of that noise, so with it a token would no longer be a sample of the policy.

    def add(self, responses: Iterable[Response], version: int) -> None:
        """Store the responses of a rollout by the target `version`. They replace earlier responses to their prompts."""
        found = [Ahead.of(response, version, ended=True) for response in responses]
        for prompt in {ahead.prompt for ahead in found}:
            self.forget([*self._groups.get(prompt, ())])
        self.put(found)

    def save(self, folder: Path) -> None:
        """Write all responses to a file in this folder, if there are any."""
        if not self._kept:
            return
        number = {prompt: index for index, prompt in enumerate(self._groups)}
        kept = self._kept.values()
        arrays = {
            "seeds": np.array([ahead.seed for ahead in kept], dtype=np.uint64),
            "versions": np.array([ahead.version for ahead in kept]),
            "prompt_numbers": np.array([number[ahead.prompt] for ahead in kept]),
            **_joined("prompts", [np.array(prompt, dtype=np.int32) for prompt in number]),
            **_joined("responses", [ahead.tokens for ahead in kept]),
        }
        save_file(arrays, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Read the responses from the file in this folder, if there is one."""
        if not (folder / _FILE).is_file():
            return
        arrays = load_file(folder / _FILE)
        prompts = [tuple(prompt.tolist()) for prompt in _split("prompts", arrays)]
        lists = (arrays[name].tolist() for name in ("seeds", "prompt_numbers", "versions"))
        self.put(
            Ahead(seed, prompts[number], tokens, version, True)
            for seed, number, version, tokens in zip(*lists, _split("responses", arrays), strict=True)
        )


def _joined(name: str, lists: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate(lists), f"{name}_lengths": np.array([len(one) for one in lists])}


def _split(name: str, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
