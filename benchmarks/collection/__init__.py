"""The parts of `collectors.py`: tasks, the systems that gather frames, and the process that measures one of them."""
