"""Real model families for demos, tests and benchmarks: ResNet, Transformers, U-Net."""

from leanstep.models.build import Built, build, names
from leanstep.models.tasks import Batch, Loss

__all__ = ["Batch", "Built", "Loss", "build", "names"]
