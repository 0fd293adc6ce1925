"""Execute dry runs in a process of their own, because they replace functions of torch; print the results as JSON.

The arguments are the titles of the runs; `QUICK` without any.
"""

import json
import sys
from dataclasses import asdict

from engine.dev.dry_gpu.library import load_library

QUICK = ["default", "fsdp, rank 1 of 4", "hybrid, bit_exact, rank 1 of 4"]  # shards; stages and their replicas
SABOTAGES = ["ItemInLoss", "MaskInAugmentation", "MaskedAssignment", "CopyToDevice"]


def main() -> None:
    load_library()
    from engine.dev.dry_gpu.cases import CASES, Case
    from engine.dev.dry_gpu.report import problems, read_rows
    from engine.dev.dry_gpu.run import run_cases

    cases = [case for case in CASES if case.title in (sys.argv[1:] or QUICK)]
    sabotages = " ".join(f"+callbacks.{name}._target_=tests.engine.gpu.sabotages.{name}" for name in SABOTAGES)
    cases.append(Case("sabotaged", f"model=mlp {sabotages}"))
    kept = read_rows()
    results = {
        case.title: {"result": asdict(result), "problems": problems(case, result, kept)}
        for case, result in run_cases(cases)
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
