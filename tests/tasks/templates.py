"""Chat templates and tokenizers of the shapes that model families have, with tiny vocabularies. Templates of reasoning
models drop the reasoning of earlier turns."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from areal_like.tasks.text import byte_tokenizer


def template(name: str) -> str:
    return (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text().removesuffix("\n")


QWEN3 = template("qwen3")
"""Of Qwen3: it keeps the thinking behind the last question, for tool calls."""
DEEPSEEK_R1 = template("deepseek_r1")
"""As those distilled from DeepSeek-R1: it opens the thinking, and always drops it afterwards."""
QWEN = template("qwen")
"""ChatML, as of Qwen2: every turn is <|im_start|>role\\ncontent<|im_end|>\\n."""
LLAMA3 = template("llama3")
GEMMA = template("gemma")
MISTRAL = template("mistral")
LLAMA2 = MISTRAL.replace("m.content + eos_token", "m.content + ' ' + eos_token")
PHI3 = template("phi3")
PHI4 = QWEN.replace("<|im_end|>\n", "<|im_end|>").replace("\n", "<|im_sep|>")
GLM4 = template("glm4")
GPT_OSS = template("gpt_oss")


@dataclass(frozen=True)
class Family:
    """The shape of a family's tokenizer: template, EOS, the stops that `generation_config.json` names, other added
    special tokens, `plain` ones, and where SentencePiece writes one more `▁` ("": the tokens are bytes); `end`: of a
    turn, if not EOS."""

    template: str
    eos: str
    stops: str
    others: str = ""
    pieces: str = ""
    end: str = ""
    plain: str = ""


FAMILIES = {
    "chatml": Family(QWEN, "<|im_end|>", "<|im_end|> <|endoftext|>", "<|im_start|>", plain="<tool_call>"),
    "chatml, other EOS": Family(QWEN, "<|endoftext|>", "", "<|im_start|> <|im_end|>", end="<|im_end|>"),
    "llama 3": Family(LLAMA3, "<|eot_id|>", "<|eom_id|>", "<s> <|start_header_id|> <|end_header_id|>"),
    "llama 2": Family(LLAMA2, "</s>", "", "<s>", "first", plain="[INST] [/INST]"),
    "gemma": Family(GEMMA, "<eos>", "<end_of_turn>", "<s> <start_of_turn>", "never", end="<end_of_turn>"),
    "mistral": Family(MISTRAL, "</s>", "", "<s> [INST] [/INST] [TOOL_CALLS]", "first"),
    "phi 3": Family(PHI3, "<|endoftext|>", "<|end|>", "<|user|> <|assistant|>", end="<|end|>"),
    "phi 4": Family(PHI4, "<|endoftext|>", "<|im_end|>", "<|im_start|> <|im_sep|>", end="<|im_end|>"),
    "glm 4": Family(GLM4, "<|endoftext|>", "<|user|>", "[gMASK] <sop> <|assistant|>", end="<|user|>"),
    "thinking": Family(QWEN3, "<|im_end|>", "", "<|im_start|> <think> </think>"),
    "gpt-oss": Family(GPT_OSS, "<|return|>", "", "<|start|> <|end|> <|channel|> <|message|>"),
}


def tokenizer_of(family: Family) -> Any:
    found: Any = _pieces(family.pieces) if family.pieces else byte_tokenizer()
    names = [family.eos, *family.stops.split(), *family.others.split()]
    found.add_special_tokens({"eos_token": family.eos, "additional_special_tokens": names[1:]})
    if "<s>" in names:
        found.add_special_tokens({"bos_token": "<s>"})
    found.add_tokens(family.plain.split())
    found.chat_template = family.template
    return found


def _pieces(prepend: str) -> PreTrainedTokenizerFast:
    """As SentencePiece has them: `▁` for a space, one more in front of a text, bytes for characters that it lacks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    inner = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>")


def write_tokenizer(folder: Path, family: Family) -> str:
    """The folder of a tokenizer, with the stops of `generation_config.json`."""
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(folder)
    stops = tokenizer.convert_tokens_to_ids(family.stops.split())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return str(folder)
