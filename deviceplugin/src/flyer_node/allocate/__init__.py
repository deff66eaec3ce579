"""Which GPUs a container gets: pure, exact over all subsets."""

from flyer_node.allocate.choose import Cost, choose, cost
from flyer_node.allocate.problem import Board, board_of

__all__ = ["Board", "Cost", "board_of", "choose", "cost"]
