"""OpenVINO GenAI's continuous batching in float32, on the checkpoint exported to its own format."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai

from jobs.benchmarks.peers.protocol import WARM_UP, Job, Peer, Prompts, Run, serve

CACHE_GB = 2
TOKENS_PER_PASS = 2048


class OpenVino(Peer):
    version = openvino_genai.__version__

    def __init__(self, job: Job) -> None:
        self._job, self._exported = job, os.path.join(job.scratch, "openvino")
        command = [
            *("-m", "optimum.commands.optimum_cli", "export", "openvino", "-m", job.model),
            *("--task", "text-generation-with-past", "--weight-format", "fp32", self._exported),
        ]
        subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)
        self._pipeline = self._made()

    def _made(self) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = self._job.rows
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = TOKENS_PER_PASS
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[self._job.dtype]
        properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": self._job.threads}
        return openvino_genai.ContinuousBatchingPipeline(self._exported, scheduler, "CPU", properties)

    def renew(self) -> None:
        """A pipeline keeps the prompts it has seen, so a later run would find them all."""
        del self._pipeline
        self._pipeline = self._made()
        self.answer([[token + 1 for token in prompt] for prompt in self._job.prompts[:WARM_UP]])  # others: kept too

    def answer(self, prompts: Prompts) -> Run:
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = self._job.new_tokens
        settings.min_new_tokens = self._job.least_tokens
        settings.do_sample = False
        settings.stop_token_ids = set(self._job.eos)
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(tensors, [settings] * len(tensors))
        return Run([list(result.m_generation_ids[0]) for result in results])


if __name__ == "__main__":
    serve(OpenVino)
