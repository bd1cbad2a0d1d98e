"""Faults of models/: the decoder's arithmetic, options of families, weights by name."""

from __future__ import annotations

from mutants.mutant import Mutant

DECODER, FAMILIES, WEIGHTS = "models/decoder.py", "models/families.py", "models/weights.py"
FORWARD, LOADING, NAMES = "models/test_decoder.py", "models/test_families.py", "models/test_weights.py"

MUTANTS = [
    Mutant("a norm's epsilon is that of a sum, not of a mean", DECODER, "(size * eps) ** 0.5", "eps**0.5", FORWARD),
    Mutant(
        "norms of bfloat16 are computed in bfloat16",
        DECODER,
        "wide = x.float() if x.dtype == torch.bfloat16 else x\n",
        "wide = x\n",
        FORWARD,
    ),
    Mutant(
        "the rope's attention_scaling is dropped",
        DECODER,
        "torch.polar(torch.ones_like(angles), angles) * options.attention_scaling)",
        "torch.polar(torch.ones_like(angles), angles))",
        FORWARD,
    ),
    Mutant(
        "angles of a float64 decoder are float32",
        DECODER,
        "angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32",
        "angle_dtype = torch.float32",
        FORWARD,
    ),
    Mutant(
        "rope pairs stay Hugging Face's halves",
        DECODER,
        "return halves.transpose(1, 2).reshape(weight.shape).contiguous()",
        "return halves.reshape(weight.shape).contiguous()",
        FORWARD,
    ),
    Mutant(
        "values are re-ordered as queries and keys are",
        DECODER,
        'return tensor if "v_proj" in name else to_pairs',
        "return to_pairs",
        FORWARD,
    ),
    Mutant(
        "the bias of queries and keys is not re-ordered",
        DECODER,
        'self._in_pairs(prefix + f"self_attn.{n}.bias", (s,))',
        'self.take(prefix + f"self_attn.{n}.bias", (s,))',
        FORWARD,
    ),
    Mutant(
        "the weight of the queries' norm is not re-ordered",
        DECODER,
        'self._in_pairs(prefix + f"self_attn.{n}_norm.weight", (E,))',
        'self.take(prefix + f"self_attn.{n}_norm.weight", (E,))',
        FORWARD,
    ),
    Mutant(
        "keys are normed with the queries' weight",
        DECODER,
        "k.expand(o.num_kv_heads, E)",
        "q.expand(o.num_kv_heads, E)",
        FORWARD,
    ),
    Mutant(
        "the bias of queries, keys and values is dropped",
        DECODER,
        "Product(torch.cat(qkv), qkv_bias)",
        "Product(torch.cat(qkv), None)",
        FORWARD,
    ),
    Mutant(
        "the bias behind attention is dropped",
        DECODER,
        'self.own(out + "bias", (D,)) if o.out_bias else None',
        "None",
        FORWARD,
    ),
    Mutant("gate and up change places", DECODER, "F.silu(gate).mul_(up)", "F.silu(up).mul_(gate)", FORWARD),
    Mutant(
        "features are tapped behind the layer's norm",
        DECODER,
        "taps[index] = x",
        "taps[index] = layer.input_norm(x)",
        "draft/test_features.py",
    ),
    Mutant(
        "the engine shares its tensors with the policy",
        DECODER,
        "self.take(name, shape).clone(memory_format=torch.contiguous_format)",
        "self.take(name, shape)",
        NAMES,
    ),
    Mutant(
        "the version changes before the weights are known to fit",
        DECODER,
        "        loader = _Loader(",
        "        self.version = version\n        loader = _Loader(",
        NAMES,
    ),
    Mutant(
        "the size of a head is not read from the config",
        FAMILIES,
        'getattr(c, "head_dim", None) or c.hidden_size',
        "c.hidden_size",
        LOADING,
    ),
    Mutant(
        "a sliding window does not bound the positions",
        FAMILIES,
        'limits.append((config.sliding_window, "sliding_window"))',
        "pass",
        LOADING,
    ),
    Mutant(
        "longrope's first range does not bound the positions",
        FAMILIES,
        'if rope.get("rope_type") == "longrope":',
        "if False:",
        LOADING,
    ),
    Mutant(
        "the digest takes a transpose in the same memory for the tensor itself",
        WEIGHTS,
        "tensor.shape, tensor.stride())",
        "tensor.shape)",
        NAMES,
    ),
    Mutant(
        "a head that is put together as it is read is taken for the embedding, in whose place it was",
        "models/decoder.py",
        "both[0].data_ptr() == both[-1].data_ptr()",
        "self.state[_HEAD if _HEAD in self.state else _EMBEDDING].data_ptr() == self.state[_EMBEDDING].data_ptr()",
        "models/test_weights.py",
    ),
    Mutant(
        "the digest passes over a tensor that came to the place of another",
        "models/weights.py",
        "seen[place] = tensor",
        "seen[place] = torch.empty(0)",
        "models/test_weights.py",
    ),
]
