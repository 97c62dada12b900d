"""Components of `collectors.py`: tasks, the collectors of each system, and the process that measures them."""
