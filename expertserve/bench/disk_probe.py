"""What reading experts costs, for plans, simulations and rooflines: a trial of the disk as the terms of a step.

Owns when the trial is taken: twice at first, then in between whatever else the caller measures. Where direct reads are
not to be had the kernel is asked to drop what it holds of the files before each part, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from expertserve.bench.costs import DiskCosts
from expertserve.bench.page_cache import forget
from expertserve.experts.disk_trial import DiskRate, DiskTrial, open_trial
from expertserve.models.model import Model


class DiskProbe:
    """A trial of a model's disk, which may have found nothing.

    Attributes:
        how: what is read and past which caches, or why nothing is.
    """

    def __init__(self, trial: DiskTrial | None, model: Model, threads: int, *, direct: bool) -> None:
        self._trial, self._paths, self._threads, self._direct = trial, model.file.paths, threads, direct
        self.how = "too little of the file is here"
        if trial is not None:
            size = f"experts of {trial.expert_bytes} bytes in {trial.reads} reads, {threads} at once"
            cache = "through the page cache, which was asked to drop the file: it may have kept some"
            self.how = f"{size}, {'past the page cache (O_DIRECT)' if direct else cache}"
            self.take()
            self.take()

    def take(self) -> None:
        """One more part of the trial.

        Raises:
            ExpertReadError: a read failed.
        """
        if self._trial is not None:
            if not self._direct:
                forget(self._paths)
            self._trial.take()

    @property
    def rate(self) -> DiskRate | None:
        """What was found so far; None where too few experts are in the files yet."""
        return None if self._trial is None else self._trial.rate()

    @property
    def costs(self) -> DiskCosts | None:
        """The same as terms of a step."""
        rate, trial = self.rate, self._trial
        if rate is None or trial is None:
            return None
        return DiskCosts(rate.bandwidth, rate.latency_s, self._threads, trial.reads, trial.expert_bytes)


@contextmanager
def probe_disk(model: Model, threads: int) -> Iterator[DiskProbe]:
    """Opens the model's files and takes the trial's first two parts."""
    with open_trial(model.towers, model.file.paths, threads) as (trial, mode):
        yield DiskProbe(trial, model, threads, direct=mode == "direct")
