# SPDX-License-Identifier: Apache-2.0
"""The same over HTTP: the prompt of a completion is the encoder's text.

.venv/bin/vllm serve tests/models/bart --served-model-name bart
.venv/bin/python examples/bart_client.py
"""

from openai import OpenAI

TEXT = "Please send the report before Friday, 5 June 2043, thank you!"


def main() -> None:
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="unused")
    answer = client.completions.create(model="bart", prompt=TEXT)
    print(f"{TEXT} -> {answer.choices[0].text}")


if __name__ == "__main__":
    main()
