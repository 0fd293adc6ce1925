"""Convert a checkpoint into a single file, or into a sharded one with its tensors in a folder beside it.

A checkpoint saved with strategy.sharded_checkpoints=true becomes one file that torch.load reads, and the reverse. All
content is kept.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

from onecurve.checkpoint import sharded
from onecurve.checkpoint.io import AtomicCheckpointIO, read_run_checkpoint
from onecurve.checkpoint.newest import checkpoint_file
from onecurve.errors import UserError


def convert(source: Path, target: Path, shards: bool) -> None:
    """Copy `source` to `target`, and replace an existing `target`.

    Raises:
        UserError: if `source` holds no complete checkpoint, or `target` cannot be written.
    """
    if not checkpoint_file(source).is_file():
        raise UserError(f"source={source}: there is no such file or run folder")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # reading shards needs no process group
    files = AtomicCheckpointIO()
    checkpoint = read_run_checkpoint(checkpoint_file(source), "source")
    if "config" not in checkpoint:
        raise UserError(f"source={source} is no checkpoint of this project: it has no `config`")
    checkpoint.pop(sharded.SHARDS, None)
    if shards:
        folder = sharded.new_folder(target)
        try:
            sharded.save_shards(checkpoint, folder)
        except OSError as error:
            raise UserError(f"target={target} cannot be written ({error.strerror})") from error
        checkpoint = sharded.map_tensors(checkpoint, lambda tensor: torch.empty_like(tensor, device="meta"))
        checkpoint[sharded.SHARDS] = folder.name
    files.save_checkpoint(checkpoint, target)
    sharded.remove_unused_folders(target)
    print(f"{target}{f', with its tensors in {folder.name}' if shards else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a checkpoint, or a run folder")
    parser.add_argument("target", type=Path, help="the file to write")
    parser.add_argument("--sharded", action="store_true", help="write the tensors into a folder beside it")
    arguments = parser.parse_args()
    try:
        convert(arguments.source, arguments.target, arguments.sharded)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
