# SPDX-License-Identifier: Apache-2.0
"""What BART makes of texts, in this process.

.venv/bin/python examples/bart.py [MODEL [TEXT ...]]

MODEL: a folder with a BART or mBART, such as facebook/bart-large-cnn; left out: the small model of
the tests, which turns dates into ISO dates.
"""

import sys
from pathlib import Path

from vllm import LLM

SMALL_MODEL = Path(__file__).parent.parent / "tests" / "models" / "bart"
TEXTS = [
    "The contract was signed on the 21st of October, 2015 in Geneva.",
    "Born: 17. März 1984",
    "We met on March the third, nineteen ninety-nine.",
]


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else str(SMALL_MODEL))
    texts = sys.argv[2:] or TEXTS
    # Without parameters of ours the model's generation_config.json counts, as in Transformers.
    for text, output in zip(texts, llm.generate(texts, use_tqdm=False), strict=True):
        print(f"{text} -> {output.outputs[0].text}")

    # How the decoder begins can be said too: here with the year, which the model goes on from.
    if len(sys.argv) == 1:
        prompt = {"encoder_prompt": texts[0], "decoder_prompt": "<s>2015-"}
        (output,) = llm.generate([prompt], use_tqdm=False)
        print(f"{texts[0]} -> 2015-{output.outputs[0].text}")


if __name__ == "__main__":
    main()
