"""The output of `tlt export --to vllm`, served by an ordinary vLLM: `make test-vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tlt.build import open_engine, open_workplace
from tlt.commands.export import export
from tlt.config import Config, load_config
from tlt.draft.strategy import Strategy
from tlt.engine.tuner import Fixed
from tlt.sampling import make_requests
from tlt.types import SamplingParams
from tlt.vllm.settings import is_tested, vllm_version

pytestmark = pytest.mark.skipif(not is_tested(vllm_version() or ""), reason="no tested vLLM is installed")
ROOT = Path(__file__).parent.parent.parent
PROMPTS, NEW, GUESSES = 48, 96, 4

SERVE = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
from vllm import LLM, SamplingParams

asked = json.loads(sys.stdin.read())
served = LLM(**asked["arguments"], enforce_eager=True, max_num_seqs=16, disable_log_stats=False)
params = SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True)
outputs = served.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params, use_tqdm=False)
counters = {m.name: m.value for m in served.get_metrics() if hasattr(m, "value")}
print(json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "counters": counters}))
"""


def greedy(config: Config) -> tuple[list[list[int]], list[list[int]], float]:
    """Return our engine's prompts, responses, and the share of accepted draft tokens. End tokens end no response,
    because vLLM counts draft tokens after one, and tlt does not."""
    place = open_workplace(config)
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW)
    asked = make_requests(place.prompts[:PROMPTS], 1, params, seed=0)
    engine = open_engine(config, place.target)
    engine.tuner = Fixed(Strategy("eagle", GUESSES))  # vLLM verifies unlikely draft tokens too
    said = {response.request.prompt.prompt_id: response.token_ids for response in engine.generate(asked)}
    prompts = [list(prompt.token_ids) for prompt in place.prompts[:PROMPTS]]
    stats = engine.stats
    return prompts, [said[prompt.prompt_id] for prompt in place.prompts[:PROMPTS]], stats.accepted / stats.drafted


def served(**asked: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", SERVE]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=400)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_exported_policy_and_drafter_decode_as_in_our_engine(tmp_path: Path) -> None:
    chain = ("--speculation.drafter", "eagle", "--speculation.depth", str(GUESSES), "--model.dtype", "float32")
    config = load_config(ROOT / "recipes" / "longtail.toml", chain)
    policy, drafter = tmp_path / "policy", tmp_path / "drafter"
    export(Path(config.model.path), policy, "vllm", "float32")
    export(Path(str(config.speculation.path)), drafter, "vllm", "float32", Path(config.model.path))
    prompts, expected, accepted = greedy(config)
    drafts = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": GUESSES}
    arguments = {"model": str(policy), "dtype": "float32", "max_model_len": 512, "speculative_config": drafts}
    found = served(arguments=arguments, prompts=prompts, new=NEW)
    assert found["tokens"] == expected
    counted = Counter(found["counters"])
    theirs = counted["vllm:spec_decode_num_accepted_tokens"] / counted["vllm:spec_decode_num_draft_tokens"]
    print(f"accepted of all guesses: {theirs:.4f} in vLLM, {accepted:.4f} here")
    assert theirs == pytest.approx(accepted, rel=0.05)
