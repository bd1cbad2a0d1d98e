"""The mutants: each breaks one promise, and the named tests must notice.

To choose a site, run `python -m mutants.sites MODULE:FUNCTION` in the folder tests. Before a mutant is listed,
`make mutants ARGS="-k FUNCTION"` must show that the tests notice it.
"""

from __future__ import annotations

from mutants.mutant import Mutant

_TABLE: dict[tuple[str, str], list[tuple[str, str, int, str]]] = {
    ("sampling", "test_sampling.py"): [
        ("request_seed", "argument", 3, "A request's seed has 64 bits of its own hash."),
        ("philox", "constant", 0, "The noise is Philox with ten rounds, as its published vectors say."),
        ("_host_words", "less", 5, "Each bit of a seed counts once."),
        ("philox_words", "swap", 4, "Noise depends on position and token by a fixed place in the counter."),
        ("_gumbel", "constant", 1, "The noise has the standard Gumbel distribution."),
        ("sampling_log_probs", "compare", 3, "Top-k keeps k tokens."),
        ("sampling_log_probs", "argument", 25, "Top-p sums probabilities in float64."),
        ("sampling_log_probs", "compare", 5, "Top-p keeps the smallest prefix that reaches its mass."),
        ("sampling_log_probs", "unwrap", 31, "A restricted distribution sums to 1."),
        ("gumbel_topk", "operator", 0, "A token is the argmax of log-probability plus noise."),
    ],
    ("engine.committing", "engine/test_committing.py"): [
        ("num_accepted", "compare", 0, "An accepted token is the one that the target sampled."),
        ("num_accepted", "never", 0, "No token after a rejected one is accepted."),
    ],
    ("engine.rows", "engine/test_rows.py"): [
        ("RowTable.remove", "drop", 3, "The last row takes the place of a row that leaves."),
    ],
    ("engine.committing", "engine/test_engine.py"): [
        ("Stops.append", "never", 0, "Nothing follows a stop token within a round."),
        ("Stops.append", "compare", 1, "A response has at most max_new_tokens tokens."),
        ("Stops.append", "compare", 0, "A response ends at a stop token."),
    ],
    ("engine.committing", "test_spelling.py"): [
        ("Stops._ends_in_stop_string", "opposite", 0, "One stop string is enough to end a response."),
    ],
    ("spelling", "data/test_tokenizer.py"): [
        ("Detokenizer.__call__", "constant", 1, "Text is what the tokens spell, with no space removed."),
    ],
    ("spelling", "test_spelling.py"): [
        ("Detokenizer._bytes_of", "element", 2, "A byte-fallback token spells its byte."),
    ],
    ("engine.kv_cache", "engine/test_rows.py"): [
        ("KVCache.clear", "drop", 2, "A new rollout does not reuse prompts of the previous one."),
        ("KVCache.wipe", "drop", 1, "A wiped slot holds no prompt."),
        ("KVCache.remove", "drop", 1, "Values that are not finite are wiped when their row leaves."),
        ("KVCache.remove", "drop", 4, "A row that moves takes its keys and values along."),
    ],
    ("engine.kv_cache", "engine/test_kv_cache.py"): [
        ("TurnStore.known", "operand", 1, "Keys and values of a turn are used for the same tokens alone."),
        ("KVCache.fits", "compare", 0, "The cache uses all of its bound."),
    ],
    ("engine.scheduler", "engine/test_scheduler.py"): [
        ("Scheduler.admit", "opposite", 4, "Admission counts the longest row."),
        ("Scheduler.admit", "drop", 15, "Admission stops at the cache's bound."),
        ("Scheduler.admit", "operand", 30, "Rows have room to grow when a row is admitted."),
        ("Scheduler.admit", "operand", 17, "The number of rows never exceeds max_rows."),
        ("Scheduler.submit", "drop", 2, "A request that can never run is refused at once."),
    ],
    ("engine.rows", "engine/test_scheduler.py"): [
        ("RowTable.own", "always", 0, "Withdrawing requests leaves look-ahead rows alone."),
    ],
    ("engine.scheduler", "engine/test_rows.py"): [
        ("place_new_rows", "operand", 1, "A prompt is reused only from the slot that holds it."),
        ("place_new_rows", "operand", 3, "A row that was begun is not replaced by its sibling's prompt."),
        ("place_and_prefill", "drop", 15, "A sibling gets a copy of its prompt's keys and values."),
    ],
    ("engine.noise_window", "engine/test_noise_window.py"): [
        ("NoiseWindow.remove", "drop", 0, "A row that moves takes its noise along."),
        ("NoiseWindow.append", "drop", 4, "A greedy row has no noise."),
        ("NoiseWindow.prepare", "operand", 5, "The bonus token of a chain has noise."),
        ("DraftNoise.__call__", "operand", 1, "A drafter ranks candidates under the noise of their own position."),
    ],
    ("engine.sampling_table", "engine/test_planted_bugs.py"): [
        ("SamplingTable.remove", "drop", 0, "A row that moves keeps its sampling parameters."),
    ],
    ("engine.sampling_table", "engine/test_rows.py"): [
        ("SamplingTable.append", "drop", 1, "A new row's sampling parameters apply from its first round."),
    ],
    ("engine.runner", "draft/test_features.py"): [
        ("Runner._keep", "operand", 19, "A feature is stored with the token that follows it."),
    ],
    ("engine.runner", "engine/test_engine.py"): [
        ("Runner._following", "operand", 1, "Each token of a draft has its own position and noise."),
        ("NewTokens.of", "always", 0, "Padding is not computed on a CPU."),
    ],
    ("engine.runner", "engine/test_planted_bugs.py"): [
        ("_sample", "never", 0, "A greedy token has probability 1."),
    ],
    ("engine.committing", "engine/test_planted_bugs.py"): [
        ("commit_tokens", "operand", 1, "All accepted tokens are committed."),
    ],
    ("engine.committing", "engine/test_rows.py"): [
        ("verify_drafts", "drop", 3, "A draft that leads to values that are not finite changes no token."),
    ],
    ("engine.engine", "engine/test_look_ahead.py"): [
        ("Engine._admit", "drop", 0, "A request of this step takes precedence over look-ahead."),
        ("Engine._commit", "never", 0, "A look-ahead row is no response of this step."),
    ],
    ("engine.committing", "engine/test_look_ahead.py"): [
        ("commit_rows", "operand", 1, "Look-ahead tokens do not count as a drafter's."),
    ],
    ("engine.drafters", "engine/test_look_ahead.py"): [
        ("look_ahead_offers", "argument", 11, "A look-ahead draft ends where the response must end."),
    ],
    ("draft.features", "engine/test_look_ahead.py"): [
        ("Harvester.collect", "operand", 4, "Look-ahead rows are no training data."),
    ],
    ("vllm.drafting", "vllm_backend/test_vllm_engine.py"): [
        ("Drafting.noise", "operator", 3, "In vLLM each draft token has the noise of its own position."),
        ("Drafting.round", "compare", 3, "In vLLM the tuner learns the seconds of passes without a prefill."),
        ("RowTables.append", "swap", 3, "In vLLM a row takes the hidden states of a cached prompt from its group."),
        ("RowTables.entries", "swap", 4, "In vLLM a row's own hidden states begin where the prefix cache ended."),
    ],
    ("engine.drafters", "engine/test_drafters.py"): [
        ("_copied", "unwrap", 3, "A drafter gets copies of the engine's lists."),
    ],
    ("engine.drafters", "engine/test_engine.py"): [
        ("Drafters.guard", "drop", 6, "A drafter that failed is not asked again."),
    ],
    ("integrations.verl", "integrations/test_verl.py"): [
        ("Seeds.next", "drop", 2, "In verl each response to a prompt has its own seed."),
        ("Seeds.next", "argument", 1, "In verl two replicas never use the same seed."),
        ("Seeds.next", "argument", 3, "In verl each step has its own seeds."),
        ("NoisyServer._preprocess_engine_kwargs", "drop", 0, "verl's own arguments of vLLM are kept."),
    ],
    ("attention.slot_memory", "attention/test_slots.py"): [
        ("SlotMemory.resize", "drop", 3, "Growing the cache keeps its contents."),
        ("SlotMemory.wipe", "element", 4, "Wiping a slot keeps the tokens before its start."),
    ],
    ("attention.slots", "attention/test_slots.py"): [
        ("SlotAttention._call", "operand", 1, "A row attends to its own tokens only."),
        ("SlotAttention.plan_draft", "operand", 13, "A drafter's entries wrap around the ring."),
        ("SlotAttention.deeper", "operand", 0, "Each level of a draft has its own slots."),
        ("SlotAttention.bias", "compare", 0, "A token sees itself and all tokens before it."),
        ("exact_attention", "never", 0, "A single row with one key-value head has the same bits on several threads."),
    ],
    ("models.product", "models/test_product.py"): [
        ("Product.__init__", "never", 1, "A product with few outputs sums in one order."),
        ("Product.__init__", "operand", 3, "The head has one order of summation too."),
        ("Product.__call__", "never", 1, "A few rows sum in the order of many."),
        ("by_rows", "always", 0, "Threads share whole rows."),
        ("by_rows", "never", 1, "Few elements per thread are computed by one thread."),
        ("by_vectors", "always", 0, "Rows of any size are computed by vectors."),
    ],
    ("models.packed", "models/test_packed.py"): [
        ("_OwnRowAlone.__torch_function__", "never", 1, "A gate is computed by vectors."),
        ("pack", "never", 3, "Layers that call PyTorch's functions themselves are intercepted."),
    ],
    ("models.decoder", "models/test_decoder.py"): [
        ("RMSNorm._unit", "operand", 10, "A norm's epsilon is added to a mean."),
        ("rotary_table", "operand", 1, "Rotary embedding uses attention_scaling."),
        ("to_pairs", "unwrap", 5, "Rotary pairs are re-ordered from Hugging Face's halves."),
        ("Decoder.forward", "drop", 10, "Queries and keys are normed where the family does so."),
    ],
    ("models.decoder", "models/test_weights.py"): [
        ("Decoder.load", "unwrap", 21, "The engine has its own copy of the policy's weights."),
        ("Decoder.load", "drop", 11, "The head that drafters read has the new weights."),
        ("Decoder.load", "drop", 13, "The head's product has the new weights."),
    ],
    ("models.decoder", "models/test_families.py"): [
        ("_Loader.__init__", "never", 4, "An unknown weight is an error."),
    ],
    ("models.decoder", "engine/test_graphs.py"): [
        ("overwrite", "unwrap", 3, "New weights of a layer are copied."),
        ("overwrite", "never", 0, "Weights and norms of a layer keep the addresses that CUDA graphs have."),
        ("overwrite", "never", 1, "Biases and products of a layer are written into the old ones."),
        ("Decoder.load", "never", 1, "The embedding keeps its address."),
        ("Decoder.load", "drop", 10, "The embedding has the new weights."),
        ("Decoder.load", "drop", 12, "The last norm has the new weight."),
        ("Decoder.load", "operand", 2, "A head that is tied no longer is a tensor of its own."),
    ],
    ("cuda_graph", "engine/test_graphs.py"): [
        ("Addresses.have_changed", "compare", 0, "Graphs are captured again if the cache is resized, and only then."),
    ],
    ("engine.engine", "engine/test_graphs.py"): [
        ("Engine._new_rollout", "always", 0, "A cache whose addresses graphs have is kept for the next rollout."),
        ("Engine._new_rollout", "drop", 10, "A new rollout begins with an empty feature window."),
    ],
    ("engine.kv_cache", "engine/test_graphs.py"): [
        ("KVCache.clear", "drop", 0, "Values that are not finite do not stay in a cache that is kept."),
    ],
    ("spot.trainer", "spot/test_trainer.py"): [
        ("DrafterTrainer.target_moved", "unwrap", 1, "The head of an older version does not change."),
    ],
    ("models.weights", "models/test_weights.py"): [
        ("sha256", "element", 3, "A digest tells a tensor from its transpose."),
        ("sha256", "unwrap", 1, "A digest does not depend on the order of tensors."),
    ],
    ("models.families", "models/test_families.py"): [
        ("_max_positions", "drop", 3, "A sliding window bounds the positions."),
    ],
    ("rl.groups", "rl/test_groups.py"): [
        ("_deviation", "operand", 3, "The standard deviation divides by n - 1."),
        ("dr_grpo", "drop", 0, "Equal rewards have an advantage of exactly 0."),
        ("rloo", "less", 0, "RLOO leaves the response itself out of the mean."),
        ("_ratio", "negate", 0, "A deviation of 0 divides nothing."),
        ("rewards_of", "always", 0, "A response without a reward is left out."),
        ("has_spread", "compare", 0, "A group of equal rewards is resampled."),
        ("make_batch", "operand", 1, "A truncated response is masked."),
    ],
    ("rl.losses", "rl/test_losses.py"): [
        ("k3", "swap", 0, "k3 estimates the divergence of the policy from the reference."),
        ("truncated_weights", "unwrap", 0, "Importance weights are capped."),
        ("_clipped", "unwrap", 6, "A negative advantage counts at most the dual clip."),
        ("_clipped", "operand", 11, "The loss uses importance weights."),
        ("clipped_policy_loss", "swap", 2, "The ratio is policy over old policy."),
        ("needs_logprobs", "operand", 1, "The log-probs of carried responses are not computed again."),
        ("needs_logprobs", "never", 0, "A KL term in the reward needs the log-probs of all responses."),
    ],
    ("rl.batching", "rl/test_batching.py"): [
        ("plan", "operand", 2, "A prompt counts against the token budget."),
        ("pack", "operand", 1, "The last token of a prompt predicts the first token of each response."),
        ("pack", "operand", 6, "A response continues the positions of its prompt."),
    ],
    ("rl.batching", "rl/test_shared_prefix.py"): [
        ("Packer.plan", "always", 0, "A model that cannot share rows computes one sequence at a time."),
    ],
    ("rl.shared_prefix", "rl/test_shared_prefix.py"): [
        ("LayerMask.of_last", "operator", 0, "No token of a response attends to a later one."),
        ("LayerMask.of_row", "drop", 0, "A sequence keeps the attention window of each layer."),
        ("share_prefixes", "unwrap", 0, "A model is compared before it shares prompts."),
    ],
    ("rl.logprobs", "rl/test_logprobs.py"): [
        ("LogProbs.forward", "never", 0, "The trainer's log-probabilities use the rollout's temperature."),
        ("LogProbs.backward", "operand", 1, "A gradient is that of the logits divided by the temperature."),
        ("LogProbs.backward", "operand", 2, "The gradient of the other tokens is minus their probability."),
    ],
    ("rl.policy", "rl/test_policy.py"): [
        ("Policy.update", "drop", 2, "The learning rate follows its schedule."),
        ("Update.compute_fixed", "operand", 8, "A carried response keeps the log-probs of the policy that decoded it."),
        ("TrainedModel.apply_gradients", "always", 1, "A step whose gradient is not finite changes nothing."),
    ],
    ("rl.lora", "rl/test_lora_targets.py"): [
        ("merged_state", "swap", 0, "The engine gets each weight with its adapter."),
        ("_find", "never", 1, "A target of LoRA that names no layer is refused."),
        ("_find", "never", 2, "Linear layers with the names of experts get adapters."),
        ("_find", "operand", 4, "A layer of a model without experts is adapted as a module."),
        ("_find", "never", 4, "The tensors of fused experts get adapters."),
        ("add_adapters", "never", 1, "A layer that PEFT passes over is an error."),
    ],
    ("rl.losses", "rl/test_policy.py"): [
        ("has_gradient", "operand", 3, "A masked response teaches nothing."),
    ],
    ("rl.logprobs", "rl/test_parallel.py"): [
        ("exchange", "drop", 2, "All members have all log-probs."),
    ],
    ("integrations.trl_terms", "integrations/test_trl_tools.py"): [
        ("ToolTurns.begin", "drop", 2, "Turns are numbered from the first of their generation."),
        ("ToolTurns._request", "operand", 1, "A turn has at most what is left of max_completion_length."),
    ],
    ("rl.parallel", "rl/test_parallel.py"): [
        ("_assign", "opposite", 0, "The next part goes to the shard with least work."),
        ("all_shards", "opposite", 1, "The busiest shard has as little work as possible."),
        ("in_order", "constant", 1, "Every shard counts in the sum."),
        ("sum_gradients", "drop", 8, "Every member gets the sum of gradients."),
        ("take_gradients", "drop", 2, "A shard begins without the gradients of the one before."),
    ],
    ("rl.measure", "rl/test_policy.py"): [
        ("refuse_loss", "drop", 0, "A loss that is not finite ends the run."),
    ],
    ("rewards.scores", "rewards/test_scores.py"): [
        ("exactly", "opposite", 0, "One right answer is enough."),
        ("length_penalty", "opposite", 0, "The length penalty is at most 1."),
        ("_arguments", "unwrap", 0, "A function that changes its arguments changes no other score."),
    ],
    ("rewards.scores", "rewards/test_score_pool.py"): [
        ("_users.scores", "drop", 8, "A batched reward returns one number for each response."),
    ],
    ("rewards.score_pool", "rewards/test_score_pool.py"): [
        ("ScorePool._give", "operand", 4, "A response that ends its process twice is not retried again."),
        ("ScorePool._give", "drop", 0, "Responses of a lost batch are scored one by one."),
        ("ScorePool._lose", "drop", 3, "Responses of a lost process return to the queue."),
        ("ScorePool._grow", "operand", 4, "The number of reward processes is bounded."),
        ("ScorePool._places", "operand", 1, "A response under suspicion is scored alone."),
    ],
    ("environments.episodes", "environments/test_episodes.py"): [
        ("Episodes._continued", "compare", 4, "A reply leaves room for another token."),
        ("Episodes._continued", "compare", 2, "An episode has at most reward.turns turns."),
        ("Episodes.begin", "drop", 3, "A late reply to an interrupted rollout is dropped."),
    ],
    ("environments.instances", "environments/test_instances.py"): [
        ("Environments.answer_all", "never", 0, "An environment's instance lasts as long as its rollout."),
        ("open_environments", "never", 3, "A run whose calls cannot be read is refused."),
        ("Environments.answer_all", "always", 1, "A plain environment may run an event loop."),
    ],
    ("data.continuation", "data/test_continuation.py"): [
        ("Continuation.__call__", "element", 2, "A reply is rendered after the turns before it."),
        ("Continuation.__call__", "element", 1, "A reply is rendered after the messages of the prompt."),
        ("Continuation.__call__", "never", 1, "A message that the prompt begins is part of the first turn."),
        ("Continuation.__call__", "unwrap", 9, "The name of a special token in a reply is text."),
        ("Continuation.__call__", "never", 2, "The end that the model has generated is not written again."),
        ("Continuation._refuse_dropped", "never", 2, "A reply that the template leaves out is an error."),
        ("Continuation._after", "element", 7, "The rest of a call is not written again."),
        ("Continuation._follow", "element", 1, "A text that follows another one gets no space before it."),
        ("_marked", "never", 0, "The results of a turn are rendered after its calls."),
    ],
    ("environments.call_reader", "environments/test_call_reader.py"): [
        ("CallReader.__call__", "operand", 6, "A tag outside of calls is a malformed call."),
        ("CallReader.__call__", "operand", 10, "A call in the form of another family is malformed."),
        ("CallReader.__call__", "operand", 9, "A tag without a call is malformed."),
        ("CallReader.__call__", "never", 1, "A call in the reasoning is none."),
        ("CallReader.__call__", "always", 1, "An argument may contain the end of a reasoning."),
        ("_parsed", "never", 2, "An argument without its end tag is not dropped."),
        ("_parsed", "never", 3, "An argument that is given twice is not dropped."),
        ("_call", "never", 4, "Arguments under another key are not dropped."),
        ("_is_read", "constant", 1, "A call that does not come back is a fault."),
    ],
    ("rewards.isolated", "rewards/test_inherited_state.py"): [
        ("make_usual", "constant", 0, "User code has the usual start method of multiprocessing."),
        ("_handle_signals", "argument", 6, "A forked process can be terminated at once."),
        ("_survive", "operand", 1, "A call whose programs a signal ended is repeated."),
    ],
    ("types", "test_lengths.py"): [
        ("Response.is_truncated", "element", 1, "An episode is truncated if a reply leaves it no room."),
        ("Response.num_sampled", "operand", 1, "Tokens of a reply do not count in a length."),
    ],
    ("environments.tools", "environments/test_tools.py"): [
        ("Tools._result", "operator", 1, "A malformed call is counted."),
        ("Tools.schemas", "drop", 7, "A tool that no call can reach is refused."),
    ],
    ("engine.kv_cache", "environments/test_episodes.py"): [
        ("TurnStore.known", "never", 0, "Keys and values of a turn are not computed again for the next."),
    ],
    ("rl.batching", "rl/test_policy.py"): [
        ("Packer.pack", "always", 0, "Tokens that an environment wrote are not trained on."),
    ],
    ("store.checkpoint", "store/test_checkpoint.py"): [
        ("save", "drop", 7, "A checkpoint appears whole or not at all."),
        ("save", "always", 0, "A damaged newer checkpoint does not push out a good one."),
        ("fault", "compare", 0, "A damaged file is detected."),
        ("_lists_all", "operator", 1, "A manifest without weights is damaged."),
    ],
    ("run.resume", "run/test_resume.py"): [
        ("allowed_changes", "drop", 2, "A resumed run cannot have fewer steps than are done."),
        ("allowed_changes", "negate", 3, "A change that alters the result is refused."),
        ("_is_of", "operand", 1, "A section's name covers its fields."),
        ("_differences", "drop", 6, "Another model under the same path is noticed."),
    ],
    ("commands.export", "commands/test_export.py"): [
        ("export", "drop", 0, "An export never overwrites a folder."),
        ("_complete", "never", 1, "An export names the end tokens of training."),
        ("_complete", "never", 3, "An exported model serves with a key-value cache."),
    ],
    ("models.hugging_face", "models/test_hugging_face.py"): [
        ("save_model", "operand", 2, "A saved model keeps the config that was published."),
    ],
    ("gain", "test_gain.py"): [
        ("gain_of", "never", 4, "Busy cores leave no claim."),
        ("gain_of", "never", 5, "Without drafts no gain is claimed."),
        ("gain_of", "never", 6, "Few steps are not enough for a claim."),
        ("gain_of", "never", 7, "An interval that contains 1.00 is no gain."),
        ("gain_of", "constant", 9, "No claim exceeds the accept length of the drafts."),
        ("gain_of", "never", 2, "The first step, with its start-up, is left out."),
        ("_interval", "less", 3, "The interval covers the median with 95 %."),
    ],
    ("commands.estimate", "commands/test_estimate.py"): [
        ("expected", "never", 0, "If the cores were busy, the estimate has no number."),
        ("expected", "operator", 1, "The start-up is what the first step took longer than the others."),
    ],
    ("run.mistakes", "run/test_mistakes.py"): [
        ("refuse_mistakes", "drop", 1, "A wrong model folder is refused before torch is imported."),
        ("refuse_mistakes", "drop", 2, "A missing reward function is refused before torch is imported."),
        ("refuse_mistakes", "never", 0, "A missing file of held-out prompts is refused before torch is imported."),
        ("_refuse_data", "never", 1, "A missing right answer is refused before torch is imported."),
    ],
    ("rewards.scores", "run/test_mistakes.py"): [
        ("_find_definition", "never", 4, "A function that a module does not define is refused without its import."),
        ("_find_definition", "always", 4, "A function that a module defines is not refused."),
    ],
    ("loop", "test_loop.py"): [
        ("one_step", "negate", 4, "Episodes are counted in each step with an environment."),
    ],
    ("store.hub", "store/test_hub.py"): [
        ("_files_of_split", "constant", 3, "The split train is the default, whatever the card names first."),
        ("_write_outline", "never", 0, "The card of a data set defines its splits."),
    ],
    ("data.tables", "data/test_data.py"): [
        ("_refuse_several_sources", "never", 0, "A folder with test files is not trained on."),
    ],
    ("draft.chains", "draft/test_chains.py"): [
        ("draft_chains", "opposite", 2, "Nothing is drafted behind a stop token."),
        ("draft_chains", "compare", 6, "No draft goes beyond max_new_tokens."),
        ("draft_chains", "operand", 4, "A draft has tokens of the vocabulary only."),
        ("draft_chains", "operand", 9, "A draft ends where all its tokens together are unlikely."),
        ("_check_shapes", "negate", 1, "A drafter that returns a wrong shape is refused."),
        ("Calibration.observe", "element", 0, "Tokens after a rejected one do not count."),
        ("Calibration.next_round", "drop", 3, "Acceptance counts fade together with their totals."),
    ],
    ("draft.suffix", "draft/test_suffix.py"): [
        ("SuffixDrafter._match", "element", 1, "The newest 16 occurrences count."),
        ("SuffixDrafter.open", "element", 0, "A match may begin in the prompt."),
        ("_followers", "operand", 3, "A match goes on with each drafted token."),
        ("SuffixDrafter.propose", "element", 6, "Unseen tokens keep a share of the probability."),
        ("_Prompt.extend", "drop", 0, "Every committed token can be matched later."),
    ],
    ("draft.ahead", "draft/test_history.py"): [
        ("History.add", "element", 0, "Responses of an epoch replace those of the one before."),
        ("History.load", "swap", 3, "A restored response has its own seed."),
    ],
    ("cluster.idle", "cluster/test_idle.py"): [
        ("ComingRequests.drafts", "element", 0, "The last responses to a prompt are sent with its requests."),
        ("ComingRequests.end", "drop", 7, "The responses of a rollout are kept."),
        ("Crowding.decoded", "operand", 3, "Idle work rests only if it ran while others waited for a core."),
        ("Crowding.decoded", "negate", 2, "Idle work rests if it takes cores from workers that decode."),
    ],
    ("run.opening", "run/test_run.py"): [
        ("_restore", "drop", 13, "The last responses to each prompt survive a resume."),
    ],
    ("draft.ahead", "draft/test_ahead.py"): [
        ("AheadStore.put", "drop", 10, "The look-ahead store is bounded."),
        ("AheadStore.group", "unwrap", 2, "A row's own entry comes first in its group."),
        ("LookAhead.remove", "drop", 0, "A row that moves keeps its place in its old response."),
        ("Ahead.is_valid", "compare", 1, "Drafts hold tokens of the vocabulary only."),
        ("AheadStore.put_row", "argument", 0, "An old draft is kept until new tokens replace it."),
        ("AheadStore.row", "compare", 0, "Only drafts that are short to prefill are continued."),
        ("Pointer.advance", "drop", 8, "A draft ends at the first token that differs."),
    ],
    ("draft.features", "draft/test_features.py"): [
        ("Harvester._give", "operand", 4, "Training data that a drafter overwrote is dropped."),
        ("FeatureWindow.copy", "unwrap", 1, "A sibling claims only entries that its source still has."),
    ],
    ("draft.features", "spot/test_buffer.py"): [
        ("Harvest.cut", "operand", 3, "A piece keeps its position in the sequence."),
    ],
    ("spot.buffer", "spot/test_buffer.py"): [
        ("HarvestBuffer.past", "element", 0, "The drafter is trained one step behind its evaluation data."),
        ("HarvestBuffer.add", "drop", 4, "The training data is bounded."),
        ("HarvestBuffer.forget", "constant", 0, "Only the last rollout is kept when the task changes."),
        ("HarvestBuffer.sample", "operand", 8, "A sample is of one target version."),
        ("_weighted", "operand", 1, "Newer training data is drawn more often."),
    ],
    ("draft.learned", "draft/test_learned.py"): [
        ("EagleDrafter.close", "drop", 0, "A row that moves takes the drafter's keys and values along."),
        ("EagleDrafter.close", "drop", 2, "A drafter's slot is wiped when its row leaves."),
        ("EagleDrafter._deeper", "operand", 1, "Draft tokens stand at their own positions."),
        ("EagleDrafter.predict", "drop", 4, "A row without features gets no draft."),
    ],
    ("draft.learned", "draft/test_replayed_chain.py"): [
        ("FusedLayer.begin", "always", 1, "The drafter's table keeps the address that CUDA graphs have."),
        ("FusedLayer.begin", "always", 3, "The head of a draft vocabulary keeps its address."),
        ("ReplayedChain._compute", "operator", 6, "Tokens of a chain stand behind one another in the drafter's cache."),
        ("ReplayedChain._compute", "compare", 3, "A row with features gets a draft when chains are drafted whole."),
    ],
    ("attention.slots", "engine/test_graphs.py"): [
        ("SlotAttention.fixed_plan", "operator", 1, "A row of a padded pass attends to its own tokens only."),
    ],
    ("attention.kernels", "attention/test_kernels.py"): [
        ("_parts", "operand", 120, "In Triton, a token attends to no later token."),
        ("_parts", "compare", 7, "In Triton, a token attends to its window and to no token before it."),
        ("_joined", "unwrap", 23, "Parts of a sum are joined at one scale."),
    ],
    ("sampling_kernel", "test_sampling_kernel.py"): [
        ("_rank", "operand", 29, "In Triton, each response has noise of its own position."),
        ("_pick", "compare", 1, "In Triton, a greedy token has probability 1."),
    ],
    ("engine.runner", "engine/test_graphs.py"): [
        ("GraphedPasses.__call__", "never", 0, "A captured pass is dropped with the cache that it reads."),
        ("PaddedPass.__call__", "less", 0, "A padding row writes to no slot."),
    ],
    ("draft.eagle", "draft/test_eagle.py"): [
        ("load_drafter", "never", 8, "A drafter that is not finite is refused."),
    ],
    ("spot.unroll", "spot/test_trainer.py"): [
        ("_blocks", "compare", 1, "The attention window in training is that of inference."),
    ],
    ("spot.unroll", "spot/test_unroll.py"): [
        ("draft_loss", "drop", 2, "A loss under way can be interrupted."),
    ],
    ("spot.schedule", "spot/test_schedule.py"): [
        ("Schedule.publishes", "operand", 1, "A drafter that is not better is not published."),
        ("Schedule.evaluated", "operand", 4, "Training rests when its candidates gain little."),
    ],
    ("cluster.idle", "cluster/test_coordinator.py"): [
        ("IdleWork.start", "operand", 3, "The only idle worker also looks ahead."),
    ],
    ("spot.trainer", "spot/test_rounds.py"): [
        ("expected_rounds", "unwrap", 6, "A draft token behind a wrong one counts for nothing."),
    ],
    ("cluster.calls", "cluster/test_calls.py"): [
        ("Deadlines.seconds", "opposite", 0, "A long call has at least the short calls' timeout."),
        ("Deadlines.took", "drop", 0, "A long call's timeout follows the measured times."),
    ],
    ("cluster.coordinator", "cluster/test_coordinator_allocation.py"): [
        ("Allocation.take_rows", "never", 0, "A full worker takes no single rows."),
    ],
    ("cluster.supervisor", "cluster/test_supervisor.py"): [
        ("Supervisor.replace", "drop", 6, "A worker that is lost again and again is left out."),
        ("Supervisor.call_all", "operand", 1, "A lost worker's call is repeated."),
    ],
    ("cluster.supervisor", "cluster/test_coordinator.py"): [
        ("Supervisor._forget", "drop", 1, "Calls of a lost worker are forgotten."),
        ("Supervisor._source", "drop", 0, "A run without workers ends with an error."),
    ],
    ("cluster.run_worker", "cluster/test_coordinator.py"): [
        ("RunWorker.rollback", "drop", 2, "A broken update is rolled back."),
    ],
    ("cluster.worker", "cluster/test_coordinator.py"): [
        ("Worker._enter_rollout", "drop", 1, "A new rollout drops the rows of the previous one."),
    ],
    ("cluster.worker", "cluster/test_worker.py"): [
        ("Worker._enter_rollout", "drop", 2, "A new rollout drops the drafts of the previous one."),
        ("Worker.interrupt", "drop", 0, "Idle work ends when the worker is needed."),
        ("Worker._news", "drop", 2, "Each token is reported once."),
    ],
    ("cluster.run_worker", "cluster/test_worker.py"): [
        ("RunWorker.release", "operand", 4, "Adam's moments need memory before the first update."),
    ],
    ("rl.policy", "cluster/test_coordinator.py"): [
        ("Update._optimizer_step", "drop", 1, "An interrupted update leaves no gradient behind."),
    ],
    ("cluster.remote", "cluster/test_coordinator.py"): [
        ("ClusterPolicy.update", "drop", 12, "All workers roll back before an update is repeated."),
        ("ClusterPolicy._members", "operand", 1, "Workers meet at a new address after a loss."),
    ],
    ("cluster.coordinator", "cluster/test_coordinator.py"): [
        ("Coordinator._next", "element", 0, "A worker gets the last responses to the prompts of its rows."),
        ("Coordinator._stats", "drop", 6, "Tokens that were decoded twice count once."),
        ("Coordinator._reclaim", "drop", 1, "Tokens of a lost worker serve as drafts for its rows."),
    ],
}
"""(module, tests) -> function, operator, site, promise"""

MUTANTS = [
    Mutant(module, function, operator, site, promise, tests)
    for (module, tests), rows in _TABLE.items()
    for function, operator, site, promise in rows
]
