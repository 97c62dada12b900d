"""Where the workers of a group run: in this process, in processes of this machine, or on the nodes of a Ray cluster."""
