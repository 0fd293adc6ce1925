"""Random functions of a step, such as `F.dropout` and `torch.randn_like`, with the same numbers on any hardware.

torch's generators do not know samples: the numbers of a sample would depend on its rank and its micro-batch. While a
step runs, a function mode gives each row of a random function's result its own seed, a hash of (seed, epoch, sample,
call). A function without rows of samples draws the same numbers on every rank.

A call takes one number from torch's CPU generator. All ranks seed it alike, and torch.utils.checkpoint restores it
when it computes a block again. `nn.Dropout` has a faster way (`src/engine/determinism/dropout.py`).
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from src.engine.determinism.dropout import SampleDropout, drop_elements, dropouts, set_keys
from src.engine.determinism.hashing import hash_ints
from src.engine.determinism.samples import seed_generators, torch_generator_states
from src.engine.utils.errors import UserError

_DROPOUT, _ATTENTION = F.dropout, F.scaled_dot_product_attention
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu)
_SIGNATURES: dict[Any, inspect.Signature] = {
    function: inspect.signature(function) for function in (*_DROPOUTS, F.multi_head_attention_forward)
}
_SIGNATURES[_ATTENTION] = inspect.signature(
    lambda query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False: None
)
_FUNCTIONS = "rand randn randint randperm rand_like randn_like randint_like normal poisson bernoulli multinomial"
_METHODS = "bernoulli bernoulli_ multinomial normal_ uniform_ exponential_ random_ geometric_ cauchy_ log_normal_"
_RANDOM = {*_DROPOUTS, _ATTENTION, F.gumbel_softmax, *(getattr(torch, name) for name in _FUNCTIONS.split())}
_RANDOM |= {getattr(Tensor, name) for name in _METHODS.split()}
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_STEPS = ("training_step", "backward", "validation_step", "test_step")  # of a strategy; `backward` may recompute


class SampleRandom(TorchFunctionMode):
    """The mode in which random functions draw for each sample.

    Attributes:
        make_keys: computes `keys`, which most steps do not need.
        device: device of the module.
        calls: number of calls of random functions so far.
        is_divided: whether ranks or micro-batches hold parts of the global batch.
        checks_all: whether to check that no other function draws, which takes time.
        is_active: whether a step runs in the mode.
    """

    make_keys: Callable[[], Tensor]
    device = torch.device("cpu")
    calls = 0
    is_divided = checks_all = is_active = False

    @functools.cached_property
    def keys(self) -> Tensor:
        """One number for each sample of the current (micro-)batch, (n,) int64."""
        return self.make_keys()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:  # torch.utils.checkpoint computes a block again, so the mode must be on
            with (
                self,
                _unchecked(torch.autograd, "has_torch_function"),
                _unchecked(torch._tensor, "has_torch_function_unary"),
            ):
                return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and _draws(func, args, kwargs):
            return self._attend(args, kwargs)
        if func in _RANDOM and _draws(func, args, kwargs):
            return self._draw(func, args, kwargs)
        if not self.checks_all:
            return func(*args, **kwargs)
        with self.refuse_draws(getattr(func, "__name__", str(func))):
            return func(*args, **kwargs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter the mode. A step may contain another, such as a manual backward pass."""
        self.is_active = True
        try:
            with self:
                yield
        finally:
            self.is_active = False

    @contextmanager
    def refuse_draws(self, name: str) -> Iterator[None]:
        """Raise a UserError if torch's generators are used, and their numbers would depend on the hardware."""
        before = torch_generator_states(self.device.type) if self.is_divided else []
        yield
        if self.is_divided and torch_generator_states(self.device.type) != before:
            raise self.refusal(name)

    def begin(self, make_keys: Callable[[], Tensor], device: torch.device) -> None:
        """Go on with other samples."""
        self.make_keys, self.device = make_keys, device
        vars(self).pop("keys", None)

    def begin_micro_batch(self, keys: Tensor, state: Tensor, calls: int) -> None:
        """Go on with the samples of a micro-batch, as after a number of calls from a state of the CPU generator."""
        self.keys = keys
        torch.set_rng_state(state)
        for _ in range(calls):
            _draw_salt()

    def _attend(self, args: Any, kwargs: Any) -> Any:
        """Run multi-head attention, inside of which the mode is off."""
        samples = args[0].shape[1]

        def dropout(weights: Tensor, p: float) -> Tensor:  # (samples * heads, targets, sources)
            return self._draw(_DROPOUT, (weights.unflatten(0, (samples, -1)), p), {}).flatten(0, 1)

        def attention(*args: Any, **kwargs: Any) -> Tensor:
            return self._draw(_ATTENTION, args, kwargs)

        with mock.patch.multiple(F, dropout=dropout, scaled_dot_product_attention=attention):
            return F.multi_head_attention_forward(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        salt, size = _draw_salt(), _size(args, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        with torch.random.fork_rng(devices=[]):
            is_factory, samples = _first_tensor(args, kwargs) is None, len(self.keys)
            is_ambiguous = "out" in kwargs or (is_factory and samples == 1)  # one number for all, or for this sample
            if size and size[0] == samples and func is not torch.randperm and not is_ambiguous:
                return self._draw_rows(func, args, kwargs, salt)
            is_activation = func in _SIGNATURES or any(length % samples == 0 for length in size)
            if self.is_divided and is_activation:
                raise self.refusal(f"{func.__name__} with shape {list(size)}")
            self._seed(salt)
            own_args, own_kwargs = tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
            return _result(func, args, kwargs, func(*own_args, **own_kwargs))

    def _draw_rows(self, func: Any, args: Any, kwargs: Any, salt: int) -> Any:
        """Call a function for each sample, with its own seed."""
        if func is _DROPOUT and (options := _options(func, args, kwargs))["p"] < 1:
            return drop_elements(self.keys, salt, options["input"], options["p"], options["inplace"])
        rows = []
        for row, seed in enumerate(hash_ints(self.keys, salt).tolist()):
            self._seed(seed)
            own_args, own_kwargs = _arguments_of_row(args, kwargs, row)
            rows.append(func(*own_args, **own_kwargs))
        return _result(func, args, kwargs, torch.cat(rows))

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def refusal(self, name: str) -> UserError:
        return UserError(
            f"{name} draws random numbers that would depend on the number of ranks and micro-batches, of which this "
            f"one has {len(self.keys)} samples: use nn.Dropout or a function of torch on tensors with a row for each "
            "sample, or train on one device without micro-batches"
        )


sample_random = SampleRandom()  # one for the process, as torch's generators


def _unchecked(module: Any, check: str) -> Any:
    """Return a context in which the functions of a module do not call the mode.

    They would call it again and again: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_tensor.py (`backward`).
    """
    return mock.patch.object(module, check, _never)


def _never(*_: Any) -> bool:
    return False


def _draw_salt() -> int:
    return int(torch.randint(1 << 62, ()))


def _options(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = _SIGNATURES[func].bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call draws: a dropout in evaluation or of probability zero does not."""
    if func not in _SIGNATURES:
        return True
    options = _options(func, args, kwargs)
    return bool(options.get("training", True) and options.get("p", options.get("dropout_p", 1.0)))


def _first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    return next((value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)), None)


def _size(args: Any, kwargs: Any) -> Sequence[int]:
    """Return the shape of the first tensor, or else the size that a call asks for."""
    first = _first_tensor(args, kwargs)
    if first is not None:
        return first.shape
    return kwargs.get("size") or next((value for value in args if isinstance(value, tuple | list)), args)


def _arguments_of_row(args: Any, kwargs: Any, row: int) -> tuple[Any, Any]:
    """Return the arguments for one row of the result: with rows of the tensors, or with another size."""
    first = _first_tensor(args, kwargs)
    if first is None:
        size = (1, *_size(args, kwargs)[1:])
        numbers = (
            [] if _size(args, kwargs) is args else [value for value in args if not isinstance(value, tuple | list)]
        )
        return numbers, kwargs | {"size": size}

    def take(value: Tensor) -> Tensor:  # a mask of attention may have fewer dimensions
        has_rows = value.ndim == first.ndim and len(value) == len(first)
        return (value[row : row + 1] if has_rows else value).contiguous()  # numbers fill the memory in its order

    return tree_map_only(Tensor, take, (args, kwargs))


def _result(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return the result of a call, which a function in place writes into its argument."""
    is_inplace = func.__name__.endswith("_") or (func in _SIGNATURES and _options(func, args, kwargs).get("inplace"))
    return _first_tensor(args, kwargs).copy_(result) if is_inplace else result


class RandomNumbers(L.Callback):
    """Lets each step draw the same numbers on any hardware, and in a resumed run.

    Before each batch, torch, NumPy and Python are seeded with a hash of (seed, epoch, step), and the samples get their
    keys. The mode has a cost for each function of torch. The first batch of an epoch therefore tells whether the others
    need it.

    Args:
        seed: seed of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._dropouts: list[SampleDropout] = []
        self._needs_mode: dict[Any, bool] = {}  # by stage; a stage whose first batch is due is missing

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if "training_step" not in vars(trainer.strategy):
            for name in _STEPS:
                setattr(trainer.strategy, name, self._in_mode(trainer, getattr(trainer.strategy, name)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._dropouts = dropouts(pl_module)

    def on_train_epoch_start(self, *_: Any) -> None:
        self._needs_mode = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin_batch(trainer, batch_idx // trainer.accumulate_grad_batches)
        if self._dropouts:
            set_keys(self._dropouts, sample_random.keys)

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._begin_batch(trainer, 0)  # the number of a batch depends on the accumulation, the keys do not

    def on_test_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._begin_batch(trainer, 0)

    def _begin_batch(self, trainer: L.Trainer, number: int) -> None:
        data: Any = trainer.datamodule
        epoch, samples, parallel = trainer.current_epoch, data.sample_index, data.parallel
        sample_random.begin(lambda: hash_ints(self.seed, epoch, samples), trainer.lightning_module.device)
        sample_random.is_divided = parallel.dp_size * parallel.num_microbatches * trainer.accumulate_grad_batches > 1
        seed_generators(hash((self.seed, epoch, number)), sample_random.device.type)

    def _in_mode(self, trainer: L.Trainer, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step of the strategy that runs in the mode, if it draws random numbers."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            stage = trainer.state.stage
            if sample_random.is_active:
                return step(*args, **kwargs)
            if not self._needs_mode.get(stage, True):
                with sample_random.refuse_draws(f"{step.__name__}, in some batches of an epoch only,"):
                    return step(*args, **kwargs)
            if _is_compiled(trainer.lightning_module):  # it would be compiled with the mode
                with sample_random.refuse_draws(f"{step.__name__} of a compiled network"):
                    return step(*args, **kwargs)
            sample_random.checks_all, calls = stage not in self._needs_mode, sample_random.calls
            with sample_random.active():
                result = step(*args, **kwargs)
            self._needs_mode[stage] = self._needs_mode.get(stage, False) or sample_random.calls > calls
            return result

        return run


def _is_compiled(module: nn.Module) -> bool:
    parts = module.modules()
    return any(part._compiled_call_impl or hasattr(part.forward, "_torchdynamo_orig_callable") for part in parts)
