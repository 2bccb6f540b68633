"""What a site says of itself in its node config, checked in one place."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from isoloco_flwr.fields import SettingsError, build_settings, setting, setting_keys
from isoloco_flwr.pretraining.states import states_folder

__all__ = ["SiteSettings", "parse_site"]


@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """A site's node config; simulations set the first two keys only."""

    partition_id: int = setting(at_least=0)
    """The site's place in the run, 0 <= partition-id < num-partitions."""
    num_partitions: int = setting(at_least=1)
    """R, the places of the run."""
    data_source: str = setting(default="", may_be_empty=True)
    """The site's own text, for data.partitioner = 'natural': as `data.source` in a run config."""
    device: str = setting(default="auto")
    """auto (a GPU where there is one), cpu, cuda, or cuda:N."""
    state_folder: str = setting(default="", may_be_empty=True)
    """Absolute path of the folder for the inner optimizers' states; empty takes that of
    `python -m isoloco_flwr.pretraining.states`."""
    max_batch_size: int = setting(default=0, at_least=0)
    """Largest number of sequences whose gradients are taken at once; 0 leaves it to the run."""
    max_seconds: float = setting(default=0.0, at_least=0)
    """Seconds of a round in which the site trains, from the message on; 0 has no limit."""

    def __post_init__(self) -> None:
        if self.partition_id >= self.num_partitions:
            raise SettingsError(
                f"node config partition-id = {self.partition_id}: allowed is 0 <= partition-id < "
                f"{self.num_partitions}, the node's num-partitions"
            )
        source = Path(self.data_source)
        if source.is_absolute() and not source.exists():
            raise SettingsError(
                f"node config data-source = {self.data_source!r}: allowed is a file or folder that "
                "is there, or the name of a corpus"
            )
        if self.state_folder and not Path(self.state_folder).is_absolute():
            raise SettingsError(
                f"node config state-folder = {self.state_folder!r}: allowed is an absolute path"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise SettingsError(
                f"node config device = {self.device!r}: allowed is auto, cpu, cuda or cuda:N"
            )

    def torch_device(self) -> torch.device:
        """Return the device to train on.

        Raises
        ------
        SettingsError
            If there is no such GPU, as far as this process may see.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device == "auto":
            return torch.device("cuda" if count else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= count:
            raise SettingsError(
                f"node config device = {self.device!r}: this process sees {count} GPUs, allowed is "
                + ", ".join(["auto", "cpu", *(f"cuda:{index}" for index in range(count))])
            )
        return device

    def states(self) -> Path:
        """Return the folder for the inner optimizers' states, made if missing.

        Raises
        ------
        SettingsError
            If it cannot be made or written to.
        """
        folder = Path(self.state_folder) if self.state_folder else states_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(
                f"node config state-folder = {self.state_folder!r}: {folder} cannot be written to "
                f"({error}), allowed is another folder"
            ) from error
        return folder

    def micro_batch_size(self, run_wide: int) -> int:
        """Return the run's micro batch size, or the site's where that is smaller; 0: no limit."""
        return min(filter(None, (run_wide, self.max_batch_size)), default=0)


def parse_site(node_config: Mapping[str, bool | float | int | str]) -> SiteSettings:
    """Check a node config and return it as settings.

    Keys of other apps may be there as well, since a SuperNode serves more than one; one that
    looks like a slip of the pen is refused.

    Raises
    ------
    SettingsError
        One line that names the key, its value and what is allowed.
    """
    known = setting_keys(SiteSettings)
    for key, value in node_config.items():
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if key not in known and nearest:
            raise SettingsError(f"node config {key} = {value!r}: did you mean {nearest[0]}?")
    return build_settings(SiteSettings, node_config, "node config")
