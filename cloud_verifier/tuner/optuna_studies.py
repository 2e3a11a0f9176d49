"""Studies in Optuna: one per device and search, by the plan of ``core.studies``.

What Optuna minimises is the logarithm of the TPT: thresholds may make it three times as long, and
such a trial must not drown the small differences near the best. Optuna's Gaussian process has a
Matern 5/2 kernel and expected improvement, as the paper's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import sys
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from broker.errors import LocalProtocolError
from cloud_verifier.tuner.core.messages import Choice, Proposal
from cloud_verifier.tuner.core.space import (
    DEFAULT,
    R2_BOUNDS,
    SHARE_BOUNDS,
    Pair,
    from_search,
    to_search,
)
from cloud_verifier.tuner.core.studies import (
    AGAIN_WEIGHT,
    BUDGET,
    MAX_FAILED,
    Told,
    again,
    budget_for,
    first_pairs,
    leaders,
    next_again,
)
from cloud_verifier.tuner.database import BrokenStudyError, Database, StudyError

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler

log = logging.getLogger(__name__)

GP, TPE, RANDOM = SAMPLERS = ("gp", "tpe", "random")
#: Of what this version writes into a study. One of another form is put aside.
FORMAT = 1
#: Studies kept open, and searches of a device that stay in the storage.
_MAX_OPEN = 256
KEPT_CAMPAIGNS = 5

Prior = Callable[[str, str], Sequence[Pair]]


def check_sampler(name: str) -> str:
    """``gp`` where it can run, else ``tpe``, which is said."""
    missing = [m for m in ("torch", "scipy") if importlib.util.find_spec(m) is None]
    if name == GP and missing:
        log.warning(
            "%s is not installed, so trials are chosen by --sampler tpe instead of gp", missing[0]
        )
        return TPE
    if name == GP and "torch" not in sys.modules:
        # Torch reads it when it is loaded. On 16 points more threads only wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return name


def study_name(device: str, campaign: int) -> str:
    """Of the device's search number ``campaign``."""
    return f"pipesd/{device}/{campaign}"


class OptunaStudies:
    """See ``core.studies.Studies``. ``prior(device, device_class)``: pairs to begin with."""

    def __init__(
        self,
        database: Database,
        *,
        trials: int = BUDGET,
        sampler: str = GP,
        prior: Prior = lambda _device, _class: (),
        seed: int = 0,
    ) -> None:
        self._database = database
        self._trials = trials
        self._sampler = sampler
        self._prior = prior
        self._seed = seed
        self._open: OrderedDict[str, optuna.Study] = OrderedDict()

    # -- the port ---------------------------------------------------------------------------------

    def ask(self, device: str, campaign: int, device_class: str) -> Proposal | Choice:
        """See Studies."""
        with self._guarded(device, campaign):
            study = self._study(device, campaign, device_class)
            attrs = study.user_attrs
            budget, first = int(attrs["budget"]), [Pair(*pair) for pair in attrs["first"]]
            trials = study.get_trials(deepcopy=False)
            for trial in trials:
                # Nobody measures it any more: whoever asks has no other trial.
                if trial.state.name == "RUNNING":
                    self._end(study, trial.number, None, {"cause": "abandoned"})
            told = [_told(device, trial) for trial in trials if trial.state.name == "COMPLETE"]
            failed = sum(trial.state.name in ("FAIL", "RUNNING") for trial in trials)
            order = leaders(told)
            best = Choice(order[0][1], order[0][0], len(told)) if order else None
            if len(told) >= budget or failed >= MAX_FAILED * budget:
                return best or Choice(DEFAULT, 0.0, 0)
            pair, weight = None, 1
            if len(told) < len(first):
                pair = first[len(told)]
            elif len(told) >= budget - again(budget):
                pair, weight = next_again(told, order, budget), AGAIN_WEIGHT
            number, found = self._next(study, pair)
            return Proposal(number, found, len(told) + 1, budget, best, weight)

    def tell(
        self, device: str, campaign: int, number: int, tpt: float, tokens: float, *, early: bool
    ) -> None:
        """See Studies."""
        with self._guarded(device, campaign):
            study = self._study(device, campaign, "")
            notes: dict[str, object] = {"tpt": tpt, "tokens": tokens, "early": early}
            self._end(study, number, math.log(tpt), notes)

    def fail(self, device: str, campaign: int, number: int, cause: str) -> None:
        """See Studies."""
        with self._guarded(device, campaign):
            self._end(self._study(device, campaign, ""), number, None, {"cause": cause})

    def fail_running(self, device: str, campaign: int, cause: str) -> int:
        """See Studies."""
        with self._guarded(device, campaign):
            self._open.pop(study_name(device, campaign), None)  # another tuner went on with it
            study = self._find(device, campaign)
            if study is None:
                return 0
            running = [
                trial.number
                for trial in study.get_trials(deepcopy=False)
                if trial.state.name == "RUNNING"
            ]
            for number in running:
                self._end(study, number, None, {"cause": cause})
            return len(running)

    # -- for who looks on -------------------------------------------------------------------------

    def best(self, device: str, campaign: int) -> Choice | None:
        """The best pair so far."""
        with self._guarded(device, campaign):
            study = self._find(device, campaign)
            trials = [] if study is None else study.get_trials(deepcopy=False)
            told = [_told(device, trial) for trial in trials if trial.state.name == "COMPLETE"]
            order = leaders(told)
            return Choice(order[0][1], order[0][0], len(told)) if order else None

    def history(self, device: str, campaign: int) -> list[dict[str, Any]]:
        """The search's trials so far, oldest first, as plain values."""
        with self._guarded(device, campaign):
            study = self._find(device, campaign)
            if study is None:
                return []
            return [
                {
                    "number": trial.number,
                    "state": trial.state.name.lower(),
                    **{key: trial.user_attrs.get(key) for key in ("r1", "r2", "tpt", "early")},
                    "cause": trial.user_attrs.get("cause"),
                }
                for trial in study.get_trials(deepcopy=False)
            ]

    # -- one study --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self, device: str, campaign: int) -> Iterator[None]:
        """Whatever Optuna makes of what stands in a study, or of its absence, is a StudyError."""
        try:
            with self._database.guarded():
                yield
        except StudyError:
            raise
        except Exception as error:
            # Perhaps somebody deleted it, and the next look finds that out.
            self._open.pop(study_name(device, campaign), None)
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            raise BrokenStudyError(_broken(device, what)) from error

    def _next(self, study: optuna.Study, pair: Pair | None) -> tuple[int, Pair]:
        from optuna.distributions import FloatDistribution

        if pair is not None:
            r2, share = to_search(pair)
            study.enqueue_trial({"root_r2": r2, "root_share": share})
        trial = study.ask(
            {
                "root_r2": FloatDistribution(*R2_BOUNDS),
                "root_share": FloatDistribution(*SHARE_BOUNDS),
            }
        )
        # Rounded: what a device reports and what an operator reads is this pair.
        found = from_search(trial.params["root_r2"], trial.params["root_share"])
        found = Pair(max(0.001, round(found.r1, 4)), round(found.r2, 4))
        trial.set_user_attr("r1", found.r1)
        trial.set_user_attr("r2", found.r2)
        return trial.number, found

    def _end(
        self, study: optuna.Study, number: int, value: float | None, notes: dict[str, object]
    ) -> None:
        from optuna.trial import TrialState

        trials = study.get_trials(deepcopy=False)
        if not 0 <= number < len(trials) or trials[number].state.is_finished():
            return
        trial_id = trials[number]._trial_id
        for key, note in notes.items():
            self._database.studies.set_trial_user_attr(trial_id, key, note)
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        study.tell(number, value, state=state, skip_if_finished=True)

    def _study(self, device: str, campaign: int, device_class: str) -> optuna.Study:
        """The study, begun where there is none."""
        study = self._find(device, campaign)
        if study is None:
            study = self._create(device, campaign, device_class)
        return study

    def _find(self, device: str, campaign: int) -> optuna.Study | None:
        import optuna

        name = study_name(device, campaign)
        if (study := self._open.get(name)) is not None:
            self._open.move_to_end(name)
            return study
        storage = self._database.studies
        try:
            study = optuna.load_study(
                study_name=name, storage=storage, sampler=self._make_sampler(name)
            )
        except KeyError:
            return None
        form = study.user_attrs.get("format")
        if form != FORMAT:
            self._put_aside(name, form)
            return None
        self._keep(name, study)
        return study

    def _keep(self, name: str, study: optuna.Study) -> None:
        self._open[name] = study
        while len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)

    def _create(self, device: str, campaign: int, device_class: str) -> optuna.Study:
        import optuna

        name = study_name(device, campaign)
        storage = self._database.studies
        first = first_pairs(self._prior(device, device_class))
        budget = budget_for(self._trials, len(first) > 1)
        study = optuna.create_study(
            study_name=name, storage=storage, sampler=self._make_sampler(name)
        )
        study.set_user_attr("budget", budget)
        study.set_user_attr("first", [[pair.r1, pair.r2] for pair in first[:budget]])
        study.set_user_attr("class", device_class)
        # Last: a study without it was not finished, and is put aside like an old one.
        study.set_user_attr("format", FORMAT)
        old = study_name(device, campaign - KEPT_CAMPAIGNS)
        self._open.pop(old, None)
        self._delete(old)
        self._keep(name, study)
        return study

    def _delete(self, name: str) -> None:
        import optuna

        with contextlib.suppress(KeyError):
            optuna.delete_study(study_name=name, storage=self._database.studies)

    def _put_aside(self, name: str, form: object) -> None:
        import optuna

        storage = self._database.studies
        kept = f"{name}@{form}"
        log.warning("study %s is of another version (%s): kept as %s, begun anew", name, form, kept)
        self._delete(kept)
        optuna.copy_study(
            from_study_name=name, from_storage=storage, to_storage=storage, to_study_name=kept
        )
        optuna.delete_study(study_name=name, storage=storage)

    def _make_sampler(self, name: str) -> BaseSampler:
        from optuna import samplers

        # The same search on the same device goes the same way: the name decides.
        seed = self._seed ^ (hash_of(name) & 0x7FFFFFFF)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._sampler == GP:
                return samplers.GPSampler(seed=seed, n_startup_trials=1)
            if self._sampler == TPE:
                return samplers.TPESampler(seed=seed, n_startup_trials=4, multivariate=True)
            return samplers.RandomSampler(seed=seed)


def hash_of(name: str) -> int:
    """A number that is the same in every process, unlike ``hash``."""
    return zlib.crc32(name.encode())


def _broken(device: str, what: str) -> str:
    return f"the study of {device} is broken ({what}): tune reset {device} begins another"


def _told(device: str, trial: optuna.trial.FrozenTrial) -> Told:
    try:
        pair = Pair(trial.user_attrs["r1"], trial.user_attrs["r2"])
        tpt = float(trial.user_attrs["tpt"])
        tokens = float(trial.user_attrs["tokens"])
        if not (0.0 < tpt < math.inf and 0.0 < tokens < math.inf):
            raise ValueError
    except (KeyError, TypeError, ValueError, LocalProtocolError):
        raise BrokenStudyError(_broken(device, f"trial {trial.number}")) from None
    return Told(pair, tpt, tokens)
