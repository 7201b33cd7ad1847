"""A signature in a URL stands nowhere afterwards."""

import logging
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline import logs
from pipeline.commits.commit import commit_unit
from pipeline.commits.failed import record_failure
from pipeline.errors import JobError
from pipeline.redaction import redacted
from pipeline.rows.rows import GENERATED
from pipeline.rows.unit import WorkUnit
from pipeline.storage.storage import Storage

SECRET = "5ecret"


def test_what_is_secret_in_an_inputs_url_stands_in_no_record(tmp_path: Path) -> None:
    url = f"https://h/x.parquet?X-Amz-Date=1&access_token={SECRET}&versionId=3"
    storage, unit = Storage(str(tmp_path)), WorkUnit("00000-000000000", url, 0, 1)
    record_failure(storage, unit, 1, f"reading {url} failed")
    rows = [{"mean_active_layers": 1.0, "generated_tokens": 1}]
    commit_unit(storage, unit, pa.Table.from_pylist(rows, schema=GENERATED))
    written = [file for file in tmp_path.rglob("*.json") if file.is_file()]
    assert len(written) == 2
    for file in written:
        assert SECRET not in file.read_text()
        assert "https://h/x.parquet?versionId=3" in file.read_text()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://h/x?X-Amz-Credential=a%2Fb&X-Amz-Signature=c&versionId=3", "https://h/x?versionId=3"),
        ("'https://h/x?sv=1&sig=a%3D&se=3'", "'https://h/x'"),
        ("https://h/x?a=b&access_token=c", "https://h/x?a=b"),
        ("https://h/x?Signature=c&Expires=1&x=2", "https://h/x?x=2"),
        ("https://user:word@h/x", "https://h/x"),
        ("https://:word@h/x", "https://h/x"),
        ("model 'https://hf_t0ken@h/x' is no directory", "model 'https://h/x' is no directory"),
        ("https://h/x#access_token=c&a=b", "https://h/x#a=b"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("http://h/?q=a@b, http://h:80/a@b", "http://h/?q=a@b, http://h:80/a@b"),
        ("s3://AKIA:wJalr/K7/bPx@b/in", "s3://b/in"),
        ("no s3://AKIA:/K7@b/in, nor 's3://AKIA:7x/K@b/c@d'", "no s3://b/in, nor 's3://b/c@d'"),
        ("s3://AKIA:9/K7@b/in", "s3://b/in"),
        ("http://h:9000/p@q", "http://h:9000/p@q"),
        ("url=http://h:8000,to=a@b.c", "url=http://h:8000,to=a@b.c"),
        ("(https://h:443)a@b.c", "(https://h:443)a@b.c"),
        ("http://[::1]:9000/p@q", "http://[::1]:9000/p@q"),
        ("s3://arn:aws:s3:r:1:accesspoint/a/p@q", "s3://arn:aws:s3:r:1:accesspoint/a/p@q"),
        ("s3://b/a:b@c", "s3://b/a:b@c"),
        ("s3://b/part-?.parquet", "s3://b/part-?.parquet"),
        ("is it a?sig=1", "is it a?sig=1"),
    ],
)
def test_what_is_secret_in_a_url_is_taken_out_and_nothing_else(text: str, left: str) -> None:
    assert redacted(text) == left
    assert str(JobError(text)) == left


@pytest.mark.parametrize("format", ["text", "json"])
def test_no_line_of_the_log_repeats_a_signature(
    format: logs.LogFormat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.set_up(format)
    try:
        raise OSError("https://h/x?sig=5ecret")
    except OSError:
        logging.getLogger("pipeline").exception("reading %s", "https://h/x?sig=5ecret")
    said = capsys.readouterr().err
    assert "https://h/x" in said
    assert SECRET not in said
