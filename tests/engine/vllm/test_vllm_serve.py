"""vLLM without our pipeline: its own entry points, in processes of their own, under one setting."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from engine import Engine, Sampling, Schedule, checkpoint_directory
from tests.engine.prompts import random_prompts

pytest.importorskip("vllm.config", exc_type=ImportError)

from tests.engine.vllm.both_engines import LENGTHS, VARIANTS, whole

PATIENCE_S = 900  # a busy machine takes minutes to import vLLM twice
SETTINGS = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
DEMO = Path(__file__).parents[3] / "infra" / "demo"


@contextmanager
def server(model: Path, schedule: Path, shared: int, folder: Path) -> Iterator[str]:
    """URL of one that serves a model under a schedule, to prompts of which the first tokens are shared.

    It is what `vllm serve` starts, which vllm-cpu lacks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    setting = {"skipdecode_schedule": str(schedule), "skipdecode_shared_tokens": shared}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--max-model-len", "160", "--max-num-batched-tokens", "48", "--max-num-seqs", "4", "--block-size", "32",
        "--distributed-executor-backend", "uni",  # as on one GPU
        "--additional-config", json.dumps(setting),
    ]  # fmt: skip
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=SETTINGS, stdout=log, stderr=subprocess.STDOUT)
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
    under, (prefix,) = whole(own), random_prompts((40,), seed=9)
    prompts = [[*prefix, *prompt] for prompt in random_prompts(LENGTHS)]
    own.share_prefix(prefix)
    under.write(tmp_path / "schedule")
    sampling = Sampling(max_new_tokens=14)
    wanted = [list(each.tokens) for each in sorted(own.generate(prompts, sampling, under), key=lambda each: each.index)]
    with server(model, tmp_path / "schedule", len(prefix), tmp_path) as url:
        client = OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S)

        def answer(prompt: list[int], **extra: int) -> list[int]:
            body = {"return_token_ids": True, "vllm_xargs": extra}
            found = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=14, temperature=0, extra_body=body
            )
            return list(found.choices[0].token_ids)  # type: ignore[attr-defined]

        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(answer, prompts)) == wanted
        assert answer(prompts[1], skipdecode_full_depth=1) == list(next(own.generate([prompts[1]], sampling)).tokens)
        own.share_prefix([])
        apart = list(next(own.generate([prompts[1]], sampling, under)).tokens)
        assert answer(prompts[1], skipdecode_shared_tokens=0) == apart


@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_file_of_requests_has_our_own_engines_tokens(packaged: Engine, texts: list[str], tmp_path: Path) -> None:
    """What `vllm run-batch` starts, which takes chats alone; under the demo's schedule, that skips on prompts too."""
    schedule = replace(Schedule.read(DEMO / "whole_sample_2x"), head_preview=None)  # vLLM has none
    schedule.write(tmp_path / "schedule")
    users = [f"Summarize this in one short sentence.\n\n{text}" for text in texts[:4]]
    requests = [
        {
            "custom_id": f"row {number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "packaged",
                "messages": [{"role": "user", "content": user}],
                "max_completion_tokens": 12,
                "temperature": 0,
                "return_token_ids": True,
            },
        }
        for number, user in enumerate(users)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", "in.jsonl", "-o", "out.jsonl",
        "--model", str(checkpoint_directory("smollm2-135m-instruct")), "--served-model-name", "packaged",
        "--dtype", "float32", "--max-model-len", "1024",
        "--additional-config", json.dumps({"skipdecode_schedule": str(tmp_path / "schedule")}),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=SETTINGS, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["token_ids"] for answer in answers}
    prompts = [packaged.tokenizer.encode_chat(user) for user in users]
    wanted = packaged.generate(prompts, Sampling(max_new_tokens=12), schedule)
    assert found == {f"row {each.index}": list(each.tokens) for each in wanted}
