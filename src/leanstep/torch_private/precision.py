"""What torch computes float32 in: TF32 or bfloat16, where that is faster and allowed.

Torch has two ways to say it, an older one and
one by library and kind of op, which are seen in each other; the private names here read and set
them all.
"""

from collections.abc import Iterable, Mapping

import torch

# What float32 is computed in where that is faster, by library and kind of op. What is said for all
# holds, and is read, wherever nothing is said in particular. The older way to say it sets a pair.
_FOR_ALL = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_PRODUCTS = (("cuda", "matmul"), ("mkldnn", "matmul"))
_OF_CUDNN = (("cuda", "conv"), ("cuda", "rnn"))
_PRECISIONS = (*_FOR_ALL, *_PRODUCTS, *_OF_CUDNN, ("mkldnn", "conv"))


def float32_precisions() -> tuple[str, ...]:
    """What float32 is computed in (TF32, bfloat16): both of torch's ways to say so are seen."""
    read = torch._C._get_fp32_precision_getter
    return tuple([read(*place) for place in _PRECISIONS])


def set_float32_precisions(precisions: tuple[str, ...]) -> None:
    """Let float32 be computed so.

    For all first, and in particular only what is still another then: what is said in particular
    hides from then on what the user says for all.
    """
    wanted = dict(zip(_PRECISIONS, precisions, strict=True))
    _set_others(_FOR_ALL, wanted)
    # The older way before the newer: where the two disagree, torch raises when it is asked.
    if _are_others(_PRODUCTS, wanted):
        cuda, onednn = map(wanted.__getitem__, _PRODUCTS)
        fast = "medium" if onednn == "bf16" else "high"
        torch.set_float32_matmul_precision(fast if cuda == "tf32" else "highest")
        _set_anew(_PRODUCTS, wanted)
    if _are_others(_OF_CUDNN, wanted):
        torch._C._set_cudnn_allow_tf32(wanted["cuda", "conv"] == "tf32")
        _set_anew(_OF_CUDNN, wanted)
    _set_others(_PRECISIONS, wanted)


def _are_others(places: Iterable[tuple[str, str]], wanted: Mapping[tuple[str, str], str]) -> bool:
    read = torch._C._get_fp32_precision_getter
    return any(read(*place) != wanted[place] for place in places)


def _set_others(places: Iterable[tuple[str, str]], wanted: Mapping[tuple[str, str], str]) -> None:
    for place in places:
        if _are_others([place], wanted):
            torch._C._set_fp32_precision_setter(*place, wanted[place])


def _set_anew(places: Iterable[tuple[str, str]], wanted: Mapping[tuple[str, str], str]) -> None:
    """Set what is another where nothing is said in particular."""
    for place in places:
        torch._C._set_fp32_precision_setter(*place, "none")
        _set_others([place], wanted)
