"""GenerateText, for data sets of one's own: what the engine gives, as columns."""

from typing import Any

import pyarrow as pa
import pytest
import ray
from engine_double import EchoBackend
from pydantic import ValidationError
from ray.data import ActorPoolStrategy

from engine import Engine, Sampling, for_target_speedup
from pipeline.errors import JobError
from pipeline.generate_text import GenerateText
from pipeline.rows.rows import GENERATED
from pipeline.rows.template import PromptTemplate

PROMPT = "Summarise in one sentence: {text}"


@pytest.mark.usefixtures("cluster")
def test_a_data_set_gets_what_the_engine_gives_for_the_same_prompts(packaged: Engine, texts: list[str]) -> None:
    rows: list[dict[str, Any]] = [{"id": number, "text": text} for number, text in enumerate(texts[:5])]
    rows.append({"id": 5, "text": None})
    found = (
        ray.data.from_items(rows, override_num_blocks=1)
        .map_batches(
            GenerateText,
            fn_constructor_kwargs={"prompt": PROMPT, "max_new_tokens": 6, "target_speedup": 1.1, "threads": 1},
            batch_size=3,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=1),
            num_cpus=1,
        )
        .take_all()
    )
    prompts = [packaged.tokenizer.encode_chat(PROMPT.format(text=text)) for text in texts[:5]]
    schedule = for_target_speedup(1.1, [(256, 6)], packaged.shape)
    wanted = {g.index: g for g in packaged.generate(prompts, Sampling(max_new_tokens=6), schedule)}
    shared = len(PromptTemplate(PROMPT).shared_prefix(packaged.tokenizer))
    by_id = sorted(found, key=lambda row: row["id"])
    assert [row["text"] for row in by_id] == [*texts[:5], None]
    for number, row in enumerate(by_id[:5]):
        generation = wanted[number]
        assert row["generation"] == generation.text
        assert row["generated_tokens"] == generation.generated_tokens
        assert row["flops_decode"] == generation.flops_decode < generation.flops_decode_full_depth
        assert row["shared_prefix_tokens"] == shared > 20
        assert row["flops_prompt"] < generation.flops_prompt
    assert by_id[5]["error"] == "text is null"


@pytest.fixture
def generate_text() -> GenerateText:
    return GenerateText(backend=EchoBackend(), id_column="id", prompt="{title}{text}", prompt_format="raw")


def test_the_outputs_columns_follow_the_batchs_own(generate_text: GenerateText) -> None:
    batch = pa.table({"id": [1], "text": ["x"], "title": ["t"]})
    output = generate_text(batch)
    assert output.schema == pa.schema([*batch.schema, *GENERATED])
    assert output["generation"].to_pylist() == ["tx"]


@pytest.mark.parametrize("missing", ["text", "id", "title"])
def test_a_batch_without_a_column_it_needs_is_refused_by_name(generate_text: GenerateText, missing: str) -> None:
    batch = pa.table({"id": [1], "text": ["x"], "title": ["t"]}).drop_columns([missing])
    with pytest.raises(JobError, match=f"column '{missing}'"):
        generate_text(batch)


def test_a_batch_with_a_column_of_the_outputs_name_is_refused(generate_text: GenerateText) -> None:
    with pytest.raises(JobError, match="column 'error'"):
        generate_text(pa.table({"id": [1], "text": ["x"], "title": ["t"], "error": ["e"]}))


@pytest.mark.parametrize("option", [{"max_tokens": 5}, {"temperature": -1}, {"input": "in/"}])
def test_an_option_that_is_unknown_or_out_of_range_is_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(option))):
        GenerateText(backend=EchoBackend(), **option)
