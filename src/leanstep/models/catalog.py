"""The names that `build` knows: sizes, and the shapes a model is called with unless told.

The full-size ones have the parameter counts of the published models. The tiny ones have the same
structure, at least three repeated blocks, and a step of milliseconds on a CPU. `gpt2-mini` is for
the demo: seconds on a CPU, with activations that outweigh the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from leanstep.models.resnet import BasicBlock, Bottleneck, ResNetSizes
from leanstep.models.transformer import BertSizes, GPT2Sizes, LlamaSizes, Seq2SeqSizes
from leanstep.models.unet import UNetSizes

ImageSizes = ResNetSizes | UNetSizes
TextSizes = BertSizes | GPT2Sizes | LlamaSizes | Seq2SeqSizes


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalog; `extent` is the image's side in pixels or the tokens in a row."""

    sizes: ImageSizes | TextSizes
    rows: int
    extent: int


def resnet(block: type[BasicBlock] | type[Bottleneck], *depths: int) -> Entry:
    """Return a full-size ResNet with this many blocks in its four stages."""
    first, second, third, fourth = depths
    return Entry(ResNetSizes(block=block, depths=(first, second, third, fourth)), 8, 224)


def bert(width: int, depth: int) -> Entry:
    """Return a full-size BERT; heads are 64 wide."""
    sizes = BertSizes(
        width=width,
        depth=depth,
        heads=width // 64,
        inner=4 * width,
        vocabulary=30_522,
        positions=512,
    )
    return Entry(sizes, 4, 512)


def gpt2(width: int, depth: int) -> Entry:
    """Return a full-size GPT-2; heads are 64 wide."""
    sizes = GPT2Sizes(
        width=width,
        depth=depth,
        heads=width // 64,
        inner=4 * width,
        vocabulary=50_257,
        positions=1024,
    )
    return Entry(sizes, 2, 1024)


LLAMA_1B = LlamaSizes(
    width=2048,
    depth=16,
    heads=32,
    key_heads=8,
    inner=8192,
    vocabulary=128_256,
    positions=2048,
)
LLAMA_8B = LlamaSizes(
    width=4096,
    depth=32,
    heads=32,
    key_heads=8,
    inner=14_336,
    vocabulary=128_256,
    positions=2048,
    is_tied=False,
)
SEQ2SEQ_BASE = Seq2SeqSizes(
    width=768, depth=12, heads=12, inner=3072, vocabulary=32_128, positions=512
)

RESNET_TINY = ResNetSizes(block=BasicBlock, depths=(2, 2, 2, 2), width=16, num_classes=10)
BERT_TINY = BertSizes(width=64, depth=4, heads=4, inner=256, vocabulary=512, positions=64)
GPT2_TINY = GPT2Sizes(width=64, depth=4, heads=4, inner=256, vocabulary=512, positions=64)
GPT2_MINI = GPT2Sizes(width=256, depth=8, heads=4, inner=1024, vocabulary=4096, positions=512)
LLAMA_TINY = LlamaSizes(
    width=64, depth=4, heads=4, key_heads=2, inner=192, vocabulary=512, positions=64
)
SEQ2SEQ_TINY = Seq2SeqSizes(width=64, depth=3, heads=4, inner=256, vocabulary=512, positions=64)

CATALOG: dict[str, Entry] = {
    "resnet18": resnet(BasicBlock, 2, 2, 2, 2),
    "resnet50": resnet(Bottleneck, 3, 4, 6, 3),
    "resnet152": resnet(Bottleneck, 3, 8, 36, 3),
    "bert-base": bert(768, 12),
    "bert-large": bert(1024, 24),
    "gpt2": gpt2(768, 12),
    "gpt2-medium": gpt2(1024, 24),
    "llama-1b": Entry(LLAMA_1B, 1, 2048),
    "llama-8b": Entry(LLAMA_8B, 1, 2048),
    "seq2seq-base": Entry(SEQ2SEQ_BASE, 4, 512),
    "unet": Entry(UNetSizes(widths=(64, 128, 256, 512), groups=32), 4, 224),
    "gpt2-mini": Entry(GPT2_MINI, 8, 256),
    "resnet-tiny": Entry(RESNET_TINY, 8, 32),
    "bert-tiny": Entry(BERT_TINY, 4, 32),
    "gpt2-tiny": Entry(GPT2_TINY, 4, 32),
    "llama-tiny": Entry(LLAMA_TINY, 4, 32),
    "seq2seq-tiny": Entry(SEQ2SEQ_TINY, 4, 32),
    "unet-tiny": Entry(UNetSizes(widths=(16, 32, 32)), 2, 32),
}
