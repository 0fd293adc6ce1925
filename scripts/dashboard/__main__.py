"""Save a workspace and a report of a W&B project, with the charts of this template.

The workspace has the sections Learning, Speed, Memory, Ranks, Images and Sweep. The report compares strategies, ranks,
the jobs of sweeps, and strategies at equal global batch. Each call saves new ones. `pip install '.[dashboard]'` brings
the package.
"""

import argparse
import json
import os
import re
import sys
from importlib.util import find_spec
from typing import Any

from src.engine.utils.errors import UserError, suggest

_OPTIONS = ["optimizer.lr", "optimizer.weight_decay", "data.batch_size", "seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="a W&B project of a user or a team")
    parser.add_argument("--dry-run", action="store_true", help="print the JSON instead; this needs no account")
    parser.add_argument("--options", nargs="+", default=_OPTIONS, help="options of sweeps; default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=128, help="global batch of the comparison; default: 128")
    arguments = parser.parse_args()
    try:
        entity, project = _split(arguments.project)
        if not find_spec("wandb_workspaces"):
            raise UserError("this needs wandb-workspaces: pip install '.[dashboard]'")
        if not arguments.dry_run:
            _check_project(entity, project)
    except UserError as error:
        sys.exit(f"error: {error}")
    from scripts.dashboard.pages import build_report, build_workspace

    workspace = build_workspace(entity, project, arguments.options)
    report = build_report(entity, project, arguments.options, arguments.batch_size)
    if arguments.dry_run:
        print(json.dumps({"workspace": _spec(workspace), "report": _spec(report)}, indent=1))
        return
    for page in (workspace, report):
        page.save()
        print(page.url)


def _split(name: str) -> tuple[str, str]:
    """Return entity and project.

    Raises:
        UserError: if the name has another form.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name}: give ENTITY/PROJECT, such as my-team/cifar")
    entity, _, project = name.partition("/")
    return entity, project


def _check_project(entity: str, project: str) -> None:
    """Check that the project exists, because a report in a misspelt project would create that project.

    Raises:
        UserError: if there is no key, no connection, or no such project.
    """
    os.environ.setdefault("WANDB_SILENT", "true")  # wandb would print the account, and more
    import wandb

    try:
        if not wandb.login(prompt=False, verify=False):
            raise UserError("no W&B API key is configured: run `wandb login`, or set WANDB_API_KEY")
        names = [found.name for found in wandb.Api().projects(entity)]
    except UserError:
        raise
    except Exception as error:  # of wandb, its service or the network
        reason = " ".join(str(error).split())
        raise UserError(f"{entity}/{project}: W&B cannot list the projects of {entity} ({reason})") from None
    if project not in names:
        hint = suggest(project, names) if names else "it has none, or there is no such entity"
        raise UserError(f"{entity}/{project}: {entity} has no project {project}; {hint}")


def _spec(page: Any) -> Any:
    return json.loads(page._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


if __name__ == "__main__":
    main()
