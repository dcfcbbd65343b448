"""What the command refuses before it listens, and what its options are for a server."""

from typing import Any

import pytest
import torch
from click.testing import CliRunner
from served import build_model, build_tokenizer

from colossal._src.cli.serve import command
from colossal._src.inference import server
from colossal._src.inference.packed_weights import PackedWeight, packs_weights
from colossal._src.inference.server import ServerSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_model().save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def served(monkeypatch) -> list[Any]:
    """What would be served."""
    found: list[Any] = []

    def remember(engine: Any, settings: ServerSettings, *, watch: Any) -> bool:
        assert watch is None
        found.extend([engine, settings])
        return settings.port != 1

    monkeypatch.setattr(server, "run_server", remember)
    return found


def test_dtype_is_that_of_the_parameters(folder, served) -> None:
    done = CliRunner().invoke(command, [str(folder), "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    engine, settings = served
    assert settings.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    assert isinstance(engine.model.get_output_embeddings().weight, PackedWeight) == packs_weights(torch.bfloat16)


def test_options_are_settings(folder, served) -> None:
    words = [str(folder), "--port", "8021", "--max-batch-size", "3", "--max_input_len", "40", "--max_output_len", "20"]
    done = CliRunner().invoke(command, [*words, "--num_blocks", "7", "--queue_size", "0", "--timeout", "2.5"])
    assert done.exit_code == 0, done.output
    engine, settings = served
    config = engine.config
    assert (config.max_batch_size, config.max_input_len, config.max_output_len, config.total_blocks) == (3, 40, 20, 7)
    assert (settings.host, settings.port, settings.model_name) == ("127.0.0.1", 8021, "tiny")
    assert (settings.queue_size, settings.timeout_seconds) == (0, 2.5)


def test_lengths_fit_the_positions_of_the_model(folder, served) -> None:
    assert CliRunner().invoke(command, [str(folder)]).exit_code == 0
    engine, settings = served
    assert (engine.config.max_input_len, engine.config.max_output_len, settings.port) == (128, 128, 8020)


def test_a_server_whose_step_has_failed_ends_with_1(folder, served) -> None:
    assert CliRunner().invoke(command, [str(folder), "--port", "1"]).exit_code == 1
    assert served


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_input_len", "200", "--max_output_len", "100"], "256 positions"),
        (["--num_blocks", "1"], "num_blocks is at least 16"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(folder, served, words, message) -> None:
    done = CliRunner().invoke(command, [str(folder), *words])
    assert (done.exit_code, served) == (1, [])
    assert message in done.output


def test_a_directory_without_a_model_is_refused(tmp_path, served) -> None:
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert (done.exit_code, served) == (1, [])
    assert "config.json" in done.output
