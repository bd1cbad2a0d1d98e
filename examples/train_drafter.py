"""Train a drafter for my model, from prompts alone: python examples/train_drafter.py RECIPE OUT [TOKENS SECONDS]"""

import sys
from pathlib import Path

import tlt

if not sys.argv[2:]:
    sys.exit(__doc__)
recipe, out = sys.argv[1], Path(sys.argv[2])
tokens, seconds = map(int, sys.argv[3:] or (200_000, 600))
config = tlt.load_config(recipe)  # its [model], [data] and [rollout] say what is answered, and how
tlt.train_drafter(config, out, tokens, seconds)
engine = tlt.load_engine(config.model, speculation={"drafter": "adaptive", "path": str(out)})
print(f"the engine picks among {', '.join(strategy.name for strategy in engine.tuner.strategies)}")
