"""My own loop: decode, score, update, and give the engine the new weights: python examples/own_loop.py RECIPE"""

import sys

from transformers import AutoTokenizer

import tlt

if not sys.argv[1:]:
    sys.exit(__doc__)
config = tlt.load_config(sys.argv[1])
policy, engine = tlt.make_policy(config), tlt.load_engine(config.model, config.speculation, config.engine)
tokenizer = AutoTokenizer.from_pretrained(config.model.path)
prompt = tlt.Prompt(0, "Write a word.\n", tuple(tokenizer.encode("Write a word.\n")))
law = tlt.SamplingParams(max_new_tokens=20, stop_token_ids=(tokenizer.eos_token_id,))
for step in range(config.train.steps):
    said = sorted(engine.generate(tlt.make_requests([prompt], 16, law, seed=step)), key=lambda r: r.request.index)
    rewards = [len(set(response.text)) / 20 for response in said]
    advantages = [reward - sum(rewards) / len(rewards) for reward in rewards]
    tokens, logprobs = [response.token_ids for response in said], [response.full_logprobs for response in said]
    metrics = policy.update(tlt.TrainBatch([prompt.token_ids] * len(said), tokens, advantages, logprobs), step)
    engine.target.load(policy.state_dict(), step + 1)  # a model of your own has a state_dict() too
    print(f"step {step}: reward {sum(rewards) / len(rewards):.3f}, loss {metrics['loss']:.4f}")
