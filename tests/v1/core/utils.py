# SPDX-License-Identifier: Apache-2.0
"""Schedulers, requests and a stand-in for the model, for the tests of this folder."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput, RequestFailure
from vllm.v1.request import Request

EOS = 1


@cache
def _model_folder() -> tempfile.TemporaryDirectory:
    # Removed with the object, when the process ends.
    folder = tempfile.TemporaryDirectory(prefix="vllm-test-core-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 1 << 20,
    }
    (Path(folder.name) / "config.json").write_text(json.dumps(config))
    return folder


def make_config(
    *,
    max_model_len: int = 1024,
    max_num_batched_tokens: int = 1024,
    max_num_seqs: int = 16,
    enable_prefix_caching: bool = True,
    num_gpu_blocks_override: int | None = None,
    block_size: int = 16,
    is_encoder_decoder: bool = False,
    kv_transfer_config: KVTransferConfig | None = None,
    **scheduler_options,
) -> VllmConfig:
    """A config for a small Llama, without weights; or one that says it has an encoder."""
    model_config = ModelConfig(model=_model_folder().name, max_model_len=max_model_len)
    model_config.hf_config_dict["is_encoder_decoder"] = is_encoder_decoder
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_gpu_blocks_override=num_gpu_blocks_override,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=max_model_len,
            is_encoder_decoder=is_encoder_decoder,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            **scheduler_options,
        ),
        kv_transfer_config=kv_transfer_config,
    )


def full_spec(block_size: int = 16, **changes) -> FullAttentionSpec:
    """Full attention, 1 KiB a token."""
    fields = {"num_kv_heads": 2, "head_size": 64, "dtype": "float32"} | changes
    return FullAttentionSpec(block_size=block_size, **fields)


def window_spec(window: int, block_size: int = 16, **changes) -> SlidingWindowSpec:
    """A sliding window, 1 KiB a token."""
    fields = {"num_kv_heads": 2, "head_size": 64, "dtype": "float32"} | changes
    return SlidingWindowSpec(block_size=block_size, sliding_window=window, **fields)


def cross_spec(
    block_size: int = 16, max_num_encoder_tokens: int | None = None, **changes
) -> CrossAttentionSpec:
    """Cross-attention, 1 KiB a token."""
    fields = {"num_kv_heads": 2, "head_size": 64, "dtype": "float32"} | changes
    return CrossAttentionSpec(
        block_size=block_size, max_num_encoder_tokens=max_num_encoder_tokens, **fields
    )


def make_kv_cache_config(usable_pages: int, *specs: KVCacheSpec) -> KVCacheConfig:
    """A cache of that many pages besides the null page, with a group for each spec."""
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(usable_pages + 1, [], groups)


def make_scheduler(
    usable_pages: int, *specs: KVCacheSpec, log_stats: bool = False, **config
) -> Scheduler:
    """A scheduler over that many pages besides the null page; one full attention group by
    default."""
    specs = specs or (full_spec(),)
    has_encoder = any(isinstance(spec, CrossAttentionSpec) for spec in specs)
    vllm_config = make_config(is_encoder_decoder=has_encoder, **config)
    kv_cache_config = make_kv_cache_config(usable_pages, *specs)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return Scheduler(
        vllm_config,
        kv_cache_config,
        None,
        block_size,
        hash_block_size,
        include_finished_set=True,
        log_stats=log_stats,
    )


def make_request(
    request_id: str,
    prompt: int | list[int],
    max_tokens: int = 1,
    *,
    hash_block_size: int = 16,
    priority: int = 0,
    arrival_time: float | None = None,
    client_index: int = 0,
    cache_salt: str | None = None,
    mm_features: list | None = None,
    ignore_eos: bool = True,
    **sampling,
) -> Request:
    """A request with a prompt of its own of that length, or with the given prompt."""
    if isinstance(prompt, int):
        rng = random.Random(request_id)
        prompt = [rng.randrange(2, 1000) for _ in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling)
    params.update_from_generation_config({}, EOS)
    return Request(
        request_id,
        prompt,
        params,
        priority=priority,
        arrival_time=arrival_time,
        client_index=client_index,
        cache_salt=cache_salt,
        mm_features=mm_features,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
    )


def make_feature(identifier: str, num_tokens: int, offset: int = 0) -> MultiModalFeatureSpec:
    """An encoder input of that many tokens."""
    position = PlaceholderRange(offset, num_tokens)
    return MultiModalFeatureSpec(None, "text", identifier, position, identifier)


NO_GOOD = "no good"
"""What a request is told whose encoder input is unencodable."""


class FakeModel:
    """What a runner does to the scheduler's eyes. It keeps the states it is told of and checks that
    it is told rightly, and draws random tokens for requests whose known tokens are all computed.

    It also keeps a KV cache: one value a slot, that names the group and all tokens up to that slot.
    A step writes first and then reads what each token attends to, so a page that was found though
    its content is another's, was never computed, or is in use twice, is noticed. Groups of
    cross-attention hold what the encoder made of the request's inputs; `encoded` are all inputs it
    ran over. It makes nothing of those in `unencodable`: requests that have one fail.
    """

    def __init__(self, specs: list[KVCacheSpec], seed: int = 0, vocab_size: int = 1000) -> None:
        self._specs = specs
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.block_ids: dict[str, tuple[list[int], ...]] = {}
        self.features: dict[str, list[MultiModalFeatureSpec]] = {}
        self.encoded: list[str] = []
        self.unencodable: set[str] = set()
        self._kept: set[str] = set()
        self.finished: set[str] = set()

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the step."""
        self._forget(step)
        begins = self._learn(step)
        assert set(begins) == set(step.num_scheduled_tokens)
        failures = self._encode(step)
        step = step.without(failures)
        ends = {r: begins[r] + n for r, n in step.num_scheduled_tokens.items()}
        names = {r: self._name_prefixes(self.tokens[r][: ends[r]]) for r in ends}
        for request_id, end in ends.items():
            self._write(request_id, names[request_id], begins[request_id], end)
        for request_id in ends:
            self._read(request_id, names[request_id], begins[request_id])
        req_ids = list(step.num_scheduled_tokens)
        sampled = []
        for request_id in req_ids:
            assert ends[request_id] <= len(self.tokens[request_id])
            is_complete = ends[request_id] == len(self.tokens[request_id])
            sampled.append([self._rng.randrange(self._vocab_size)] if is_complete else [])
            self.tokens[request_id] += sampled[-1]
        places = {r: i for i, r in enumerate(req_ids)}
        return ModelRunnerOutput(req_ids, places, sampled, failures=failures)

    def _forget(self, step: SchedulerOutput) -> None:
        twice = self.finished & step.finished_req_ids
        assert not twice, f"told twice that {twice} finished"
        self.finished |= step.finished_req_ids
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            self.tokens.pop(request_id, None)
            self.block_ids.pop(request_id, None)

    def _learn(self, step: SchedulerOutput) -> dict[str, int]:
        """Takes over what is new; returns where each request goes on."""
        begins = {}
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.tokens, f"{new.req_id} is known already"
            self.tokens[new.req_id] = list(new.prefill_token_ids)
            self.block_ids[new.req_id] = tuple(list(ids) for ids in new.block_ids)
            self.features[new.req_id] = new.mm_features
            begins[new.req_id] = new.num_computed_tokens
        known = step.scheduled_cached_reqs
        for i, request_id in enumerate(known.req_ids):
            for table, added in zip(self.block_ids[request_id], known.new_block_ids[i] or ()):
                table.extend(added)
            begins[request_id] = known.num_computed_tokens[i]
        return begins

    def _encode(self, step: SchedulerOutput) -> dict[str, RequestFailure]:
        """Runs the encoder; a step's outputs are kept until a later one says otherwise. Returns the
        requests that have an input which it makes nothing of."""
        failed: set[str] = set()
        assert self._kept >= set(step.free_encoder_mm_hashes), "freed though not kept"
        self._kept -= set(step.free_encoder_mm_hashes)
        for request_id, input_ids in step.scheduled_encoder_inputs.items():
            assert request_id in {new.req_id for new in step.scheduled_new_reqs}
            assert input_ids == list(range(len(self.features[request_id])))
            identifiers = [feature.identifier for feature in self.features[request_id]]
            self.encoded += identifiers
            self._kept |= set(identifiers)
            failed |= self.unencodable.intersection(identifiers)
            if not self.unencodable.isdisjoint(identifiers):
                continue
            for group_id in self._cross_groups:
                for position, name in enumerate(self._encoder_names(request_id)):
                    slot = self._slot(request_id, group_id, position)
                    self._slots[slot] = (group_id, name)
        return {
            new.req_id: RequestFailure(NO_GOOD, is_computed=False)
            for new in step.scheduled_new_reqs
            if any(feature.identifier in failed for feature in new.mm_features)
        }

    @property
    def _cross_groups(self) -> list[int]:
        return [i for i, s in enumerate(self._specs) if isinstance(s, CrossAttentionSpec)]

    def _encoder_names(self, request_id: str) -> list[tuple[str, int]]:
        features = self.features[request_id]
        return [(f.identifier, i) for f in features for i in range(f.mm_position.length)]

    @staticmethod
    def _name_prefixes(tokens: list[int]) -> list[int]:
        names = [0]
        for token in tokens:
            names.append(hash((names[-1], token)))
        return names[1:]

    def _slot(self, request_id: str, group_id: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self._specs[group_id].block_size)
        page_id = self.block_ids[request_id][group_id][page]
        assert page_id != 0, f"{request_id} needs position {position}, but its page is null"
        return page_id, offset

    def _write(self, request_id: str, names: list[int], begin: int, end: int) -> None:
        for group_id in set(range(len(self._specs))) - set(self._cross_groups):
            for position in range(begin, end):
                slot = self._slot(request_id, group_id, position)
                self._slots[slot] = (group_id, names[position])

    def _read(self, request_id: str, names: list[int], begin: int) -> None:
        for group_id in self._cross_groups:
            wanted = self._encoder_names(request_id)
            pages = self.block_ids[request_id][group_id]
            assert len(pages) == -(-len(wanted) // self._specs[group_id].block_size)
            for position, name in enumerate(wanted):
                found = self._slots.get(self._slot(request_id, group_id, position))
                assert found == (group_id, name), f"{request_id}: encoder position {position}"
        for group_id, spec in enumerate(self._specs):
            if group_id in self._cross_groups:
                continue
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else len(names)
            for position in range(max(0, begin - window + 1), len(names)):
                slot = self._slot(request_id, group_id, position)
                assert self._slots.get(slot) == (group_id, names[position]), (
                    f"{request_id}: position {position} of group {group_id} holds another's content"
                )


class Engine:
    """Scheduler and stand-in model, step by step."""

    def __init__(self, scheduler: Scheduler, seed: int = 0, model: FakeModel | None = None) -> None:
        self.scheduler = scheduler
        specs = [m.kv_cache_spec for m in scheduler.kv_cache_manager.single_type_managers]
        self.model = FakeModel(specs, seed) if model is None else model
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.steps: list[SchedulerOutput] = []

    def add(self, *requests: Request) -> None:
        """Queues them."""
        for request in requests:
            self.outputs[request.request_id] = []
            self.scheduler.add_request(request)

    def step(self) -> SchedulerOutput:
        """One step; checks the block pool's books."""
        step = self.scheduler.schedule()
        envelopes = self.scheduler.update_from_output(step, self.model.run(step))
        for envelope in envelopes.values():
            for output in envelope.outputs:
                self.outputs[output.request_id].append(output)
        self.scheduler.check_integrity()
        self.steps.append(step)
        return step

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is due.

        Raises:
            AssertionError: that takes more than `max_steps`.
        """
        for _ in range(max_steps):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"still {self.scheduler.get_request_counts()} after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        """Tokens given to the client so far."""
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def finish_reason(self, request_id: str):
        """How the request ended; None if it has not."""
        return self.outputs[request_id][-1].finish_reason if self.outputs[request_id] else None
