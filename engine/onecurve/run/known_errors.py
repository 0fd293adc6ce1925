"""Errors of Lightning that a user can mend, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from onecurve.errors import UserError

_CHOOSES_ELEMENTS = (
    "strategy=fsdp: a hook or the optimizer chooses elements of a weight, of which a rank has only a shard, as "
    "torch.nn.utils.prune and torch.optim.Rprop do: prune in __init__ of the module, or use strategy=ddp"
)
# Errors of the user for which Lightning has no exception of its own, by some words, and what to say instead.
_KNOWN_ERRORS = {
    "Early stopping conditioned on metric": "",
    "Allowed precision values": "",
    "`num_nodes` must be a positive integer": "",
    "Found more than one stateful callback": (
        "two callbacks of a class, such as ModelCheckpoint, have the same `monitor` and the same intervals, by which "
        "checkpoints tell their states apart: change one of these options, or leave one callback out"
    ),
    "It looks like your LightningModule has parameters that were not used": (
        "a backward pass gives some weights no gradient, as after toggle_optimizer, and DDP waits for it: set "
        "+strategy.find_unused_parameters=true"
    ),
    "got mixed torch.Tensor and DTensor": (
        "strategy=fsdp: a hook combines a weight, of which a rank has only a shard, with a whole tensor, such as the "
        "buffer of a moving average: use strategy=ddp, or callbacks=ema"
    ),
    "FSDP does not support deepcopy": (
        "strategy=fsdp: a hook copies a network, of which a rank has only shards: copy it in __init__ of the "
        "module, or use strategy=ddp or callbacks=ema"
    ),
    "in-place operations that require placement changes": _CHOOSES_ELEMENTS,
    "aten.nonzero.default": _CHOOSES_ELEMENTS,  # of prune.global_unstructured
    "Expected more than 1 value per channel when training": (
        "a batch normalization layer gets one value per channel: set fewer virtual_ranks, or a larger data.batch_size"
    ),
    "but its data is not allocated yet": (
        "strategy=fsdp: a hook makes a tensor of numbers that are spread over the ranks, as Lightning's `grad_norm` "
        "does: take `.item()` of each, or callbacks=gradients"
    ),
    "out of bounds for storage of size 0": (
        "strategy=fsdp: training_step calls torch.autograd.grad, such as for a gradient penalty, when FSDP has freed "
        "the weights of the pass: use strategy=ddp"
    ),
    "checkpoint contains only the model": (
        "ckpt_path has weights only, as a ModelCheckpoint with save_weights_only=True saves, from which no run can go "
        "on: give another file, or load them into the module for a new run"
    ),
    "Skipping the `training_step` by returning None": (
        "training_step returns None, and the other processes wait for its gradients: return a loss of zero, such as "
        "0 * loss, or set trainer.devices=1; if the step calls its optimizers, set self.automatic_optimization=False"
    ),
}


@contextmanager
def translated_errors(ckpt_path: str | None) -> Iterator[None]:
    """Return a context in which such an error becomes a UserError; `ckpt_path` is where the run goes on."""
    try:
        yield
    except (AssertionError, KeyError, MisconfigurationException, RuntimeError, ValueError) as error:
        known = [text for words, text in _KNOWN_ERRORS.items() if words in str(error)]
        if ckpt_path and str(error).startswith("Error(s) in loading state_dict"):
            _, *lines = str(error).splitlines()  # the class; the missing names, and the unexpected ones
            difference = lines[0].strip()
            known = [f"ckpt_path contains another network than this run's; set `module` as in that run ({difference})"]
            if len(lines) == 2 and sum("_orig_mod." in line for line in lines) == 1:
                known = [
                    "ckpt_path: torch.compile wraps a network in one of the two runs, which changes the names of its "
                    "weights: compile it in place, as by `self.net.compile()`, which changes none"
                ]
        if not isinstance(error, MisconfigurationException) and not known:
            raise
        message = "".join(known) or f"Lightning refuses this run: {' '.join(str(error).split())}"
        if "could not find the monitored key" in message:
            message += " Set the `monitor` of this callback, such as callbacks.best.monitor, or callbacks.best=null"
        raise UserError(message) from error
