"""Files of OpenAI's Batch API: requests in, responses and errors out.

A request is a line {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {"model", "messages", ...}}.
All requests of a file share one set of sampling parameters here, as they share the batches they are decoded in.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine import parse_json
from pipeline.errors import JobError, one_line
from pipeline.storage.records import LARGE
from pipeline.storage.storage import Storage

URL = "/v1/chat/completions"
ID, MESSAGES = "custom_id", "messages"
REQUESTS = "_requests"
GZIP = b"\x1f\x8b"
READ_BYTES = 2**23  # at a time: each is a request to an object store
OUTPUT_FILE, ERRORS_FILE = "output.jsonl", "errors.jsonl"
ANSWERED = [ID, "sample", "generation", "finish_reason", "prompt_tokens", "generated_tokens", "error"]  # columns
_HALF = re.compile("[\ud800-\udfff]")
SCHEMA = pa.schema([(ID, pa.string()), (MESSAGES, pa.string())])

# Parameters of a request body -> options of the job.
OPTIONS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
    "n": "samples_per_prompt",
}
# They ask for nothing that changes the answer's text.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}


@dataclass(frozen=True, slots=True)
class Requests:
    """A file of requests: a row each, and the options that all of them ask for."""

    table: pa.Table
    options: dict[str, Any]


def read_requests(storage: Storage) -> Requests:
    """Read a JSONL file. Raises JobError naming the line that cannot be answered; StorageGone, StorageRefused."""
    rows: list[dict[str, str]] = []
    options: dict[str, Any] = {}
    seen: set[str] = set()
    for number, line in _lines_of(storage):
        where = f"line {number} of {storage.url!r}"
        request = _parse(line, where)
        if request[ID] in seen:
            raise JobError(f"{where} has custom_id {request[ID]!r} for the second time: each names one request")
        seen.add(request[ID])
        body = request["body"]
        asked = _options(body, where)
        if rows and asked != options:
            raise JobError(
                f"{where} asks for {asked}, the lines before for {options}: put requests of other parameters into "
                "another file"
            )
        options = asked
        messages = json.dumps([_message(message, where) for message in body["messages"]])
        rows.append({ID: request[ID], MESSAGES: messages})
    if not rows:
        raise JobError(f"input {storage.url!r} holds no requests")
    return Requests(pa.Table.from_pylist(rows, SCHEMA), options)


def _lines_of(storage: Storage) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers. Raises JobError for what is no file, or a line beyond all use."""
    try:
        if storage.is_local and not os.path.isfile(storage.root):  # to open a pipe would wait for ever
            raise FileNotFoundError
        with io.BufferedReader(storage.open_path(storage.root), READ_BYTES) as stream:
            for number in count(1):
                line = stream.readline(LARGE + 1)
                if len(line) > LARGE:
                    raise JobError(f"line {number} of {storage.url!r} has more than {LARGE:,} bytes: repair it")
                if number == 1 and line.startswith(GZIP):
                    raise JobError(f"input {storage.url!r} is compressed with gzip: unpack it")
                if line.strip():
                    yield number, line
                elif not line:
                    return
    except (FileNotFoundError, IsADirectoryError) as error:
        raise JobError(f"input {storage.url!r} is no file: name one JSONL file of requests") from error


def name_of(requests: Requests) -> str:
    """Of the Parquet file that a job reads: one for these requests and no others."""
    # By what is asked: the file's own bytes name the library that wrote them.
    digest = hashlib.sha256(json.dumps(requests.table.to_pylist()).encode()).hexdigest()
    return f"{REQUESTS}/{digest[:16]}.parquet"


def write_requests(storage: Storage, requests: Requests) -> str:
    """As the Parquet file that a job reads; its name."""
    sink, name = pa.BufferOutputStream(), name_of(requests)
    pq.write_table(requests.table, sink)
    storage.write_if_absent(name, sink.getvalue().to_pybytes())  # its time may tell a job that it has not changed
    return name


def responses(rows: Sequence[Mapping[str, Any]], run: str, model: str, created: int) -> tuple[str, str]:
    """(lines of the output file, lines of the error file); `created` is in Unix time, `run` part of the ids.

    Rows have all columns of `ANSWERED`, and `dropped`, the filter that they failed or None.
    """
    by_request: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_request.setdefault(row[ID], []).append(row)
    answers, errors = [], []
    for name, samples in by_request.items():
        digest = hashlib.sha256(f"{run}\0{name}".encode()).hexdigest()[:24]
        line = {"id": f"batch_req_{digest}", ID: name}
        good = sorted((row for row in samples if row["dropped"] is None), key=lambda row: row["sample"])
        if good:
            body = _completion(good, samples, digest, model, created)
            response = {"status_code": 200, "request_id": digest, "body": body}
            answers.append(json.dumps({**line, "response": response, "error": None}) + "\n")
        else:
            errors.append(json.dumps({**line, "response": None, "error": _error(samples[0])}) + "\n")
    return "".join(answers), "".join(errors)


def _completion(
    good: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]], digest: str, model: str, created: int
) -> dict[str, Any]:
    prompt, output = good[0]["prompt_tokens"], sum(row["generated_tokens"] for row in samples)
    return {
        "id": f"chatcmpl-{digest}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": row["sample"],
                "message": {"role": "assistant", "content": row["generation"], "refusal": None},
                "logprobs": None,
                "finish_reason": row["finish_reason"],
            }
            for row in good
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }


def _error(row: Mapping[str, Any]) -> dict[str, str]:
    if row["error"] is not None:
        return {"code": "generation_failed", "message": row["error"]}
    return {"code": f"dropped_{row['dropped']}", "message": f"the answer was dropped by the filter {row['dropped']}"}


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        request = parse_json(line)
    except ValueError as error:
        raise JobError(f"{where} is no JSON ({one_line(error)}): repair it") from error
    if _HALF.search(json.dumps(request, ensure_ascii=False)):
        raise JobError(f"{where} has half a surrogate pair, which is no text: repair it")
    if not isinstance(request, dict) or not isinstance(request.get(ID), str) or not request[ID]:
        raise JobError(f"{where} has no custom_id: give each request one")
    if request.get("method") != "POST" or request.get("url") != URL:
        raise JobError(
            f"{where} asks for {request.get('method')} {request.get('url')}: only POST {URL} can be answered"
        )
    body = request.get("body")
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise JobError(f"{where} has no body.messages: give each request the messages of its chat")
    return request


def _message(message: Any, where: str) -> dict[str, str]:
    """A message with its content as plain text, which a list of text parts stands for too."""
    calls = isinstance(message, dict) and (message.get("tool_calls") or message.get("function_call"))
    if isinstance(message, dict) and isinstance(message.get("role"), str) and not calls:
        role = "system" if message["role"] == "developer" else message["role"]
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if isinstance(content, str):
            return {"role": role, "content": content}
    raise JobError(f"{where} has a message that is no role with a text: tools, images and sound cannot be answered")


def _options(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a body asks for, as options of the job. A temperature that is not given is 1, as in the API."""
    unknown = sorted(
        name for name, value in body.items() if value and name not in {*OPTIONS, *IGNORED, "messages", "model"}
    )
    if unknown:
        raise JobError(f"{where} asks for {unknown[0]}, which cannot be given: leave it out")
    options: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if (value := body.get(name)) is not None and options.setdefault(option, value) != value:
            raise JobError(f"{where} asks for {option} {options[option]} and {value}, by two names: leave one out")
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return {"temperature": 1.0, **options}
