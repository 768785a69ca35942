from .flow import Flow as Flow
from .node import Length as Length
from .stats import FlowStats as FlowStats
