"""What another program made is fine-tuned: as by plain PyTorch under every plugin, killed, resumed, loaded again."""

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed import run as torchrun
from transformers import PreTrainedTokenizerFast

from colossal._src.testing.limits import scaled
from colossal.errors import ConfigError, NonFiniteError, ShapeError
from colossal.testing import run_processes, run_threads

ROOT = Path(__file__).parents[2]
STRANGER = Path(__file__).with_name("stranger.py")
STEPS = 12
COMMON = f"--steps {STEPS} --batch-size 16 --length 64 --lr 3e-3 --eval-every 4 --precision fp32".split()
CASES = {
    "ddp": "--accumulate 4",
    "zero2": "--plugin zero2 --accumulate 2",
    "gemini": "--plugin gemini --accumulate 2 --checkpoint-layers",
    "tp": "--plugin hybrid --tp 2",
    "pp": "--plugin hybrid --pp 2 --accumulate 2 --checkpoint-layers",
}
MORE_CASES = {
    "fsdp": "--plugin fsdp",
    "zero1": "--plugin zero1 --checkpoint-layers",
    "sp": "--plugin hybrid --sp 2",
    "pack": "--pack",
}
KILLS = {  # what is killed on two ranks; on how many ranks and how it goes on
    "gpt2": (CASES["ddp"], 2, CASES["tp"]),
    "llama": (CASES["zero2"], 1, "--plugin gemini --accumulate 2"),
    "qwen3": (CASES["pp"], 2, CASES["zero2"]),
}


def part_of_the_program(name: str) -> Any:
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT))]
    return importlib.import_module(f"examples.{name}")


def finetune(runs: list[list[str]]) -> None:
    """Run the program in processes that are launched, once after the other."""
    options, train = part_of_the_program("finetune.options"), part_of_the_program("finetune.train")
    training = part_of_the_program("common.training").Training
    begin = training.train

    def check_mode(self: Any) -> None:
        assert all(module.training for module in self.model.modules()), "from_pretrained returns evaluation mode"
        begin(self)

    training.train = check_mode
    for words in runs:
        train.run(options.parse(words))


def run_stranger(*words: str) -> str:
    command = [sys.executable, str(STRANGER), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(600), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each family a model, its data, and what plain PyTorch does with them in one process."""
    folder = tmp_path_factory.mktemp("stranger")
    run_stranger("make", str(folder))
    return folder


def words_of(folder: Path, output: Path, case: str) -> list[str]:
    inputs = ["--model", str(folder / "model"), "--data", str(folder / "data.jsonl")]
    return [*inputs, "--output", str(output), *COMMON, *case.split()]


def log_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_equal_logs(found: list[dict[str, float]], folder: Path) -> None:
    expected = json.loads((folder / "log.json").read_text(encoding="utf-8"))
    assert expected[-1]["loss"] < expected[0]["loss"]
    assert expected[-1]["eval_loss"] < expected[3]["eval_loss"]
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, STEPS + 1))
    for name in ("loss", "eval_loss"):
        losses = [[line.get(name, 0.0) for line in log] for log in (found, expected)]
        torch.testing.assert_close(*map(torch.tensor, losses), atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", KILLS)
def test_losses_equal_plain_pytorch_under_every_plugin(family: str, made: Path, tmp_path: Path) -> None:
    cases = CASES | (MORE_CASES if family == "llama" else {})
    runs = [words_of(made / family, tmp_path / name, case) for name, case in cases.items()]
    run_processes(finetune, 2, runs)
    for name in cases.keys() - {"pack"}:
        assert_equal_logs(log_of(tmp_path / name), made / family)
    if "pack" in cases:
        assert len(log_of(tmp_path / "pack")) == STEPS


def kill_after(step: int, words: list[str], log: Path) -> int:
    """Start two ranks, and kill both by SIGKILL when this step is logged."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [*launcher, str(ROOT / "examples/finetune/train.py"), *words]
    job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while job.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= step):
        time.sleep(0.002)
    for rank in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text(encoding="utf-8").split():
        os.kill(int(rank), signal.SIGKILL)
    output, _ = job.communicate(timeout=scaled(600))
    assert b"exitcode: -9" in output or b"exitcode  : -9" in output, output.decode()
    return job.returncode


@pytest.mark.slow
@pytest.mark.parametrize("family", KILLS)
def test_a_killed_run_goes_on_under_another_plugin_and_the_other_program_generates(family, made, tmp_path) -> None:
    killed, num_ranks, resumed = KILLS[family]
    seed = random.SystemRandom().randrange(2**32)
    step = random.Random(seed).randint(3, STEPS - 5)  # noqa: S311
    sys.stdout.write(f"seed {seed}: killed after step {step}\n")
    output, options = tmp_path / "run", " --save-every 2 --resume"
    assert kill_after(step, words_of(made / family, output, killed + options), output / "log.jsonl") != 0
    before = log_of(output)
    assert step <= len(before) < STEPS
    assert not (output / "model").exists()
    runs = [words_of(made / family, output, resumed + options)]
    run_processes(finetune, num_ranks, runs)
    assert_equal_logs(log_of(output), made / family)
    # it went on from a checkpoint: the lines until then are those of the run that was killed
    num_kept = sum(old == new for old, new in zip(before, log_of(output), strict=False))
    assert num_kept >= 2
    assert num_kept % 2 == 0
    expected = json.loads((made / family / "tokens.json").read_text(encoding="utf-8"))
    assert json.loads(run_stranger("generate", str(output / "model"))) == expected
    assert len(expected) > 24


@pytest.mark.parametrize("program", ["finetune.options", "pretrain.train"])
def test_torchrun_takes_no_option_of_the_program_for_its_own(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It compares all words with the beginnings of its options, those of the program too."""
    with pytest.raises(SystemExit):
        part_of_the_program(program).parse(["--help"])
    names = sorted(set(re.findall(r"--[a-z]+(?:-[a-z]+)*", capsys.readouterr().out)) - {"--help"})
    words = [word for name in names for word in (name, "1")]
    parsed = torchrun.parse_args(["examples/finetune/train.py", *words])
    assert parsed.training_script_args == words
    assert len(names) > 20


class TokenizerOfOneToken:
    eos_token_id = 0

    def __call__(self, _text: str, **_options: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[1])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "", '{"question": "a", "answer": "b"}'], r"Found the keys question, answer in .*:3\."),
        (['{"prompt": "a"}'], r"Found the keys prompt in .*:1\."),
        (["[1, 2]"], r"Found list in .*:1\."),
        (['{"text": "a"}', '{"text": '], r"Found Expecting value: .* in .*:2\."),
        (['{"text": null}'], r"Found \[None\] in .*:1\."),
        (['{"messages": [{"from": "human", "value": "a"}]}'], r"role and content\. Found others in .*:1\."),
        (['{"messages": [3]}'], r"role and content\. Found others in .*:1\."),
    ],
)
def test_lines_that_are_no_samples_are_named(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    tokenizer = TokenizerOfOneToken()
    with pytest.raises(ValueError, match=message):
        part_of_the_program("finetune.data").read(path, tokenizer, 8, pack=False)


def test_files_of_a_directory_and_other_encodings_of_a_line_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    (tmp_path / "b.jsonl").write_text('{"text": "\u2028"}\n', encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no sample", encoding="utf-8")
    read = part_of_the_program("finetune.data").read
    assert read(tmp_path, TokenizerOfOneToken(), 8, pack=False) == [([1, 0], [-100, 0])] * 3
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9t\xe9"}')
    with pytest.raises(ValueError, match=r"in UTF-8\. Found .*0xe9.* in .*c\.jsonl:2\."):
        read(tmp_path, TokenizerOfOneToken(), 8, pack=False)


PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
FORGETS = PLAIN.replace("{{ m.content", "{{ '<think>' if m.role == 'assistant' and loop.last }}{{ m.content")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, [" c|ef|"]),  # the token " c" begins before the answer
        (FORGETS, ["<think>c|", "<think>ef|"]),  # like that of Qwen3: only the last answer has its reasoning
    ],
)
def test_answers_are_learned_where_tokens_cross_them_and_templates_forget(
    template: str, expected: list[str], tmp_path: Path
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "Ġc"])}
    model = Tokenizer(models.BPE(vocabulary, [("Ġ", "c")]))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template)
    roles = zip(("user", "assistant", "user", "assistant"), ("ab", "c", "d", "ef"), strict=True)
    messages = [{"role": role, "content": content} for role, content in roles]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    read = part_of_the_program("finetune.data").read
    samples = read(path, tokenizer, 99, pack=False)
    learned = [[label for label in labels if label != -100] for _, labels in samples]
    assert [tokenizer.decode(ids) for ids in learned] == expected
    assert tokenizer.decode(samples[-1][0]) == tokenizer.apply_chat_template(messages, tokenize=False)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="without a template"):
        read(path, tokenizer, 99, pack=False)


def test_what_the_program_cannot_use_is_said_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = part_of_the_program("finetune.options")
    data = tmp_path / "data.jsonl"
    data.touch()
    model, complete = tmp_path / "model", tmp_path / "complete"
    for folder, names in ((model, ["config.json"]), (complete, ["config.json", "tokenizer.json"])):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    for words, message in (
        (["--model", str(tmp_path / "none"), "--data", str(data)], "none is no directory"),
        (["--model", str(tmp_path), "--data", str(data)], "has no config.json"),
        (["--model", str(model), "--data", str(data)], "has no tokenizer"),
        (["--model", str(complete), "--data", str(model)], "neither a file nor a directory of .jsonl files"),
        (["--smoke", "--report-to", "wandb"], "pip install wandb"),
    ):
        with pytest.raises(part_of_the_program("common.program").OptionError, match=message):
            options.parse(words)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 100}', encoding="utf-8")
    train = part_of_the_program("finetune.train")
    check_length = train._check_length
    assert [train._default_length(SimpleNamespace(model=tmp_path, sp=sp)) for sp in (1, 5)] == [96, 80]
    check_length(SimpleNamespace(model=tmp_path), 96, 8)
    with pytest.raises(ConfigError, match=r"at most 100 tokens\. Found samples of 104 tokens.*--length 96"):
        check_length(SimpleNamespace(model=tmp_path), 97, 8)


def test_two_runs_are_not_mixed_in_one_folder() -> None:
    goes_on = part_of_the_program("common.training")._goes_on
    options = {"output": Path("run"), "steps": 16, "resume": False, "smoke": False}
    with pytest.raises(ConfigError, match=r"up to step 8 in run\. Pass --resume to go on with it"):
        goes_on(SimpleNamespace(**options), 8)
    assert not goes_on(SimpleNamespace(**options | {"smoke": True}), 16)
    with pytest.raises(ConfigError, match=r"up to step 17 in run"):
        goes_on(SimpleNamespace(**options | {"smoke": True}), 17)
    assert goes_on(SimpleNamespace(**options | {"resume": True}), 16)
    with pytest.raises(ConfigError, match=r"Found --steps 16 and a checkpoint of step 20"):
        goes_on(SimpleNamespace(**options | {"resume": True}), 20)


def raise_in_a_function(error: BaseException) -> None:
    raise error


def test_errors_of_use_are_one_sentence_and_an_interrupt_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = part_of_the_program("common.program")
    monkeypatch.setattr("colossal.launch_from_torch", lambda **_options: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    file, checkpoints = tmp_path / "error.json", tmp_path / "checkpoints"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def end_by(error: BaseException, rank: str = "0") -> tuple[object, str]:
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            program.run_program(lambda: SimpleNamespace(output=tmp_path), lambda _: raise_in_a_function(error))
        return ended.value.code, capsys.readouterr().err

    parser = part_of_the_program("common.options").make_parser("")
    with pytest.raises(SystemExit, match="2"):
        program.run_program(lambda: parser.parse_args(["--plugin", "none"]), print)
    error, usage = capsys.readouterr().err, json.loads(file.read_text())["message"]["message"]
    assert error.count("\n") == 1
    assert usage.endswith(error.strip())
    assert end_by(ConfigError("Pass less.")) == (1, "Pass less.\n")
    assert end_by(ConfigError("Pass less."), rank="1") == (1, "")
    written = json.loads(file.read_text())["message"]
    assert "Traceback" not in written["extraInfo"]["py_callstack"]
    assert written["message"] == "ConfigError: Pass less."
    assert end_by(KeyboardInterrupt()) == (
        130,
        "Stopped. No checkpoint was saved: the run begins anew. --save-every saves some.\n",
    )
    monkeypatch.setattr(
        "colossal.booster.Booster.latest_step", lambda _self, folder: 4 if folder == checkpoints else None
    )
    assert end_by(KeyboardInterrupt()) == (130, "Stopped. To go on after step 4, run the same command with --resume.\n")
    with pytest.raises(ShapeError):  # which no option causes
        program.run_program(SimpleNamespace, lambda _: raise_in_a_function(ShapeError("Found 3.")))


def test_a_run_goes_on_with_the_settings_that_it_began_with(tmp_path: Path) -> None:
    settings = part_of_the_program("common.settings")
    options = {"output": tmp_path, "steps": 16, "lr": 1e-3, "eval_every": 4, "pack": False, "plugin": "ddp"}

    def resume(**changed: Any) -> None:
        settings.check_settings(SimpleNamespace(**options | changed))

    def begin_and_resume() -> None:
        resume(lr=1.0)  # a run of before there was such a file
        settings.save_settings(SimpleNamespace(**options))
        resume(plugin="zero2", eval_every=8)
        with pytest.raises(ConfigError, match=r"Found --lr 0.1 instead of 0.001, --eval-every False instead of True"):
            resume(lr=0.1, eval_every=0)

    run_threads(begin_and_resume, 1)


def test_a_batch_that_does_not_divide_is_refused_by_the_names_of_the_options() -> None:
    make_loaders = part_of_the_program("common.training").make_loaders
    plugin = SimpleNamespace(data_parallel_rank_and_size=lambda: (0, 2))
    options = {"pp": 2, "num_microbatches": 0, "accumulate": 3, "batch_size": 12}
    with pytest.raises(ConfigError, match=r"2 replicas times --accumulate 3 times 4 micro-batches.*Found 12\."):
        make_loaders(SimpleNamespace(**options), SimpleNamespace(plugin=plugin), [], [], num_samples=99)


def test_a_loss_that_is_not_finite_ends_the_run_before_the_step() -> None:
    training: Any = object.__new__(part_of_the_program("common.training").Training)
    training.optimizer = None  # which makes no step
    training.run_batch = lambda _batch, _optimizer: (float("nan"), 8, 8)
    with pytest.raises(NonFiniteError, match=r"The loss is nan.*lower --lr"):
        training.step({})


class Recorder:
    """In place of a tracker: remembers what it is called with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.calls: list[Any] = [(args, options)]

    def add_scalar(self, *args: Any) -> None:
        self.calls.append(args)

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((values, step))


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_trackers_get_each_step(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorders = list[Recorder]()

    def record(*args: Any, **options: Any) -> Recorder:
        recorders.append(Recorder(*args, **options))
        return recorders[-1]

    names = {"tensorboard": ("torch.utils.tensorboard", "SummaryWriter"), "wandb": ("wandb", "init")}
    module, opener = names[kind]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{opener: record}))
    open_log = part_of_the_program("common.report").open_log

    def log_two_steps() -> None:
        log = open_log(kind, tmp_path, 4, {"lr": 0.1})
        for step in (5, 6):
            log(step, {"loss": 1.0 / step, "tokens_per_second": 9.0})

    run_threads(log_two_steps, 2)
    (recorder,) = recorders  # on rank 0 only
    values = [(step, {"loss": 1.0 / step, "tokens_per_second": 9.0}) for step in (5, 6)]
    if kind == "tensorboard":
        scalars = [(name, value, step) for step, each in values for name, value in each.items()]
        assert recorder.calls == [((tmp_path / "tensorboard",), {"purge_step": 5}), *scalars]
    else:
        options = {"project": tmp_path.name, "dir": tmp_path, "config": {"lr": 0.1}}
        assert recorder.calls == [((), options), *((each, step) for step, each in values)]
