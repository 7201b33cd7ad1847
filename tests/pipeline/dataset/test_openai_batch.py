"""Files of the Batch API, against the types of OpenAI's own client."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from pipeline.dataset.config import DatasetConfig
from pipeline.dataset.generate import generation_config
from pipeline.dataset.openai_batch import ID, read_requests, responses, write_requests
from pipeline.errors import JobError
from pipeline.storage.storage import Storage

BODY = {
    "model": "gpt-4o-mini",
    "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Name a river."}],
    "max_tokens": 20,
    "temperature": 0.5,
    "stop": "\n",
    "n": 2,
    "seed": 3,
}


def write(path: Path, *requests: dict[str, Any]) -> Storage:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return Storage(str(path))


def request(name: str = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**BODY, **body}}


def test_requests_as_the_clients_types_describe_them_become_rows_and_options(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Name "}, {"type": "text", "text": "a lake."}]}]
    given = [request("a"), request("b", messages=parts)]
    for line in given:
        TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(line["body"])

    requests = read_requests(write(tmp_path / "in.jsonl", *given))

    assert requests.table[ID].to_pylist() == ["a", "b"]
    first, second = (json.loads(text) for text in requests.table["messages"].to_pylist())
    assert [message["role"] for message in first] == ["system", "user"]
    assert second == [{"role": "user", "content": "Name a lake."}]
    assert requests.options == {
        "max_new_tokens": 20, "temperature": 0.5, "stop": ["\n"], "samples_per_prompt": 2, "seed": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (request("a"), "second time"),
        (request("b", temperature=0.9), "another file"),
        (request("b", max_completion_tokens=500), "max_new_tokens 20 and 500, by two names"),
        (request("b", tools=[{"type": "function"}]), "asks for tools, which cannot be given"),
        (request("b", presence_penalty=0.5), "asks for presence_penalty, which cannot be given"),
        (request("b", frequency_penalty=-1), "asks for frequency_penalty, which cannot be given"),
        (request("b", stream=True), "asks for stream, which cannot be given"),
        (request("b", logprobs=True), "asks for logprobs, which cannot be given"),
        (request("b", response_format={"type": "json_object"}), "asks for response_format, which cannot be given"),
        (request("b", messages=[]), "messages"),
        (request("b", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "images"),
        (request("b", messages=[{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]), "tools"),
        ({**request("b"), "url": "/v1/embeddings"}, "/v1/embeddings"),
        ({"method": "POST"}, "custom_id"),
    ],
)
def test_a_request_that_cannot_be_answered_is_named_by_its_line(
    tmp_path: Path, second: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobError, match=rf"line 2 .*{said}"):
        read_requests(write(tmp_path / "in.jsonl", request("a"), second))


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"null", b"7", b"\xff", b"[" * 100_000, b'{"custom_id": NaN}', b"9" * 5_000, b'\xef\xbb\xbf{}',
     b'{"custom_id": "\\ud800", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{}]}}',
     b'{"custom_id": "b", "method": {}, "url": [], "body": 1}',
     b'{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [1], "seed": 1e999}}'],
)  # fmt: skip
def test_a_line_of_any_kind_ends_in_a_sentence_with_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(json.dumps(request()).encode() + b"\n" + line + b"\n")
    with pytest.raises(JobError, match=r"^line 2 of '.*requests\.jsonl'"):
        read_requests(Storage(str(path)))


def test_what_asks_for_nothing_is_no_parameter(tmp_path: Path) -> None:
    nothing = {"presence_penalty": 0, "frequency_penalty": 0.0, "stream": False, "logprobs": None, "tools": []}
    asked = read_requests(write(tmp_path / "in.jsonl", request("a"), request("b", **nothing, user="me", store=True)))
    assert asked.options == read_requests(write(tmp_path / "plain.jsonl", request("a"))).options


def test_what_requests_name_wins_over_the_jobs_flags_and_what_they_do_not_is_the_apis_or_the_jobs_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags: dict[str, Any] = {"temperature": 0.2, "max_new_tokens": 77, "top_p": 0.9, "seed": 5, "prompt_format": "raw"}

    def job(name: str, line: dict[str, Any]) -> tuple[Any, ...]:
        source = write(tmp_path / name, line).url
        config = DatasetConfig(input=source, output=str(tmp_path / "out"), input_format="openai-batch", **flags)
        found = generation_config(config)
        return tuple(getattr(found, flag) for flag in flags)

    assert job("all.jsonl", request("a", top_p=0.5)) == (0.5, 20, 0.5, 3, "messages")
    assert caplog.messages == [
        "the requests say what is generated: max_new_tokens, prompt_format, seed, temperature, top_p of this job is "
        "not used"
    ]
    assert job("none.jsonl", {**request(), "body": {"messages": BODY["messages"]}}) == (1.0, 77, 0.9, 5, "messages")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no requests"):
        read_requests(write(tmp_path / "in.jsonl"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("none.jsonl", "pipe.jsonl"):
        with pytest.raises(JobError, match="is no file"):
            read_requests(Storage(str(tmp_path / name)))


def test_a_compressed_file_is_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(request()).encode()))
    with pytest.raises(JobError, match=r"in\.jsonl\.gz' is compressed with gzip: unpack it"):
        read_requests(Storage(str(path)))


def row(name: str, sample: int, error: str | None = None, dropped: str | None = None) -> dict[str, Any]:
    return {
        ID: name, "sample": sample, "generation": f"answer {sample}", "finish_reason": "stop", "prompt_tokens": 7,
        "generated_tokens": 3, "error": error, "dropped": dropped,
    }  # fmt: skip


def test_each_request_is_answered_once_in_the_clients_types() -> None:
    rows = [
        row("a", 1), row("b", 0, error="text is null", dropped="error"), row("a", 0), row("c", 0, dropped="length"),
    ]  # fmt: skip
    answers, errors = ([json.loads(line) for line in text.splitlines()] for text in responses(rows, "run", "m", 1))

    (line,) = answers
    assert (line["custom_id"], line["response"]["status_code"], line["error"]) == ("a", 200, None)
    completion = ChatCompletion.model_validate(line["response"]["body"], strict=True)
    assert [(choice.index, choice.message.content) for choice in completion.choices] == [
        (0, "answer 0"), (1, "answer 1"),
    ]  # fmt: skip
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (7, 6)
    assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in errors] == [
        ("b", None, "generation_failed"), ("c", None, "dropped_length"),
    ]  # fmt: skip


def test_the_requests_table_has_one_fixed_schema(tmp_path: Path) -> None:
    table = read_requests(write(tmp_path / "in.jsonl", request("a"))).table
    assert table.schema == pa.schema([("custom_id", pa.string()), ("messages", pa.string())])


def test_requests_are_named_by_what_they_ask_and_not_by_who_wrote_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = read_requests(write(tmp_path / "in.jsonl", request("a"), request("b")))
    other = read_requests(write(tmp_path / "in.jsonl", request("a"), request("c")))
    name = write_requests(Storage(str(tmp_path / "out")), asked)
    assert write_requests(Storage(str(tmp_path / "out")), other) != name
    write_table = pq.write_table
    monkeypatch.setattr(pq, "write_table", lambda table, sink: write_table(table, sink, compression="zstd"))
    assert write_requests(Storage(str(tmp_path / "again")), asked) == name
    assert (tmp_path / "again" / name).read_bytes() != (tmp_path / "out" / name).read_bytes()


def test_a_prompt_is_counted_where_its_first_sample_failed() -> None:
    failed = row("a", 0, error="out of memory", dropped="error") | {"prompt_tokens": 0, "generated_tokens": 0}
    answers, _ = responses([failed, row("a", 1)], "run", "m", 1)
    assert json.loads(answers)["response"]["body"]["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
    }  # fmt: skip
