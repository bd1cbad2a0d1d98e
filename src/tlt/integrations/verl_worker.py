"""Worker extension of verl's vLLM with `rollout.name=tlt_vllm`: verl's own, and tlt's."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from tlt.config import SpeculationConfig
from tlt.models.families import read_config
from tlt.vllm.drafting import Drafting, Ends
from tlt.vllm.settings import WIDEST
from tlt.vllm.worker_extension import WorkerExtension


class NoisyWorkerExtension(vLLMColocateWorkerExtension, WorkerExtension):
    def tlt_draft(self) -> None:
        """Draft with drafters that need no weights. Call it once, after `tlt_begin`."""
        runner = self.model_runner
        config = read_config(runner.vllm_config.model_config.model)
        target = Ends(config, runner.vllm_config.model_config.dtype, runner.device)
        self.tlt_start(Drafting(SpeculationConfig(), target, runner.max_num_reqs, WIDEST))

    def tlt_forget(self) -> None:
        """Drop the tokens that the drafters copy from. The tuner stays. Requests must not be active."""
        if self._tlt_drafting:
            self._tlt_drafting.begin()

    def tlt_logprobs(self, key: int, tokens: int) -> list[float]:
        """Return the log-probs of a request's first tokens under the distribution that was sampled from."""
        return [logprob for logprob, _ in self._tlt_table.take({key: (0, tokens)})[key]]
