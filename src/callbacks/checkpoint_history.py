"""Restore the history of the checkpoint callbacks exactly, also in a folder that was moved."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class CheckpointHistory(L.Callback):
    """Restores the scores and the paths of every checkpoint callback when a run resumes.

    Lightning's ModelCheckpoint discards its scores if its absolute path has changed, and then replaces the best
    checkpoint by a worse one; it saves `current_score` but does not restore it. (`ModelCheckpoint.load_state_dict`,
    https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/callbacks/model_checkpoint.py)
    """

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the present paths into the saved states, from which Lightning restores the callbacks afterwards."""
        if not trainer.training:
            return
        folder = Path(str(trainer.ckpt_path)).resolve().parent
        for callback in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and state:
                callback.current_score = state["current_score"]
                # A file in another folder is a copy from another run, and a new history begins.
                if Path(str(callback.dirpath)) == folder:
                    checkpoint["callbacks"][callback.state_key] = _replace_folder(state, state["dirpath"], str(folder))


def _replace_folder(value: Any, old: str, new: str) -> Any:
    """Return the state, or a part of it, with the prefix `old` of every path replaced by `new`."""
    if isinstance(value, dict):
        return {_replace_folder(key, old, new): _replace_folder(item, old, new) for key, item in value.items()}
    return new + value.removeprefix(old) if isinstance(value, str) and value.startswith(old) else value
