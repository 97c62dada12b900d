"""The reward `judge`: an LLM judge behind an HTTP endpoint grades completions by a rubric."""
