# SPDX-License-Identifier: Apache-2.0
"""Flags that the benchmarks share, and what they are turned into."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.benchmarks.engine import BenchEngineSpec, VllmSpec
from vllm.benchmarks.transformers_peer import PEER_CACHES, TransformersSpec
from vllm.benchmarks.workload import Workload, length_range, random_workload
from vllm.engine.arg_utils import EngineArgs

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

PEERS = ("transformers",)
SHARED_BRIEF_HELP = """\
  --model MODEL               folder, .gguf file or cached hub model; left out: the embedded one
  --dtype, --seed             bfloat16, float32, ...; the seed of the prompts
  --compare transformers      measure this peer too, in turn
  --peer-cache                its KV cache: auto, dynamic, static, compiled
  --profile                   milliseconds a step, part by part
  --json, --output-json FILE  results as JSON

More, the engine's flags among them: --help=all, --help=listgroup, --help=WORD"""


@dataclass(frozen=True)
class Rounds:
    """How often a workload is run."""

    num_iters: int
    num_iters_warmup: int


COMPARE_DEFAULTS = Rounds(num_iters=5, num_iters_warmup=1)


def add_shared_args(parser: FlexibleArgumentParser) -> None:
    """The engine's flags, the peer's, and where results go."""
    parser.add_argument(
        "--compare",
        choices=PEERS,
        help="Measure this peer too, in turn with us, each in a process of its own: same prompts, "
        "same number of threads, exactly the output length, greedy, token ids in and out.",
    )
    parser.add_argument(
        "--peer-cache",
        choices=("auto", *PEER_CACHES),
        default="auto",
        help="KV cache of the Transformers peer. auto: each is tried first and the fastest is "
        "measured; compiled takes a C++ compiler and about a minute for each batch size.",
    )
    parser.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Lengths of prompts are drawn evenly from --input-len * (1 - R) to * (1 + R).",
    )
    parser.add_argument("--json", action="store_true", help="Print the results as JSON alone.")
    parser.add_argument("--output-json", metavar="FILE", help="Write the results to FILE as JSON.")
    parser.add_argument(
        "--disable-detokenize",
        action="store_true",
        help="Leave text out: token ids are the output. With --compare it is always so.",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="Run each workload once more and print the milliseconds a step that each part takes.",
    )
    EngineArgs.add_cli_args(parser)
    # The same prompts every round: cached prefixes would make prompts free.
    parser.set_defaults(enable_prefix_caching=False, disable_log_stats=True)


def validate_shared_args(args: argparse.Namespace) -> None:
    """Checks what the parser cannot.

    Raises:
        ValueError: one line that says what to change.
    """
    if args.compare is None and args.peer_cache != "auto":
        raise ValueError("--peer-cache has an effect only with --compare transformers")
    if not 0 <= args.random_range_ratio < 1:
        raise ValueError("--random-range-ratio must be at least 0 and less than 1")
    if args.compare and args.profile:
        raise ValueError("--profile is of this engine alone: leave --compare out")
    if args.compare and args.enable_prefix_caching:
        raise ValueError("--enable-prefix-caching with --compare would time prompts not computed")


def make_workloads(
    model_config: ModelConfig,
    seed: int,
    shapes: Sequence[tuple[int, int, int]],
    range_ratio: float = 0.0,
) -> list[Workload]:
    """A workload for each shape (prompts, tokens in, tokens out) that fits the model.
    `range_ratio`: how far the tokens in may be from the shape's.

    Raises:
        ValueError: a shape that does not.
    """
    return [
        random_workload(
            *shape, model_config.get_vocab_size(), seed, special_ids(model_config), range_ratio
        )
        for shape in shapes
        if _fits(shape, range_ratio, model_config)
    ]


def _fits(shape: tuple[int, int, int], range_ratio: float, model_config: ModelConfig) -> bool:
    _, input_len, output_len = shape
    input_len = length_range(input_len, range_ratio)[1]
    max_model_len = model_config.max_model_len
    if model_config.is_encoder_decoder:
        # The encoder has positions of its own; the decoder's prompt is start token and forced BOS.
        longest = model_config.hf_config_dict.get("max_position_embeddings") or max_model_len
        if input_len > longest:
            raise ValueError(
                f"prompts of {input_len} tokens are more than the encoder takes ({longest}): lower "
                "--input-len"
            )
        input_len = 2
    if input_len + output_len > max_model_len:
        raise ValueError(
            f"--input-len {input_len} and --output-len {output_len} together are more than the "
            f"longest request ({max_model_len} tokens): lower them, or raise --max-model-len"
        )
    return True


def special_ids(model_config: ModelConfig) -> list[int]:
    """Ids that no prompt should hold; none without a tokenizer."""
    from vllm.tokenizers import get_tokenizer

    if model_config.skip_tokenizer_init:
        return []
    return get_tokenizer(
        model_config.tokenizer,
        model_config.tokenizer_mode,
        model_config.trust_remote_code,
        model_config.tokenizer_revision,
    ).all_special_ids


def make_specs(args: argparse.Namespace, model_config: ModelConfig) -> list[BenchEngineSpec]:
    """Our engine, then the peer that was asked for, with one dtype for all.

    Raises:
        ValueError: the peer cannot run here.
    """
    engine_args = dataclasses.replace(
        EngineArgs.from_cli_args(args), model=model_config.model, dtype=model_config.dtype
    )
    if args.compare is None:
        return [VllmSpec(engine_args, detokenize=not args.disable_detokenize)]
    if model_config.model.endswith(".gguf") and importlib.util.find_spec("accelerate") is None:
        raise ValueError(
            "--compare transformers needs accelerate to load a GGUF file: pip install accelerate"
        )
    cache = None if args.peer_cache == "auto" else args.peer_cache
    peer = TransformersSpec(
        model_config.model,
        model_config.dtype,
        cache,
        is_encoder_decoder=model_config.is_encoder_decoder,
        has_random_weights=engine_args.load_format == "dummy",
    )
    return [VllmSpec(engine_args), peer]
