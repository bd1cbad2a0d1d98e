"""Decode with speculation: python examples/decode.py FOLDER"""

import sys

from transformers import AutoTokenizer

import tlt

if not sys.argv[1:]:
    sys.exit(__doc__)
folder = sys.argv[1]  # a Hugging Face checkpoint: Llama, Mistral, Qwen2 or Qwen3
tokenizer = AutoTokenizer.from_pretrained(folder)
engine = tlt.load_engine(folder, speculation={"drafter": "suffix"})
questions = ["What is 17 + 25?\n", "What is the greatest common divisor of 12 and 18?\n"]
prompts = [tlt.Prompt(i, text, tuple(tokenizer.encode(text))) for i, text in enumerate(questions)]
law = tlt.SamplingParams(temperature=0.8, max_new_tokens=200, stop_token_ids=(tokenizer.eos_token_id,))
for response in engine.generate(tlt.make_requests(prompts, 4, law, seed=0)):  # as each one finishes
    print(response.request.prompt.text, response.text)
print(f"{engine.stats.tokens} tokens, {engine.stats.accept_length:.2f} in each pass of the model")
