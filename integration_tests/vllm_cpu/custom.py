"""Models whose attention is replaced: vLLM with a variant of attnloom, and transformers with plain torch code.

    python -m integration_tests.vllm_cpu.custom CASES.json RESULTS.json

A case: those of case.py, and `attention`, for each layer the name of a function in models/replaced.py. The variants are
in its `engine`, as vLLM's option `additional_config`. A result: `CUSTOM` as in case.py, `reference` and `usual`: what
transformers answers with that attention and with the model's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from integration_tests.models.replaced import answers, replaced_answers
from integration_tests.vllm_cpu.case import run_backend


def main() -> None:
    """Run the cases named on the command line."""
    source, target = map(Path, sys.argv[1:])
    results = []
    for case in json.loads(source.read_text()):
        result: dict[str, Any] = {"CUSTOM": run_backend(case, "CUSTOM")}
        result["reference"] = replaced_answers(case)
        result["usual"] = answers(case, "eager")
        results.append(result)
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
