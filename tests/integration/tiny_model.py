"""Writes a tiny vision-language model with random weights as two GGUF files, for llama.cpp's server.

Its answers are gibberish, but everything around them is real: tokens, stop reasons, usage, log probabilities,
grammar-constrained JSON, and pictures that the server itself decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]

# The language model: a llama of two blocks.
WIDTH = 64
BLOCKS = 2
HEADS = 4
FEED_FORWARD = 128
CONTEXT_LENGTH = 131_072

# The picture encoder: a CLIP of two blocks that sees 64 x 64 pixels as 16 patches.
VISION_WIDTH = 32
VISION_BLOCKS = 2
VISION_HEADS = 2
VISION_FEED_FORWARD = 64
IMAGE_SIZE = 64
PATCH_SIZE = 16

WORD_START = "\u2581"
"""How a SentencePiece vocabulary spells the space before a word."""

WORDS = ("the", "a", "of", "to", "is", "it", "and", "red", "blue", "green", "cat", "dog", "image", "yes", "no")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Where the two files of the model are.

    Args:
        language: The language model with its tokenizer and chat template, 0.5 MB.
        vision: The picture encoder and its projection into the language model, 0.2 MB.
    """

    language: Path
    vision: Path


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of the vocabulary; tokens of a higher score are merged first."""

    text: str
    kind: gguf.TokenType
    score: float = 0.0


class Weights:
    """Random weights that are the same in every run."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, *shape: int, scale: float = 0.3) -> NDArray[np.float32]:
        return self._rng.normal(0.0, scale, shape).astype(np.float32)


def make_tiny_model(folder: Path) -> TinyModel:
    """Write both files into `folder`, which must exist; takes a fraction of a second."""
    model = TinyModel(language=folder / "tiny-llama.gguf", vision=folder / "tiny-mmproj.gguf")
    _write_language_model(model.language, Weights(seed=0))
    _write_vision_model(model.vision, Weights(seed=1))
    return model


def vocabulary() -> list[Token]:
    """Control tokens, all bytes, printable ASCII and a few words: any prompt can be encoded.

    The first three are `<unk>`, `<s>`, `</s>`; the last is the end of a turn.
    """
    bytes_ = [Token(f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(256)]
    characters = [*map(chr, range(33, 127)), WORD_START]
    return [
        Token("<unk>", gguf.TokenType.UNKNOWN),
        Token("<s>", gguf.TokenType.CONTROL),
        Token("</s>", gguf.TokenType.CONTROL),
        *bytes_,
        *(Token(text, gguf.TokenType.NORMAL, -1000.0 - rank) for rank, text in enumerate(characters)),
        *(Token(WORD_START + word, gguf.TokenType.NORMAL, -300.0 - rank) for rank, word in enumerate(WORDS)),
        Token("<|im_start|>", gguf.TokenType.CONTROL),
        Token("<|im_end|>", gguf.TokenType.CONTROL),
    ]


def _write_language_model(path: Path, weights: Weights) -> None:
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    _add_tokenizer(writer, tokens)
    _write(writer, _language_tensors(tokens, weights))


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: list[Token]) -> None:
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token.text.encode() for token in tokens])
    writer.add_token_types([token.kind for token in tokens])
    writer.add_token_scores([token.score for token in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _language_tensors(tokens: list[Token], weights: Weights) -> Tensors:
    output = weights(len(tokens), WIDTH, scale=1.0)
    for index, token in enumerate(tokens):
        # A row of zeros makes a token improbable: answers stay printable ASCII and run to `max_tokens`.
        if token.kind is not gguf.TokenType.NORMAL:
            output[index] = 0.0
    tensors = {"token_embd.weight": weights(len(tokens), WIDTH), "output_norm.weight": _ones(WIDTH)}
    tensors["output.weight"] = output
    for block in range(BLOCKS):
        prefix = f"blk.{block}."
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"{prefix}{name}.weight"] = _ones(WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"{prefix}{name}.weight"] = weights(WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            tensors[f"{prefix}{name}.weight"] = weights(FEED_FORWARD, WIDTH)
        tensors[f"{prefix}ffn_down.weight"] = weights(WIDTH, FEED_FORWARD)
    return tensors


def _write_vision_model(path: Path, weights: Weights) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.has_llava_projector", True)
    writer.add_bool("clip.use_gelu", False)
    writer.add_uint32("clip.vision.image_size", IMAGE_SIZE)
    writer.add_uint32("clip.vision.patch_size", PATCH_SIZE)
    writer.add_uint32("clip.vision.embedding_length", VISION_WIDTH)
    writer.add_uint32("clip.vision.feed_forward_length", VISION_FEED_FORWARD)
    writer.add_uint32("clip.vision.projection_dim", WIDTH)
    writer.add_uint32("clip.vision.block_count", VISION_BLOCKS)
    writer.add_uint32("clip.vision.attention.head_count", VISION_HEADS)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.48, 0.46, 0.41])
    writer.add_array("clip.vision.image_std", [0.27, 0.26, 0.28])
    _write(writer, _vision_tensors(weights))


def _vision_tensors(weights: Weights) -> Tensors:
    positions = (IMAGE_SIZE // PATCH_SIZE) ** 2 + 1  # every patch, and the class embedding
    tensors = {
        "v.class_embd": weights(VISION_WIDTH),
        "v.patch_embd.weight": weights(VISION_WIDTH, 3, PATCH_SIZE, PATCH_SIZE),
        "v.position_embd.weight": weights(positions, VISION_WIDTH),
        "v.pre_ln.weight": _ones(VISION_WIDTH),
        "v.pre_ln.bias": weights(VISION_WIDTH),
        **_linear("mm.0", WIDTH, VISION_WIDTH, weights),
        **_linear("mm.2", WIDTH, WIDTH, weights),
    }
    for block in range(VISION_BLOCKS):
        prefix = f"v.blk.{block}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            tensors |= _linear(prefix + name, VISION_WIDTH, VISION_WIDTH, weights)
        tensors |= _linear(prefix + "ffn_up", VISION_FEED_FORWARD, VISION_WIDTH, weights)
        tensors |= _linear(prefix + "ffn_down", VISION_WIDTH, VISION_FEED_FORWARD, weights)
        for name in ("ln1", "ln2"):
            tensors[f"{prefix}{name}.weight"] = _ones(VISION_WIDTH)
            tensors[f"{prefix}{name}.bias"] = weights(VISION_WIDTH)
    return tensors


def _linear(name: str, rows: int, columns: int, weights: Weights) -> Tensors:
    return {f"{name}.weight": weights(rows, columns), f"{name}.bias": weights(rows)}


def _ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, np.float32)


def _write(writer: gguf.GGUFWriter, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
