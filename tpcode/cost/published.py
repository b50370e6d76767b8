"""Published numbers beside what this package computes for them: `comparisons()` is the list, `table()` its text.

The numbers are in `published.yaml`, with the place where each stands. Reading it takes PyYAML (the extras `dev` and
`book` bring it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tpcode.config import Layout, ModelConfig
from tpcode.cost import flops
from tpcode.cost.fit import PRIOR, Run, fit, leave_one_out
from tpcode.cost.hardware import CARDS
from tpcode.cost.step_time import Efficiencies, Machine, efficiencies_of, layer_operations, seconds, step_time
from tpcode.cost.workload import Workload

DROPOUT = 0.1  # of the papers' GPTs
K22_NAMES = {"22B": "k22-22b", "175B": "k22-175b", "530B": "k22-530b", "1T": "k22-1t"}


@dataclass(frozen=True)
class Comparison:
    """One published number and ours.

    Attributes:
        source: paper and place.
        what: which number.
        unit: of both.
        published, ours: the numbers.
        within: by how much they may differ: rounding of the published one, or a bound; None where none is set.
        relative: whether `within` is a share of the published number, or in its unit.
    """

    source: str
    what: str
    unit: str
    published: float
    ours: float
    within: float | None = None
    relative: bool = False

    @property
    def error(self) -> float:
        """ours over published, less 1."""
        return self.ours / self.published - 1

    @property
    def good(self) -> bool | None:
        """Whether it is within its bound; None where there is none."""
        if self.within is None:
            return None
        missed = abs(self.error) if self.relative else abs(self.ours - self.published)
        return missed <= self.within * (1 + 1e-12)


@cache
def numbers() -> dict:
    """What `published.yaml` holds, by source.

    Raises:
        ImportError: PyYAML is not installed.
    """
    import yaml

    return yaml.safe_load((Path(__file__).parent / "published.yaml").read_text())


def rows(source: str, name: str) -> list[dict]:
    """A table of `published.yaml`, each row by the names of its columns."""
    found = numbers()[source][name]
    if "cols" not in found:
        return found["rows"]
    return [dict(zip(found["cols"], row, strict=True)) for row in found["rows"]]


# ---- N21 and M19: what is counted -----------------------------------------------------------------------------------


def parameter_counts() -> list[Comparison]:
    """N21's ten models and M19's four, in billions, within their rounding."""
    found = []
    for row in rows("narayanan2021", "table1_weak_scaling"):
        ours = flops.n21_parameters(row["layers"], row["hidden"], vocab=51_200, sequence=2048)
        found.append(_counted("N21 table 1", row["params_B"], ours))
    for row in rows("shoeybi2019", "weak_scaling_configs"):
        ours = flops.n21_parameters(row["layers"], row["hidden"], vocab=51_200, sequence=1024)
        found.append(_counted("M19 table 1", row["params_B"], ours))
    return found


def _counted(source: str, published: float, ours: int) -> Comparison:
    return Comparison(source, f"parameters of the {published}B model", "10⁹", published, ours / 1e9, within=0.05)


def percentages_of_peak() -> list[Comparison]:
    """N21's ten, from the FLOP/s per GPU that stand beside them; rounded to whole percents twice."""
    peak = CARDS["a100"].flops_per_second
    return [
        Comparison(
            "N21 table 1",
            f"{row['params_B']}B: share of the peak",
            "%",
            row["pct_peak"],
            100 * row["TFLOPs_per_gpu"] * 1e12 / peak,
            within=0.5,
        )
        for row in rows("narayanan2021", "table1_weak_scaling")
    ]


def training_days() -> list[Comparison]:
    """N21's two, for GPT-3 and a model of a trillion parameters, in whole days."""
    published = numbers()["narayanan2021"]["training_days"]
    found = []
    for key, model in (("gpt3_175B", "gpt3-175b"), ("one_T", "n21-1t")):
        run = published[key]
        parameters = ModelConfig.preset(model).num_parameters
        days = flops.training_seconds(parameters, float(run["T"]), run["n"], float(run["X"])) / 86_400
        found.append(Comparison("N21 section 5.1", f"{model}: training", "days", run["days"], days, within=0.5))
    return found


# ---- K22: utilization, and time -------------------------------------------------------------------------------------


def utilizations() -> list[Comparison]:
    """K22's MFU and HFU of table 5, from the published times, by its equations 7 and 8: within 0.2 points."""
    sizes = {row["name"]: row for row in rows("korthikanti2022", "table3_configs")}
    found = []
    for row in rows("korthikanti2022", "table5_end_to_end"):
        size, config = sizes[row["name"]], ModelConfig.preset(K22_NAMES[row["name"]])
        for name, count in (("MFU", flops.k22_model_flops), ("HFU", flops.k22_hardware_flops)):
            done = count(config, size["global_batch"], 2048)
            peak = CARDS["a100"].flops_per_second
            ours = 100 * flops.utilization(done, row["present_s"], size["gpus"], peak)
            what = f"{row['name']}: {name}"
            found.append(Comparison("K22 table 5", what, "%", row[f"{name}_pct"], ours, within=0.2))
    return found


@cache
def k22_runs() -> tuple[Run, ...]:
    """The eight runs of K22's table 5: each model with full recomputation and plain TP, and with selective
    recomputation and SP."""
    times = {row["name"]: row for row in rows("korthikanti2022", "table5_end_to_end")}
    found = []
    for row in rows("korthikanti2022", "table3_configs"):
        config = replace(ModelConfig.preset(K22_NAMES[row["name"]]), dropout=DROPOUT)
        for recompute, sp, column in (("full", False, "full_recompute_s"), ("selective", True, "present_s")):
            workload = Workload(
                batch=row["global_batch"],
                sequence=2048,
                microbatch=row["microbatch"],
                recompute=recompute,
                interleave=3 if row["name"] in ("175B", "530B") else 1,  # K22, section 6
            )
            layout = Layout(tp=row["tp"], pp=row["pp"], sequence_parallel=sp)
            found.append(Run(row["name"], config, layout, workload, "a100", times[row["name"]][column]))
    return tuple(found)


@cache
def iteration_times(prior: float = PRIOR) -> tuple[tuple[Run, float, Efficiencies, float], ...]:
    """For each run of K22's table 5: the run, its error in sample, the efficiencies that the other models' runs give,
    and the error with those."""
    inside = fit(k22_runs(), prior)
    return tuple((run, run.error(inside), others, error) for run, others, error in leave_one_out(k22_runs(), prior))


def step_times() -> list[Comparison]:
    """K22's eight iteration times, each with efficiencies fitted to the other three models: within 7%."""
    found = []
    for run, _, _, error in iteration_times():
        what = f"{run.name}, {_described(run)}: from the other models"
        ours = run.seconds * (1 + error)
        found.append(Comparison("K22 table 5", what, "s", run.seconds, ours, within=0.07, relative=True))
    for run, error, _, _ in iteration_times():
        what = f"{run.name}, {_described(run)}: fitted to all"
        found.append(Comparison("K22 table 5", what, "s", run.seconds, run.seconds * (1 + error)))
    return found


def _described(run: Run) -> str:
    return f"{run.workload.recompute} recomputation{', SP' if run.layout.sequence_parallel else ''}"


# ---- what nothing was fitted to -------------------------------------------------------------------------------------


def layer_times() -> list[Comparison]:
    """K22's table 4: one layer of the 22B model, forward and backward, in milliseconds. The fit saw no such time."""
    config = replace(ModelConfig.preset("k22-22b"), dropout=DROPOUT)
    machine = Machine(CARDS["a100"], efficiencies_of("a100"))
    settings = {
        "baseline_no_recompute": ("none", False),
        "sequence_parallel": ("none", True),
        "full_recompute": ("full", False),
        "selective": ("selective", False),
        "selective_plus_sequence": ("selective", True),
    }
    found = []
    for row in rows("korthikanti2022", "table4_layer_ms_22B"):
        recompute, sp = settings[row["experiment"]]
        workload = Workload(batch=4, microbatch=4, sequence=2048, recompute=recompute)
        operations = layer_operations(config, Layout(tp=8, sequence_parallel=sp), workload)
        forward, whole = seconds(operations, machine, "forward"), seconds(operations, machine)
        name = row["experiment"].replace("_", " ")
        found.append(Comparison("K22 table 4", f"{name}: forward", "ms", row["fwd"], 1e3 * forward))
        found.append(Comparison("K22 table 4", f"{name}: backward", "ms", row["bwd"], 1e3 * (whole - forward)))
    return found


def data_parallel_step() -> list[Comparison]:
    """K22's 530B model on 8 replicas: its gradients are summed after the backward (section 6)."""
    run = next(run for run in k22_runs() if run.name == "530B" and run.layout.sequence_parallel)
    published = numbers()["korthikanti2022"]["dp8_530B"]["iter_s"][1]
    workload = replace(run.workload, batch=8 * run.workload.batch, overlap_gradients=False)
    ours = step_time(run.config, replace(run.layout, dp=8), workload, "a100").seconds
    return [Comparison("K22 section 6", "530B on 2,240 GPUs, dp = 8: step", "s", published, ours)]


def weak_scaling() -> list[Comparison]:
    """M19's figure 5: FLOP/s per GPU against one GPU's, on V100s, by the efficiencies of A100s. Gradients are taken to
    be summed over the replicas behind the backward."""
    published = numbers()["shoeybi2019"]["weak_scaling_efficiency"]

    def per_gpu(model: str, layout: Layout) -> float:
        config = replace(ModelConfig.preset(model), dropout=DROPOUT)
        workload = Workload(batch=8 * layout.dp, microbatch=8, sequence=1024, recompute="full")
        return step_time(config, layout, workload, "v100").hfu

    models = {1: "m19-1.2b", 2: "m19-2.5b", 4: "m19-4.2b", 8: "m19-8.3b"}
    alone = per_gpu(models[1], Layout(tp=1))
    found = []
    for t, efficiency in published["model_parallel_pct"].items():
        ours = 100 * per_gpu(models[t], Layout(tp=t)) / alone
        found.append(Comparison("M19 figure 5", f"tp = {t}: efficiency", "%", efficiency, ours))
    for gpus, efficiency in published["model_plus_data_pct"].items():
        t = gpus // 64
        ours = 100 * per_gpu(models[t], Layout(tp=t, dp=64)) / alone
        found.append(Comparison("M19 figure 5", f"tp = {t}, dp = 64: efficiency", "%", efficiency, ours))
    return found


# The playbook gives no sizes of its "3B model". These are Llama-3.2's of that name, with 32 heads, so that TP 32 works.
PLAYBOOK_3B = ModelConfig(
    family="llama", hidden=3072, ffn=8192, heads=32, kv_heads=32, layers=28, vocab=128_256, max_seq=4096, tied=True
)


def playbook_curve() -> list[Comparison]:
    """The Ultra-Scale Playbook's tokens per second and GPU at TP 2 to 32, H100s, against TP 2's."""
    found = []
    for name, sp in (("ultrascale_tp", False), ("ultrascale_tp_sp", True)):
        published = numbers()["tp_measurements"][name]
        speeds = {}
        for t, batch in published["max_batch"].items():
            workload = Workload(batch=batch, microbatch=batch, sequence=4096)
            layout = Layout(tp=t, sequence_parallel=sp)
            speeds[t] = step_time(PLAYBOOK_3B, layout, workload, "h100").tokens_per_second_per_gpu
        measured = published["tok_s_gpu"]
        for t in list(measured)[1:]:
            what = f"TP {t}{' and SP' if sp else ''}: tokens/s/GPU against TP 2's"
            ours, theirs = 100 * speeds[t] / speeds[2], 100 * measured[t] / measured[2]
            found.append(Comparison("Ultra-Scale Playbook", what, "%", theirs, ours))
    return found


# ---- all of it ------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], list[Comparison]]] = {
    "Counted": parameter_counts,
    "Divided": percentages_of_peak,
    "Training times": training_days,
    "Utilization": utilizations,
    "Iteration times": step_times,
    "A layer, which nothing was fitted to": layer_times,
    "Data parallelism, which nothing was fitted to": data_parallel_step,
    "Another card, which nothing was fitted to": weak_scaling,
    "Other models and cards, which nothing was fitted to": playbook_curve,
}


def comparisons() -> dict[str, list[Comparison]]:
    """Everything, by section."""
    return {name: section() for name, section in SECTIONS.items()}


def table(found: dict[str, Iterable[Comparison]] | None = None) -> str:
    """Plain text: published, ours, the error in percent of the published number, and whether it is within its bound."""
    lines = []
    for name, section in (found or comparisons()).items():
        lines += ["", name, f"{'':21}{'':62}{'published':>10}{'ours':>10}{'':5}{'error':>8}"]
        for one in section:
            verdict = {None: "", True: "  within bound", False: "  OUT OF BOUND"}[one.good]
            sizes = f"{one.published:10.2f}{one.ours:10.2f} {one.unit:<4}{100 * one.error:+7.1f}%"
            lines.append(f"{one.source:<21}{one.what:<62}{sizes}{verdict}")
    return "\n".join(lines[1:])
