"""What vLLM itself says of recipes: a program, so that no test process imports vLLM. JSON in, JSON out.

Standard input: ``[{name, arguments, tool_parser, reasoning_parser, harmony, output}, ...]``. The last line of standard
output: ``{name: {error, reasoning, content, calls}, ...}``; ``error`` is the parser's of the command line. Under
"speculation": methods and keys of vLLM's configuration.
"""

import gzip
import json
import os
import sys
import tempfile
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import get_args

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from appliance.flagcheck import check

# Those that Qwen's tokenizers have as tokens of their own.
TAGS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_tokens([AddedToken(tag, special=tag.startswith("<|")) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=TAGS[1])


def parse(recipe: dict, tokens: PreTrainedTokenizerFast) -> dict:
    """An answer of the model, as the API server takes it apart."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.parser_manager import ParserManager

    kind = ParserManager.get_parser(
        tool_parser_name=recipe["tool_parser"],
        reasoning_parser_name=recipe["reasoning_parser"],
        enable_auto_tools=True,
        is_harmony=recipe["harmony"],
        tokenizer=tokens,
    )
    messages = [{"role": "user", "content": "?"}]
    request = ChatCompletionRequest(model="m", messages=messages, tools=TOOLS, tool_choice="auto")
    output = recipe["output"]
    ids = get_encoding().encode(output, allowed_special="all") if recipe["harmony"] else tokens.encode(output)
    parser = kind(tokens, request.tools)
    reasoning, content, calls = parser.parse(output, request, enable_auto_tools=True, model_output_token_ids=ids)
    return {
        "reasoning": reasoning,
        "content": content,
        "calls": [[c.name, json.loads(c.arguments)] for c in calls or []],
    }


def main() -> None:
    from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod

    tokens = tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        packed = resources.files("bpe_openai").joinpath("data", "o200k_base.tiktoken.gz").read_bytes()
        Path(folder, "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
        told = {}
        for recipe in json.load(sys.stdin):
            parsed = parse(recipe, tokens) if recipe["tool_parser"] else {}
            told[recipe["name"]] = {"error": check(recipe["arguments"]), **parsed}
    told["speculation"] = {"methods": get_args(SpeculativeMethod), "keys": [f.name for f in fields(SpeculativeConfig)]}
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
