"""Faults of calls to workers, and of how a run ends and begins again: in who is found to hang and when, in who is
blamed, and in what a run does about being stopped or lost."""

from __future__ import annotations

from mutants.mutant import Mutant

CREW = "cluster/test_crew.py"
MIRROR = "test_mirror.py"
RESTARTS = "test_restarts.py"
STOPPING = "test_run.py"

MUTANTS = [
    Mutant(
        "nobody is found to hang while another one answers",
        "cluster/crew.py",
        "if handle in self._calls] + self._hung()",
        "if handle in self._calls] or self._hung()",
        CREW,
    ),
    Mutant(
        "only calls of a rollout have a deadline",
        "cluster/deadlines.py",
        "return max(self.patience, _TIMES * max(taken)) if taken else _UNKNOWN * self.patience",
        'return float("inf")',
        CREW,
    ),
    Mutant(
        "a deadline goes by the call before alone",
        "cluster/deadlines.py",
        "_TIMES * max(taken)",
        "_TIMES * taken[-1]",
        CREW,
    ),
    Mutant(
        "of those that wait for each other any is blamed",
        "cluster/crew.py",
        "return max(silent, default=index), method",
        "return 0, method",
        CREW,
    ),
    Mutant(
        "who waits for the state of one that hangs is blamed",
        "cluster/crew.py",
        "if source in self.sound and not self.pool.wait([state], 0):",
        "if False:",
        CREW,
    ),
    Mutant(
        "why a worker was lost is not said",
        "cluster/crew.py",
        "filter(None, (why, self.pool.last_words(index)))",
        "filter(None, (why,))",
        CREW,
    ),
    Mutant(
        "who has no process is waited for for ever",
        "cluster/capacity.py",
        "if now - since > self.grace]",
        "if False]",
        CREW,
    ),
    Mutant(
        "nobody is told that a process does not begin",
        "cluster/capacity.py",
        "                log.warning(",
        "                log.debug(",
        CREW,
    ),
    Mutant(
        "a run goes on with fewer workers than it needs",
        "cluster/capacity.py",
        "if len(self.present) < self.least:",
        "if not self.present:",
        CREW,
    ),
    Mutant(
        "who is back takes the state of when it was lost",
        "cluster/crew.py",
        "            self._bring_up(index)\n            log.warning",
        "            self.capacity.awaits(index)\n            self.call(index, 'take_state', self._sources[index][1])\n"
        "            log.warning",
        CREW,
    ),
    Mutant(
        "who has no process counts as one that hangs",
        "cluster/crew.py",
        "if index not in self.capacity.awaited]",
        "]",
        CREW,
    ),
    Mutant(
        "a new worker that cannot be built ends the run",
        "cluster/crew.py",
        'if method != "take_state":\n',
        "if method:\n",
        CREW,
    ),
    Mutant(
        "a group of other members meets at the place of the one before",
        "cluster/coordinator.py",
        "now = self.crew.losses, members",
        "now = 0",
        "cluster/test_coordinator.py",
    ),
    Mutant(
        "nobody is taken in again",
        "cluster/coordinator.py",
        "            self.crew.take_in()\n",
        "",
        "cluster/test_coordinator.py",
    ),
    Mutant(
        "a cluster that asks nobody for a token is joined",
        "cluster/control.py",
        "return done.returncode == 0",
        "return False",
        "cluster/test_control.py",
    ),
    Mutant(
        "whatever goes wrong is taken for a refusal of who has no token",
        "cluster/control.py",
        'or "AuthenticationError" in done.stderr:',
        "or done.stderr is not None:",
        "cluster/test_control.py",
    ),
    Mutant(
        "a manifest is copied to the mirror first",
        "mirror.py",
        "for path in [*paths, checkpoint / MANIFEST]:",
        "for path in [checkpoint / MANIFEST, *paths]:",
        MIRROR,
    ),
    Mutant(
        "what is fetched is not compared with its manifest",
        "mirror.py",
        "if wrong := fault(draft):",
        "if wrong := None:",
        MIRROR,
    ),
    Mutant(
        "the mirror keeps every checkpoint",
        "mirror.py",
        "self._found() - set(sorted(whole)[-self.keep :])",
        "self._found() - set(whole)",
        MIRROR,
    ),
    Mutant(
        "nobody is told of a copy that fails",
        "mirror.py",
        "        except Exception as error:  # of any library for any place: the run's own",
        "        except KeyError as error:  # of any library for any place: the run's own",
        MIRROR,
    ),
    Mutant(
        "a checkpoint that the run removes is no longer copied",
        "mirror.py",
        "self._put(held, checkpoint.name)",
        "self._put(checkpoint, checkpoint.name)",
        MIRROR,
    ),
    Mutant(
        "every checkpoint waits for the one before",
        "mirror.py",
        "if checkpoint != self._newest or checkpoint == self._copied:",
        "if checkpoint == self._copied:",
        MIRROR,
    ),
    Mutant(
        "a copy that failed at last is left so",
        "mirror.py",
        "            self._copier.submit(self._copy, self._newest)\n",
        "            pass\n",
        MIRROR,
    ),
    Mutant(
        "a bucket that is missing is made",
        "mirror.py",
        "self._files.mkdir(folder, create_parents=False)",
        "self._files.mkdir(folder, create_parents=True)",
        MIRROR,
    ),
    Mutant(
        "that nothing can be written to the mirror is seen with the first checkpoint",
        "mirror.py",
        "            self._refuse_to_be_kept_out()\n",
        "",
        MIRROR,
    ),
    Mutant(
        "an older checkpoint is fetched over a newer one",
        "mirror.py",
        "if steps_of(name) > newer_than)",
        "if True)",
        MIRROR,
    ),
    Mutant(
        "--resume auto begins anew where only the mirror has a checkpoint",
        "cli.py",
        "return mirror is not None and mirror.newest > 0",
        "return False",
        MIRROR,
    ),
    Mutant(
        "the run before is gone on with",
        "restarts.py",
        "not at_start or after != at_start",
        "True",
        RESTARTS,
    ),
    Mutant(
        "a checkpoint does not count as progress",
        "restarts.py",
        "failures = failures + 1 if after == before else 1",
        "failures += 1",
        RESTARTS,
    ),
    Mutant(
        "a step that ended in time is given up all the same",
        "stopping.py",
        "            signal.setitimer(signal.ITIMER_REAL, 0)\n\n\n@contextmanager",
        "            pass\n\n\n@contextmanager",
        STOPPING,
    ),
    Mutant(
        "an update is given up as soon as a rollout",
        "stopping.py",
        "if self._more and self.amid_update():",
        "if False:",
        STOPPING,
    ),
    Mutant(
        "one that the run goes on without is waited for",
        "cluster/publication.py",
        "if worker in self.crew.present:",
        "if True:",
        "cluster/test_publication.py",
    ),
]
