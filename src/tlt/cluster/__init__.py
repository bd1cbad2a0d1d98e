"""Where rollouts run: one worker in this process."""
