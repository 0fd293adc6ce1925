"""Random functions of a step, such as `F.dropout`, with the same numbers on any hardware; all others are refused.

torch's generators do not know samples: the numbers of a sample would depend on its rank and its micro-batch. In a run,
the functions of `_FUNCTIONS` therefore take the masks of `onecurve/random/dropout.py`, or the numbers of
`onecurve/random/hashing.py`, for each row of a tensor that has a row for each sample. Whatever else draws from torch's
generators is refused where ranks or micro-batches hold parts of the global batch; on one process it draws as in torch.

A call takes its number from the seed of torch's CPU generator, and leaves the generator with the next seed, which
torch.utils.checkpoint restores when it computes a block again. A generator whose state is not that of its seed has been
used by something else. Dropout layers count their own calls by `dropout.CALL`, since a compiled network has them, too,
and counts none.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal

from onecurve.errors import UserError
from onecurve.patches.torch import attention_weights, is_in_vmap, is_parameter
from onecurve.random.dropout import CALL, hash_samples, keep_mask
from onecurve.random.hashing import hash_ints, normal, uniform_rows
from onecurve.random.seeding import torch_generator_states

_ATTENTION, _MULTI_HEAD_ATTENTION = F.scaled_dot_product_attention, F.multi_head_attention_forward
_BERNOULLI, _RSAMPLE = Tensor.bernoulli_, Normal.rsample
_CALLS = 1  # without it a call would have the hash of a sample, since a step begins with the seed of its samples' keys
_CHANNEL_DIMS = {("dropout1d", 2): 1, ("dropout3d", 4): 1}  # torch takes the rows of these for channels of one sample
_DIGITS = {torch.bfloat16: 8, torch.float16: 11}  # in bits, of numbers below 1; a type with more has 24 random ones
_OTHERS = "a function such as torch.randn, torch.randint, the dropout of nn.LSTM or F.dropout in a compiled network"


class SampleRandom:
    """The samples for which random functions draw.

    Attributes:
        make_keys: computes `keys`, which most steps do not need; None outside of a batch.
        device: device of the module.
        is_divided: whether ranks or micro-batches hold parts of the global batch.
        calls: number of calls of random functions so far.
        first_seed: seed of torch's CPU generator before the first call.
        shift: added to the seed of torch's CPU generator, which gives the number of a call: a virtual rank has another
            seed, and its calls keep the numbers that they have without virtual ranks.
    """

    make_keys: Callable[[], Tensor] | None = None
    device = torch.device("cpu")
    is_divided = False
    calls = 0
    first_seed = 0
    shift = 0
    _device_states: Sequence[bytes] = ()

    @functools.cached_property
    def keys(self) -> Tensor:
        """One number for each sample of the current (micro-)batch, (n,) int64."""
        assert self.make_keys
        return self.make_keys()

    def begin(self, make_keys: Callable[[], Tensor], device: torch.device, is_divided: bool, shift: int = 0) -> None:
        """Draw for other samples. The generators must have been seeded."""
        self.make_keys, self.device, self.is_divided, self.shift = make_keys, device, is_divided, shift
        self.first_seed = torch.initial_seed()
        if is_divided:
            _, *self._device_states = torch_generator_states(device.type)
        vars(self).pop("keys", None)

    @property
    def call_seed(self) -> int:
        """The number that the next call takes."""
        return self.first_seed + (torch.initial_seed() - self.first_seed) % CALL + self.shift

    def begin_micro_batch(self, keys: Tensor, seed: int) -> None:
        """Draw for the samples of a micro-batch of a pipeline's schedule, with a seed of torch's CPU generator."""
        self.check()
        self.keys = keys
        torch.default_generator.manual_seed(seed)

    def end(self) -> None:
        """Let all functions draw as in torch."""
        self.make_keys, self.is_divided = None, False

    def has_row_per_sample(self, values: Tensor, name: str) -> bool:
        """Return whether a function draws for the rows of a tensor; those of a parameter are no samples.

        In a compiled network torch's own draws; so does it under `torch.vmap`, as for each member of an ensemble.
        """
        if torch.compiler.is_compiling() or self.make_keys is None:
            return False
        is_weight = is_parameter(values)
        if values.ndim and len(values) == len(self.keys) and not is_weight and not is_in_vmap():
            return True
        if self.is_divided:
            raise self.refusal(f"{name} on a {'parameter' if is_weight else 'tensor'} of shape {list(values.shape)}")
        return False

    def keep_mask(self, shape: torch.Size, rate: float) -> Tensor:
        """Return the bool mask of the elements to keep, with a row for each sample."""
        return keep_mask(hash_samples(self.keys, self._begin_call()), shape, rate)

    def normal(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return numbers from the standard normal distribution, with a row for each sample."""
        return normal(self.keys ^ self._begin_call(), *shape[1:]).to(dtype)

    def uniform(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return numbers in [0, 1), with a row for each sample; in half precision none is rounded to 1, as in torch."""
        return uniform_rows(self.keys ^ self._begin_call(), *shape[1:], bits=_DIGITS.get(dtype, 24)).to(dtype)

    def _begin_call(self) -> int:
        """Return a hash of the number of the call, and leave the generator with the next number."""
        self.check()
        self.calls += 1
        number = self.call_seed
        torch.default_generator.manual_seed(torch.initial_seed() + 1)
        return int(hash_ints(number, _CALLS))

    def check(self) -> None:
        """Raise a UserError if anything else has used torch's generators in a batch that is divided."""
        if not self.is_divided:
            return
        state, *device_states = torch_generator_states(self.device.type)
        fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state().numpy().tobytes()
        if state != fresh or device_states != list(self._device_states):
            raise self.refusal(_OTHERS)

    def refusal(self, name: str) -> UserError:
        functions = ", ".join(f"{owner.__name__}.{function}" for owner, function in _FUNCTIONS)
        return UserError(
            f"{name} draws numbers that would depend on the number of ranks and micro-batches: use nn.Dropout, "
            f"{functions.replace(F.__name__, 'F')} on tensors with a row for each sample ({len(self.keys)} here), or "
            "set bit_exact=true, with which any function draws for each virtual rank (not in a pipeline, nor with "
            "manual optimization)"
        )


sample_random = SampleRandom()  # one for the process, as torch's generators


def _dropout_of(name: str) -> Callable[..., Tensor]:
    """Return the function in place of `F.dropout`, or in place of one that drops whole channels."""
    original = getattr(F, name)

    @functools.wraps(original)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not (training and 0 < p < 1 and sample_random.has_row_per_sample(input, f"F.{name}")):
            return original(input, p, training, inplace)
        channels = _CHANNEL_DIMS.get((name, input.ndim), 2)
        per_channel = torch.Size((*input.shape[:channels], *[1] * (input.ndim - channels)))
        mask = sample_random.keep_mask(input.shape if name == "dropout" else per_channel, p)
        return input.mul_(mask).div_(1 - p) if inplace else input * mask / (1 - p)

    return dropout


@functools.wraps(_BERNOULLI)
def _bernoulli_(self: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    if isinstance(p, float | int) and p in (0, 1):
        return self.fill_(p)  # without a draw
    is_plain = isinstance(p, float) and 0 < p < 1 and generator is None
    if not (is_plain and sample_random.has_row_per_sample(self, "bernoulli_")):
        return _BERNOULLI(self, p, generator=generator)
    return self.copy_(sample_random.keep_mask(self.shape, 1 - p))


def _noise_like(name: str, draw: Callable[[torch.Size, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """Return the function in place of `torch.randn_like` or `torch.rand_like`."""
    original = getattr(torch, name)

    @functools.wraps(original)
    def noise_like(
        input: Tensor, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **options: Any
    ) -> Tensor:
        kind = dtype or input.dtype
        is_plain = kind.is_floating_point and options.get("generator") is None
        if not (is_plain and sample_random.has_row_per_sample(input, f"torch.{name}")):
            return original(input, dtype=dtype, device=device, requires_grad=requires_grad, **options)
        return draw(input.shape, kind).to(device or input.device).requires_grad_(requires_grad)

    return noise_like


@functools.wraps(_RSAMPLE)
def _rsample(self: Normal, sample_shape: Any = ()) -> Tensor:
    mean = self.loc.expand(*sample_shape, *self.batch_shape)
    if not sample_random.has_row_per_sample(mean, "the rsample of a normal distribution"):
        return _RSAMPLE(self, sample_shape)
    return mean + sample_random.normal(mean.shape, mean.dtype).to(mean.device) * self.scale


@functools.wraps(_ATTENTION)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if not (0 < dropout_p < 1 and sample_random.has_row_per_sample(query, "attention with dropout")):
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # of the positions to attend to
        attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
    weights = attention_weights(query, key, value[..., :0], attn_mask, 0.0, is_causal, None, **options)
    if options.get("enable_gqa"):
        value = value.repeat_interleave(weights.shape[-3] // value.shape[-3], -3)
    mask = sample_random.keep_mask(weights.shape, dropout_p)
    return (weights * mask / (1 - dropout_p)) @ value


@functools.wraps(_MULTI_HEAD_ATTENTION)
def _multi_head_attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Drop attention weights, of which those of a sample's heads are consecutive rows."""
    has_dropout = kwargs.get("training", True) and kwargs.get("dropout_p", *args[9:10])
    if torch.compiler.is_compiling() or not (has_dropout and kwargs.get("need_weights", True) and query.ndim == 3):
        return _MULTI_HEAD_ATTENTION(query, *args, **kwargs)

    def dropout(weights: Tensor, p: float) -> Tensor:  # (samples * heads, targets, sources)
        return _FUNCTIONS[F, "dropout"](weights.unflatten(0, (query.shape[1], -1)), p).flatten(0, 1)

    with mock.patch.object(F, "dropout", dropout):
        return _MULTI_HEAD_ATTENTION(query, *args, **kwargs)


_FUNCTIONS: dict[tuple[Any, str], Any] = {
    **{(F, name): _dropout_of(name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")},
    (F, "scaled_dot_product_attention"): _attention,
    (F, "multi_head_attention_forward"): _multi_head_attention,
    (Tensor, "bernoulli_"): _bernoulli_,
    (torch, "randn_like"): _noise_like("randn_like", sample_random.normal),
    (torch, "rand_like"): _noise_like("rand_like", sample_random.uniform),
    (Normal, "rsample"): _rsample,
}


def intercept() -> None:
    """Put the functions in the place of torch's, which they call outside of a batch."""
    for (owner, name), function in _FUNCTIONS.items():
        setattr(owner, name, function)


def release() -> None:
    sample_random.end()
    for (owner, name), function in _FUNCTIONS.items():
        setattr(owner, name, function.__wrapped__)
