"""Hooks of modules and of optimizers, of one or of the whole process."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as _modules

# The step hooks that apply to every optimizer of the process.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def original_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """The optimizer's own step, past what a learning-rate scheduler put in front of it."""
    step = type(optimizer).step
    return lambda: step(optimizer)


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """The dictionaries that hold an optimizer's step hooks, and those of all optimizers."""
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ]


def forward_hooks(module: torch.nn.Module) -> list[dict[int, Any]]:
    """The dictionaries that hold a module's forward hooks."""
    return [module._forward_pre_hooks, module._forward_hooks]


def remove_forward_hooks(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """Take a function off a module that nobody has a handle of: it is a copy."""
    for hooks in forward_hooks(module):
        for key in [key for key, hook in hooks.items() if hook is function]:
            del hooks[key]
            for which in (
                module._forward_hooks_always_called,
                module._forward_hooks_with_kwargs,
                module._forward_pre_hooks_with_kwargs,
            ):
                which.pop(key, None)


# The child of the modules that `checkpoint_wrapper` of torch.distributed puts around others.
CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"


def composable_checkpoint(module: torch.nn.Module) -> Any | None:
    """The state that `torch.distributed._composable.checkpoint` keeps of a module, if it does."""
    home = "torch.distributed._composable.checkpoint_activation"
    hooks = module._forward_pre_hooks.values()
    # Asked for a module that it does not know, it would leave a dictionary there.
    known = any(getattr(hook, "__module__", "") == home for hook in hooks)
    return sys.modules[home].checkpoint.state(module) if known else None


def global_forward_hooks() -> list[dict[int, Any]]:
    """The dictionaries that hold the forward hooks of every module of the process."""
    return [_modules._global_forward_pre_hooks, _modules._global_forward_hooks]


def global_hooks() -> list[dict[int, Any]]:
    """The dictionaries that hold all hooks of every module of the process."""
    return [
        *global_forward_hooks(),
        _modules._global_backward_pre_hooks,
        _modules._global_backward_hooks,
    ]


# The names under which a module holds its hooks.
HOOK_GROUPS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


# Every call of a module goes through this function: its frame on the stack holds the module.
MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__
