"""Where the workers of a group run: in this process, or in processes of this machine."""
