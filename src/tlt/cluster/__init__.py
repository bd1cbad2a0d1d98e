"""Where rollouts run: one worker in this process, or many workers on Ray."""
