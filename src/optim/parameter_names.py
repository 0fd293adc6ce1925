"""Names in the state of an optimizer whose author gave none."""

from torch import nn
from torch.optim import Optimizer


def name_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """Add the names of the parameters in the module, and of the groups, to the optimizer's state, where missing.

    torch keeps `param_names` in state dicts (https://docs.pytorch.org/docs/stable/optim.html).
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        group.setdefault("param_names", [names[parameter] for parameter in group["params"]])
        group.setdefault("name", f"group {number:02}")
