"""Real model families for demos, tests and benchmarks: ResNet, Transformers, U-Net."""

from leanstep.models.build import Built, build, names
from leanstep.models.loop import train
from leanstep.models.target import Target, find_target
from leanstep.models.tasks import Batch, Loss

__all__ = ["Batch", "Built", "Loss", "Target", "build", "find_target", "names", "train"]
