"""Commands that answer a question about a config, a run or this machine, and train nothing."""
