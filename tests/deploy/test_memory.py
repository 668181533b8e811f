"""What services need is known before they start, and a run that does not fit is refused."""

import json
from pathlib import Path

import pytest

from deploy.errors import UserError
from deploy.gpus import Gpu, parse_gpus
from deploy.memory import find_room, fit_into_memory
from deploy.memory_plan import Room, plan_memory
from deploy.model_shape import ModelShape, read_model_shape
from deploy.run_file import RunConfig, load_run_file

GIB = 1 << 30
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QWEN_1_5B = ModelShape(1_543_714_304, 1536, 8960, 28, 151_936, 512, "bfloat16")
TABLE = "0, GPU-aa11, NVIDIA H200, 143771, 143000\n1, GPU-bb22, NVIDIA H200, 143771, 100\n"


def config(**overrides: str) -> RunConfig:
    return load_run_file(None, {key.replace("__", "."): value for key, value in overrides.items()})


def gpu_room(gib: int, *, num_servers: int = 1, num_ranks: int = 1) -> Room:
    return Room("GPU 0", gib * GIB, gib * GIB, is_gpu=True, num_servers=num_servers, num_ranks=num_ranks)


def write_config(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(SMOLLM2 | changes))
    return folder


def test_the_size_of_a_model_is_read_from_its_config(tmp_path: Path) -> None:
    shape = read_model_shape(write_config(tmp_path))

    assert shape is not None
    assert shape.num_parameters == 134_515_008
    assert (shape.kv_width, shape.dtype) == (384, "bfloat16")


def test_an_untied_head_counts(tmp_path: Path) -> None:
    shape = read_model_shape(write_config(tmp_path, tie_word_embeddings=False))

    assert shape is not None
    assert shape.num_parameters == 134_515_008 + 49152 * 576


def test_a_model_of_another_kind_is_not_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    assert read_model_shape(tmp_path) is None
    assert fit_into_memory(config(), tmp_path) == (config(), None)


def test_gpus_are_read_from_the_table_of_nvidia_smi() -> None:
    first, second = parse_gpus(TABLE, visible=None)

    assert first == Gpu(0, "NVIDIA H200", 143771 << 20, 143000 << 20)
    assert second.free_bytes == 100 << 20


@pytest.mark.parametrize(("visible", "indices"), [("1", [1]), ("GPU-aa11", [0]), ("", []), ("1,0", [0, 1])])
def test_cuda_visible_devices_chooses_gpus(visible: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in parse_gpus(TABLE, visible=visible)] == indices


def test_a_gpu_that_does_not_say_its_memory_is_left_out() -> None:
    assert parse_gpus("0, GPU-aa11, Some GPU, [N/A], [N/A]\n", visible=None) == ()


def test_services_with_a_gpu_each_need_no_plan() -> None:
    assert find_room(config(), parse_gpus(TABLE, visible=None)) is None


def test_services_that_share_a_gpu_share_the_one_with_least_memory() -> None:
    room = find_room(config(rollout__num_servers="3"), parse_gpus(TABLE, visible=None))

    assert room is not None
    assert (room.name, room.num_servers, room.num_ranks) == ("GPU 1 (NVIDIA H200)", 2, 1)


def test_the_cache_holds_all_samples_at_full_length_where_there_is_room() -> None:
    plan = plan_memory(config(learner__dtype="bf16", rollout__max_running_samples="64"), QWEN_1_5B, gpu_room(141))

    assert plan.kv_cache_bytes == 64 * 4096 * 28 * 512 * 2
    assert plan.needed_bytes < plan.room.free_bytes


def test_the_cache_takes_what_is_left_where_there_is_less() -> None:
    settings = config(learner__dtype="bf16", rollout__max_running_samples="256", learner__tokens_per_micro_batch="2048")
    plan = plan_memory(settings, QWEN_1_5B, gpu_room(80))

    assert plan.kv_cache_bytes < 256 * 4096 * 28 * 512 * 2
    assert 76 * GIB < plan.needed_bytes <= 80 * GIB


def test_a_cache_that_is_set_stays() -> None:
    plan = plan_memory(config(rollout__kv_cache_bytes="1000000"), QWEN_1_5B, gpu_room(141))

    assert plan.kv_cache_bytes == 1_000_000


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"too little memory on GPU 0: .* are free; .*: lower learner") as caught:
        plan_memory(config(), QWEN_1_5B, gpu_room(24))

    assert "\n" not in str(caught.value)


def test_gradient_checkpointing_and_bf16_need_less() -> None:
    plain = plan_memory(config(), QWEN_1_5B, gpu_room(500))
    sparing = plan_memory(
        config(learner__gradient_checkpointing="true", learner__dtype="bf16"), QWEN_1_5B, gpu_room(500)
    )

    assert sparing.activation_bytes < plain.activation_bytes / 2


def test_the_default_run_fits_into_eight_gigabytes(tmp_path: Path) -> None:
    tiny = ModelShape(1_270_656, 192, 704, 2, 468, 384, "float32")
    settings = load_run_file(Path("deploy/runs/tiny.toml"), {})
    room = Room("this machine", 8 * 10**9, 7 * 10**9, is_gpu=False, num_servers=1, num_ranks=1)

    assert plan_memory(settings, tiny, room).needed_bytes < 7 * 10**9


def test_a_shared_gpu_gives_the_server_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.memory.visible_gpus", lambda: parse_gpus(TABLE, visible="0"))

    planned, plan = fit_into_memory(config(learner__dtype="bf16"), write_config(tmp_path))

    assert plan is not None
    assert planned.rollout.kv_cache_bytes == plan.kv_cache_bytes > 0
    share = (plan.server_bytes + plan.kv_cache_bytes) / (143771 << 20)
    assert planned.rollout.memory_share == pytest.approx(share, abs=1e-4)
