"""Loading and saving on ranks: the same model from every form of file at every t; each rank reads its slices; what
fails on one rank fails on all, and leaves nothing."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tpcode import ModelConfig, ParallelTransformer, RankPool
from tpcode.checkpoint import CheckpointError, load, merge, open_checkpoint, reshard, save, shard
from tpcode.checkpoint.files import write_huggingface
from tpcode.comm import record
from tpcode.dense import MODELS
from tpcode.runtime import launch
from tpcode.training import train

TOLERANCE = 1e-12
B, S, V = 2, 6, 10


def config_of(family, heads=4, **kwargs):
    kv_heads = {"gpt2": {4: 4, 9: 9}, "llama": {4: 2, 9: 3}}[family][heads]
    sizes = {"hidden": 2 * heads, "ffn": 10, "heads": heads, "kv_heads": kv_heads, "layers": 2, "max_seq": S}
    return ModelConfig(family=family, vocab=V, **{**sizes, **kwargs})


class OfDense:
    """A dense model's parameters, as a reader gives them: what `write_huggingface` writes."""

    def __init__(self, dense):
        self.config, self.bias, self.tensors = dense.config, dense.bias, dict(dense.named_parameters())
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name, dim, start, stop):
        return self.tensors[name].detach().narrow(dim, start, stop - start)


def write_dense(directory, config):
    torch.manual_seed(0)
    dense = MODELS[config.family](config, dtype=torch.float64)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=0.4)
    directory.mkdir()
    write_huggingface(OfDense(dense), directory, 10**9)
    return dense


def ids():
    return torch.arange(B * S).reshape(B, S) % V


def logits_of(directories):
    """From each of these: this rank's share of the logits."""
    found = []
    for directory in directories:
        with record() as ledger:
            model = load(directory)
        assert ledger.count() == 0  # each rank reads what it needs; nobody sends it
        with torch.no_grad():
            found.append(model(ids()))
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("heads", [4, 9])
def test_one_checkpoint_in_every_form_at_every_t(tmp_path, family, heads):
    """Rules out: a fused QKV cut as one matrix, or cut for one t and read at another. Shard for 2 (3), merge, shard for
    4 (9): equal logits from every form, loaded at the t it was made for and at others."""
    few, many = {4: (2, 4), 9: (3, 9)}[heads]
    config = config_of(family, heads)
    dense = write_dense(tmp_path / "hf", config)
    wanted = dense(ids()).detach()
    shard(tmp_path / "hf", tmp_path / "few", few)
    merge(tmp_path / "few", tmp_path / "merged")
    shard(tmp_path / "merged", tmp_path / "many", many, vocab_multiple=4)
    reshard(tmp_path / "many", tmp_path / "again", many, few)
    for t, forms in ((few, ("hf", "few", "many", "again")), (many, ("hf", "few", "many"))):
        by_rank = launch(logits_of, t, [tmp_path / form for form in forms])
        for form, shares in zip(forms, zip(*by_rank, strict=True), strict=True):
            assert (torch.cat(shares, -1)[..., :V] - wanted).abs().max() < TOLERANCE, (form, t)


def train_and_save(directory, source):
    """A few steps on a loaded model, then its shards; returns the merged weights."""
    model = load(source, dtype=torch.float32, vocab_multiple=4)
    batches = [(ids(), ids().roll(-1, 1))] * 3
    losses = train(model, batches, lr=0.01, progress=False)
    save(model, directory)
    names = [name for name, _ in model.named_parameters()]
    return losses, {name: p.detach() for name, p in model.to_dense().named_parameters()}, names


def continue_from(*directories):
    """From each: the loss, and whether embedding and head are one parameter."""
    models = [load(directory) for directory in directories]
    return [
        (model.loss(ids(), ids().roll(-1, 1)).item(), model.head.weight is model.embedding.weight) for model in models
    ]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_trained_and_saved_at_one_t_goes_on_at_another(tmp_path, family):
    """Saved at 4, merged: bit by bit the weights that were trained, V rows, no head of its own. Loaded at 2: the same
    loss. Rules out tied weights that come apart on a step, on saving or on loading."""
    write_dense(tmp_path / "hf", config_of(family))
    answers = launch(train_and_save, 4, tmp_path / "saved", tmp_path / "hf")
    losses, weights, names = answers[0]
    assert losses[-1] < losses[0] and not any("head" in name for name in names)
    merge(tmp_path / "saved", tmp_path / "merged")
    reader = open_checkpoint(tmp_path / "merged")
    assert reader.shapes == {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name, tensor in weights.items():
        assert torch.equal(reader.read(name, 0, 0, len(tensor)), tensor)
    forms = [tmp_path / form for form in ("saved", "merged")]
    (one, tied), _ = continue_from(*forms)  # in this process: t = 1
    assert tied
    for found in launch(continue_from, 2, *forms):
        assert found == [(pytest.approx(one, abs=1e-5), True)] * 2


# ---- memory ---------------------------------------------------------------------------------------------------------

LARGE = ModelConfig(  # 50 MB in float32
    family="llama", hidden=512, ffn=1536, heads=8, layers=2, vocab=8192, max_seq=8, tied=True
)


def measured(directory):
    """Bytes of this rank's parameters; of what it read; and how much more memory it had at most while it loaded."""
    import tpcode.checkpoint.shards as module

    open_as_ever, readers = module.open_checkpoint, []

    def kept(*args):
        readers.append(open_as_ever(*args))
        return readers[-1]

    load(directory / "small")  # what is imported and started on the first call
    before = anonymous_bytes()
    peak, done = [before], threading.Event()

    def watch():
        while not done.wait(0.0005):
            peak.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    module.open_checkpoint = kept
    try:
        model = load(directory / "large")
    finally:
        module.open_checkpoint = open_as_ever
        done.set()
        watcher.join()
    return sum(parameter.nbytes for parameter in model.parameters()), readers[0].bytes_read, max(peak) - before


def anonymous_bytes():
    """What this process has written to: pages of files, which it reads and the kernel may drop, are not in it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("form", ["hf", "shards"])
def test_a_rank_reads_and_holds_its_share_alone(tmp_path, form):
    """Bytes read are those of its own parameters, to the byte. Memory, as the kernel counts the pages that the process
    has written to, sampled while it loads: the share, one slice besides, and little more. The whole is four times the
    share. (New ranks: those that have worked reuse what they have freed, and seem to need less.)"""
    for name, config in (("small", config_of("llama")), ("large", LARGE)):
        dense = MODELS["llama"](config)
        (tmp_path / name).mkdir()
        write_huggingface(OfDense(dense), tmp_path / name, 20_000_000)
        if form == "shards":
            shard(tmp_path / name, tmp_path / f"{name}4", 4)
            (tmp_path / name).rename(tmp_path / f"{name}-hf")
            (tmp_path / f"{name}4").rename(tmp_path / name)
    whole = sum(parameter.nbytes for parameter in dense.parameters())
    assert whole > 40e6
    with RankPool(4) as pool:
        found = pool.run(measured, tmp_path)
    for share, read, grown in found:
        assert read == share < 0.251 * whole
        assert share * 0.5 < grown < 1.5 * share + 2e6 < 0.45 * whole


# ---- what fails -----------------------------------------------------------------------------------------------------


def save_on_a_full_disk(directory, when):
    """Rank 1's file cannot be written, or rank 0 finds the directory taken; and what each rank raised."""
    import safetensors.torch

    written = safetensors.torch.save_file

    def failing(*args):
        raise OSError("no space left on device")

    if when == "full" and dist.get_rank() == 1:
        safetensors.torch.save_file = failing
    try:
        save(ParallelTransformer(config_of("llama")), directory)
    except (OSError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        safetensors.torch.save_file = written


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path):
    said = launch(save_on_a_full_disk, 4, tmp_path / "saved", "full")
    other = "CheckpointError: rank 1 of the group could not write its part; its own error says why"
    assert said == [other, "OSError: no space left on device", other, other]
    assert list(tmp_path.iterdir()) == []
    assert launch(save_on_a_full_disk, 4, tmp_path / "saved", "") == [None] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    said = launch(save_on_a_full_disk, 2, tmp_path / "saved", "")
    assert said[0].startswith("FileExistsError: ") and said[1].startswith("CheckpointError: rank 0 of the group")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before


def load_what_is_damaged(directory):
    said = []
    with record() as ledger:
        for call in (
            lambda: load(directory),
            lambda: load(directory.with_name("nine")),
            lambda: shard(directory, directory.with_name("out"), 2),
        ):
            try:
                call()
            except ValueError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said, ledger.count()


def test_every_rank_refuses_before_anything_is_sent(tmp_path):
    """A file that ends too early; heads that do not split over 2 ranks; cutting files on ranks, each of which would."""
    write_dense(tmp_path / "hf", config_of("llama"))
    write_dense(tmp_path / "nine", config_of("llama", 9))
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for (damaged, heads, on_ranks), sent in launch(load_what_is_damaged, 2, tmp_path / "hf"):
        assert damaged.startswith(f"CheckpointError: {file} is damaged")
        assert heads.startswith("ValueError: query heads = 9 and KV heads = 3") and heads.endswith("work: 1, 3, 9")
        assert on_ranks.startswith("CheckpointError: shard, merge and reshard read and write files in one process")
        assert sent == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "nine"]
