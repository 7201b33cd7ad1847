"""Generate a data set offline: prompts from templates, several samples each, filtered, sharded, with a card.

python jobs/generate_dataset.py --input corpus/ --output dataset/ --prompt 'Ask a question about: {text}' \
    --samples-per-prompt 4 --temperature 0.8
python jobs/generate_dataset.py --input requests.jsonl --input-format openai-batch --output answers/ \
    --output-format openai-batch
"""

import sys

from jobs import command_line, job_output
from pipeline.dataset.config import DatasetConfig
from pipeline.dataset.generate import generate_dataset, generation_config
from pipeline.errors import counted

PROGRAM = "generate_dataset.py"


def generate(config: DatasetConfig) -> None:
    if config.plan:
        job_output.show_plan(generation_config(config))
        return
    result = generate_dataset(config)
    job_output.show_result(config, result.run)
    dropped = {f"dropped: {reason}": f"{count:,}" for reason, count in result.dropped.items()}
    job_output.show(f"{result.output}: data set", {"rows": f"{result.kept:,}", **dropped})
    print(f"{counted(len(result.files), 'file')} below {result.output}, the first is {result.files[0]}")


if __name__ == "__main__":
    sys.exit(command_line.start(DatasetConfig, PROGRAM, generate))
