"""The rollout engine: rounds of draft, verify and commit over a continuously refilled batch. Start reading at
engine.py."""
