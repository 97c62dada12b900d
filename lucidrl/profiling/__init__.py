"""Where the time of a run goes: phase spans on one clock."""
