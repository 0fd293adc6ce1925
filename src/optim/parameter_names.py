"""Names in the state of an optimizer whose author gave none."""

from torch import nn
from torch.optim import Optimizer

from src.utils.errors import UserError


def name_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """Add the names of the parameters in the module, and of the groups, to the optimizer's state, where missing.

    torch keeps `param_names` in state dicts (https://docs.pytorch.org/docs/stable/optim.html).

    Raises:
        UserError: if a parameter is not in the module, or two groups have one name: no checkpoint could restore them.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer_name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if not names.keys() >= set(group["params"]):
            raise UserError(
                f"group {number} of {optimizer_name} has a parameter that is not in {type(module).__name__}: make its "
                "module an attribute"
            )
        group.setdefault("param_names", [names[parameter] for parameter in group["params"]])
        group.setdefault("name", f"group {number:02}")
    if len({group["name"] for group in optimizer.param_groups}) < len(optimizer.param_groups):
        raise UserError(f"two parameter groups of {optimizer_name} have the same `name`: give each its own, or none")
