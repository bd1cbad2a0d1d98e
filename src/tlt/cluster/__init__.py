"""Workers: one in this process, or many on Ray."""
