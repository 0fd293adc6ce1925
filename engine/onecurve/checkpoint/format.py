"""The format of what a run saves: the version that wrote it, and the keys of a checkpoint."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("onecurve")
except PackageNotFoundError:  # a copy of the source that is not installed
    VERSION = "unknown"

VERSION_KEY = "onecurve"  # the key of the version in checkpoints, config.yaml, job.json and the starts in events.jsonl

# How the parts of the ranks become one value: tensors by the name of a weight; states of optimizers; other values by
# name, where the first rank that has a name wins. `_merge_ranks` of parallel/sharded_state.py does so.
BY_WEIGHT, STATES, UNION = "by weight", "states", "union"
# The keys of a checkpoint, by the file that adds them: what each is, and how it is merged if each rank has a part. Code
# reads only how it is merged; tests/engine/checkpoint/test_format.py compares the keys with saved checkpoints.
CHECKPOINT_KEYS: dict[str, dict[str, str | tuple[str, str]]] = {
    "Lightning": {
        "epoch": "number of the epoch, from zero, also at its end; what counts on resuming is `position`",
        "global_step": "optimizer steps, of all optimizers",
        "pytorch-lightning_version": "version of Lightning",
        "state_dict": ("weights and buffers of the module; the average of callbacks=ema, if there is one", BY_WEIGHT),
        "loops": "counters of Lightning's loops, which `position` replaces on resuming",
        "callbacks": "states of the callbacks",
        "optimizer_states": ("states of torch, whose groups have `param_names`; a list, one of each optimizer", STATES),
        "lr_schedulers": "states of the schedulers",
        "hyper_parameters": "of a module that has `save_hyperparameters`",
        "hparams_name": "name of its argument that takes them",
        "datamodule_hyper_parameters": "of a DataModule that has `save_hyperparameters`",
        "datamodule_hparams_name": "name of its argument that takes them",
        "OrderedData": "state of the user's DataModule",
        "MixedPrecision": "scale of the loss with trainer.precision=16-mixed",
    },
    "run/recorder.py": {
        VERSION_KEY: "version of this library",
        "config": "the resolved configuration as YAML",
        "experiment": "options of the experiment and a hash of its code, of which the fingerprint is made",
        "numerics": "what changes the last bits, such as the number of threads",
        "metrics": "the last value of each metric",
    },
    "checkpoint/resumption.py": {
        "position": "epoch, steps trained in it, steps of the run, states of streams; whether a step is incomplete",
        "has_begun_epoch": "whether the hooks of the start of the epoch have run, perhaps without a step yet",
        "requires_grad": ("weights that were frozen or unfrozen during training", UNION),
    },
    "run/loop_changes.py": {"plateau_is_behind": "whether ReduceLROnPlateau has not had its step of the ended epoch"},
    "run/attributes.py": {"attributes": ("numbers and tensors of modules and callbacks that training changed", UNION)},
    "run/metric_states.py": {"metric_states": "what metrics have accumulated"},
    "run/ema.py": {"training_state_dict": ("weights in training, where `state_dict` is their average", BY_WEIGHT)},
    "checkpoint/sharded.py": {"shards": "name of the folder with each rank's part"},
    "src/models/classifier.py": {"scheduler": "class of the scheduler, which a continued run compares"},
}
MERGED = {key: entry[1] for keys in CHECKPOINT_KEYS.values() for key, entry in keys.items() if isinstance(entry, tuple)}
