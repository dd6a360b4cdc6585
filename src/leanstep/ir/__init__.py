"""The nouns that pass between stages: frozen values of the standard library, saved as JSON."""

from leanstep.ir.graph import Block as Block
from leanstep.ir.graph import Category as Category
from leanstep.ir.graph import Fact as Fact
from leanstep.ir.graph import Graph as Graph
from leanstep.ir.graph import ModuleCall as ModuleCall
from leanstep.ir.graph import Op as Op
from leanstep.ir.graph import Phase as Phase
from leanstep.ir.graph import Save as Save
from leanstep.ir.graph import Storage as Storage
from leanstep.ir.graph import Unpack as Unpack
from leanstep.ir.graph import Value as Value
from leanstep.ir.plan import Decision as Decision
from leanstep.ir.plan import Engine as Engine
from leanstep.ir.plan import Plan as Plan
from leanstep.ir.profile import Cost as Cost
from leanstep.ir.profile import Profile as Profile
from leanstep.ir.profile import RecipeCost as RecipeCost
from leanstep.ir.timeline import Point as Point
from leanstep.ir.timeline import Timeline as Timeline
from leanstep.ir.verdict import Verdict as Verdict
