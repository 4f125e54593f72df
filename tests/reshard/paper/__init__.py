"""Random models as checkpoints of every kind without an engine, and what their files hold, put
together by plain torch.

The reader here shares no code with the package: formulas are those of DeepSpeed's documentation of
its own buffers, names and cuts those of megatron-core. The first checkpoint of a model is written
by the package's writer on one rank, where nothing is cut; everything else is a conversion.
"""

from tests.reshard.paper.compare import differences as differences
from tests.reshard.paper.compare import problems as problems
from tests.reshard.paper.first import write as write
from tests.reshard.paper.layout import expected_groups as expected_groups
from tests.reshard.paper.layout import named as named
from tests.reshard.paper.model import Model as Model
from tests.reshard.paper.model import find_family as find_family
from tests.reshard.paper.model import plain_model as plain_model
from tests.reshard.paper.model import position as position
from tests.reshard.paper.model import random_model as random_model
from tests.reshard.paper.model import random_target as random_target
from tests.reshard.paper.reader import read as read
from tests.reshard.paper.reader import same as same
