# SPDX-License-Identifier: Apache-2.0
"""What Nemotron Parse reads on a page, in this process.

.venv/bin/python examples/nemotron_parse.py [MODEL] [IMAGE]

MODEL: a folder with nvidia/NVIDIA-Nemotron-Parse-v1.1; left out: the small model of the tests, which
reads pages like page.png.
"""

import re
import sys
from pathlib import Path

from PIL import Image

from vllm import LLM, SamplingParams

HERE = Path(__file__).parent
SMALL_MODEL = HERE.parent / "tests" / "models" / "nemotron_parse" / "checkpoint"
TASK = "</s><s><predict_bbox><predict_classes><output_markdown>"
ITEM = re.compile(r"<x_([\d.]+)><y_([\d.]+)>(.*?)<x_([\d.]+)><y_([\d.]+)><class_(.+?)>", re.DOTALL)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(SMALL_MODEL)
    image = Image.open(sys.argv[2] if len(sys.argv) > 2 else HERE / "page.png")
    llm = LLM(model=model)
    prompt = {"prompt": TASK, "multi_modal_data": {"image": image}}
    longest = llm.llm_engine.model_config.max_model_len - 16
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=longest))
    for left, top, text, right, bottom, kind in ITEM.findall(output.outputs[0].text):
        print(f"{kind} at ({left}, {top}) to ({right}, {bottom}): {text}")


if __name__ == "__main__":
    main()
