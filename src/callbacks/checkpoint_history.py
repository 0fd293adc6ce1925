"""What checkpoint callbacks know of the files they wrote, restored exactly, also in a folder that was moved."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class CheckpointHistory(L.Callback):
    """Restores the scores and the paths of every checkpoint callback when a run is continued.

    Lightning's ModelCheckpoint forgets its scores if its absolute path has changed, and then replaces the best
    checkpoint by a worse one; it saves `current_score` but does not restore it. (`ModelCheckpoint.load_state_dict`,
    https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/callbacks/model_checkpoint.py)
    """

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write today's paths into the saved states, from which Lightning restores the callbacks afterwards."""
        if not trainer.training:
            return
        folder = Path(str(trainer.ckpt_path)).resolve().parent
        for callback in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and state:
                callback.current_score = state["current_score"]
                if Path(str(callback.dirpath)) == folder:  # else another run's file was copied: a new history begins
                    checkpoint["callbacks"][callback.state_key] = _moved(state, state["dirpath"], str(folder))


def _moved(value: Any, old: str, new: str) -> Any:
    """Return the state with paths in `new` instead of `old`."""
    if isinstance(value, dict):
        return {_moved(key, old, new): _moved(item, old, new) for key, item in value.items()}
    return new + value.removeprefix(old) if isinstance(value, str) and value.startswith(old) else value
