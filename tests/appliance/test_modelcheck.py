import json

import pytest

from appliance.errors import ModelError
from appliance.modelcheck import check_model
from tests.appliance.conftest import write_safetensors


def test_a_complete_folder(model):
    assert check_model(model) == (model / "model.safetensors").stat().st_size


def drop(name):
    return lambda model: (model / name).unlink()


def truncate(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def lfs_pointer(model):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def missing_shard(model):
    (model / "model.safetensors").unlink()
    write_safetensors(model / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_part(model):
    (model / "model.safetensors").unlink()
    (model / "m-00001-of-00002.gguf").write_bytes(b"GGUF....")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop("config.json"), "no config.json"),
        (drop("tokenizer.json"), "no tokenizer"),
        (drop("model.safetensors"), "no weights"),
        (truncate, r"model.safetensors: \d+ bytes, its header says \d+: the download is not complete"),
        (lfs_pointer, "not a safetensors file"),
        (missing_shard, "2 of 3 shards are missing, first b.safetensors"),
        (missing_part, "m-00002-of-00002.gguf: this part of the model is missing"),
        (lambda model: (model / "config.json").write_text("{"), "config.json: not readable as JSON"),
    ],
)
def test_what_is_wrong_is_named(model, spoil, message):
    spoil(model)
    with pytest.raises(ModelError, match=message) as caught:
        check_model(model)
    assert "\n" not in str(caught.value)


def test_no_such_folder(tmp_path):
    with pytest.raises(ModelError, match="nowhere: no such model folder"):
        check_model(tmp_path / "nowhere")


def test_what_the_engine_will_not_read_is_not_asked_for(model):
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    assert check_model(model, weights=False, tokenizer=False) == 0
