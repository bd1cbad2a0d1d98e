"""Learned drafters: one decoder layer over the target's hidden states, with the target's embedding and head.

The layer has one entry per token. Entry p reads the target's hidden states of token p and the embedding of token p + 1.
It predicts token p + 2. The target has no hidden states of draft tokens yet, so the layer's own output at the previous
entry replaces them.

- `eagle3` (arXiv 2503.01840): hidden states of a low, a middle and a high target layer are fused by the linear layer
`fc`. Attention reads the normed embedding and the normed fused states.

- `eagle1` (arXiv 2401.15077): `fc` fuses only the last hidden state with the embedding. There is no input norm and no
output norm. The engine keeps a quarter as many hidden states for eagle1 as for eagle3.

Saved tensors have the names and shapes of the published checkpoints. Shapes: M entries, D hidden size, H query heads,
K key-value heads, E head size, F size of a token's hidden states.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tlt.draft.drafter_folder import DrafterError, drafter_config, refuse_other_target, unreadable
from tlt.draft.features import FeatureLayout
from tlt.files import errors_as
from tlt.models.families import DecoderOptions

Kind = Literal["eagle1", "eagle3"]
_DRAFT_VOCABULARY = 8192  # reduced, because the head takes most of the time of a draft level and of a training step
_VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class EagleOptions:
    """Shape of a learned drafter."""

    kind: Kind
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    max_positions: int
    taps: tuple[int, ...]
    """indices of the target's `hidden_states`, as in transformers, that `fc` fuses; () for eagle1"""
    window: int
    """attention window in entries (tokens)"""
    draft_vocab_size: int
    """number of tokens that the drafter can propose"""

    @property
    def layout(self) -> FeatureLayout:
        return FeatureLayout(self.taps, self.window)


def eagle_options(target: DecoderOptions, kind: Kind, window: int) -> EagleOptions:
    """Return options of a drafter whose layer has the sizes of the target's layers. `window` is in tokens."""
    L = target.num_layers
    return EagleOptions(
        kind=kind,
        hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        taps=(min(2, L - 1), L // 2, max(0, L - 3)) if kind == "eagle3" else (),
        window=min(window, target.max_positions),  # no context is longer
        draft_vocab_size=min(_DRAFT_VOCABULARY, target.vocab_size),
    )


class WideRMSNorm(nn.RMSNorm):
    """RMS norm in the dtype of its weight. Inputs are converted to this dtype, because PyTorch warns if the dtypes
    differ."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class EagleLayer(nn.Module):
    """Trainable weights of a learned drafter. `fuse`, `inputs` and `finish` differ between eagle1 and eagle3."""

    vocabulary: Tensor | None
    """[draft_vocab_size] ids of the tokens that the drafter can propose, ascending; None: all tokens"""

    def __init__(self, options: EagleOptions) -> None:
        super().__init__()
        self.options = o = options
        self.acceptance_rate: float | None = None
        """acceptance rate of the drafter's first draft token on held-out responses; None if not measured"""
        D, E, wide = o.hidden_size, o.head_dim, (2 if o.kind == "eagle3" else 1) * o.hidden_size
        self.fc = nn.Linear(3 * D if o.kind == "eagle3" else 2 * D, D, bias=False)
        self.q_proj = nn.Linear(wide, o.num_heads * E, bias=False)
        self.k_proj = nn.Linear(wide, o.num_kv_heads * E, bias=False)
        self.v_proj = nn.Linear(wide, o.num_kv_heads * E, bias=False)
        self.o_proj = nn.Linear(o.num_heads * E, D, bias=False)
        self.gate_proj = nn.Linear(D, o.intermediate_size, bias=False)
        self.up_proj = nn.Linear(D, o.intermediate_size, bias=False)
        self.down_proj = nn.Linear(o.intermediate_size, D, bias=False)
        self.post_attention_layernorm = WideRMSNorm(D, o.rms_norm_eps)
        if o.kind == "eagle3":
            self.input_layernorm = WideRMSNorm(D, o.rms_norm_eps)
            self.hidden_norm = WideRMSNorm(D, o.rms_norm_eps)
            self.norm = WideRMSNorm(D, o.rms_norm_eps)
        is_reduced = o.draft_vocab_size < o.vocab_size
        self.register_buffer(_VOCABULARY, torch.arange(o.draft_vocab_size) if is_reduced else None)

    @property
    def trained(self) -> bool:
        """Whether the drafter's first draft token has a measured acceptance rate above 0."""
        return bool(self.acceptance_rate)

    def head(self, target_head: Tensor) -> Tensor:
        """Return the rows of the target's head [V, D] for the tokens that the drafter can propose."""
        return target_head if self.vocabulary is None else target_head[self.vocabulary]

    def fuse(self, features: Tensor) -> Tensor:
        """Map the target's hidden states [M, F], as the engine keeps them, to fused states [M, D] for `inputs`."""
        D = self.options.hidden_size
        return self.fc(features[:, : 3 * D]) if self.options.kind == "eagle3" else features[:, -D:]

    def inputs(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Map embeddings and fused states, [M, D] each, to the input of the query, key and value projections ([M, 2 D]
        for eagle3, else [M, D]) and to the residual stream [M, D]."""
        if self.options.kind == "eagle3":
            return torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], dim=-1), g
        z = self.fc(torch.cat([embedded, g], dim=-1))
        return z, z

    def mlp(self, x: Tensor) -> Tensor:
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))

    def finish(self, g: Tensor) -> Tensor:
        """Map the layer's output [M, D] to the input of the target's head [M, D]."""
        return self.norm(g) if self.options.kind == "eagle3" else g


# -- folders -----------------------------------------------------------------------------------------------------------


def _checkpoint_name(name: str, kind: Kind) -> str:
    """Return the name of a tensor in published checkpoints of this kind. `name` is its name in `EagleLayer`."""
    if name.startswith(("fc.", "norm.", _VOCABULARY)):
        return name
    layer = "midlayer." if kind == "eagle3" else "layers.0."
    part = name.split(".")[0]
    home = {"q_proj": "self_attn.", "k_proj": "self_attn.", "v_proj": "self_attn.", "o_proj": "self_attn."}
    home |= {"gate_proj": "mlp.", "up_proj": "mlp.", "down_proj": "mlp."}
    return layer + home.get(part, "") + name


def checkpoint_tensors(layer: EagleLayer) -> dict[str, Tensor]:
    """Return the layer's weights in host memory, by their names in published checkpoints."""
    kind = layer.options.kind
    return {
        _checkpoint_name(name, kind): weight.detach().contiguous().cpu() for name, weight in layer.named_parameters()
    }


def save_drafter(layer: EagleLayer, folder: str | Path) -> None:
    """Write model.safetensors (with published tensor names) and config.json. Raises OSError or SafetensorError."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {} if layer.vocabulary is None else {_VOCABULARY: layer.vocabulary.cpu()}
    save_file(checkpoint_tensors(layer) | vocabulary, path / "model.safetensors", metadata={"format": "pt"})
    config = {"tlt_drafter": asdict(layer.options), "acceptance_rate": layer.acceptance_rate}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_drafter(folder: str | Path, target: DecoderOptions) -> EagleLayer:
    """Load a drafter from a folder. Raises DrafterError if the folder has no drafter, or if the drafter does not fit
    the target."""
    path = Path(folder)
    config = drafter_config(path)
    try:
        tensors = load_file(path / "model.safetensors")
        options = TypeAdapter(EagleOptions).validate_python(asdict(EagleOptions(**config["tlt_drafter"])))
        acceptance_rate = config["acceptance_rate"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise unreadable(path, error) from None
    refuse_other_target(path, vars(options), vars(target))
    taps = 3 if options.kind == "eagle3" else 0
    if options.window < 1 or len(options.taps) != taps or min(options.taps, default=0) < 0:
        raise DrafterError(f"{path / 'config.json'} is not valid for a drafter: check window and taps")
    if max(options.taps, default=0) >= target.num_layers:
        raise DrafterError(
            f"the drafter in {path} reads layer {max(options.taps)}, but the model's last layer is "
            f"{target.num_layers - 1}: train one with tlt draft train"
        )
    with errors_as(DrafterError, f"{path / 'config.json'} does not describe a drafter"):
        layer = EagleLayer(options)
    wanted = {_checkpoint_name(name, options.kind): name for name in layer.state_dict()}
    if wanted.keys() != tensors.keys():
        odd = sorted(wanted.keys() ^ tensors.keys())[0]
        raise DrafterError(f"{path / 'model.safetensors'} does not fit its config.json: check {odd}")
    shapes = {name: layer.state_dict()[wanted[name]].shape for name in sorted(tensors)}
    if odd := [name for name, shape in shapes.items() if tensors[name].shape != shape]:
        has, wants = list(tensors[odd[0]].shape), list(shapes[odd[0]])
        raise DrafterError(f"{path / 'model.safetensors'} does not fit its config.json: {odd[0]} is {has}, not {wants}")
    vocabulary = tensors.get(_VOCABULARY, torch.zeros(1))
    if vocabulary.min() < 0 or vocabulary.max() >= options.vocab_size:
        raise DrafterError(
            f"the draft vocabulary in {path / 'model.safetensors'} has token ids outside the model's vocabulary of "
            f"{options.vocab_size} tokens: train a drafter with tlt draft train"
        )
    layer.load_state_dict({wanted[name]: tensor for name, tensor in tensors.items()})
    if odd := [name for name, tensor in sorted(tensors.items()) if not bool(tensor.isfinite().all())]:
        raise DrafterError(f"{path / 'model.safetensors'}: {odd[0]} is not finite: retrain with tlt draft train")
    layer.acceptance_rate = acceptance_rate
    return layer
