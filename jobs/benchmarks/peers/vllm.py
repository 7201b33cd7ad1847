"""vLLM, as it is or under a schedule of ours through this project's plugin."""

import os
import time
from typing import Any

from jobs.benchmarks.peers.protocol import Job, Peer, Prompts, Run, serve

CACHE_GB = "2"


class Vllm(Peer):
    def __init__(self, job: Job) -> None:
        """All in this process; settings of the environment count when vLLM is imported."""
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        if job.device == "cpu":
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: job.threads]))
            os.environ |= {"VLLM_CPU_KVCACHE_SPACE": CACHE_GB, "VLLM_CPU_OMP_THREADS_BIND": cores}
        import vllm

        self.version = vllm.__version__
        self._settings = vllm.SamplingParams(
            temperature=0, max_tokens=job.new_tokens, min_tokens=job.least_tokens, stop_token_ids=job.eos,
            detokenize=False,
        )  # fmt: skip
        self._model = vllm.LLM(
            job.model,
            dtype=job.dtype,
            max_num_seqs=job.rows,
            max_model_len=max(map(len, job.prompts)) + job.new_tokens,
            enable_prefix_caching=True,
            gpu_memory_utilization=job.memory_share,
            load_format="dummy" if job.random_weights else "auto",
            # On CPUs its default is 128, more than an instruction has: none would be shared.
            block_size=32 if job.device == "cpu" else None,
            additional_config=(
                {"skipdecode_schedule": job.schedule, "skipdecode_shared_tokens": len(job.shared_prefix)}
                if job.schedule
                else {}
            ),
        )

    def renew(self) -> None:
        """It keeps the prompts that it has seen, so a later run would find them all."""
        self._model.reset_prefix_cache()

    def answer(self, prompts: Prompts) -> Run:
        return Run([list(result.outputs[0].token_ids) for result in self._generate(prompts, self._settings)])

    def prompt_seconds(self, prompts: Prompts) -> float:
        """Its passes take prompts and decode tokens together."""
        settings = self._settings.clone()
        settings.max_tokens, settings.min_tokens = 1, min(1, settings.min_tokens)
        self.renew()
        start = time.perf_counter()
        self._generate(prompts, settings)
        return time.perf_counter() - start

    def _generate(self, prompts: Prompts, settings: Any) -> list[Any]:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found: list[Any] = self._model.generate(requests, settings, use_tqdm=False)
        return found


if __name__ == "__main__":
    serve(Vllm)
