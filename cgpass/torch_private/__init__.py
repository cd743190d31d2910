"""The only package that touches private torch modules: others read the names of its modules from here.

What torch doesn't load anyway is imported on first use, so that importing cgpass loads neither Dynamo nor Inductor.
What differs between torch 2.11 and 2.15 is told apart here, by looking for the feature first and at the version second.
"""

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from cgpass.torch_private.backward import *
from cgpass.torch_private.compiling import *
from cgpass.torch_private.dynamo import *
from cgpass.torch_private.frames import *
from cgpass.torch_private.graphs import *
from cgpass.torch_private.kept_graphs import *
from cgpass.torch_private.modes import *
from cgpass.torch_private.operators import *
from cgpass.torch_private.optimizers import *
from cgpass.torch_private.process_groups import *
from cgpass.torch_private.randomness import *
from cgpass.torch_private.storages import *
from cgpass.torch_private.traces import *
from cgpass.torch_private.training_graphs import *
