# SPDX-License-Identifier: Apache-2.0
"""Several prompts at once, in this process.

.venv/bin/python examples/offline.py [MODEL]     MODEL: a folder or a .gguf file
"""

import sys

from vllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "A haiku about the sea:\n",
]


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else "", max_model_len=1024)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    messages = [
        {"role": "user", "content": "What is the capital of Italy? Answer in one sentence."}
    ]
    print(llm.chat(messages, params)[0].outputs[0].text)


if __name__ == "__main__":
    main()
