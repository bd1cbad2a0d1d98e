"""A sharded policy with real processes: the policy of a single one, except for the rounding of a sum, in a part of the
memory."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import qwen3, random_batch, tiny_config
from torch import Tensor
from torch.distributed.tensor import DTensor

from tlt.config import RolloutConfig, TrainConfig
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options, read_config
from tlt.models.model_folder import ModelError
from tlt.models.product import Product
from tlt.models.weights import read_safetensors
from tlt.rl import dry_run
from tlt.rl.measure import NotFinite
from tlt.rl.parallel import Alone, GroupBroken, Processes, ProcessGroup, Rendezvous, numbers_of
from tlt.rl.parity import check_parity, take_weights
from tlt.rl.policy import Policy
from tlt.rl.sharded import ShardedPolicy, _local
from tlt.types import TrainBatch

CPU = torch.device("cpu")
VOCAB = 31
LAYERS = 3
Act = Callable[..., Any]
"""(group, arguments) -> what a member found, in plain data and arrays"""

forks = multiprocessing.get_context("forkserver")  # conftest.py says what it imports


def together(size: int, act: Act, *arguments: Any, shards: int = 0) -> list[Any]:
    """Call act(group, *arguments) for every member, each a process. Return None for one that failed. There are as many
    `shards` as members by default."""
    rendezvous = Rendezvous("127.0.0.1")
    pipes = [forks.Pipe(duplex=False) for _ in range(size)]
    members = [
        forks.Process(target=_member, args=(sender, rendezvous.address, rank, size, shards or size, act, arguments))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for member, (_, sender) in zip(members, pipes, strict=True):
        member.start()
        sender.close()
    try:
        return [_found(receiver) for receiver, _ in pipes]
    finally:
        for member in members:
            member.join(10)  # a process that ended by itself leaves nothing behind
            member.kill()


def _member(sender: Any, address: str, rank: int, size: int, shards: int, act: Act, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sender.send(act(Processes(address, rank, size, shards, CPU), *arguments))


def _found(receiver: Any) -> Any:
    assert receiver.poll(60), "a member hangs"
    try:
        return receiver.recv()
    except EOFError:
        return None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("untied", "tied")}
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "eos_token_id": VOCAB - 1}
    heads = {
        "untied": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "tied": {"tie_word_embeddings": True},
    }
    for name, folder in found.items():
        qwen3(**sizes, **heads[name], initializer_range=0.3).save_pretrained(folder)
    return found


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["tied"]


def make_policy(group: ProcessGroup, folder: Path, train: dict[str, Any], dtype: torch.dtype = torch.float64) -> Policy:
    settings = {"learning_rate": 1e-2, "micro_batch_tokens": 24, "max_grad_norm": 0.1, "shard": group.size > 1}
    config, kind = TrainConfig(**settings | train), Policy if group.size == 1 else ShardedPolicy
    policy = kind(folder, dtype, CPU, config, RolloutConfig(max_new_tokens=12))
    if isinstance(policy, ShardedPolicy):
        policy.shard_over(group)
    return policy


def all_of(policy: Policy) -> dict[str, np.ndarray]:
    return {k: v.detach().numpy().copy() for k, v in [*policy.state_dict().items(), *policy.optimizer_state().items()]}


def updated(
    group: ProcessGroup, folder: Path, batch: TrainBatch, train: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[dict[str, float], dict[str, np.ndarray], str]:
    policy = make_policy(group, folder, train, dtype)
    policy.update(batch, 0, group)
    metrics = policy.update(batch, 1, group)
    policy.update(replace(batch, advantages=[0.0] * len(batch.advantages)), 2, group)
    return metrics, all_of(policy), policy.sha256()


def updated_once(group: ProcessGroup, folder: Path, batch: TrainBatch) -> tuple[bool, bool]:
    """Return whether a dry run finds that the update fits, and whether the update has the same result without it."""
    dry, plain = (make_policy(group, folder, {}) for _ in range(2))
    config = tiny_config(folder.parent, train={"micro_batch_tokens": 24}, rollout={"max_new_tokens": 12})
    has_room = dry_run._measured(dry, config, 4) < math.inf
    for policy in (dry, plain):
        policy.update(batch, 0, group)
    return has_room, dry.sha256() == plain.sha256()


def test_a_dry_run_of_shards_changes_nothing(folder: Path) -> None:
    assert together(2, updated_once, folder, random_batch(VOCAB)) == [(True, True)] * 2


def close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance / 100, err_msg=name)


def summed(group: ProcessGroup) -> list[float]:
    numbers = [1e16, 1.0, -1e16, 1.0]  # 1e16 + 1 is 1e16: any other order is another sum
    own = [numbers[k] for k in numbers_of(group.rank, group.size, group.shards)]
    given = torch.tensor([[number] * 5 for number in own], dtype=torch.float64)
    return group.sum_shards(given).tolist()


def test_shards_are_summed_in_their_order() -> None:
    assert together(3, summed, shards=4) == [[1.0] * 5] * 3


@pytest.mark.parametrize(
    ("head", "size", "responses", "train"),
    [
        ("untied", 2, 7, {"updates_per_step": 2, "loss": "gspo"}),
        ("tied", 3, 2, {"updates_per_step": 2, "loss": "dapo", "kl_weight": 0.1, "gradient_checkpointing": True}),
    ],
)
def test_several_members_end_with_the_weights_of_one(
    folders: dict[str, Path], head: str, size: int, responses: int, train: dict[str, Any]
) -> None:
    """Some members have more passes than others, and some have no response in an optimizer step. Each prompt has up to
    two responses. The untied model has layers with a sliding window."""
    folder, batch = folders[head], random_batch(VOCAB, responses=responses)
    batch.prompt_ids = [tuple(range(k // 2, k // 2 + 10)) for k in range(responses)]
    metrics, expected, _ = updated(Alone(), folder, batch, train)
    assert metrics["grad_norm"] > 0.1, "it is clipped"
    members = together(size, updated, folder, batch, train)
    for found, tensors, digest in members:
        close(tensors, expected)
        for name, value in metrics.items():  # the mismatch is computed in float32
            assert found[name] == pytest.approx(value, rel=1e-6 if "mismatch" in name else 1e-10, abs=1e-13), name
        assert (found, digest) == (members[0][0], members[0][2])


def test_bfloat16_differs_by_its_rounding(folder: Path) -> None:
    batch, train = random_batch(VOCAB), {"gradient_checkpointing": True, "max_grad_norm": 1e3}
    metrics, expected, _ = updated(Alone(), folder, batch, train, torch.bfloat16)
    for found, tensors, _ in together(2, updated, folder, batch, train, torch.bfloat16):
        assert tensors.keys() == expected.keys()
        assert {array.dtype for array in tensors.values()} == {np.dtype(np.float32)}
        for name in ("loss", "entropy", "grad_norm"):
            assert found[name] == pytest.approx(metrics[name], rel=1e-2, abs=1e-3), name


def not_finite(group: ProcessGroup, folder: Path, batch: TrainBatch) -> tuple[float, bool, list[str]]:
    """Update with values of one member that are not finite: its gradient, the advantage of a response, and a weight.
    Return the share of skipped steps, whether the weights stayed the same, and the errors."""
    policy, said = make_policy(group, folder, {}), list[str]()
    parameters, before = dict(policy.model.named_parameters()), policy.sha256()
    factor = math.nan if group.rank == 0 else 1.0
    spoilt = parameters["model.embed_tokens.weight"].register_hook(lambda gradient: gradient * factor)
    skipped, is_same = policy.update(batch, 0, group)["skipped"], policy.sha256() == before
    spoilt.remove()
    idle = replace(batch, advantages=[0.0] * len(batch.advantages))
    for asked in (replace(idle, advantages=[math.inf, *idle.advantages[1:]]), idle):
        if asked is idle and group.rank == 0:
            with torch.no_grad():
                _local(parameters["model.layers.1.mlp.up_proj.weight"])[0, 0] = math.nan
        try:
            policy.update(asked, 3, group)
        except NotFinite as error:
            said.append(str(error))
    return skipped, is_same, said


def test_values_that_are_not_finite_are_skipped_or_named_by_all_members(folder: Path) -> None:
    for skipped, is_same, (loss, weight) in together(2, not_finite, folder, random_batch(VOCAB)):
        assert (skipped, is_same) == (1.0, True)
        assert loss.startswith("the loss is not finite in step 4")
        assert weight.startswith("model.layers.1.mlp.up_proj.weight of the policy is not finite after step 4")


def held(group: ProcessGroup, folder: Path, batch: TrainBatch) -> tuple[int, int, int]:
    """Return the number of elements in this member's shards and moments, and in all its memory, after an update."""
    policy = make_policy(group, folder, {"gradient_checkpointing": True})

    def cut(*arguments: Any) -> None:
        assert all(isinstance(p, DTensor) for p in policy.model.base_model.layers.parameters())

    policy.model.base_model.norm.register_forward_pre_hook(cut)  # behind the last layer
    policy.update(batch, 0, group)
    shards = [p for p in policy.model.parameters() if isinstance(p, DTensor)]
    moments = [m for p in shards for m in policy.optimizer.state[p].values() if isinstance(m, DTensor)]
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and type(t) is not DTensor]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    own, adams = (sum(t.to_local().numel() for t in part) for part in (shards, moments))
    return own, adams, sum(storages.values()) // 8


def test_each_member_has_its_part_of_the_memory(folder: Path) -> None:
    sizes = {name: tensor.numel() for name, tensor in read_safetensors(folder).items()}
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    rest = sum(sizes.values()) - layers
    members = together(2, held, folder, random_batch(VOCAB))
    assert sum(own for own, _, _ in members) == layers
    for own, moments, total in members:
        assert own == pytest.approx(layers / 2, rel=0.07)
        assert moments == 2 * own
        assert 3 * (own + rest) <= total < 3.1 * (own + rest), "and nothing else"


def save_between(group: ProcessGroup, folder: Path, batch: TrainBatch, place: Path) -> dict[str, np.ndarray]:
    policy = make_policy(group, folder, {})
    policy.update(batch, 0, group)
    policy.save(place)
    policy.update(batch, 1, group)
    return all_of(policy)


def go_on(group: ProcessGroup, batch: TrainBatch, place: Path) -> dict[str, np.ndarray]:
    policy = make_policy(group, place / "policy", {})
    policy.load_optimizer(place)
    policy.update(batch, 1, group)
    return all_of(policy)


def test_checkpoints_are_equal_and_can_be_loaded_with_and_without_shards(folder: Path, tmp_path: Path) -> None:
    batch, (one, many) = random_batch(VOCAB), (tmp_path / name for name in ("one", "many"))
    whole = save_between(Alone(), folder, batch, one)
    shards = together(2, save_between, folder, batch, many)[0]
    files = [sorted(str(path.relative_to(place)) for path in place.rglob("*")) for place in (one, many)]
    assert files[0] == files[1]
    assert (one / "policy/config.json").read_bytes() == (many / "policy/config.json").read_bytes()
    saved, expected = ({k: v.numpy() for k, v in read_safetensors(place / "policy").items()} for place in (many, one))
    close(saved, expected)
    close(go_on(Alone(), batch, many), whole)
    for member in together(3, go_on, batch, one):
        close(member, whole)
    for member in together(2, go_on, batch, many):
        assert all(np.array_equal(member[name], shards[name]) for name in shards), "the same bits"


def agree(group: ProcessGroup, folder: Path, batch: TrainBatch, place: Path) -> tuple[str, str, str]:
    """Compare engine and policy before the policy is sharded, after an update, and with another engine. Then save a
    checkpoint."""
    target = Decoder(decoder_options(read_config(folder)), torch.float64, CPU)
    target.load(read_safetensors(folder), version=0)
    policy = ShardedPolicy(folder, torch.float64, CPU, TrainConfig(learning_rate=1e-2, shard=True), RolloutConfig())
    check_parity(target, policy)
    policy.shard_over(group)
    policy.update(batch, 0, group)
    take_weights(target, policy, version=1)
    digest = policy.sha256()
    policy.save(place)
    target.to_logits = Product(target.embedding.flip(0))
    try:
        check_parity(target, policy)
    except ModelError as error:
        return digest, policy.sha256(), str(error)
    return digest, policy.sha256(), ""


@pytest.mark.parametrize("head", ["untied", "its own"])
def test_the_engine_and_shards_are_one_model(folders: dict[str, Path], head: str, tmp_path: Path) -> None:
    folder = folders.get(head, tmp_path)
    if head == "its own":
        shutil.copytree(folders["tied"], folder, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(1).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    members = together(2, agree, folder, random_batch(VOCAB), tmp_path)
    policy = make_policy(Alone(), tmp_path / "policy", {})
    for before, after, said in members:
        assert before == after == policy.sha256()
        assert "not one model at version 1" in said


def lost(group: ProcessGroup, folder: Path, batch: TrainBatch, method: str) -> tuple[str, float]:
    """Let the last member end at its second pass. Return the errors of the others, and how soon they came."""
    policy = make_policy(group, folder, {"updates_per_step": 2})
    real, calls = policy.passes.logprobs, count(1)
    is_last = group.rank == group.size - 1

    def logprobs(*arguments: Any) -> Any:
        return os._exit(1) if is_last and next(calls) == 2 else real(*arguments)

    policy.passes.logprobs = logprobs  # type: ignore[method-assign]
    if is_last and method == "logits":
        os._exit(1)
    began = time.monotonic()
    try:
        _ = policy.update(batch, 0, group) if method == "update" else policy.logits(torch.arange(4))
    except GroupBroken as broken:
        group.leave()
        return str(broken), time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize(("size", "method"), [(3, "update"), (2, "logits")])
def test_a_lost_member_breaks_the_group_soon(folder: Path, size: int, method: str) -> None:
    *others, dead = together(size, lost, folder, random_batch(VOCAB), method)
    assert dead is None
    for said, seconds in others:
        assert said
        assert seconds < 10


def wrong(group: ProcessGroup, folder: Path, batch: TrainBatch) -> str:
    policy = make_policy(group, folder, {})
    policy.passes.logprobs = lambda *arguments: torch.ones(2) @ torch.ones(3)  # type: ignore[method-assign]
    try:
        policy.update(batch, 0, group)
    except RuntimeError as error:
        return type(error).__name__
    return ""


def test_another_error_is_not_taken_for_a_lost_member(folder: Path) -> None:
    assert together(2, wrong, folder, random_batch(VOCAB)) == ["RuntimeError"] * 2
